"""Pinned answers as bytes. A generation's answer is frozen with its record, so that it is made once for all of its
ranks, and whoever asks again is told without a look at the storage."""

from __future__ import annotations

from pydantic import BaseModel

MAX_ANSWERS = 1000
Key = tuple[str, str, int | None]  # run, attempt, fallback_of


class PinnedAnswers:
    """The newest so many. Belongs to the event loop."""

    def __init__(self) -> None:
        self._bodies: dict[Key, bytes] = {}

    def get(self, key: Key) -> bytes | None:
        return self._bodies.get(key)

    def keep(self, key: Key, body: bytes) -> None:
        self._bodies[key] = body
        if len(self._bodies) > MAX_ANSWERS:
            del self._bodies[next(iter(self._bodies))]


def body_of(answer: BaseModel) -> bytes:
    return answer.model_dump_json().encode()
