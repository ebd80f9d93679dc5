"""Durable, blocking saves of the same bytes: ours, the peers', and plain files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from benchmarks.costs import alone
from benchmarks.jobs import Job
from benchmarks.ours import Saving, new_root
from benchmarks.peers import PEERS, Peer, load_peer_libraries
from benchmarks.references import bytes_of, remove, warm_buffer, write, write_direct
from benchmarks.results import Part, Row, Table, ratio
from benchmarks.rounds import Contender, Tell, take_turns
from benchmarks.states import State, make, packed

YIELDS = frozenset({"save/raw", "save/torch", "save/dcp"})
RAW, DIRECT, OURS = "raw write + fsync", "O_DIRECT write + fsync", "ckptd"


def measure(job: Job, folder: Path, tell: Tell) -> Part:
    load_peer_libraries(job.peers)
    tell("making the state")
    state = make(job.gigabytes, job.tensors)
    buffer = warm_buffer(state.size_bytes)
    packed(state, buffer)
    peaks = first_times(state, folder, [] if job.left_out else _able(job), tell)

    ours = Saving(new_root(folder / "ours"))
    target = folder / "one"
    data, pages = bytes_of(buffer)[: state.size_bytes], bytes_of(buffer)
    contenders = [
        Contender(RAW, lambda: write(target, data), after=lambda: remove(target)),
        Contender(DIRECT, lambda: write_direct(target, pages), after=lambda: remove(target)),
        Contender(OURS, lambda: ours.save(state), after=ours.forget),
        *(_contender(peer, job, state, target) for peer in PEERS),
    ]
    rows = take_turns(contenders, job.rounds, tell, each_round=state.change)
    ours.close()

    rows = [_with_peak(row, peaks.get(row.name)) for row in rows]
    title = f"Durable save, {job.label}"
    table = Table(group="saving", title=title, rows=tuple(rows), reference=RAW, note=NOTE)
    dcp = _faster(table.row("dcp.save"), table.row("dcp.save, 2 threads"))
    figures = [
        *ratio("save/raw", job.label, table.row(OURS), table.row(RAW)),
        *ratio("save/torch", job.label, table.row(OURS), table.row("torch.save + fsync")),
        *ratio("save/dcp", job.label, table.row(OURS), dcp),
    ]
    return Part(tables=(table,), figures=tuple(figures))


def _faster(one: Row, other: Row) -> Row:
    return min((row for row in (one, other) if not row.missing), key=lambda row: row.median("seconds"), default=one)


NOTE = "Extra memory is the peak of a first save in a process of its own."


def first_times(state: State, folder: Path, peers: list[Peer], tell: Tell) -> dict[str, float]:
    """The peak of extra memory of a first save by each contender, alone in a fork. Nothing here starts a thread."""
    peaks: dict[str, float] = {}
    target = folder / "first"
    works = {peer.name: _call(peer.save, state, target) for peer in peers}
    works[OURS] = lambda: _save_once(state, target)
    for name, work in works.items():
        tell(f"extra memory: {name}")
        try:
            peaks[name] = alone(work)["peak_bytes"]
        except RuntimeError:
            if name == OURS:
                raise
        finally:
            shutil.rmtree(target, ignore_errors=True)
            target.unlink(missing_ok=True)
    return peaks


def _able(job: Job) -> list[Peer]:
    return [peer for peer in PEERS if not peer.why_missing(job.tensors)]


def _save_once(state: State, folder: Path) -> None:
    saving = Saving(new_root(folder))
    saving.save(state)
    saving.close()


def _call(save: Callable[[State, Path], None], state: State, target: Path) -> Callable[[], None]:
    return lambda: save(state, target)


def _contender(peer: Peer, job: Job, state: State, target: Path) -> Contender:
    missing = job.left_out or peer.why_missing(job.tensors)
    save = _call(peer.save, state, target)
    return Contender(peer.name, save, after=lambda: remove(target), peer=True, missing=missing)


def _with_peak(row: Row, peak: float | None) -> Row:
    if row.missing or peak is None:
        return row
    return row.model_copy(update={"samples": row.samples | {"peak_bytes": (peak,)}})
