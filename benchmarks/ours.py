"""ckptd as its users see it: `CheckpointClient` on a storage URL, and what the benchmarks need around it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.references import files_in, remove
from benchmarks.states import State
from ckptd import layout, log_snapshots
from ckptd.digests import CHUNK_BYTES, chunk_digest
from ckptd.ledger import Ledger
from ckptd.manifest import ObjectRef
from ckptd.reading import read_verified
from ckptd.storage import Storage, init_root, open_storage
from ckptd.wire import OpenRequest
from ckptd_client import CheckpointClient, SaveHandle

RUN = "bench"
SNAPSHOT_DEADLINE_SECONDS = 60.0
PARALLEL: dict[str, Any] = {"parallel": True}
"""Options of a client whose ranks all write their share of the shared state."""


def new_root(folder: Path) -> str:
    """The URL of a new storage in `folder`."""
    folder.mkdir(parents=True)
    url = f"file://{folder}"
    init_root(url)
    return url


def prepare(client: CheckpointClient, state: State) -> None:
    """Get ready for the first save ahead of it."""
    client.prepare(state.app_state)


class Saving:
    """One rank that saves again and again, and forgets what it saved before. The state is the same each time, so it
    must not be borrowed from the save before: that is off."""

    def __init__(self, url: str, **options: Any) -> None:
        self.url, self.step = url, 0
        self.client = CheckpointClient(url, RUN, **({"rank": 0, "world_size": 1, "incremental": False} | options))
        self.client.latest()

    def save(self, state: State) -> None:
        """Returns when it is durable and committed."""
        self.step += 1
        self.client.save(state.app_state, step=self.step, wait=True)

    def start(self, state: State) -> SaveHandle:
        """Returns when the state may change again."""
        self.step += 1
        return self.client.save(state.app_state, step=self.step)

    def forget(self) -> None:
        """Delete the payload of all saves but the newest. The disk would fill, and no one loads these."""
        for saves in payload_folders(self.url).values():
            for save in saves[:-1]:
                remove(save)

    def close(self) -> None:
        self.client.close()


def payload_folders(url: str) -> dict[str, list[Path]]:
    """The folders of the saves of each generation on a file storage, oldest first."""
    data = Path(url.removeprefix("file://")) / "runs" / RUN / "data"
    return {generation.name: sorted(generation.iterdir()) for generation in sorted(data.iterdir())}


def newest_payload(url: str) -> list[Path]:
    """The files that hold the newest save."""
    saves = [save for found in payload_folders(url).values() for save in found]
    return files_in(saves[-1])


class Loading:
    """One start of a job: `open` meets the run, `restore` is the load into the live state, `close` ends it."""

    def __init__(self, url: str, **options: Any) -> None:
        self.url, self.options = url, {"rank": 0, "world_size": 1} | options
        self.client: CheckpointClient | None = None

    def open(self) -> None:
        self.client = CheckpointClient(self.url, RUN, **self.options)
        self.client.latest()

    def restore(self, state: State) -> None:
        assert self.client is not None
        self.client.restore(state.app_state)

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
            self.client = None


def put_payload(storage: Storage, save: str, data: memoryview) -> ObjectRef:
    """Write an object as a save does, its chunks digested on the way."""
    digests: list[str] = []

    def chunks() -> Iterator[memoryview]:
        for start in range(0, data.nbytes, CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            digests.append(chunk_digest(chunk))
            yield chunk

    key = layout.payload_key(RUN, save, 0, layout.new_nonce())
    storage.put(key, chunks(), data.nbytes)
    return ObjectRef(key=key, size=data.nbytes, chunk_bytes=CHUNK_BYTES, chunks=tuple(digests))


def get_payload(storage: Storage, ref: ObjectRef, buffer: memoryview) -> None:
    """Read it as a load does, every chunk checked."""
    read_verified(storage, ref, buffer)


def make_snapshot(url: str, run: str) -> None:
    """Append to a log as a start does, and wait for the snapshot that follows a long one."""
    storage = open_storage(url)
    Ledger(storage).open(run, OpenRequest(attempt=layout.new_attempt(), job="bench", host="bench"))
    give_up_at = time.monotonic() + SNAPSHOT_DEADLINE_SECONDS
    while not log_snapshots.listed(storage, run):
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"no snapshot of run {run} within {SNAPSHOT_DEADLINE_SECONDS:g} s")
        time.sleep(0.05)


def replay(url: str, run: str) -> int:
    """Read a run's log as a process does that sees it for the first time; its current generation."""
    return Ledger(open_storage(url)).current(run).generation
