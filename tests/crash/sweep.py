"""Kill every operation at every system call that changes files, and let every such call fail; then look.

    python -m tests.crash.sweep                       # a sample, as `make test` takes it
    python -m tests.crash.sweep --all                 # every point of every operation
    python -m tests.crash.sweep --only commit --seed 7
    python -m tests.crash.sweep --only commit --weakened trusting      # whether it would notice

Each point starts from a fresh copy of the run. A child does the operation under strace and is killed (or one of its
calls fails); other new processes then audit the run, ask for the same again, and start a new incarnation.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ckptd import layout
from ckptd.errors import CkptdError, describe
from ckptd.ledger import Ledger
from ckptd.storage.local import LocalStorage
from ckptd.testing.auditor import Auditor
from ckptd.testing.durable import unsure
from ckptd.testing.syscalls import Call, Fail, Kill, Outcome, Work, traced
from tests.core.by_hand import RUN, C, beginning, opening
from tests.crash.looks import accepted, half_visible
from tests.crash.scenes import SCENES, Scene, ledger_at
from tests.crash.weakened import WEAKENED

P = TypeVar("P")
SAMPLE = 6  # kills, and failures, that are tried of an operation of which not every point is
ANSWER = "(the answer)"
# What a killed process leaves behind is the same on every drive, and this one makes no fsync wait for another's.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


@dataclass
class Row:
    """What came of one operation: calls by name, and how its points ended."""

    scene: str
    calls: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    fails: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Bench:
    """One operation in a folder of its own: the run as it was before, copied for every point."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        self.scene, self.folder = scene, folder
        self.base = folder / "base"
        failed = in_new_process(lambda: scene.prepare(self.base))
        if failed:
            raise AssertionError(f"{scene.name} could not be prepared: {failed}")
        self._count = 0

    def copy(self) -> Path:
        self._count += 1
        root = self.folder / f"root-{self._count}"
        shutil.copytree(self.base, root)
        return root

    def run(self, root: Path, order: Kill | Fail | None = None) -> Outcome:
        """The operation in a child under strace. It asks twice if the first time fails, as its user would."""

        def prepare() -> Work:
            ledger = ledger_at(root)
            return lambda: [_told(self.scene.do, ledger), _told(self.scene.do, ledger)]

        return traced(prepare, order)

    def points(self) -> tuple[list[Call], list[str]]:
        """The calls of an undisturbed operation that change something below its root, or tell; what is wrong with it.

        The second asking of `run` is not counted: it begins with the first call after the answer was ready."""
        root = self.copy()

        def prepare() -> Work:
            ledger = ledger_at(root)
            return lambda: _told(self.scene.do, ledger)

        outcome = traced(prepare)
        findings = [] if outcome.answer == "ok" else [f"undisturbed it ended with {outcome.answer}"]
        findings += _could_be_lost(outcome, root)
        made = {path for call in outcome.calls if call.creates for path in call.paths()}
        calls = [call for call in outcome.calls if changes(call, root, made)]
        shutil.rmtree(root)
        return calls, findings


def changes(call: Call, root: Path, made: set[str]) -> bool:
    """Whether a call can make a difference to the files, or tells what was done. `made` are the files it wrote."""
    match call.name:
        case "openat":
            return call.creates
        case "write" if "pipe:" in call.args:
            return True
        case "close":  # of a file just written; a folder has nothing to tell
            return bool(call.paths()) and made.issuperset(call.paths())
    return f"<{root}" in call.args or call.name.startswith(("mkdir", "rename", "link", "unlink"))


def faults(calls: list[Call]) -> Iterator[Fail]:
    """What a drive may answer to each call."""
    for call in calls:
        match call.name:
            case "fsync":
                yield Fail(call.name, call.nth, "EIO")
            case "write" if "pipe:" not in call.args:
                yield Fail(call.name, call.nth, "ENOSPC")
            case "pwrite64":
                yield Fail(call.name, call.nth, "ENOSPC")
                yield Fail(call.name, call.nth, "EIO")
                yield Fail(call.name, call.nth, "EINVAL")
            case "fallocate":
                yield Fail(call.name, call.nth, "ENOSPC")
                yield Fail(call.name, call.nth, "EOPNOTSUPP")
            case "openat" | "mkdirat":
                yield Fail(call.name, call.nth, "ENOSPC")
            case "linkat":
                yield Fail(call.name, call.nth, "EDQUOT")
                yield Fail(call.name, call.nth, "EIO")
            case "close":
                yield Fail(call.name, call.nth, "EDQUOT")
            case "unlinkat":
                yield Fail(call.name, call.nth, "EIO")


def _could_be_lost(outcome: Outcome, root: Path) -> Iterator[str]:
    """What a power cut could take of the log, and of what its commits name; the rest nobody was told of."""
    slots = list((root / layout.log_folder(RUN)).glob("*/*"))
    named = [str(path.relative_to(root)) for path in slots]
    for path in slots:
        record = json.loads(path.read_bytes())
        if record["kind"] == "checkpoint-committed":
            key = record["body"]["manifest"]["key"]
            named.append(key)
            if (root / key).exists():  # it may be retired and collected
                named += [part["payload"]["key"] for part in json.loads((root / key).read_bytes())["parts"]]
    for name, why in unsure(outcome.calls, str(root)).items():
        if any(f"{key}/".startswith(f"{name}/") for key in named):
            yield f"{name} could be lost: {why}"


def _told(do: Callable[[Ledger], object], ledger: Ledger) -> str:
    try:
        do(ledger)
    except CkptdError as error:
        return describe(error)
    return "ok"


def sweep(scene: Scene, *, sample: int | None, seed: int, first: bool) -> Row:
    """All points of one operation, or a seeded sample of them; up to the first finding, if that is enough."""
    row, began = Row(scene.name), time.monotonic()
    dice = random.Random(f"{seed} {scene.name}")
    with tempfile.TemporaryDirectory(prefix="ckptd-sweep-", dir=None if scene.on_drive else MEMORY) as folder:
        bench = Bench(scene, Path(folder))
        calls, wrong = bench.points()
        row.findings += [f"undisturbed: {what}" for what in wrong]
        row.calls = Counter(ANSWER if "pipe:" in call.args else call.name for call in calls)
        kills = [Kill(call.name, call.nth) for call in calls]
        fails = list(faults(calls))
        if sample is not None and not scene.every:
            kills, fails = _some(kills, sample, dice), _some(fails, sample, dice)
        points: list[Kill | Fail] = [*kills, *fails]
        for point in points:
            if not (first and row.findings):
                _try(bench, point, row)
        row.kills, row.fails = len(kills), len(fails)
    row.seconds = time.monotonic() - began
    return row


def _some(points: list[P], count: int, dice: random.Random) -> list[P]:
    chosen = sorted(dice.sample(range(len(points)), min(count, len(points))))
    return [points[index] for index in chosen]


def _try(bench: Bench, point: Kill | Fail, row: Row) -> None:
    if isinstance(point, Kill):
        _kill(bench, point, row)
    else:
        _fail(bench, point, row)


def _kill(bench: Bench, kill: Kill, row: Row) -> None:
    root = bench.copy()
    outcome = bench.run(root, kill)
    where = f"{kill.name} #{kill.nth} killed"
    if not outcome.killed or outcome.answer is not None:
        row.findings.append(f"{where}: it was not killed there")
        return
    landed = in_new_process(lambda: _recover(bench.scene, root, acknowledged=False))
    _note(row, where, landed, root)


def _fail(bench: Bench, fail: Fail, row: Row) -> None:
    root = bench.copy()
    outcome = bench.run(root, fail)
    where = f"{fail.name} #{fail.nth} {fail.error}"
    threads = {call.thread for call in outcome.injected}  # each counts its own calls
    if not outcome.injected or len(outcome.injected) != len(threads) or outcome.answer is None:
        row.findings.append(f"{where}: it did not fail there ({len(outcome.injected)} times)")
        return
    told = outcome.answer
    ok = "ok" in told
    if ok:
        row.findings += [f"{where}: told ok, but {what}" for what in _could_be_lost(outcome, root)]
    if told[0] == "ok":
        row.outcomes["fault survived"] += 1
    elif told[1] == "ok":
        row.outcomes["failed, ok when asked again"] += 1
    else:
        row.outcomes["failed twice, ok in a new process"] += 1
    _note(row, where, in_new_process(lambda: _recover(bench.scene, root, acknowledged=ok)), root)


def _note(row: Row, where: str, found: list[str], root: Path) -> None:
    state, *findings = found
    row.outcomes[state] += 1
    row.findings += [f"{where}: {what}" for what in findings]
    shutil.rmtree(root)


def _recover(scene: Scene, root: Path, *, acknowledged: bool) -> list[str]:
    """In a new process: whether the record had landed, then everything that is wrong."""
    storage, ledger = LocalStorage(root), ledger_at(root)
    auditor, wrong = Auditor(storage, RUN), list[str]()
    told = [*scene.acknowledged, *([scene.becomes] if acknowledged and scene.becomes else [])]

    def audit(when: str) -> None:
        wrong.extend(f"{when}: {finding}" for finding in auditor.check(acknowledged=told, damaged=scene.damaged))

    landed = any(rid.startswith(scene.rid) for rid in accepted(root))
    audit("after the crash")
    wrong.extend(half_visible(root))
    if scene.acknowledged:
        step = _resume_step(ledger)
        expected = {scene.steps[1]} if landed else {scene.steps[0]}
        if step not in expected:
            wrong.append(f"it would resume from {step}, expected {expected}")
    if acknowledged and not landed:
        wrong.append(f"was told ok, and no record {scene.rid} counts")
    again = _told(scene.do, ledger)
    if again != "ok":
        wrong.append(f"asked again in a new process: {again}")
    if scene.becomes:
        told.append(scene.becomes)
    records = [rid for rid in accepted(root) if rid.startswith(scene.rid)]
    if len(records) != 1:
        wrong.append(f"{len(records)} records after asking again: {records}")
    audit("after asking again")
    ledger.open(RUN, opening(C))
    answer = ledger.begin(RUN, beginning(C)).checkpoint
    if (answer.step if answer else None) != scene.steps[1]:
        wrong.append(f"a new start resumes from {answer and answer.step}, expected {scene.steps[1]}")
    audit("after a new start")
    return ["landed" if landed else "not there", *wrong]


def _resume_step(ledger: Ledger) -> int | None:
    found = ledger.latest(RUN).checkpoint
    return found.step if found else None


def in_new_process(work: Callable[[], object]) -> list[str]:
    """Run `work` in a forked process that did nothing with storages before; what it returned, as texts."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(source)
        try:
            found = work()
            answer = {"found": [str(item) for item in found] if isinstance(found, list) else []}
        except BaseException as error:  # noqa: BLE001 - handed to the parent
            answer = {"found": ["failed", f"{type(error).__name__}: {error}"]}
        with os.fdopen(sink, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(sink)
    with os.fdopen(source) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    result: list[str] = json.loads(text)["found"]
    return result


def table(rows: list[Row]) -> str:
    lines = [
        "| operation | system calls | kills | failures | how it was after | findings | s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        calls = " · ".join(f"{count} {name}" for name, count in sorted(row.calls.items()))
        outcomes = ", ".join(f"{count} {name}" for name, count in sorted(row.outcomes.items()))
        cells = (row.scene, calls, row.kills, row.fails, outcomes, len(row.findings), f"{row.seconds:.1f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every point of every operation")
    parser.add_argument("--only", action="append", choices=[scene.name for scene in SCENES])
    parser.add_argument("--seed", type=int, default=None, help="of the sample")
    parser.add_argument("--weakened", choices=sorted(WEAKENED), help="break the storage on purpose first")
    args = parser.parse_args()
    if args.weakened:
        WEAKENED[args.weakened]()
    seed = args.seed if args.seed is not None else int.from_bytes(os.urandom(4))
    print(f"seed {seed}", flush=True)
    rows = []
    for scene in SCENES:
        if args.only is None or scene.name in args.only:
            rows.append(sweep(scene, sample=None if args.all else SAMPLE, seed=seed, first=bool(args.weakened)))
            for finding in rows[-1].findings:
                print(f"{scene.name}: {finding}", flush=True)
    print(table(rows))
    return 1 if any(row.findings for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
