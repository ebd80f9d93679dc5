"""Cut the power at many moments of a small history, and look at what is left on the medium.

    unshare --mount --pid --fork --kill-child --mount-proc python -m tests.crash.power --fs ext4 [--all] [--seed N]

Cuts are made before and after every operation, and at system calls inside of them: at every one with `--all`, else at
a seeded sample. After each, the file system replays its journal, and the run must have every record that was told to
be in it, and every checkpoint whole; nothing may be half visible; and a new start must be able to go on.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptd.errors import CkptdError, describe
from ckptd.keeper import Keeper
from ckptd.ledger import Ledger
from ckptd.retention import Policy
from ckptd.storage import init_root
from ckptd.storage.local import LocalStorage
from ckptd.testing.auditor import Auditor
from ckptd.testing.drives import CuttableDrive, FileSystem, mounted
from ckptd.wire import AbortRequest
from tests.core.by_hand import RUN, A, B, C, a_ledger, beginning, opening, save, write_save
from tests.crash.looks import accepted, half_visible
from tests.crash.scenes import a_verifier, large_payload
from tests.crash.weakened import WEAKENED

SAMPLE = 12  # moments inside of operations
CHANGING = ("fsync", "link", "unlink", "mkdir")
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


@dataclass
class Told:
    """What somebody was told is durable: the storage, records by rid, saves, and the step a start resumes from."""

    initialised: bool = False
    rids: list[str] = field(default_factory=list)
    saves: list[str] = field(default_factory=list)
    steps: set[int | None] = field(default_factory=lambda: {None})

    def copy(self) -> Told:
        return Told(self.initialised, [*self.rids], [*self.saves], {*self.steps})


@dataclass(frozen=True)
class Step:
    """One operation of the history: what it is called, what is done, the record and the save it is told for, and
    where a start resumes once it is there."""

    name: str
    do: Callable[[Ledger], object]
    rid: str | None = None
    save: str | None = None
    resumes: int | None = None


def _commit(generation: int, step: int, *, large: bool = False) -> Step:
    name = save(generation, step)

    def do(ledger: Ledger) -> None:
        chunks = large_payload(name) if large else ()
        ledger.commit(RUN, write_save(ledger.storage, generation, step, chunks=chunks))

    return Step(f"save {step}", do, f"commit:{name}:", name, step)


def _start(attempt: str, generation: int) -> list[Step]:
    return [
        Step("open", lambda ledger: ledger.open(RUN, opening(attempt)), f"open:{attempt}"),
        Step("begin", lambda ledger: ledger.begin(RUN, beginning(attempt)), f"begin:{attempt}:0"),
        Step("ready", lambda ledger: ledger.ready(RUN, attempt, generation), f"ready:{attempt}:{generation}"),
    ]


def keeper(ledger: Ledger) -> Keeper:
    return Keeper(ledger, reader=a_verifier)


HISTORY = [
    *_start(A, 1),
    _commit(1, 10),
    _commit(1, 20),
    Step(
        "abort",
        lambda ledger: ledger.abort(RUN, save(1, 25), AbortRequest(generation=1, reason="the disk is full")),
        f"abort:{save(1, 25)}",
    ),
    _commit(1, 30),
    *_start(B, 2),
    _commit(2, 40, large=True),
    Step("verify 30", lambda ledger: keeper(ledger).verify(RUN, save(1, 30)), f"verify:{save(1, 30)}:"),
    Step("verify 40", lambda ledger: keeper(ledger).verify(RUN, save(2, 40)), f"verify:{save(2, 40)}:"),
    Step("retire", lambda ledger: keeper(ledger).retire(RUN, Policy(keep_last=2)), "retire:0"),
    Step("collect", lambda ledger: keeper(ledger).collect(RUN), "purge:0"),
    _commit(2, 50),
]


class Cutter:
    """Takes copies of the medium at the moments that were chosen, with what had been told by then."""

    def __init__(self, drive: CuttableDrive, chosen: set[int] | None) -> None:
        self.drive, self.chosen = drive, chosen
        self.told = Told()
        self.moments = 0
        self.cuts: list[tuple[str, Path, Told]] = []
        self.doing = "init"

    def here(self, what: str) -> None:
        self.cuts.append((f"{self.doing}, {what}", self.drive.cut_copy(), self.told.copy()))

    def moment(self, what: str) -> None:
        """Inside of an operation."""
        self.moments += 1
        if self.chosen is None or self.moments in self.chosen:
            self.here(f"before {what}")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Every call of this process that changes the drive is such a moment."""
        real = {name: getattr(os, name) for name in CHANGING}

        def watched(name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.moment(name)
                return real[name](*args, **kwargs)

            return call

        for name in CHANGING:
            setattr(os, name, watched(name))
        try:
            yield
        finally:
            for name, function in real.items():
                setattr(os, name, function)


def history(cutter: Cutter, root: Path) -> None:
    """All operations, with cuts between and inside of them."""
    cutter.here("before")
    with cutter.watching():
        init_root(str(root))
    cutter.told.initialised = True
    ledger = a_ledger(LocalStorage(root))
    resumes: int | None = None
    for step in HISTORY:
        cutter.doing = step.name
        cutter.here("before")
        cutter.told.steps = {resumes, step.resumes or resumes}
        with cutter.watching():
            step.do(ledger)
        resumes = step.resumes or resumes
        cutter.told.steps = {resumes}
        cutter.told.rids += [step.rid] if step.rid else []
        cutter.told.saves += [step.save] if step.save else []
        cutter.here("after")


def look(root: Path, told: Told) -> Iterator[str]:
    """What is wrong with the run on a drive whose power was cut, and then whether it goes on."""
    try:
        init_root(str(root))
        if not told.initialised:
            return
        there = accepted(root)
        yield from (f"{rid} was told, and is not there" for rid in told.rids if not _has(there, rid))
        yield from half_visible(root)
        auditor = Auditor(LocalStorage(root), RUN)
        yield from map(str, auditor.check(acknowledged=_kept(told.saves, there)))
        yield from _go_on(root, told)
        yield from map(str, auditor.check(acknowledged=_kept(told.saves, there)))
    except CkptdError as error:
        yield describe(error)


def _go_on(root: Path, told: Told) -> Iterator[str]:
    """A new incarnation starts on the medium that was cut, and saves."""
    ledger = a_ledger(LocalStorage(root))
    ledger.open(RUN, opening(C))
    answer = ledger.begin(RUN, beginning(C))
    resumes = answer.checkpoint.step if answer.checkpoint else None
    if resumes not in told.steps:
        yield f"a start resumes from {resumes}, expected one of {told.steps}"
    ledger.ready(RUN, C, answer.generation)
    ledger.commit(RUN, write_save(ledger.storage, answer.generation, 60))
    after = ledger.latest(RUN).checkpoint
    if after is None or after.step != 60:
        yield f"after another save it would resume from {after and after.step}"


def _has(there: dict[str, int], rid: str) -> bool:
    return any(found.startswith(rid) for found in there)


def _kept(saves: list[str], there: dict[str, int]) -> list[str]:
    """Retired checkpoints are nobody's promise any more."""
    return saves[-2:] if _has(there, "retire:0") else saves


def cut_power(kind: FileSystem, *, sample: int | None, seed: int) -> tuple[str, list[str]]:
    """The row of the table, and the findings."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ckptd-power-", dir=MEMORY) as name:
        folder = Path(name)
        chosen = None
        if sample is not None:
            with tempfile.TemporaryDirectory(dir=name) as plain:  # how many moments there are
                counter = Cutter(_Uncut(), set())  # type: ignore[arg-type]
                history(counter, Path(plain) / "root")
            chosen = set(random.Random(seed).sample(range(1, counter.moments + 1), sample))
        with CuttableDrive(folder, kind) as drive:
            cutter = Cutter(drive, chosen)
            history(cutter, drive.path / "root")
            cutter.doing = "the end"
            cutter.cuts.append(("the end, in earnest", drive.cut(), cutter.told))
        findings = []
        for what, image, told in cutter.cuts:
            with mounted(image, kind, folder / "after") as path:
                findings += [f"{kind}, cut at {what}: {finding}" for finding in look(path / "root", told)]
            image.unlink()
    inside = f"{len(cutter.cuts) - 2 * len(HISTORY) - 2} of {cutter.moments}"
    seconds = f"{time.monotonic() - began:.1f}"
    cells = (kind, len(HISTORY) + 1, len(cutter.cuts), inside, len(findings), seconds)
    return f"| {' | '.join(map(str, cells))} |", findings


class _Uncut:
    """Stands for a drive while moments are counted."""

    def cut_copy(self) -> Path:
        return Path()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fs", action="append", choices=["ext4", "xfs"])
    parser.add_argument("--all", action="store_true", help="cut at every system call")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--weakened", choices=["unflushed"], help="break the storage on purpose first")
    args = parser.parse_args()
    if args.weakened:
        WEAKENED[args.weakened]()
    seed = args.seed if args.seed is not None else int.from_bytes(os.urandom(4))
    print(f"seed {seed}", flush=True)
    rows, findings = [], list[str]()
    for kind in args.fs or ["ext4", "xfs"]:
        row, found = cut_power(kind, sample=None if args.all else SAMPLE, seed=seed)
        rows.append(row)
        findings += found
    print(*findings, sep="\n")
    print(
        "| file system | operations | cuts | inside of one | findings | s |\n|---|---|---|---|---|---|",
        *rows,
        sep="\n",
    )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
