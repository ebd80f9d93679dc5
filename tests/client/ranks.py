"""The ranks of one job as threads of this process, each with a client of its own over one shared drive.

job = Job(drive, world=4)
steps = job.run(lambda client: client.restore(state))        # on four threads; the results by rank
errors = job.outcomes(...)                                    # the same, exceptions as values
"""

from __future__ import annotations

import faulthandler
import fnmatch
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import uvicorn
from torch._C._distributed_c10d import HashStore

from ckptd import layout
from ckptd.ledger import Ledger
from ckptd.service.app import create_app
from ckptd.service.settings import ServiceSettings
from ckptd.slots import all_slots
from ckptd.storage import open_storage
from ckptd.storage.base import Storage
from ckptd.testing.faulty import FaultyStorage
from ckptd_client import CheckpointClient, transport
from ckptd_client.agreement import Store
from tests.homes import Stored, everything

T = TypeVar("T")
DEADLINE_SECONDS = 60.0
RUN = "en-it"


def on_threads(functions: Sequence[Callable[[], T]]) -> list[T | BaseException]:
    """Run all at the same time; what each returned or raised. Fails, with all stacks, if one does not end."""
    found: list[T | BaseException] = [AssertionError("did not end")] * len(functions)

    def run(index: int) -> None:
        try:
            found[index] = functions[index]()
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            found[index] = error

    threads = [threading.Thread(target=run, args=(i,), name=f"rank-{i}", daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    give_up_at = time.monotonic() + DEADLINE_SECONDS
    for thread in threads:
        thread.join(max(0.0, give_up_at - time.monotonic()))
    hung = [thread.name for thread in threads if thread.is_alive()]
    if hung:
        faulthandler.dump_traceback(file=sys.stderr)
        raise AssertionError(f"{hung} did not end within {DEADLINE_SECONDS} s")
    return found


def results(found: Sequence[T | BaseException]) -> list[T]:
    """The results if there are only such; the errors otherwise."""
    errors = [error for error in found if isinstance(error, BaseException)]
    if errors:
        raise BaseExceptionGroup("some ranks failed", errors)
    return [result for result in found if not isinstance(result, BaseException)]


def of_log(key: str) -> bool:
    """A slot of a log, or a folder of slots."""
    return "/log" in key


class Drive:
    """The storage that all ranks share: a folder or a bucket's prefix, initialised. A client that is told
    `url_for(machine)` works on `seen_by(machine)`."""

    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.url = url
        self.storage: Storage = open_storage(url)
        self._machines: dict[str, FaultyStorage] = {}
        self._lock = threading.Lock()
        monkeypatch.setattr(transport, "open_storage", self._open)

    def url_for(self, machine: str | int) -> str:
        return f"{machine}+{self.url}"

    def seen_by(self, machine: str | int) -> FaultyStorage:
        url = self.url_for(machine)
        with self._lock:
            if url not in self._machines:
                # A folder is opened by each machine, for what a process remembers of one. Of a bucket it remembers
                # nothing, and its connections take long to make.
                on_s3 = self.url.startswith("s3://")
                self._machines[url] = FaultyStorage(self.storage if on_s3 else open_storage(self.url))
            return self._machines[url]

    def _open(self, url: str) -> Storage:
        machine, plus, _ = url.partition("+")
        if not plus:
            return open_storage(url)
        storage = self.seen_by(machine)
        storage.check_root()
        return storage

    def beside(self, name: str) -> str:
        """The URL of another root, not initialised: an empty folder, or a prefix where nothing is."""
        url = f"{self.url.rpartition('/')[0]}/{name}"
        if url.startswith("file://"):
            Path(url.removeprefix("file://")).mkdir()
        return url

    def ledger(self) -> Ledger:
        """Another reader of the log, with nothing remembered."""
        return Ledger(self.storage)

    def records(self, run: str = RUN) -> list[dict[str, Any]]:
        """The records in the log."""
        keys = [layout.log_key(run, seq) for seq in all_slots(self.storage, run)]
        return [json.loads(Stored(self.storage, key).read_bytes()) for key in keys]

    def kinds(self, run: str = RUN) -> list[str]:
        """The kinds of the records in the log."""
        return [record["kind"] for record in self.records(run)]

    def steps(self, run: str = RUN) -> list[int]:
        """The steps that are checkpoints."""
        return [c.step for c in self.ledger().checkpoints(run)]

    def find(self, pattern: str, run: str = RUN) -> list[Stored]:
        """The objects of a run whose keys below its folder match, in order. A `*` takes slashes, too."""
        keys = fnmatch.filter(everything(self.storage), f"runs/{run}/{pattern}")
        return [Stored(self.storage, key) for key in sorted(keys)]

    def objects(self, step: int, run: str = RUN) -> list[Stored]:
        """The payload objects of a step, by writer."""
        ledger = self.ledger()
        manifest = ledger.manifest(ledger.checkpoint_at(run, step).manifest)
        return [Stored(self.storage, ref.key) for ref in manifest.objects()]

    def manifest(self, step: int, run: str = RUN) -> Stored:
        return Stored(self.storage, self.ledger().checkpoint_at(run, step).manifest.key)


@dataclass
class Job:
    """One incarnation. `options` go to every client."""

    drive: Drive
    world: int = 1
    run_name: str = RUN
    options: dict[str, Any] = field(default_factory=dict)
    store: Any = field(default_factory=HashStore)
    url: str | None = None

    def client(self, rank: int = 0, **options: Any) -> CheckpointClient:
        """Close it. Rank `n` sees the drive as machine `n`."""
        told: dict[str, Any] = {
            "rank": rank,
            "world_size": self.world,
            "store": self.store,
            "start_deadline_seconds": 30.0,
            "save_deadline_seconds": 30.0,
            **({"storage": self.drive.url_for(rank)} if self.url else {}),
            **self.options,
            **options,
        }
        return CheckpointClient(self.url or self.drive.url_for(rank), self.run_name, **told)

    def outcomes(self, function: Callable[[CheckpointClient], T], **options: Any) -> list[T | BaseException]:
        """`function(client)` on a thread per rank; what each returned or raised."""

        def on_rank(rank: int) -> Callable[[], T]:
            def run() -> T:
                with self.client(rank, **options) as client:
                    return function(client)

            return run

        return on_threads([on_rank(rank) for rank in range(self.world)])

    def run(self, function: Callable[[CheckpointClient], T], **options: Any) -> list[T]:
        return results(self.outcomes(function, **options))


class TellingStore:
    """A store that releases a semaphore for every key written that ends so."""

    def __init__(self, inner: Store, ending: str) -> None:
        self._inner, self._ending, self.told = inner, ending, threading.Semaphore(0)

    def set(self, key: str, value: str) -> None:
        self._inner.set(key, value)
        if self._ending in key:
            self.told.release()

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._inner.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)


class Trained:
    """A small model with all that belongs to it, after `updates` steps of training from `seed`."""

    def __init__(self, seed: int = 0, updates: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = torch.nn.Linear(4, 3)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.app: dict[str, object] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "mean": torch.zeros(2),
            "epoch": 0,
            "config": {"name": "small", "sizes": [1, 2]},
        }
        self.generator = generator
        for _ in range(updates):
            self.update()

    def update(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(2, 4, generator=self.generator)).square().sum().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.app["epoch"] = int(str(self.app["epoch"])) + 1
        mean = self.app["mean"]
        assert isinstance(mean, torch.Tensor)
        mean += 1

    def digest(self) -> list[bytes]:
        """Every byte that training depends on."""
        tensors: list[torch.Tensor] = [*self.model.state_dict().values()]
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        mean = self.app["mean"]
        assert isinstance(mean, torch.Tensor)
        plain = repr((self.scheduler.state_dict(), self.app["epoch"], self.app["config"])).encode()
        return [tensor.detach().numpy().tobytes() for tensor in [*tensors, mean]] + [plain]


def train(drive: Drive, steps: Sequence[int], *, world: int = 1, run: str = RUN, per_rank: bool = False) -> None:
    """One incarnation that resumes, saves each of `steps`, durably, and ends."""

    def life(client: CheckpointClient) -> None:
        trained = Trained()
        client.restore(trained.app)
        for step in steps:
            trained = Trained(updates=step)
            own = {"rank": client.rank, "position": torch.full((3,), float(step))} if per_rank else None
            client.save(trained.app, step=step, per_rank=own, wait=True)

    Job(drive, world, run).run(life)


@contextmanager
def serving(drive: Drive, *, port: int = 0, **settings: Any) -> Iterator[str]:
    """The real service over HTTP, on a thread; its URL."""
    listener = socket.create_server(("127.0.0.1", port))
    app = create_app(ServiceSettings(storage=drive.url, **{"relook_seconds": 0.05, **settings}))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, args=([listener],), name="service")
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        app.state.service.lookout.close()
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive(), "the service did not end"
