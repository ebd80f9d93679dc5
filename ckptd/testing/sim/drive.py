"""The storage of a simulated cluster: one medium in memory, and for each process a view of it that does its worst.

A view keeps to what `ckptd.storage.base` promises (an object appears whole and once, or not at all) and breaks
everything it does not: answers get lost, puts land late or twice, listings are old, processes are cut off.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Protocol, Self

from ckptd import layout
from ckptd.errors import AlreadyExists, Corrupt, NotFound, Unavailable
from ckptd.storage.base import Buffer
from ckptd.storage.memory import MemoryStorage
from ckptd.testing.sim.baton import Baton, Killed, Process
from ckptd.testing.sim.weather import Weather

LATENCY_SECONDS = 0.02
KEPT_EVENTS = 400


class Watcher(Protocol):
    """Is told at once what the medium took, and what a process removed from it."""

    def landed(self, key: str, data: bytes) -> None: ...

    def removed(self, key: str) -> None: ...


class Drive:
    """The medium, the puts that are on their way to it, and the faults that all processes share."""

    def __init__(self, baton: Baton, rng: random.Random, weather: Weather) -> None:
        self.baton, self.rng, self.weather = baton, rng, weather
        self.medium = MemoryStorage("sim")
        self.operations = 0
        self.met: Counter[str] = Counter()
        self.events: deque[str] = deque(maxlen=KEPT_EVENTS)
        self.full_until = 0.0
        self.watcher: Watcher | None = None
        self.after_operation: Callable[[], None] = lambda: None
        self.damaged: dict[str, bytes] = {}  # the key of an object damaged at rest, and what it was
        self.born: dict[str, int] = {}  # the operation that made a key, or the name of a folder, first
        self._late: list[tuple[float, int, str, bytes]] = []

    def view(self, process: Process) -> View:
        return View(self, process)

    def say(self, who: str, what: str) -> None:
        """For the trace."""
        self.events.append(f"{self.baton.now:9.2f} s {who}: {what}")

    def put(self, key: str, data: bytes) -> None:
        """The medium takes an object. `AlreadyExists`."""
        self.medium.put(key, [data], len(data))
        name = key
        while name and name not in self.born:
            self.born[name] = self.operations
            name = name.rpartition("/")[0]
        if self.watcher is not None:
            self.watcher.landed(key, data)

    def put_late(self, key: str, data: bytes) -> None:
        """It lands after a while: at once, or when nobody remembers."""
        delay = self.rng.choice((0.05, 1.0, 10.0, 100.0)) * self.rng.random()
        heapq.heappush(self._late, (self.baton.now + delay, self.operations, key, data))

    def deliver(self) -> None:
        """What was on its way and is due."""
        while self._late and self._late[0][0] <= self.baton.now:
            _, sent, key, data = heapq.heappop(self._late)
            try:
                self.put(key, data)
            except AlreadyExists:
                self.say("drive", f"{_short(key)} of operation {sent} came late and was refused")
            else:
                self.met["landed late"] += 1
                self.say("drive", f"{_short(key)} of operation {sent} landed late")

    def delete(self, key: str) -> None:
        if self.watcher is not None:
            self.watcher.removed(key)
        self.medium.delete(key)

    def damage(self, key: str, data: bytes | None) -> None:
        """At rest: other bytes, or none at all."""
        self.damaged.setdefault(key, self.medium.get(key, 1 << 30))
        self.medium.delete(key)
        if data is not None:
            self.medium.put(key, [data], len(data))
        self.met["damaged"] += 1

    def repair(self) -> None:
        """Every damaged object from a backup, as a person would."""
        for key, data in self.damaged.items():
            self.medium.delete(key)
            self.medium.put(key, [data], len(data))
        self.damaged.clear()


class View:
    """The storage as one process sees it; a `Storage`. Every call is a place where other tasks may go on."""

    def __init__(self, drive: Drive, process: Process) -> None:
        self.url = drive.medium.url
        self.process = process
        self._drive = drive
        self._misreads_until = 0.0
        self._misreads = ""
        self._cut_until = 0.0
        self._began = drive.operations
        self._seen: set[str] = set()

    # The storage.

    def put(self, key: str, chunks: Iterable[Buffer], size: int) -> None:
        drive, weather = self._drive, self._drive.weather
        self._enter("put", key)
        data = b"".join(bytes(chunk) for chunk in chunks)
        if len(data) != size:
            raise AssertionError(f"{key}: the chunks have {len(data)} bytes, announced were {size}")
        if drive.full_until > drive.baton.now:
            raise self._refuse("full", "put", key)
        if self._meets(weather.delayed):
            drive.put_late(key, data)
            raise self._refuse("delayed", "put", key)
        drive.put(key, data)
        if self._meets(weather.doubled):
            drive.put_late(key, data)
            self._tell("doubled", "put", key)
        if self._meets(weather.echoed):
            self._tell("echoed", "put", key)
            raise AlreadyExists(f"simulated: {key} exists already", key=key)
        self._leave("put", key)

    def get(self, key: str, max_bytes: int) -> bytes:
        self._enter("get", key)
        data = self._read(key)
        if len(data) > max_bytes:
            raise Corrupt(f"{key} is too long", key=key, expected=max_bytes, found=len(data))
        self._leave("get", key)
        return data

    def reader(self, key: str, *, fresh: bool = False) -> ViewReader:
        self._enter("reader", key)
        data = self._read(key)
        self._leave("reader", key)
        return ViewReader(self, key, data)

    def size(self, key: str) -> int:
        self._enter("size", key)
        size = self._drive.medium.size(key)
        self._leave("size", key)
        return size

    def list(self, folder: str) -> list[str]:
        self._enter("list", folder)
        names = self._drive.medium.list(folder)
        if names and self._meets(self._drive.weather.stale):
            self._tell("stale", "list", folder)
            drive = self._drive
            age = drive.rng.choice((20, 200, drive.operations)) * drive.rng.random()
            born, moment = drive.born, drive.operations - age
            names = [name for name in names if born[f"{folder}/{name}"] <= moment]
        self._leave("list", folder)
        return names

    def sync(self, key: str) -> None:
        self._enter("sync", key)
        self._drive.medium.sync(key)
        self._leave("sync", key)

    def delete(self, key: str) -> None:
        self._enter("delete", key)
        self._drive.delete(key)
        self._leave("delete", key)

    def check_root(self) -> str:
        self._enter("check_root", layout.ROOT_MARKER)
        return self._drive.medium.check_root()

    def read_on(self, key: str) -> None:
        """A reader of this view reads on."""
        self._enter("read", key)

    # Faults.

    def _enter(self, operation: str, key: str) -> None:
        """Before the call: others may go on, time passes, this process may die, stop, or not get through."""
        drive = self._drive
        drive.baton.step(LATENCY_SECONDS * drive.rng.random())
        drive.operations += 1
        drive.deliver()
        drive.say(self.process.name, f"{operation} {_short(key)}")
        drive.after_operation()
        weather = drive.weather
        if self.process.mortal:
            if self._meets(weather.killed):
                self._tell("killed", operation, key)
                self.process.dead = True
                raise Killed
            if self._meets(weather.stopped):
                self._tell("stopped", operation, key)
                seconds = drive.rng.choice((1.0, 10.0, 100.0)) * drive.rng.random()
                self.process.asleep_until = drive.baton.now + seconds
                drive.baton.pause(0.0)
            if self._meets(weather.misread):
                self._misreads_until = drive.baton.now + 30.0 * drive.rng.random()
                self._misreads = drive.rng.choice(("/log/", "/data/", "/data/", "/manifests/", "/snapshots/", ""))
        if self._meets(weather.outage):
            self._cut_until = drive.baton.now + drive.rng.choice((0.5, 5.0, 30.0)) * drive.rng.random()
        if self._meets(weather.full):
            drive.full_until = drive.baton.now + 20.0 * drive.rng.random()
        if self._cut_until > drive.baton.now:
            raise self._refuse("outage", operation, key)
        if self._meets(weather.refused):
            raise self._refuse("refused", operation, key)

    def _leave(self, operation: str, key: str) -> None:
        if self._meets(self._drive.weather.lost):
            raise self._refuse("lost", operation, key)

    def _read(self, key: str) -> bytes:
        weather, log = self._drive.weather, "/log/" in key
        late = log and key not in self._seen and self._drive.born.get(key, 0) > self._began
        if late and self._meets(weather.negative):
            self._tell("negative", "get", key)
            raise NotFound(f"simulated: {key} does not exist", key=key)
        data = self._drive.medium.get(key, 1 << 30)
        if log:
            self._seen.add(key)
        wrong = self._misreads_until > self._drive.baton.now and self._misreads in key and weather.misread > 0.0
        if not wrong or not data:
            return data
        self._tell("misread", "get", key)
        return flipped(data, self._drive.rng)

    def _meets(self, chance: float) -> bool:
        return chance > 0.0 and self._drive.rng.random() < chance

    def _tell(self, fault: str, operation: str, key: str) -> None:
        self._drive.met[fault] += 1
        self._drive.say(self.process.name, f"  {operation} {_short(key)}: {fault}")

    def _refuse(self, fault: str, operation: str, key: str) -> Unavailable:
        self._tell(fault, operation, key)
        return Unavailable(f"simulated: {operation} of {key}: {fault}", key=key)


class ViewReader:
    def __init__(self, view: View, key: str, data: bytes) -> None:
        self._view, self._key, self._data = view, key, data
        self.size = len(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._view.read_on(self._key)
        piece = self._data[offset : offset + buffer.nbytes]
        if len(piece) < buffer.nbytes:
            raise Corrupt(f"{self._key} ends too early", key=self._key, expected=buffer.nbytes, found=len(piece))
        buffer[:] = piece

    def paged(self) -> bool:
        return False

    def close(self) -> None:
        self._data = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def flipped(data: bytes, rng: random.Random) -> bytes:
    """`data` with one bit wrong."""
    at = int(rng.random() * len(data))
    return data[:at] + bytes([data[at] ^ (1 << int(rng.random() * 8))]) + data[at + 1 :]


def _short(key: str) -> str:
    """A key as people read it in a trace."""
    return key.removeprefix("runs/").replace("00000000", "..")
