"""Files that only grow, line by line, and stay readable when their writer is killed at any moment."""

from __future__ import annotations

import os
from pathlib import Path


class LineFile:
    """Appends whole lines, each with one write, so that another program can follow the file. Rank 0 only."""

    def __init__(self, path: Path, first_line: str = "") -> None:
        """Open for appending; a killed writer's torn last line is cut off. `first_line` goes into a new file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.ftruncate(self._fd, whole)
        if first_line and not whole:
            self.append(first_line)

    def append(self, line: str) -> None:
        rest = memoryview(f"{line}\n".encode())
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def close(self) -> None:
        os.close(self._fd)


def read_lines(path: Path) -> list[str]:
    """The whole lines of a file, without a torn last one."""
    return path.read_bytes().decode("utf-8", errors="replace").split("\n")[:-1]
