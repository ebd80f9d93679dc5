"""S3 over TLS with a certificate of one's own: AWS_CA_BUNDLE decides, for records and for payload."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ckptd import layout
from ckptd.errors import Invalid, Unavailable
from ckptd.storage.s3 import S3Storage
from ckptd.storage.s3_payload import MIB
from ckptd.testing.seaweed import SeaweedProcess
from ckptd.testing.storage_contract import KEY, LIMIT, RUN, put

PAYLOAD = f"{RUN}/data/g00000001/s/0-0123456789abcdef.safetensors"
PART = 5 * MIB


class Authority:
    """One that signs certificates; `bundle` is the file that its users are given."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir()
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        own = self._unsigned(self._name, self._key.public_key())
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.bundle = folder / "ca.pem"
        self.bundle.write_bytes(own.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def certify(self, *names: x509.GeneralName) -> tuple[Path, Path]:
        """The files of a certificate for `names`, and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "s3 server")])
        made = self._unsigned(subject, key.public_key())
        made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate, private = self._folder / "server.pem", self._folder / "server.key"
        certificate.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return certificate, private

    def _unsigned(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        day = datetime.timedelta(days=1)
        return (
            x509.CertificateBuilder(issuer_name=self._name, subject_name=subject, public_key=key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
        )


class TlsSeaweed(SeaweedProcess):
    """SeaweedFS that speaks TLS and nothing else at its S3 port."""

    def __init__(self, folder: Path, certificate: Path, key: Path, bundle: Path) -> None:
        super().__init__(folder)
        self._files = (f"-s3.cert.file={certificate}", f"-s3.key.file={key}")
        self._bundle = bundle

    @property
    def endpoint(self) -> str:
        return super().endpoint.replace("http://", "https://")

    def env_of(self, user: str) -> dict[str, str]:
        return {**super().env_of(user), "AWS_CA_BUNDLE": str(self._bundle)}

    def _command(self, config: Path) -> list[str]:
        return [*super()._command(config), *self._files]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsSeaweed]:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder / "authority", "the test authority")
    certificate, key = authority.certify(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
    with TlsSeaweed(folder / "server", certificate, key, authority.bundle) as started:
        yield started


@pytest.fixture
def url(server: TlsSeaweed) -> str:
    return server.url(f"tls/{layout.new_nonce()}")


def test_the_right_bundle_opens_records_and_payload(server: TlsSeaweed, url: str) -> None:
    storage = S3Storage(url, env=server.env, part_bytes=PART)
    storage.initialise()
    put(storage, KEY, b"a record")
    data = bytes(range(256)) * (PART // 256) + b"the end"
    storage.put(PAYLOAD, [data], len(data))
    assert storage.get(KEY, LIMIT) == b"a record"
    assert storage.list(RUN) == ["data", "log"]
    with storage.reader(PAYLOAD) as reader:
        buffer = bytearray(reader.size)
        reader.read_into(0, memoryview(buffer))
    assert buffer == data


def test_the_bundle_is_taken_from_the_environment(
    server: TlsSeaweed, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    assert S3Storage(url).initialise()


@pytest.mark.parametrize("bundle", ["none", "of another authority"])
def test_a_certificate_that_nobody_vouches_for_is_refused(
    server: TlsSeaweed, url: str, tmp_path: Path, bundle: str
) -> None:
    env = dict(server.env)
    if bundle == "none":
        del env["AWS_CA_BUNDLE"]
    else:
        env["AWS_CA_BUNDLE"] = str(Authority(tmp_path / "other", "another authority").bundle)
    storage = S3Storage(url, env=env, part_bytes=PART)
    refused_twice(storage, "certificate verify failed")


def test_a_certificate_for_another_host_is_refused(server: TlsSeaweed, url: str) -> None:
    # It is made for 127.0.0.1, which the server is reached by here too, but under another name.
    endpoint = server.endpoint.replace("127.0.0.1", "localhost")
    storage = S3Storage(url, env={**server.env, "AWS_ENDPOINT_URL": endpoint}, part_bytes=PART)
    refused_twice(storage, "localhost")


def refused_twice(storage: S3Storage, says: str) -> None:
    """By the library for records, and by the one for payload."""
    target = storage._target(PAYLOAD)
    for call in (
        storage.initialise,
        lambda: target.attempts("put", lambda: target.client.head_object(Bucket=target.bucket, Key=target.key)),
    ):
        with pytest.raises(Unavailable, match=f"the server's certificate is not accepted.*{says}") as caught:
            call()
        assert type(caught.value) is Unavailable
        assert "Set AWS_CA_BUNDLE to the file" in caught.value.do


@pytest.mark.parametrize("content", [None, b"", b"no certificate"])
def test_a_bundle_that_cannot_be_used_is_named_at_once(
    server: TlsSeaweed, url: str, tmp_path: Path, content: bytes | None
) -> None:
    bundle = tmp_path / "bundle.pem"
    if content is not None:
        bundle.write_bytes(content)
    with pytest.raises(Invalid, match=r"AWS_CA_BUNDLE cannot be used.*bundle\.pem"):
        S3Storage(url, env={**server.env, "AWS_CA_BUNDLE": str(bundle)})
