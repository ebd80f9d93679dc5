"""Where the command line reads from: a storage directly, or a service. Both say the same."""

from __future__ import annotations

import os
from typing import Any, Protocol, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter

from ckptd import layout
from ckptd.errors import CkptdError, Corrupt, Invalid, NotFound, Unavailable, describe, from_dict
from ckptd.ledger import Ledger
from ckptd.manifest import Manifest
from ckptd.service.readable import tell_readable
from ckptd.storage import open_storage
from ckptd.wire import CheckpointInfo, Latest, RunInfo

SERVICE_SECONDS = 60.0
M = TypeVar("M", bound=BaseModel)


class Source(Protocol):
    """A damaged log is `Corrupt`, with the checkpoints before the damage in its field `readable`; `runs` tells it
    in each run's `problem` instead."""

    def runs(self) -> list[RunInfo]: ...

    def latest(self, run: str) -> Latest: ...

    def checkpoints(self, run: str) -> list[CheckpointInfo]: ...

    def checkpoint_at(self, run: str, step: int) -> CheckpointInfo: ...

    def manifest(self, run: str, step: int) -> Manifest: ...


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
        return ServiceSource(url, os.environ.get("CKPTD_TOKEN"))
    return StorageSource(Ledger(open_storage(url)))


class StorageSource:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

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

    def checkpoint_at(self, run: str, step: int) -> CheckpointInfo:
        try:
            return self._ledger.checkpoint_at(run, step)
        except Corrupt as error:
            raise tell_readable(self._ledger.storage, run, error) from error

    def manifest(self, run: str, step: int) -> Manifest:
        return self._ledger.manifest(self.checkpoint_at(run, step).manifest)


class ServiceSource:
    def __init__(self, url: str, token: str | None) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            self._http = httpx.Client(base_url=url, headers=headers, timeout=SERVICE_SECONDS)
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise Invalid(f"service URL {url!r} or the token is not allowed: {error}", field="url") from error

    def runs(self) -> list[RunInfo]:
        return TypeAdapter(list[RunInfo]).validate_json(self._get("/v1/runs"))

    def latest(self, run: str) -> Latest:
        return Latest.model_validate_json(self._get(f"{_of(run)}/latest"))

    def checkpoints(self, run: str) -> list[CheckpointInfo]:
        return TypeAdapter(list[CheckpointInfo]).validate_json(self._get(f"{_of(run)}/checkpoints"))

    def checkpoint_at(self, run: str, step: int) -> CheckpointInfo:
        path = f"{_of(run)}/checkpoints/{layout.check_step(step)}"
        return CheckpointInfo.model_validate_json(self._get(path))

    def manifest(self, run: str, step: int) -> Manifest:
        path = f"{_of(run)}/checkpoints/{layout.check_step(step)}/manifest"
        return Manifest.model_validate_json(self._get(path))

    def _get(self, path: str) -> bytes:
        asked = f"{str(self._http.base_url).rstrip('/')}{path}"
        try:
            answer = self._http.get(path)
        except httpx.HTTPError as error:
            raise Unavailable(
                f"the service does not answer at {asked}: {describe(error)}",
                do="Check the URL and that `ckptd serve` runs there, or name the storage instead.",
            ) from error
        if not answer.is_success:
            raise _error_of(answer, asked)
        return answer.content


def _of(run: str) -> str:
    return f"/v1/runs/{layout.check_run(run)}"


def _error_of(answer: httpx.Response, asked: str) -> CkptdError:
    """The error an answer stands for; one without a problem does not come from ckptd."""
    if answer.headers.get("Content-Type", "").startswith("application/problem+json"):
        problem: dict[str, Any] = answer.json()
        return from_dict({**problem, "message": problem.get("detail")})
    return Unavailable(
        f"{asked} answered {answer.status_code}, and not as ckptd does", do="Check that the URL is a service's."
    )
