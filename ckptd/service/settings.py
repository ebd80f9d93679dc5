"""What the service can be told, by environment (`CKPTD_...`) or by the command line."""

from __future__ import annotations

import ipaddress
import string
from typing import Annotated, Any, Self

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from ckptd.errors import Invalid
from ckptd.lineage import MIN_KEEP
from ckptd.retention import Policy

_TOKEN_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-._~+/=")

Seconds = Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)]


class ServiceSettings(BaseSettings):
    """Checked as a whole before anything is opened. Make it with `load` to get errors of ours."""

    model_config = SettingsConfigDict(env_prefix="CKPTD_", frozen=True, extra="ignore")

    storage: Annotated[str, Field(min_length=1)]
    """URL of the storage root, such as file:///mnt/shared/ckpts. It must have been initialised."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on. Anything beyond this machine needs a token."""

    port: Annotated[int, Field(ge=0, le=65535)] = 8440
    """Port to listen on; 0 takes a free one."""

    token: SecretStr | None = None
    """What clients must send as `Authorization: Bearer ...`. None: no questions asked."""

    max_body_bytes: Annotated[int, Field(ge=1024, le=64 * 1024 * 1024)] = 256 * 1024
    """The longest request body that is read. Payload never comes this way."""

    body_deadline_seconds: Seconds = 30.0
    """How long a client may take to send its body."""

    max_requests: Annotated[int, Field(gt=0)] = 16384
    """Requests under way at one time, waiting ones included; more are answered 503, to come again. Each needs a file
    descriptor: the service raises its soft limit, and says so if the hard one (`ulimit -Hn`) is too low."""

    max_wait_seconds: Seconds = 30.0
    """The longest a request is held while it waits for an answer; more is cut down to this."""

    relook_seconds: Seconds = 0.5
    """How often a waiting request looks at the storage unprompted: other services and clients that
    go to the storage directly append there too."""

    storage_deadline_seconds: Seconds = 30.0
    """How long one look at the storage, or the resolution of one append, may take."""

    in_use_seconds: Seconds = 30.0
    """For how long a job that was heard of keeps other jobs from taking its run without being told to."""

    keep_last: Annotated[int, Field(ge=MIN_KEEP, le=10**6)] | None = None
    """How many of the newest checkpoints of each run stay. None: nothing is ever retired."""

    keep_every: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """Of every so many steps the first checkpoint stays for good, whatever its age. Needs keep_last."""

    housekeeping_seconds: Seconds = 60.0
    """The pause between two passes of housekeeping over all runs, more or less."""

    verify_mib_per_second: Annotated[float, Field(ge=0, le=10**6, allow_inf_nan=False)] = 20.0
    """How fast committed checkpoints are read again in the background to find damage; 0: they are not. Retention
    reads what it needs as fast as it can."""

    scrub_days: Annotated[float, Field(gt=0, le=3650, allow_inf_nan=False)] = 7.0
    """How old the last verification of a checkpoint is when it is read again in the background."""

    hold_seconds: Seconds = 600.0
    """After so long without a word from the reader that holds a checkpoint, it is taken for gone."""

    @field_validator("token")
    @classmethod
    def _token_fits_a_header(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and not (
            token.get_secret_value() and _TOKEN_CHARACTERS.issuperset(token.get_secret_value())
        ):
            raise ValueError("expected letters, digits and -._~+/= only, at least one")
        return token

    @model_validator(mode="after")
    def _open_to_others_only_with_a_token(self) -> Self:
        if self.token is None and not is_loopback(self.host):
            raise ValueError(f"listening on {self.host} lets other machines in and needs a token: set CKPTD_TOKEN")
        return self

    @model_validator(mode="after")
    def _keep_every_beside_keep_last(self) -> Self:
        if self.keep_every is not None and self.keep_last is None:
            raise ValueError("keep_every alone would retire all but one of every so many: set CKPTD_KEEP_LAST, too")
        return self

    @property
    def policy(self) -> Policy | None:
        """What retention keeps; None if it is off."""
        if self.keep_last is None:
            return None
        return Policy(keep_last=self.keep_last, keep_every=self.keep_every)


def load(**given: Any) -> ServiceSettings:
    """Settings from `given`, then the environment. None means not given. `Invalid` names the setting."""
    try:
        return ServiceSettings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise Invalid(
            f"setting {field or 'combination'}: {first['msg']}",
            do=f"Set CKPTD_{field.upper()} or its option." if field else "Change one of the settings.",
            field=field or "token",
        ) from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
