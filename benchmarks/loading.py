"""Loading into the live state, from a warm page cache and from a cold one: ours verifies every byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.jobs import Job
from benchmarks.ours import Loading, Saving, new_root, newest_payload
from benchmarks.peers import PEERS, Peer, load_peer_libraries, torch_load_mapped
from benchmarks.references import bytes_of, cool, read_into
from benchmarks.results import Figure, Part, Table, ratio
from benchmarks.rounds import Contender, Tell, nothing, take_turns
from benchmarks.states import State, make

YIELDS = frozenset({f"load/{than}, {how}" for than in ("raw", "torch", "dcp") for how in ("warm", "cold")})
RAW, OURS, MAPPED = "raw pread", "ckptd", "torch.load(mmap) + copy"
NAMES = {
    "torch.save + fsync": "torch.load + copy",
    "safetensors + fsync": "safetensors + copy",
    "dcp.save": "dcp.load",
    "torchsnapshot + fsync": "torchsnapshot",
}
MOST_BYTES = 11 * 10**9


def measure(job: Job, folder: Path, tell: Tell) -> Part:
    load_peer_libraries(job.peers)
    tell("making the state")
    state = make(job.gigabytes, job.tensors)
    state.remember()
    url = new_root(folder / "ours")
    tell("saving with ckptd")
    saving = Saving(url)
    saving.save(state)
    saving.close()
    files = newest_payload(url)
    places = {peer.name: folder / f"peer-{number}" for number, peer in enumerate(PEERS) if peer.load is not None}
    missing = save_all(state, places, job, tell)

    tables, figures = [], []
    for how in ("warm", "cold"):
        before = cool if how == "cold" else None
        contenders = [
            Contender(RAW, lambda: read_into(files, views(state)), before=_chill(files, before)),
            _ours(url, state, files, before),
            *(
                _loader(peer, name, state, places[peer.name], before, missing[peer.name])
                for peer, name in _loaders()
                if peer.name in places
            ),
        ]
        rows = take_turns(contenders, job.rounds, tell)
        title = f"Load into the live state, {how}, {job.label}"
        table = Table(group="loading", title=title, rows=tuple(rows), reference=RAW)
        tables.append(table)
        figures += figures_of(table, how, job.label)
    return Part(tables=tuple(tables), figures=tuple(figures))


def figures_of(table: Table, how: str, at: str) -> list[Figure]:
    ours, others = table.row(OURS), {"raw": RAW, "torch": "torch.load + copy", "dcp": "dcp.load"}
    return [f for than, name in others.items() for f in ratio(f"load/{than}, {how}", at, ours, table.row(name))]


def save_all(state: State, places: dict[str, Path], job: Job, tell: Tell) -> dict[str, str]:
    """Write every peer's file, while the disk is not too full of them; why a peer has none."""
    missing, held = {}, state.size_bytes
    for peer in PEERS:
        if peer.name not in places:
            continue
        missing[peer.name] = job.left_out or peer.why_missing(job.tensors)
        if not missing[peer.name] and held + state.size_bytes > MOST_BYTES:
            missing[peer.name] = "not measured at this size: it would fill the disk"
        if not missing[peer.name]:
            tell(f"saving with {peer.name}")
            peer.save(state, places[peer.name])
            held += state.size_bytes
    return missing


def _loaders() -> list[tuple[Peer, str]]:
    torch_peer = next(peer for peer in PEERS if peer.name == "torch.save + fsync")
    mapped = Peer(torch_peer.name, torch_peer.save, torch_load_mapped)
    return [(mapped, MAPPED), *((peer, NAMES[peer.name]) for peer in PEERS if peer.load is not None)]


def _loader(
    peer: Peer, name: str, state: State, place: Path, before: Callable[[Path], None] | None, missing: str
) -> Contender:
    load = peer.load
    assert load is not None

    def ready() -> None:
        state.spoil()
        if before is not None:
            before(place)

    return Contender(
        name,
        lambda: load(state, place),
        before=ready,
        after=lambda: state.check(name),
        peer=True,
        missing=missing,
    )


def _ours(url: str, state: State, files: list[Path], before: Callable[[Path], None] | None) -> Contender:
    """The start of a job meets the run first, which is no part of the load."""
    loading = Loading(url)

    def ready() -> None:
        loading.open()
        state.spoil()
        _chill(files, before)()

    def done() -> None:
        state.check(OURS)
        loading.close()

    return Contender(OURS, lambda: loading.restore(state), before=ready, after=done)


def _chill(files: list[Path], cooling: Callable[[Path], None] | None) -> Callable[[], None]:
    if cooling is None:
        return nothing

    def chill() -> None:
        for path in files:
            cooling(path)

    return chill


def views(state: State) -> list[memoryview]:
    """The memory of the live tensors."""
    return [bytes_of(tensor.reshape(-1).view(torch.uint8)) for tensor in state.tensors().values()]
