"""Two network namespaces joined by one cable, a node in each, and the cable can be cut. Needs root and `ip`.

Nothing else is on that network: ranks in it go to a shared folder, which needs none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

from ckptd.errors import Invalid
from ckptd.testing.chaos.zygote import NAMESPACE


class Network:
    """`with Network() as network: network.env(1)`. Node 1 has address .1, node 2 has .2."""

    def __init__(self) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise Invalid("namespaces need root and the program 'ip'", do="Run as root, with iproute2.", field="ip")
        self._names = [f"chaos-{os.getpid()}-{number}" for number in (1, 2)]
        self.addresses = ["10.213.47.1", "10.213.47.2"]

    def env(self, node: int) -> dict[str, str]:
        """What puts an agent and its ranks onto their side."""
        return {NAMESPACE: f"/run/netns/{self._names[node - 1]}", "GLOO_SOCKET_IFNAME": f"chaos{node}"}

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Packets get lost without a word to whoever sent them; what is connected stays so."""
        _ip("-n", self._names[1], "link", "set", "chaos2", "down")
        try:
            yield
        finally:
            _ip("-n", self._names[1], "link", "set", "chaos2", "up")

    def __enter__(self) -> Network:
        with contextlib.ExitStack() as stack:
            for name in self._names:
                _ip("netns", "add", name)
                stack.callback(_ip, "netns", "delete", name)
            first, second = self._names
            ends = ["type", "veth", "peer", "name", "chaos2", "netns", second]
            _ip("-n", first, "link", "add", "chaos1", *ends)
            for number, name in enumerate(self._names, 1):
                _ip("-n", name, "addr", "add", f"{self.addresses[number - 1]}/24", "dev", f"chaos{number}")
                _ip("-n", name, "link", "set", f"chaos{number}", "up")
                _ip("-n", name, "link", "set", "lo", "up")
            self._left = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Invalid(f"ip {' '.join(words)} failed: {done.stderr.strip()}", do="Run as root.", field="ip")
