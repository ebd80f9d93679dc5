"""The service over HTTP: requests, answers, and which error a bad answer stands for.

A problem of the service becomes the error it describes. No answer, or one of 500 and up from something in between, is
`Unavailable`; any other answer that is not ckptd's is `Invalid`, for then the URL is wrong.
"""

from __future__ import annotations

from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from ckptd.errors import CkptdError, Invalid, Unavailable, describe, from_dict

M = TypeVar("M", bound=BaseModel)
REQUEST_SECONDS = 40.0  # above the service's own append deadline
CONNECT_SECONDS = 5.0


class Service:
    """One service at `url`. Callable from any thread."""

    def __init__(self, url: str, token: str | None) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            self._http = httpx.Client(base_url=url, headers=headers)
        except (httpx.InvalidURL, UnicodeError) as error:
            raise Invalid(f"service URL {url!r} or its token: {error}", field="url") from error
        if not self._http.base_url.host:
            raise Invalid(f"service URL {url!r} names no host: expected http://host:8440", field="url")
        self.url = url

    def get(self, model: type[M], path: str, params: dict[str, Any] | None = None) -> M:
        return _read(model, self._send("GET", path, params=params))

    def get_if_any(self, model: type[M], path: str, params: dict[str, Any]) -> M | None:
        """None for an answer without content."""
        answer = self._send("GET", path, params=params)
        return None if answer.status_code == httpx.codes.NO_CONTENT else _read(model, answer)

    def ask(self, model: type[M], path: str, body: BaseModel, *, timeout_seconds: float = REQUEST_SECONDS) -> M:
        return _read(model, self._post(path, body, timeout_seconds))

    def tell(self, path: str, body: BaseModel, *, timeout_seconds: float = REQUEST_SECONDS) -> None:
        """For requests whose answer has no content."""
        answer = self._post(path, body, timeout_seconds)
        if answer.status_code != httpx.codes.NO_CONTENT:
            raise _not_ours(answer)

    def close(self) -> None:
        self._http.close()

    def _post(self, path: str, body: BaseModel, timeout_seconds: float) -> httpx.Response:
        content = body.model_dump_json().encode()
        headers = {"Content-Type": "application/json"}
        return self._send("POST", path, timeout_seconds, content=content, headers=headers)

    def _send(
        self, method: str, path: str, timeout_seconds: float = REQUEST_SECONDS, **options: Any
    ) -> httpx.Response:
        limits = httpx.Timeout(timeout_seconds, connect=CONNECT_SECONDS)
        try:
            answer = self._http.request(method, path, timeout=limits, **options)
        except httpx.RequestError as error:
            raise Unavailable(f"{method} {self.url}{path}: {describe(error)}") from error
        if answer.is_success:
            return answer
        raise _problem(answer)


def _read(model: type[M], answer: httpx.Response) -> M:
    try:
        return model.model_validate_json(answer.content)
    except ValidationError as error:
        raise _not_ours(answer) from error


def _problem(answer: httpx.Response) -> CkptdError:
    if answer.headers.get("Content-Type", "").startswith("application/problem+json"):
        try:
            problem = answer.json()
        except ValueError:
            return _not_ours(answer)
        if isinstance(problem, dict) and isinstance(problem.get("code"), str):
            error = from_dict({**problem, "message": problem.get("detail")})
            after = answer.headers.get("Retry-After", "")
            if isinstance(error, Unavailable) and after.isdecimal():
                error.fields["retry_after_seconds"] = int(after[:6])
            return error
    return _not_ours(answer)


def _not_ours(answer: httpx.Response) -> CkptdError:
    asked = f"{answer.request.method} {answer.request.url}"
    text = f"{asked}: HTTP {answer.status_code}, and no answer of ckptd: {answer.text[:200]!r}"
    return Unavailable(text) if answer.status_code >= 500 else Invalid(text, do="Check the URL.", field="url")
