"""Two ways to the same runs for a process of a soak: through a service, or straight on the storage."""

from __future__ import annotations

import json
from typing import Any, Protocol, TypeVar

import httpx
from pydantic import BaseModel

from ckptd import retaining
from ckptd.collecting import Collected
from ckptd.errors import CkptdError, Unavailable, describe, from_dict
from ckptd.keeper import Keeper
from ckptd.ledger import Ledger
from ckptd.retaining import RetainAnswer, RetainRequest
from ckptd.retention import Policy
from ckptd.wire import (
    AbortRequest,
    ActRequest,
    Answer,
    BeginRequest,
    CheckpointInfo,
    CommitRequest,
    DamageAnswer,
    DamageReport,
    HoldAnswer,
    Latest,
    OpenRequest,
    ReadyRequest,
    SaveStatus,
    Verb,
    VerifyAnswer,
    VerifyRequest,
)

M = TypeVar("M", bound=BaseModel)
REQUEST_SECONDS = 40.0


class Side(Protocol):
    """What a process asks for; `Straight` is one, `OverHttp` the other."""

    def open(self, run: str, request: OpenRequest) -> None: ...

    def begin(self, run: str, request: BeginRequest) -> Answer: ...

    def join(self, run: str, attempt: str, fallback_of: int | None = None) -> Answer | None: ...

    def ready(self, run: str, attempt: str, generation: int) -> None: ...

    def commit(self, run: str, request: CommitRequest) -> None: ...

    def abort(self, run: str, save: str, request: AbortRequest) -> None: ...

    def save_status(self, run: str, save: str) -> SaveStatus: ...

    def report_damage(self, run: str, report: DamageReport) -> DamageAnswer: ...

    def latest(self, run: str) -> Latest: ...

    def act(self, run: str, step: int, verb: Verb, request: ActRequest) -> CheckpointInfo: ...

    def verify(self, run: str, step: int, save: str) -> VerifyAnswer: ...

    def retain(self, run: str, policy: Policy) -> RetainAnswer: ...

    def collect(self, run: str) -> Collected: ...


class Straight(Ledger):
    """On the storage itself, with what a service does beside the ledger."""

    def act(self, run: str, step: int, verb: Verb, request: ActRequest) -> CheckpointInfo:
        return Keeper(self).act(run, step, verb, request)

    def verify(self, run: str, step: int, save: str) -> VerifyAnswer:
        return retaining.verify(Keeper(self), run, step, save)

    def retain(self, run: str, policy: Policy) -> RetainAnswer:
        return retaining.retain(Keeper(self), run, RetainRequest(**policy.model_dump()))

    def collect(self, run: str) -> Collected:
        return Keeper(self).collect(run)


class OverHttp:
    """A service at `url`. It tries once: no answer is `Unavailable`, and the outcome is open."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=f"{url}/v1/runs/", timeout=REQUEST_SECONDS)
        self._url = url

    def open(self, run: str, request: OpenRequest) -> None:
        self._send("POST", f"{run}/attempts", request)

    def begin(self, run: str, request: BeginRequest) -> Answer:
        return self._ask(Answer, "POST", f"{run}/generations", request)

    def join(self, run: str, attempt: str, fallback_of: int | None = None) -> Answer | None:
        query = f"?fallback_of={fallback_of}" if fallback_of is not None else ""
        found = self._send("GET", f"{run}/attempts/{attempt}/answer{query}")
        return None if found.status_code == httpx.codes.NO_CONTENT else Answer.model_validate_json(found.content)

    def ready(self, run: str, attempt: str, generation: int) -> None:
        self._send("POST", f"{run}/generations/{generation}/ready", ReadyRequest(attempt=attempt))

    def commit(self, run: str, request: CommitRequest) -> None:
        self._ask(SaveStatus, "POST", f"{run}/saves/{request.save}/commit", request)

    def abort(self, run: str, save: str, request: AbortRequest) -> None:
        self._send("POST", f"{run}/saves/{save}/abort", request)

    def save_status(self, run: str, save: str) -> SaveStatus:
        return self._ask(SaveStatus, "GET", f"{run}/saves/{save}")

    def report_damage(self, run: str, report: DamageReport) -> DamageAnswer:
        return self._ask(DamageAnswer, "POST", f"{run}/damage", report)

    def latest(self, run: str) -> Latest:
        return self._ask(Latest, "GET", f"{run}/latest")

    def act(self, run: str, step: int, verb: Verb, request: ActRequest) -> CheckpointInfo:
        path = f"{run}/checkpoints/{step}/{verb}"
        if verb == "hold":
            return self._ask(HoldAnswer, "POST", path, request).checkpoint
        return self._ask(CheckpointInfo, "POST", path, request)

    def verify(self, run: str, step: int, save: str) -> VerifyAnswer:
        return self._follow(VerifyAnswer, f"{run}/checkpoints/{step}/verify", VerifyRequest(save=save))

    def retain(self, run: str, policy: Policy) -> RetainAnswer:
        return self._follow(RetainAnswer, f"{run}/retain", RetainRequest(**policy.model_dump()))

    def collect(self, run: str) -> Collected:
        return self._follow(Collected, f"{run}/collect")

    def close(self) -> None:
        self._http.close()

    def _ask(self, model: type[M], method: str, path: str, body: BaseModel | None = None) -> M:
        return model.model_validate_json(self._send(method, path, body).content)

    def _follow(self, model: type[M], path: str, body: BaseModel | None = None) -> M:
        """Work that is told of line by line; the last line has its end."""
        lines = self._send("POST", path, body).text.splitlines()
        said: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        if said.get("problem") is not None:
            raise _error_in(said["problem"])
        if said.get("answer") is None:
            raise Unavailable(f"POST {self._url} {path} ended before it had answered")
        return model.model_validate_json(json.dumps(said["answer"]))

    def _send(self, method: str, path: str, body: BaseModel | None = None) -> httpx.Response:
        options: dict[str, Any] = {}
        if body is not None:
            options = {"content": body.model_dump_json(), "headers": {"Content-Type": "application/json"}}
        try:
            answer = self._http.request(method, path, **options)
        except httpx.RequestError as error:
            raise Unavailable(f"{method} {self._url} {path}: {describe(error)}") from error
        if answer.is_success:
            return answer
        raise _error_in(answer.json())


def _error_in(problem: dict[str, Any]) -> CkptdError:
    return from_dict({**problem, "message": problem["detail"]})
