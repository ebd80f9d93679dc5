"""What a bucket tells about itself, tried out for `ckptd doctor`: its server, its clock, and what it makes of a wrong
checksum and of a condition on an object of parts."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from email.utils import parsedate_to_datetime

from botocore.exceptions import ClientError

from ckptd.errors import AlreadyExists, CkptdError, NotFound, describe
from ckptd.storage.findings import lasting
from ckptd.storage.s3_errors import FAILURES, as_ckptd
from ckptd.storage.s3_payload import Target, put_parts

BODY = b"a probe of checksums"
WRONG_SHA256 = "A" * 43 + "="  # 32 zero bytes: nobody knows a body of that digest
_log = logging.getLogger("ckptd.storage")


def bucket_facts(target: Target) -> dict[str, str]:
    """The facts of a bucket, see `ProbeFacts`; what this identity may not try is left out.

    `target` is a key that nobody else uses; nothing is there afterwards. `Unavailable` if the store does not answer
    now.
    """
    facts = {"kind": "s3", "publish": "conditional put"}
    refused = False
    try:
        began = time.time()
        status, headers = _put_with_wrong_checksum(target)
        offset = clock_offset(headers.get("date", ""), began, time.time())
        if server := headers.get("server"):
            facts["server"] = server[:80]
        if offset is not None:
            facts["clock_offset_seconds"] = f"{offset:.2f}"
        refused = status not in (200, 400)
        if not refused:
            facts["checksums"] = "accepted" if status == 200 else _after_refusal(target)
            facts["conditional_parts"] = _parts_on_a_taken_key(target)
    except CkptdError as error:
        if not lasting(error):
            raise
    finally:
        if not refused:
            _remove(target)
    return facts


def clock_offset(date: str, began: float, ended: float) -> float | None:
    """Seconds from this machine's clock to the one that gave `date` between `began` and `ended`; 0 where they may be
    the same, as a date has whole seconds. None if it is no date."""
    try:
        told = parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None
    return max(told - ended, 0.0) + min(told + 1 - began, 0.0)


def _put_with_wrong_checksum(target: Target) -> tuple[int, Mapping[str, str]]:
    """Status and headers of the answer, whatever it says but for 5xx."""
    try:
        answer = target.client.put_object(
            Bucket=target.bucket, Key=target.key, Body=BODY, IfNoneMatch="*", ChecksumSHA256=WRONG_SHA256
        )
    except FAILURES as error:
        if not isinstance(error, ClientError):
            raise as_ckptd(error, target.call) from error
        answer = error.response
        if answer["ResponseMetadata"]["HTTPStatusCode"] in (429, *range(500, 600)):
            raise as_ckptd(error, target.call) from error
    told = answer["ResponseMetadata"]
    return told["HTTPStatusCode"], told["HTTPHeaders"]


def _after_refusal(target: Target) -> str:
    try:
        target.client.get_object(Bucket=target.bucket, Key=target.key)["Body"].close()
    except FAILURES as error:
        found = as_ckptd(error, replace(target.call, operation="get"))
        if isinstance(found, NotFound):
            return "refused"
        raise found from error
    return "refused after their object was stored"


def _parts_on_a_taken_key(target: Target) -> str:
    """One writer after the other: stores that refuse the second one may still let several win that race."""
    for _ in range(2):
        try:
            put_parts(target, [BODY], len(BODY), len(BODY))
        except AlreadyExists:
            return "refused"
    return "overwritten"


def _remove(target: Target) -> None:
    try:
        target.client.delete_object(Bucket=target.bucket, Key=target.key)
    except FAILURES as error:
        _log.warning("%s in %s may have stayed there: %s", target.call.key, target.call.url, describe(error))
