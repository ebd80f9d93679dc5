"""Many writers on one key at the same moment: exactly one may win, and its bytes stay.

Threads race with a storage instance each. Two processes race as well, because a store that keeps order with a lock in
this process's memory would pass with threads: this module is what they run (`python -m ckptd.storage.probe_race`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import IO, Literal

from ckptd.digests import sha256_hex
from ckptd.errors import AlreadyExists, CkptdError, Invalid, NotFound, Unavailable, describe
from ckptd.storage.base import Storage
from ckptd.storage.findings import Bench, Finding, lasting, ok, unfit, warn
from ckptd.storage.root import open_storage

BODY_BYTES = 4096
ANSWER_SECONDS = 120.0
HEAD_START_SECONDS = 0.01

Outcome = Literal["won", "refused", "open", "error"]


@dataclass(frozen=True)
class Try:
    """How one writer's put ended, and the digest of what it read right after: "" for nothing there, None if it
    could not read now."""

    body: str
    outcome: Outcome
    saw: str | None
    error: str
    seconds: float


def body(key: str, racer: int) -> bytes:
    """What racer number `racer` writes under `key`: different from what the others write in every block."""
    return f"{key} {racer:04d}\n".encode().ljust(64, b".") * (BODY_BYTES // 64)


def attempt(storage: Storage, key: str, racer: int) -> Try:
    """Put, and read at once what is there."""
    data = body(key, racer)
    outcome: Outcome = "won"
    saw: str | None = None
    error = ""
    began = time.monotonic()
    try:
        storage.put(key, [data], len(data))
    except AlreadyExists:
        outcome = "refused"
    except CkptdError as raised:
        outcome, error = "error" if lasting(raised) else "open", describe(raised)
    seconds = time.monotonic() - began
    try:
        saw = sha256_hex(storage.get(key, 2 * BODY_BYTES))
    except NotFound:
        saw = ""
    except CkptdError as raised:
        if lasting(raised):
            outcome, error = "error", describe(raised)
    return Try(sha256_hex(data), outcome, saw, error, seconds)


class Tally:
    """Judges round after round; the first problem is kept."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._settled: dict[str, str] = {}  # key -> digest of what stayed
        self.problem = ""
        self.rounds = self.open = self.early = self.lost_answers = 0
        self.slowest_seconds = 0.0

    def add(self, key: str, tries: Sequence[Try]) -> None:
        self.rounds += 1
        self.open += sum(one.outcome == "open" for one in tries)
        self.early += sum(one.outcome == "refused" and one.saw == "" for one in tries)
        self.slowest_seconds = max(self.slowest_seconds, *(one.seconds for one in tries))
        stays = self._read(key)
        self.problem = self.problem or self._problem(tries, stays)
        self.lost_answers += bool(stays) and not any(one.outcome == "won" for one in tries)
        self._settled[key] = stays

    def check_again(self) -> None:
        """At the end of all rounds each key still holds what stayed."""
        for key, stays in self._settled.items():
            if not self.problem and (now := self._read(key)) != stays:
                self.problem = f"{key} changed after its race" if now else f"{key} was gone after its race"

    def _read(self, key: str) -> str:
        try:
            return sha256_hex(self._bench.other.get(key, 2 * BODY_BYTES))
        except NotFound:
            return ""

    def _problem(self, tries: Sequence[Try], stays: str) -> str:
        errors = [one.error for one in tries if one.outcome == "error"]
        winners = [one for one in tries if one.outcome == "won"]
        seen = {one.saw for one in tries if one.saw} | ({stays} if stays else set())
        possible = {one.body for one in tries}
        if errors:
            return f"expected AlreadyExists for those that lost, found {errors[0]}"
        if len(winners) > 1:
            return f"{len(winners)} of {len(tries)} writers of one key were told that they created it"
        if len(seen) > 1:
            return f"{len(seen)} different objects were read under one key: it was overwritten, or seen half written"
        if winners and winners[0].saw == "":
            return "the winner could not read what it had just written"
        if winners and stays != winners[0].body:
            return "the winner's bytes are not what stayed" if stays else "the winner's object is not there"
        if stays and stays not in possible:
            return "bytes are stored that no writer wrote"
        if not stays and all(one.outcome == "refused" for one in tries):
            return "every writer was refused and nothing is there"
        return ""

    def finding(self, name: str, who: str) -> Finding:
        if self.problem:
            return unfit(
                name,
                f"{who}, {self.rounds} rounds: {self.problem}",
                "Do not use this storage: creating an object is not exclusive here, so two jobs could both commit.",
            )
        slowest = f"slowest answer {self.slowest_seconds:.2f} s"
        detail = f"{who}, {self.rounds} rounds: one winner each, its bytes stay; {slowest}"
        if self.lost_answers:
            detail += f"; {self.lost_answers} winners were told that the key is taken"
        if self.early:
            detail += f"; {self.early} losers could not read the winner's object at once"
        if self.open:
            return warn(
                name, f"{detail}; {self.open} writes with an open outcome", "Look for a slow or overloaded server."
            )
        return ok(name, detail)


def race_threads(bench: Bench, racers: int, rounds: int) -> Finding:
    """`racers` threads, each with a storage instance of its own."""
    tally = Tally(bench)
    barrier = threading.Barrier(racers)

    def run(key: str, racer: int) -> Try:
        barrier.wait()
        return attempt(storages[racer], key, racer)

    storages = [bench.open_one() for _ in range(racers)]
    with ThreadPoolExecutor(racers, thread_name_prefix="racer") as pool:
        for number in range(rounds):
            key = bench.key(f"race-{number:04d}")
            tally.add(key, list(pool.map(run, [key] * racers, range(racers))))
    tally.check_again()
    return tally.finding("race of threads", f"{racers} writers")


def race_processes(bench: Bench, urls: Sequence[str], rounds: int) -> Finding:
    """The same with a process for each writer, started here: one at each of `urls`, which name one storage."""
    tally = Tally(bench)
    with ExitStack() as stack:
        others = [stack.enter_context(_Racer(url, racer)) for racer, url in enumerate(urls)]
        for other in others:
            other.wait_until_ready()
        for number in range(rounds):
            key = bench.key(f"processes-{number:04d}")
            at = time.monotonic() + HEAD_START_SECONDS
            for other in others:
                other.tell({"key": key, "at": at})
            tally.add(key, [other.answer() for other in others])
    tally.check_again()
    return tally.finding("race of processes", f"{len(urls)} processes")


class _Racer:
    """One racing process, seen from the one that started it. `Unavailable` if it does not answer."""

    def __init__(self, url: str, racer: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ckptd.storage.probe_race"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.tell({"url": url, "racer": racer})  # not an argument: everybody on the machine sees those

    def __enter__(self) -> _Racer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                _close(pipe)

    def tell(self, value: object) -> None:
        pipe = self._process.stdin
        try:
            if pipe is not None:
                pipe.write(json.dumps(value) + "\n")
                pipe.flush()
        except BrokenPipeError as error:
            raise self._silent() from error

    def wait_until_ready(self) -> None:
        self._line()

    def answer(self) -> Try:
        return Try(**json.loads(self._line()))

    def _line(self) -> str:
        pipe = self._process.stdout
        timer = threading.Timer(ANSWER_SECONDS, self._process.kill)
        timer.start()
        try:
            line = pipe.readline() if pipe is not None else ""
        finally:
            timer.cancel()
        if not line.endswith("\n"):
            raise self._silent()
        return line

    def _silent(self) -> Unavailable:
        return Unavailable(f"a racing process ended, or did not answer within {ANSWER_SECONDS:.0f} s")


def _close(pipe: IO[str]) -> None:
    try:
        pipe.close()
    except BrokenPipeError:
        return  # something was not flushed to a process that is gone


def run_racer(lines: Iterator[str], say: Callable[[str], object]) -> None:
    """What a racing process does: open the storage, then one attempt for each line, at its moment.

    The monotonic clock is one for all processes of a machine.
    """
    told = json.loads(next(lines, "{}"))
    if "url" not in told:
        raise Invalid("a racing process is started by `ckptd doctor`", do="Run `ckptd doctor`.", field="url")
    storage = open_storage(told["url"])
    say("ready\n")
    for line in lines:
        order = json.loads(line)
        while time.monotonic() < order["at"]:
            pass
        say(json.dumps(asdict(attempt(storage, order["key"], told["racer"]))) + "\n")


def _say(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


if __name__ == "__main__":
    run_racer(iter(sys.stdin), _say)
