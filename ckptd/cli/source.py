"""Where the command line works: on a storage directly, or through a service. Both say and do the same."""

from __future__ import annotations

import os
from typing import Protocol

from ckptd.collecting import Collected
from ckptd.errors import Corrupt, Invalid, NotFound
from ckptd.fsck import FsckAnswer, fsck
from ckptd.keeper import Keeper
from ckptd.ledger import Ledger
from ckptd.manifest import Manifest
from ckptd.retaining import RetainAnswer, RetainRequest, retain, verify
from ckptd.service.readable import tell_readable
from ckptd.storage import open_storage
from ckptd.watched import Watch
from ckptd.why import Why, why
from ckptd.wire import ActOnRun, ActRequest, CheckpointInfo, Latest, RunInfo, RunVerb, Verb, VerifyAnswer


class Source(Protocol):
    """A damaged log is `Corrupt`, with the checkpoints before the damage in its field `readable`; `runs` tells it
    in each run's `problem` instead. `watch` is called with the bytes that were read."""

    def runs(self) -> list[RunInfo]: ...

    def latest(self, run: str) -> Latest: ...

    def checkpoints(self, run: str) -> list[CheckpointInfo]: ...

    def checkpoint_at(self, run: str, step: int, save: str | None) -> CheckpointInfo: ...

    def manifest(self, run: str, step: int, save: str | None) -> Manifest: ...

    def why(self, run: str) -> Why: ...

    def act(self, run: str, step: int, verb: Verb, request: ActRequest) -> CheckpointInfo: ...

    def act_on_run(self, run: str, verb: RunVerb, request: ActOnRun) -> RunInfo: ...

    def verify(self, run: str, step: int, save: str, watch: Watch) -> VerifyAnswer: ...

    def retain(self, run: str, request: RetainRequest, watch: Watch) -> RetainAnswer: ...

    def collect(self, run: str) -> Collected: ...

    def fsck(self, run: str, deep: bool, watch: Watch) -> FsckAnswer: ...


def open_source(url: str | None) -> Source:
    """`Invalid` without a URL, `NotInitialised` for a storage root without its marker. A service's token is taken
    from CKPTD_TOKEN only: arguments can be seen by everybody on the machine."""
    if not url:
        raise Invalid(
            "no service and no storage is named",
            do="Pass --url, or set CKPTD_URL or CKPTD_STORAGE: http://host:8440, or file:///mnt/shared/ckpts.",
            field="url",
        )
    if url.startswith(("http://", "https://")):
        from ckptd.cli.over_service import ServiceSource

        return ServiceSource(url, os.environ.get("CKPTD_TOKEN"))
    return StorageSource(Ledger(open_storage(url)))


class StorageSource:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._keeper = Keeper(ledger)

    def runs(self) -> list[RunInfo]:
        found = []
        for name in self._ledger.runs():
            try:
                found.append(self._ledger.run_info(name))
            except NotFound:
                continue  # a folder, and no record in it: not a run yet
        return found

    def latest(self, run: str) -> Latest:
        try:
            return self._ledger.latest(run)
        except Corrupt as error:
            raise tell_readable(self._ledger.storage, run, error) from error

    def checkpoints(self, run: str) -> list[CheckpointInfo]:
        try:
            return self._ledger.checkpoints(run)
        except Corrupt as error:
            raise tell_readable(self._ledger.storage, run, error) from error

    def checkpoint_at(self, run: str, step: int, save: str | None) -> CheckpointInfo:
        try:
            return self._ledger.checkpoint_at(run, step, save)
        except Corrupt as error:
            raise tell_readable(self._ledger.storage, run, error) from error

    def manifest(self, run: str, step: int, save: str | None) -> Manifest:
        return self._ledger.manifest(self.checkpoint_at(run, step, save).manifest)

    def why(self, run: str) -> Why:
        return why(self._ledger, run)

    def act(self, run: str, step: int, verb: Verb, request: ActRequest) -> CheckpointInfo:
        return self._keeper.act(run, step, verb, request)

    def act_on_run(self, run: str, verb: RunVerb, request: ActOnRun) -> RunInfo:
        return self._keeper.act_on_run(run, verb, request)

    def verify(self, run: str, step: int, save: str, watch: Watch) -> VerifyAnswer:
        return verify(self._keeper, run, step, save, watch)

    def retain(self, run: str, request: RetainRequest, watch: Watch) -> RetainAnswer:
        return retain(self._keeper, run, request, watch)

    def collect(self, run: str) -> Collected:
        return self._keeper.collect(run)

    def fsck(self, run: str, deep: bool, watch: Watch) -> FsckAnswer:
        return fsck(self._ledger.storage, run, deep=deep, watch=watch)
