"""Every error ckptd raises, named by what the caller does next.

An error says what failed, on what (run, step, rank, key), what was expected and found, and what to do.
Its fields stay JSON values, so it crosses a process, a pickle or an HTTP answer unchanged.
"""

from __future__ import annotations

from typing import Any, ClassVar


class CkptdError(Exception):
    """Base of all. `message` says what failed, `do` what to do, `fields` carry the details."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    default_do: ClassVar[str] = "Report this: it is a fault in ckptd."

    def __init__(self, message: str, *, do: str = "", **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.do = do or self.default_do
        self.fields = fields

    def __str__(self) -> str:
        reasons = self.fields.get("candidates") or ()
        lines = [self.message, *(f"  - {_candidate_line(c)}" for c in reasons), f"  what to do: {self.do}"]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """What another process needs to raise the same error: see `from_dict`."""
        return {"code": self.code, "message": self.message, "do": self.do, "fields": self.fields}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.code, self.message, self.do, self.fields)


class Fenced(CkptdError):
    """A younger incarnation of the run took over: stop, nothing you write counts any more."""

    code = "fenced"
    status = 409
    default_do = "Stop this process: a younger incarnation of the run has taken over."


class Unavailable(CkptdError):
    """Storage or service did not do it now: retry within your deadline."""

    code = "unavailable"
    status = 503
    default_do = "Retry; if it stays, check the storage and the service."


class Unreachable(Unavailable):
    """The start of a run cannot be answered; it is never read as "no checkpoint"."""

    code = "unreachable"
    default_do = "Bring the storage back, then start again. Nothing was started from zero."


class OutcomeUnknown(Unavailable):
    """A write may or may not have landed. The same call again finds out and never doubles it."""

    code = "outcome-unknown"
    default_do = "Repeat the same call: it recognises its own earlier write."


class SaveOff(Unavailable):
    """This save will not become a checkpoint, although the storage may well answer: waiting does not help."""

    code = "save-off"
    default_do = "Training goes on; the next save takes its place."


class NotInitialised(Unavailable):
    """The root carries no marker: new storage, or a drive that is not mounted."""

    code = "not-initialised"


class Conflict(CkptdError):
    """Somebody else changed what you built on: read again, then decide."""

    code = "conflict"
    status = 409
    default_do = "Read the run again and decide anew."


class InUse(Conflict):
    """Another job under this run name was heard of a moment ago."""

    code = "in-use"
    default_do = "Give this job another run name, or start it with takeover to fence the other one."


class AlreadyExists(Conflict):
    """The storage key is taken. Objects are never overwritten."""

    code = "already-exists"


class Invalid(CkptdError):
    """The call itself is wrong: fix it."""

    code = "invalid"
    status = 422
    default_do = "Correct the named field and call again."


class Unfit(Invalid):
    """The storage does not do what the protocol relies on; trying again does not help."""

    code = "unfit"
    default_do = "Run `ckptd doctor` on the storage; use another one, or mount it in another way."


class Corrupt(CkptdError):
    """Stored bytes are not what was committed: use an older checkpoint."""

    code = "corrupt"
    status = 409
    default_do = "Look at the named objects; restore them from a copy, or start from an older checkpoint."


class NotFound(CkptdError):
    """It does not exist, and the storage said so with authority."""

    code = "not-found"
    status = 404
    default_do = "Check the name."


class Unauthorized(CkptdError):
    """The service wants a token, or another one."""

    code = "unauthorized"
    status = 401
    default_do = "Set CKPTD_TOKEN to the token the service was started with."


def _all_errors(base: type[CkptdError] = CkptdError) -> dict[str, type[CkptdError]]:
    found = {base.code: base} if "code" in vars(base) else {}  # a subclass without a code of its own is its parent
    for child in base.__subclasses__():
        found |= _all_errors(child)
    return found


def by_code(code: str) -> type[CkptdError]:
    """The class of a stable code; `CkptdError` for a code this version does not know."""
    return _all_errors().get(code, CkptdError)


def from_dict(data: dict[str, Any]) -> CkptdError:
    """The error that `to_dict` described."""
    fields = {name: value for name, value in dict(data.get("fields") or {}).items() if name not in ("message", "do")}
    return by_code(str(data.get("code")))(str(data.get("message")), do=str(data.get("do") or ""), **fields)


def _rebuild(code: str, message: str, do: str, fields: dict[str, Any]) -> CkptdError:
    return by_code(code)(message, do=do, **fields)


def _candidate_line(candidate: Any) -> str:
    if not isinstance(candidate, dict):
        return str(candidate)
    return f"step {candidate.get('step')} ({candidate.get('save')}): {candidate.get('reason')}"


def describe(error: BaseException) -> str:
    """One line for a record or a report: the type and the first line of the message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
