"""A free port for a rendezvous."""

from __future__ import annotations

import secrets
import socket


def free_port() -> int:
    """A loopback port from below the range that outgoing connections take, so it stays free over restarts."""
    while True:
        port = 15_000 + secrets.randbelow(16_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
