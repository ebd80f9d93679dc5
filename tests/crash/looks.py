"""What every crash test looks at afterwards, in a run it did not write itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ckptd.log import RunLog
from ckptd.storage.local import LocalStorage
from tests.core.by_hand import RUN


def accepted(root: Path) -> dict[str, int]:
    """The records of the run that count, by rid."""
    log = RunLog(LocalStorage(root), RUN, actor="crash test")
    with log.lock:
        return dict(log.replay(to_the_end=True).accepted)


def half_visible(root: Path) -> Iterator[str]:
    """Every file of a run with a name outside tmp/ is whole: it is JSON, or a payload of its full length."""
    for path in sorted((root / "runs").rglob("*")):
        below = path.relative_to(root)
        if path.is_dir() or "tmp" in below.parts:
            continue
        data = path.read_bytes()
        if path.suffix == ".json":
            try:
                json.loads(data)
            except ValueError:
                yield f"{below} is not whole"
        elif not data.endswith(b"which fills a few chunks of it"):
            yield f"{below} is not whole"
