"""Where an `s3://` storage is and how it is reached: from its URL, and from the AWS settings of the environment.

Nothing secret stands in a URL, so a URL may be printed, logged and handed to another process; that process finds
endpoint and credentials in its own environment, as with every other S3 tool.
"""

from __future__ import annotations

import inspect
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import aiobotocore
import aiohttp
import botocore.loaders
import botocore.session
import s3fs
from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from ckptd.errors import Invalid, describe
from ckptd.storage.keys import check_key

DEADLINE_SECONDS = 40.0  # losers of a race for a key may wait for many seconds: not less than 30
CONNECT_SECONDS = 5.0
READ_SECONDS = 30.0
MAX_KEY_BYTES = 1024  # S3's own limit, for prefix and key together
_MODELS = botocore.loaders.create_loader()
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9._=+@/-]*")


@dataclass(frozen=True)
class S3Settings:
    """One bucket and prefix, and the way there. `repr` keeps the credentials to itself."""

    bucket: str
    prefix: str  # "" or "a/b", without a slash at the end
    deadline_seconds: float = DEADLINE_SECONDS
    endpoint: str | None = None  # None: AWS itself
    region: str = "us-east-1"
    addressing: str = "auto"
    ca_bundle: str | None = None
    credentials: tuple[str | None, str | None, str | None] | None = None  # None: botocore looks for them

    def __repr__(self) -> str:
        return f"S3Settings({self.url!r}, endpoint={self.endpoint!r})"

    @property
    def url(self) -> str:
        place = f"s3://{self.bucket}{f'/{self.prefix}' if self.prefix else ''}"
        changed = self.deadline_seconds != DEADLINE_SECONDS
        return f"{place}?deadline_seconds={self.deadline_seconds:g}" if changed else place

    def key(self, key: str) -> str:
        """The whole key in the bucket. `Invalid` for one no storage takes, or that is too long with its prefix."""
        check_key(key)
        full = f"{self.prefix}/{key}" if self.prefix else key
        length = len(full.encode())
        if length > MAX_KEY_BYTES:
            raise Invalid(
                f"storage key {full[:160]!r} is not allowed: S3 takes {MAX_KEY_BYTES} bytes, found {length}",
                do="Use a shorter prefix in the storage URL.",
                field="key",
            )
        return full

    def config(self) -> dict[str, Any]:
        """What both clients are told. The SDKs retry nothing: a retried put answers "taken" to its own success,
        and their default retries wait for minutes."""
        return {
            "connect_timeout": min(CONNECT_SECONDS, self.deadline_seconds),
            "read_timeout": min(READ_SECONDS, self.deadline_seconds),
            "retries": {"total_max_attempts": 1},
            "max_pool_connections": 32,
            # The checksums that are wanted are given with each put. By default the SDK adds one in a trailer,
            # which many stores do not understand.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            # The hash in the signature is not compared with the body by every store (SeaweedFS does not); the
            # checksum header is, and it is signed. One of the two is enough work.
            "s3": {"addressing_style": self.addressing, "payload_signing_enabled": False},
        }

    def client_kwargs(self) -> dict[str, Any]:
        found: dict[str, Any] = {"region_name": self.region}
        if self.ca_bundle:
            found["verify"] = self.ca_bundle
        return found

    def new_client(self) -> Any:
        """A botocore client of this process, callable from any thread."""
        key, secret, token = self.credentials or (None, None, None)
        return with_models(botocore.session.Session()).create_client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=key,
            aws_secret_access_key=secret,
            aws_session_token=token,
            config=Config(**self.config()),
            **self.client_kwargs(),
        )

    def new_filesystem(self) -> Any:
        """An s3fs file system of this process that remembers nothing and repeats nothing. Its coroutines are for
        the caller to run, and it is the caller's to close."""
        check_sdk()
        key, secret, token = self.credentials or (None, None, None)
        fs = s3fs.S3FileSystem(
            key=key,
            secret=secret,
            token=token,
            endpoint_url=self.endpoint,
            session=with_models(AioSession()),
            client_kwargs=self.client_kwargs(),
            config_kwargs={**self.config(), "http_session_cls": SendsOnce},
            # Its listing cache never expires and hides what others write, even from reads; its instances are
            # shared by all who ask with the same arguments.
            use_listings_cache=False,
            skip_instance_cache=True,
            asynchronous=True,
        )
        fs.retries = 1  # the number of tries; s3fs repeats on top of the SDK
        return fs


class SendsOnce(AIOHTTPSession):  # type: ignore[misc]  # it has no types
    """Sends each request once. aiohttp repeats a PUT by itself where a kept connection breaks; a create that is
    repeated is told "taken" because of its own success."""

    async def _get_session(self, proxy_url: str | None) -> aiohttp.ClientSession:
        session: aiohttp.ClientSession = await super()._get_session(proxy_url)
        session._retry_connection = False  # the only switch it has; check_sdk looks whether it is there
        return session


def with_models(session: Any) -> Any:
    """A session that takes the SDK's description of S3 from a copy shared by this process: reading it takes longer
    than anything else."""
    session.register_component("data_loader", _MODELS)
    return session


@cache
def check_sdk() -> None:
    """`Invalid` if the installed SDK knows no create-if-absent, which s3fs would then drop silently, or if it cannot
    be told to send a request once."""
    switch = "_retry_connection" in getattr(aiohttp.ClientSession, "ATTRS", ())
    if not switch or "http_session_cls" not in inspect.signature(AioConfig).parameters:
        raise Invalid(
            f"the installed aiohttp {aiohttp.__version__} with aiobotocore {aiobotocore.__version__} may send a put "
            "twice: there is no switch against it",
            do="Install versions that were tested: pip install -U 'ckptd[s3]'.",
        )
    model = with_models(botocore.session.Session()).get_service_model("s3")
    for operation in ("PutObject", "CompleteMultipartUpload"):
        if "IfNoneMatch" not in model.operation_model(operation).input_shape.members:
            raise Invalid(
                f"the installed botocore {botocore.__version__} knows no create-if-absent for {operation}",
                do="Install a younger one: pip install -U 'ckptd[s3]'.",
            )


def read_settings(url: str, env: Mapping[str, str] | None = None) -> S3Settings:
    """The settings of `s3://bucket/prefix[?deadline_seconds=N]`. `Invalid` for a URL that cannot be one.

    `env` stands in for the process's environment; then the credentials must be in it, too.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise _refused(url, str(error)) from error
    prefix = parts.path.strip("/")
    if parts.scheme != "s3" or not _BUCKET.fullmatch(parts.netloc):
        raise _refused(url, f"expected s3:// and a bucket's name, found {parts.netloc!r}")
    if parts.fragment or not _PREFIX.fullmatch(prefix):
        raise _refused(url, f"expected a prefix of {_PREFIX.pattern}, found {parts.path!r}")
    if prefix:
        try:
            check_key(prefix)
        except Invalid as error:
            raise _refused(url, error.message) from error
    deadline_seconds = _deadline(url, parts.query)
    names = os.environ if env is None else env
    profile = _profile() if env is None else {}
    endpoint = names.get("AWS_ENDPOINT_URL_S3") or names.get("AWS_ENDPOINT_URL") or profile.get("endpoint_url")
    if endpoint and not re.match(r"https?://[^/]", endpoint):
        raise Invalid(
            f"the S3 endpoint {endpoint!r} is not allowed: expected http(s)://host", field="AWS_ENDPOINT_URL"
        )
    ca_bundle = names.get("AWS_CA_BUNDLE") or None
    if ca_bundle:
        _check_bundle(ca_bundle)
    wanted_style = (profile.get("s3") or {}).get("addressing_style")
    region = names.get("AWS_REGION") or names.get("AWS_DEFAULT_REGION") or profile.get("region")
    return S3Settings(
        bucket=parts.netloc,
        prefix=prefix,
        deadline_seconds=deadline_seconds,
        endpoint=endpoint or None,
        region=region or "us-east-1",
        # Own servers rarely have a DNS name for every bucket.
        addressing=wanted_style or ("path" if endpoint else "auto"),
        ca_bundle=ca_bundle,
        credentials=None
        if env is None
        else (env.get("AWS_ACCESS_KEY_ID"), env.get("AWS_SECRET_ACCESS_KEY"), env.get("AWS_SESSION_TOKEN")),
    )


def _check_bundle(path: str) -> None:
    """Look now: below, the one library would tell it as a server that is away, and the other one differently."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except OSError as error:
        raise Invalid(
            f"AWS_CA_BUNDLE cannot be used: expected a file of certificates (PEM), {path!r} gives {describe(error)}",
            do="Set it to the file of the authority that signed the server's certificate, or unset it.",
            field="AWS_CA_BUNDLE",
        ) from error


def _profile() -> dict[str, Any]:
    """The settings of AWS_PROFILE, or of the default profile, in the files of the AWS tools."""
    try:
        return dict(botocore.session.Session().get_scoped_config())
    except BotoCoreError as error:
        raise Invalid(f"the AWS settings cannot be used: {error}", do="Correct AWS_PROFILE.", field="url") from error


def _deadline(url: str, query: str) -> float:
    found = dict(parse_qsl(query, keep_blank_values=True))
    text = found.pop("deadline_seconds", str(DEADLINE_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if found or not 0.1 <= seconds <= 3600:
        raise _refused(url, f"expected nothing or deadline_seconds=0.1 to 3600 after '?', found {query!r}")
    return seconds


def _refused(url: str, reason: str) -> Invalid:
    return Invalid(
        f"storage URL {url!r} is not allowed: {reason}",
        do="Use s3://bucket/prefix; endpoint and credentials come from AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...",
        field="url",
    )
