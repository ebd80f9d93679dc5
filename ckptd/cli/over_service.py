"""The command line through a service, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter

from ckptd import layout
from ckptd.collecting import Collected
from ckptd.errors import CkptdError, Invalid, Unavailable, describe, from_dict
from ckptd.fsck import FsckAnswer
from ckptd.manifest import Manifest
from ckptd.retaining import RetainAnswer, RetainRequest
from ckptd.watched import Watch, unwatched
from ckptd.why import Why
from ckptd.wire import (
    ActOnRun,
    ActRequest,
    CheckpointInfo,
    Latest,
    RunInfo,
    RunVerb,
    Verb,
    VerifyAnswer,
    VerifyRequest,
)

SERVICE_SECONDS = 60.0
M = TypeVar("M", bound=BaseModel)


class ServiceSource:
    """See `Source`."""

    def __init__(self, url: str, token: str | None) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            self._http = httpx.Client(base_url=url, headers=headers, timeout=SERVICE_SECONDS)
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise Invalid(f"service URL {url!r} or the token is not allowed: {error}", field="url") from error

    def runs(self) -> list[RunInfo]:
        return TypeAdapter(list[RunInfo]).validate_json(self._ask("GET", "/v1/runs"))

    def latest(self, run: str) -> Latest:
        return Latest.model_validate_json(self._ask("GET", f"{_of(run)}/latest"))

    def checkpoints(self, run: str) -> list[CheckpointInfo]:
        return TypeAdapter(list[CheckpointInfo]).validate_json(self._ask("GET", f"{_of(run)}/checkpoints"))

    def checkpoint_at(self, run: str, step: int, save: str | None) -> CheckpointInfo:
        return CheckpointInfo.model_validate_json(self._ask("GET", f"{_at(run, step)}{_named(save)}"))

    def manifest(self, run: str, step: int, save: str | None) -> Manifest:
        return Manifest.model_validate_json(self._ask("GET", f"{_at(run, step)}/manifest{_named(save)}"))

    def why(self, run: str) -> Why:
        return Why.model_validate_json(self._ask("GET", f"{_of(run)}/why"))

    def act(self, run: str, step: int, verb: Verb, request: ActRequest) -> CheckpointInfo:
        return CheckpointInfo.model_validate_json(self._ask("POST", f"{_at(run, step)}/{verb}", request))

    def act_on_run(self, run: str, verb: RunVerb, request: ActOnRun) -> RunInfo:
        return RunInfo.model_validate_json(self._ask("POST", f"{_of(run)}/{verb}", request))

    def verify(self, run: str, step: int, save: str, watch: Watch) -> VerifyAnswer:
        return self._follow(f"{_at(run, step)}/verify", VerifyAnswer, watch, VerifyRequest(save=save))

    def retain(self, run: str, request: RetainRequest, watch: Watch) -> RetainAnswer:
        return self._follow(f"{_of(run)}/retain", RetainAnswer, watch, request)

    def collect(self, run: str) -> Collected:
        return self._follow(f"{_of(run)}/collect", Collected, unwatched)

    def fsck(self, run: str, deep: bool, watch: Watch) -> FsckAnswer:
        return self._follow(f"{_of(run)}/fsck?deep={'true' if deep else 'false'}", FsckAnswer, watch)

    # How.

    def _ask(self, method: str, path: str, request: BaseModel | None = None) -> bytes:
        with self._answer(method, path, request) as answer:
            return answer.read()

    def _follow(self, path: str, kind: type[M], watch: Watch, request: BaseModel | None = None) -> M:
        """Work that takes long: lines that tell how many bytes were read so far, then one with the answer."""
        read_bytes = 0
        with self._answer("POST", path, request) as answer:
            for line in answer.iter_lines():
                said: dict[str, Any] = json.loads(line)
                if said.get("problem") is not None:
                    raise _error_in(said["problem"])
                if said.get("answer") is not None:
                    return kind.model_validate_json(json.dumps(said["answer"]))
                watch(said["read_bytes"] - read_bytes)
                read_bytes = said["read_bytes"]
        raise Unavailable(f"{self._url(path)} ended before it had answered", do="Ask again; what is done stays done.")

    @contextmanager
    def _answer(self, method: str, path: str, request: BaseModel | None) -> Iterator[httpx.Response]:
        """An answer that is a success, to be read within the block."""
        content = request.model_dump_json() if request is not None else None
        headers = {"Content-Type": "application/json"} if content is not None else {}
        try:
            with self._http.stream(method, path, content=content, headers=headers) as answer:
                if not answer.is_success:
                    answer.read()
                    raise _error_of(answer, self._url(path))
                yield answer
        except httpx.HTTPError as error:
            raise Unavailable(
                f"the service does not answer at {self._url(path)}: {describe(error)}",
                do="Check the URL and that `ckptd serve` runs there, or name the storage instead.",
            ) from error

    def _url(self, path: str) -> str:
        return f"{str(self._http.base_url).rstrip('/')}{path}"


def _of(run: str) -> str:
    return f"/v1/runs/{layout.check_run(run)}"


def _at(run: str, step: int) -> str:
    return f"{_of(run)}/checkpoints/{layout.check_step(step)}"


def _named(save: str | None) -> str:
    return f"?save={layout.check_save(save)}" if save is not None else ""


def _error_of(answer: httpx.Response, asked: str) -> CkptdError:
    """The error an answer stands for; one without a problem does not come from ckptd."""
    if answer.headers.get("Content-Type", "").startswith("application/problem+json"):
        return _error_in(answer.json())
    return Unavailable(
        f"{asked} answered {answer.status_code}, and not as ckptd does", do="Check that the URL is a service's."
    )


def _error_in(problem: dict[str, Any]) -> CkptdError:
    return from_dict({**problem, "message": problem.get("detail")})
