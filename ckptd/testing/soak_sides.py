"""Two ways to the same runs for a process of a soak: through a service, or straight on the storage."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import httpx
from pydantic import BaseModel

from ckptd.errors import CkptdError, Unavailable, describe, from_dict
from ckptd.wire import (
    AbortRequest,
    Answer,
    BeginRequest,
    CommitRequest,
    DamageAnswer,
    DamageReport,
    Latest,
    OpenRequest,
    ReadyRequest,
    SaveStatus,
)

M = TypeVar("M", bound=BaseModel)
REQUEST_SECONDS = 40.0


class Side(Protocol):
    """What a process asks for; `Ledger` is one, `OverHttp` the other."""

    def open(self, run: str, request: OpenRequest) -> None: ...

    def begin(self, run: str, request: BeginRequest) -> Answer: ...

    def join(self, run: str, attempt: str, fallback_of: int | None = None) -> Answer | None: ...

    def ready(self, run: str, attempt: str, generation: int) -> None: ...

    def commit(self, run: str, request: CommitRequest) -> None: ...

    def abort(self, run: str, save: str, request: AbortRequest) -> None: ...

    def save_status(self, run: str, save: str) -> SaveStatus: ...

    def report_damage(self, run: str, report: DamageReport) -> DamageAnswer: ...

    def latest(self, run: str) -> Latest: ...


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

    def close(self) -> None:
        self._http.close()

    def _ask(self, model: type[M], method: str, path: str, body: BaseModel | None = None) -> M:
        return model.model_validate_json(self._send(method, path, body).content)

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
        raise _problem(answer)


def _problem(answer: httpx.Response) -> CkptdError:
    told = answer.json()
    return from_dict({**told, "message": told["detail"]})
