"""Path and query parameters, checked before anything is looked at. The checks are those of `ckptd.layout`."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query
from pydantic import AfterValidator

from ckptd import layout
from ckptd.manifest import SaveId

RunName = Annotated[
    str,
    Path(description="Name of the run", json_schema_extra={"pattern": f"^{layout.RUN_NAME.pattern}$"}),
    AfterValidator(layout.check_run),
]
SaveName = Annotated[
    str,
    Path(description="Id of the save", json_schema_extra={"pattern": f"^{layout.SAVE_ID.pattern}$"}),
    AfterValidator(layout.check_save),
]
SaveOf = Annotated[
    SaveId | None, Query(description="Which one of several of a step; by default the one on the line, or the newest")
]
AttemptName = Annotated[str, Path(pattern=f"^{layout.TOKEN_ID.pattern}$", description="Id of the attempt")]
Step = Annotated[int, Path(ge=0, le=layout.MAX_STEP, description="Optimizer step")]
Generation = Annotated[int, Path(gt=0, lt=10**8, description="Number of the generation")]
FallbackOf = Annotated[
    int | None, Query(gt=0, lt=10**8, description="The generation this attempt falls back from, if it does")
]
Writers = Annotated[int, Query(gt=0, lt=layout.MAX_WRITERS, description="How many writers to wait for")]
Wait = Annotated[
    float,
    Query(ge=0, le=3600, allow_inf_nan=False, description="How long to wait for it; the service has its maximum"),
]
