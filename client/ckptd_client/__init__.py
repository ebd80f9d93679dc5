"""What a training loop imports: `from ckptd_client import CheckpointClient`."""

from ckptd.errors import (
    CkptdError,
    Conflict,
    Corrupt,
    Fenced,
    InUse,
    Invalid,
    NotFound,
    NotInitialised,
    OutcomeUnknown,
    Unauthorized,
    Unavailable,
    Unreachable,
)
from ckptd_client.client import CheckpointClient
from ckptd_client.handle import SaveHandle
from ckptd_client.loading import Found

__all__ = [
    "CheckpointClient",
    "CkptdError",
    "Conflict",
    "Corrupt",
    "Fenced",
    "Found",
    "InUse",
    "Invalid",
    "NotFound",
    "NotInitialised",
    "OutcomeUnknown",
    "SaveHandle",
    "Unauthorized",
    "Unavailable",
    "Unreachable",
]
