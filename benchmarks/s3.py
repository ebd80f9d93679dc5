"""Payload to and from an S3 server, beside obstore with the same bytes. The server runs on this machine and takes its
share of it, so what counts is the client's own CPU time; its seconds are shown, too."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.jobs import Job
from benchmarks.ours import Loading, Saving, get_payload, put_payload
from benchmarks.references import bytes_of, warm_buffer
from benchmarks.results import Figure, Part, Row, Table, ratio
from benchmarks.rounds import Contender, Tell, take_turns
from benchmarks.states import State, make, packed
from ckptd import layout
from ckptd.manifest import ObjectRef
from ckptd.storage import Storage, init_root, open_storage
from ckptd.testing.seaweed import SeaweedProcess

YIELDS = frozenset({f"s3 {way}, {what}" for way in ("put", "get") for what in ("CPU", "wall")})
OBSTORE, OURS, WHOLE = "obstore", "ckptd, payload", "ckptd, whole save or restore"
PART_BYTES = 16 * 1024 * 1024
AT_ONCE = 4


class Bucket:
    """One bucket, and the keys that were put into it and may go."""

    def __init__(self, server: SeaweedProcess, url: str, state: State) -> None:
        self.server, self.state = server, state
        self.storage: Storage = open_storage(url)
        self.buffer = warm_buffer(state.size_bytes)
        self.data = bytes_of(self.buffer)[: state.size_bytes]
        self.target = bytes_of(warm_buffer(state.size_bytes))[: state.size_bytes]
        self.ref: ObjectRef | None = None
        self.number = 0

    def put(self) -> None:
        self.number += 1
        self.ref = put_payload(self.storage, layout.save_id(1, self.number, all_ranks=False, count=1), self.data)

    def get(self) -> None:
        assert self.ref is not None
        get_payload(self.storage, self.ref, self.target)

    def forget(self) -> None:
        assert self.ref is not None
        self.storage.delete(self.ref.key)


class Obstore:
    """obstore's own put, in parts at once, and its own get, as one answer in memory."""

    key = "obstore"

    def __init__(self, bucket: Bucket) -> None:
        self._library: Any = importlib.import_module("obstore")
        env = bucket.server.env_of("admin")
        self._store = importlib.import_module("obstore.store").S3Store(
            bucket.server.bucket,
            endpoint=env["AWS_ENDPOINT_URL"],
            access_key_id=env["AWS_ACCESS_KEY_ID"],
            secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
            region=env["AWS_REGION"],
            client_options={"allow_http": True},
        )
        self._data = bucket.data

    def put(self) -> None:
        self._library.put(self._store, self.key, self._data, chunk_size=PART_BYTES, max_concurrency=AT_ONCE)

    def get(self) -> None:
        size = len(memoryview(self._library.get(self._store, self.key).bytes()))
        if size != self._data.nbytes:
            raise ValueError(f"obstore read {size} bytes")

    def forget(self) -> None:
        self._library.delete(self._store, self.key)


def measure(job: Job, folder: Path, tell: Tell) -> Part:
    tell("making the state")
    state = make(job.gigabytes, job.tensors)
    tell("starting SeaweedFS")
    with SeaweedProcess(folder / "seaweed") as server:
        os.environ.update(server.env_of("admin"))
        url = server.url("bench")
        init_root(url)
        bucket = Bucket(server, url, state)
        packed(state, bucket.buffer)
        tables = both_ways(job, bucket, url, tell)
    return Part(tables=tables, figures=figures_of(tables, job.label))


def both_ways(job: Job, bucket: Bucket, url: str, tell: Tell) -> tuple[Table, Table]:
    missing = "" if importlib.util.find_spec("obstore") else "not installed"
    peer = None if missing else Obstore(bucket)
    saving, loading = Saving(url), Loading(url)

    def of(call: str) -> Callable[[], None]:
        method: Callable[[], None] = getattr(peer, call, lambda: None)
        return method

    ups = take_turns(
        [
            Contender(OBSTORE, of("put"), after=of("forget"), peer=True, missing=missing),
            Contender(OURS, bucket.put, after=bucket.forget),
            Contender(WHOLE, lambda: saving.save(bucket.state)),
        ],
        job.rounds,
        tell,
        each_round=bucket.state.change,
    )
    saving.close()
    bucket.put()
    of("put")()
    downs = take_turns(
        [
            Contender(OBSTORE, of("get"), peer=True, missing=missing),
            Contender(OURS, bucket.get),
            Contender(WHOLE, lambda: loading.restore(bucket.state), before=loading.open, after=loading.close),
        ],
        job.rounds,
        tell,
    )
    if bucket.data != bucket.target:
        raise ValueError("the payload came back changed")
    return _table(f"To S3, {job.label}", ups), _table(f"From S3, {job.label}", downs)


def _table(title: str, rows: list[Row]) -> Table:
    note = "CPU seconds are the client's. ckptd digests and checks every byte besides."
    return Table(group="s3", title=title, rows=tuple(rows), reference=OBSTORE, note=note)


def figures_of(tables: tuple[Table, Table], at: str) -> tuple[Figure, ...]:
    found: list[Figure] = []
    for way, table in zip(("put", "get"), tables, strict=True):
        ours, peer = table.row(OURS), table.row(OBSTORE)
        found += ratio(f"s3 {way}, CPU", at, ours, peer, "cpu_seconds")
        found += ratio(f"s3 {way}, wall", at, ours, peer)
    return tuple(found)
