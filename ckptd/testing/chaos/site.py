"""What the job runs on: a storage on a mount of its own or an S3 server, the service, and proxies in front of them.

A mount (ext4 in a file) needs root and mkfs.ext4, a jumping clock a C compiler. Without them the kinds of faults that
need them are not planned, and the report says so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ckptd.storage import init_root, open_storage
from ckptd.storage.base import Storage
from ckptd.testing.chaos.clock import clock_if_any
from ckptd.testing.chaos.job import ChaosFailed
from ckptd.testing.chaos.network import Network
from ckptd.testing.processes import ServiceProcess
from ckptd.testing.proxy import Proxy

MOUNT_BYTES = 128 * 2**20
INODES = 2**15
MOUNT_SECONDS = 30.0
KEEP = {"CKPTD_KEEP_LAST": "6", "CKPTD_HOUSEKEEPING_SECONDS": "4"}


class Site:
    """`with Site(folder, "file") as site`. `url` is the storage as the service sees it, `env` what reaches it."""

    def __init__(self, folder: Path, kind: str, *, apart: bool = False) -> None:
        """`apart`: each node in a network namespace of its own. Its ranks reach the storage, and no service."""
        self.folder, self.kind = folder, kind
        self.mount: Path | None = None
        self.env: dict[str, str] = {}
        self.rank_env: dict[str, str] = {}
        self.clock = clock_if_any(folder, "service")
        self.node_clocks = [clock_if_any(folder, f"node{number}") for number in (1, 2)]
        self.s3_proxy: Proxy | None = None
        self.network = Network() if apart else None
        self._left = contextlib.ExitStack()

    def __enter__(self) -> Site:
        with contextlib.ExitStack() as stack:
            self._storage(stack)
            if self.network is not None:
                stack.enter_context(self.network)
            init_root(self.url)
            self.service = self._service("")
            stack.callback(lambda: self.service.kill())
            self.service.start()
            self.proxy = stack.enter_context(Proxy(self.service.url))
            self.storage: Storage = open_storage(self.url)
            self._left = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()

    def _storage(self, stack: contextlib.ExitStack) -> None:
        if self.kind == "s3":
            from ckptd.testing.seaweed import SeaweedProcess  # only here: it needs the S3 libraries

            self.s3 = stack.enter_context(SeaweedProcess(self.folder / "s3"))
            self.s3_proxy = stack.enter_context(Proxy(self.s3.endpoint))
            self.env = dict(self.s3.env)
            self.rank_env = {**self.env, "AWS_ENDPOINT_URL": self.s3_proxy.url}
            os.environ.update(self.env)
            self.url = self.s3.url("chaos")
            return
        root = self.folder / "storage"
        root.mkdir()
        if os.geteuid() == 0 and shutil.which("mkfs.ext4"):
            disk = self.folder / "disk"
            with disk.open("wb") as stream:
                stream.truncate(MOUNT_BYTES)
            _run("mkfs.ext4", "-q", "-m", "0", "-N", str(INODES), str(disk))
            _run("mount", "-o", "loop", str(disk), str(root))
            stack.callback(lambda: _run("umount", "--lazy", str(root)))
            self.mount = root
        self.url = f"file://{root}/root"

    # What ranks are given.

    @property
    def way(self) -> str:
        """The URL of ranks that go by the service, if they can reach it."""
        return self.proxy.url if self.network is None else self.url

    def node_envs(self) -> list[dict[str, str]]:
        return [{**self.rank_env, **(self.network.env(number) if self.network else {})} for number in (1, 2)]

    @property
    def addresses(self) -> list[str]:
        return self.network.addresses if self.network else ["127.0.0.1"] * 2

    # The service.

    def _service(self, orders: str, port: int = 0) -> ServiceProcess:
        env = {**self.env, **KEEP, **(self.clock.env if self.clock else {}), "CKPTD_FAILPOINTS": orders}
        return ServiceProcess(self.url, log=self.folder / "service.log", port=port, init=False, env=env)

    def restart_service(self, orders: str = "") -> None:
        """SIGKILL, and start again at the same port; with failpoints it dies by itself where they say."""
        self.service.kill()
        self.service = self._service(orders, self.service.port)
        self.service.start()

    def reset(self) -> None:
        """No fault on the wire any more, and a service that runs."""
        for proxy in filter(None, (self.proxy, self.s3_proxy)):
            proxy.reset()
        if not self.service.alive:
            self.restart_service()

    # The mount.

    @contextlib.contextmanager
    def full(self) -> Iterator[Callable[[], None]]:
        """Not a page is left on the storage's mount. What is given takes what housekeeping frees meanwhile."""
        assert self.mount is not None
        ballast = self.mount / "ballast"

        def fill() -> None:
            with ballast.open("ab", buffering=0) as stream, contextlib.suppress(OSError):
                while True:
                    stream.write(bytes(4096))

        try:
            fill()
            yield fill
        finally:
            ballast.unlink()

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        assert self.mount is not None
        give_up_at = time.monotonic() + MOUNT_SECONDS
        while subprocess.run(["mount", "-o", "remount,ro", self.mount], capture_output=True, check=False).returncode:
            if time.monotonic() > give_up_at:
                raise ChaosFailed(f"{self.mount} could not be made read-only: {os.strerror(errno.EBUSY)}")
            time.sleep(0.005)  # somebody is writing
        try:
            yield
        finally:
            _run("mount", "-o", "remount,rw", str(self.mount))

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Whoever writes to the storage's mount waits; reading goes on."""
        assert self.mount is not None
        _run("fsfreeze", "--freeze", str(self.mount))
        try:
            yield
        finally:
            _run("fsfreeze", "--unfreeze", str(self.mount))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
