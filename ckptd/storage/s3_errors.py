"""What an S3 store's answer means for the protocol: taken, absent, or no answer at all.

Only two answers are facts: 412 to a create (the key is taken) and 404 with the code NoSuchKey (there is nothing).
Everything else is `Unavailable` with its first cause, because an error must never be read as absence.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import urllib3.exceptions
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
)
from urllib3.util.ssl_match_hostname import CertificateError

from ckptd.errors import AlreadyExists, CkptdError, Invalid, NotFound, NotInitialised, Unavailable, describe

# All that the libraries below raise when a request did not work. FSTimeoutError is an OSError.
FAILURES = (
    BotoCoreError,
    ClientError,
    OSError,
    TimeoutError,
    aiohttp.ClientError,
    urllib3.exceptions.HTTPError,
)
_CERTIFICATE = (ssl.SSLCertVerificationError, CertificateError)  # the second one is urllib3's, for another host's
_PERMISSIONS = {
    "put": "s3:PutObject",
    "get": "s3:GetObject",
    "look at": "s3:GetObject",
    "list": "s3:ListBucket",
    "delete": "s3:DeleteObject",
    "abort": "s3:AbortMultipartUpload",
}
_REFUSED_CODES = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}
_REFUSED_CODES |= {"403", "401", "Forbidden", "TokenRefreshRequired", "AllAccessDisabled", "AccountProblem"}


@dataclass(frozen=True)
class Call:
    """What was asked for, for the message: the operation in words, the key, and the storage."""

    operation: str
    key: str  # "" for the bucket as a whole
    url: str
    bucket: str

    def __str__(self) -> str:
        return f"{self.operation} {self.key or self.bucket} in {self.url}"


def code_and_status(error: BaseException) -> tuple[str, int, str]:
    """The S3 error code, the HTTP status and the message of a failure; ("", 0, "") if no answer came.

    s3fs turns an answer into some OSError whose type depends on the store's wording and keeps the answer as its
    cause, or as that one's cause (fsspec wraps time-outs once more): only that is looked at.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ClientError):
        cause = cause.__cause__
    if cause is None:
        return "", 0, ""
    answer: dict[str, Any] = cause.response.get("Error") or {}
    status = (cause.response.get("ResponseMetadata") or {}).get("HTTPStatusCode") or 0
    return str(answer.get("Code") or status), int(status), str(answer.get("Message") or "")


def is_taken(error: BaseException) -> bool:
    """The answer to a create says that the key is taken."""
    code, status, _ = code_and_status(error)
    return status == 412 or code in ("PreconditionFailed", "412")


def as_ckptd(error: BaseException, call: Call) -> CkptdError:
    """Our error for a failed call; the caller raises it `from error`.

    `NotFound` is a definite answer only to a GET; a HEAD has no body that could tell a missing object from a
    missing bucket or a proxy's own 404, so its 404 is `Unavailable` here and looked into by the caller.
    """
    if isinstance(error, ParamValidationError):
        raise error  # a fault in ckptd, not in the storage
    code, status, said = code_and_status(error)
    fields: dict[str, Any] = {
        "key": call.key,
        "url": call.url,
        "operation": call.operation,
        "s3_code": code,
        "status": status,
    }
    if not status:
        return _no_answer(error, call, fields)
    text = f"{call} failed: {code} ({status}){f': {said[:300]}' if said else ''}"
    if status == 412 or code == "PreconditionFailed":
        return AlreadyExists(f"{call.key} exists already in {call.url}", key=call.key, url=call.url)
    if code == "NoSuchBucket":
        return NotInitialised(
            f"{text}: there is no bucket {call.bucket}",
            do=f"Check URL and endpoint, or create the bucket {call.bucket} yourself: ckptd never creates one.",
            **fields,
        )
    if code == "NoSuchKey":
        return NotFound(f"{call.key} does not exist in {call.url}", key=call.key, url=call.url)
    if status in (401, 403) or code in _REFUSED_CODES:
        return _refused(text, call, fields)
    if status == 501 or code == "NotImplemented":
        return Invalid(f"{text}: this store cannot do it", do="Use a store that ckptd doctor finds fit.", **fields)
    if status == 301 or code in ("PermanentRedirect", "AuthorizationHeaderMalformed"):
        return Unavailable(text, do=f"Set AWS_REGION to the region of the bucket {call.bucket}.", **fields)
    if code in ("BadDigest", "XAmzContentSHA256Mismatch", "InvalidDigest", "XAmzContentChecksumMismatch"):
        return Unavailable(f"{text}: the bytes were changed on their way, and nothing was stored", **fields)
    return Unavailable(text, **fields)


def _refused(text: str, call: Call, fields: dict[str, Any]) -> Unavailable:
    permission = _PERMISSIONS.get(call.operation, "s3:GetObject")
    if fields["s3_code"] == "RequestTimeTooSkewed":
        return Unavailable(text, do="Set this machine's clock.", **fields)
    note = (
        "; without s3:ListBucket a store may say so for an object that does not exist" if "Get" in permission else ""
    )
    return Unavailable(
        f"{text}: the credentials are refused, or lack the permission {permission} on "
        f"{call.key or call.bucket}{note}",
        do=f"Check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, and grant {permission}.",
        **fields,
    )


def _no_answer(error: BaseException, call: Call, fields: dict[str, Any]) -> CkptdError:
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return Unavailable(
            f"{call} failed: {describe(error)}: no credentials, so no permission "
            f"{_PERMISSIONS.get(call.operation, 's3:GetObject')} on {call.key or call.bucket}",
            do="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE.",
            **fields,
        )
    if any(isinstance(cause, _CERTIFICATE) for cause in _causes(error)):
        return Unavailable(
            f"{call} failed: the server's certificate is not accepted: {describe(error)}",
            do="Set AWS_CA_BUNDLE to the file (PEM) of the authority that signed the server's certificate, and use "
            "the name in the certificate as the host in AWS_ENDPOINT_URL.",
            **fields,
        )
    return Unavailable(
        f"{call} failed without an answer: {describe(error)}",
        do="Check that the endpoint is up and reachable (AWS_ENDPOINT_URL), then retry.",
        **fields,
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from, by either of Python's two chains."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__
