"""The second reading: before a checkpoint is given up, another process reads the damaged object again.

One reader alone may be wrong: bad memory, a bad cache, a bad cable. So a finding counts only when a process that
shares nothing with the first one, reading around caches, finds the object damaged too. It is run as
`python -m ckptd.second`, with the request on standard input and the finding on standard output.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable

from ckptd.errors import Unavailable
from ckptd.manifest import Frozen, ManifestRef, ObjectRef
from ckptd.reading import observe, observe_manifest
from ckptd.records import Damage, Observer
from ckptd.storage import open_storage
from ckptd.storage.base import Storage

DEADLINE_SECONDS = 3600.0


class Reading(Frozen):
    """Who read, and the first damage found; None when the bytes are whole."""

    reader: Observer
    damage: Damage | None


class ReadRequest(Frozen):
    url: str
    ref: ObjectRef | ManifestRef


SecondReader = Callable[[Storage, ObjectRef | ManifestRef], Reading]


def this_process() -> Observer:
    """How this process is named as a reader."""
    return Observer(host=socket.gethostname(), process=f"pid {os.getpid()}")


def read_here(storage: Storage, ref: ObjectRef | ManifestRef) -> Reading:
    """Read in this process. Alone it is no second reading of what this process found."""
    damage = observe_manifest(storage, ref) if isinstance(ref, ManifestRef) else observe(storage, ref)
    return Reading(reader=this_process(), damage=damage)


def read_in_new_process(storage: Storage, ref: ObjectRef | ManifestRef) -> Reading:
    """Read in a process of its own. `Unavailable` when it could not."""
    request = ReadRequest(url=storage.url, ref=ref)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ckptd.second"],
            input=request.stored(),
            capture_output=True,
            timeout=DEADLINE_SECONDS,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        why = error.stderr.decode(errors="replace").strip().splitlines()
        raise Unavailable(
            f"the second reading of {ref.key} failed: {why[-1] if why else 'no message'}", object=ref.key
        ) from error
    except subprocess.TimeoutExpired as error:
        raise Unavailable(
            f"the second reading of {ref.key} took over {DEADLINE_SECONDS:.0f} s", object=ref.key
        ) from error
    return Reading.model_validate_json(done.stdout)


if __name__ == "__main__":
    asked = ReadRequest.model_validate_json(sys.stdin.buffer.read())
    sys.stdout.buffer.write(read_here(open_storage(asked.url), asked.ref).stored())
