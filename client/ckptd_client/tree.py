"""What both directions of the state codec share: the tree's version and limits, and where one is in it."""

from __future__ import annotations

import re
from dataclasses import dataclass

VERSION = 1
MAX_DEPTH = 80  # a level is up to two JSON levels, and the parsers stop at 200
MAX_NAME_PART = 120

_ESCAPED = re.compile(r"[%/\x00-\x1f\x7f]")


@dataclass(slots=True, eq=False)  # not frozen: one is made per node, and that costs double
class Path:
    """A place in a nested state, printed as the Python expression that leads there."""

    root: str
    parent: Path | None = None
    key: str | int = 0
    depth: int = 0
    _names: str | None = None

    def child(self, key: str | int) -> Path:
        return Path(self.root, self, key, self.depth + 1)

    def keys(self) -> list[str | int]:
        found: list[str | int] = []
        place = self
        while place.parent is not None:
            found.append(place.key)
            place = place.parent
        return found[::-1]

    def __str__(self) -> str:
        return self.root + "".join(f"[{key!r}]" for key in self.keys())

    def name(self, prefix: str) -> str:
        """A readable tensor name for this place. Not unique: keys 1 and "1" have the same."""
        return prefix if self.parent is None else f"{prefix}{self.parent._name()}{self._part()}"

    def _name(self) -> str:
        """The name without its prefix; kept, because many names begin with it."""
        if self._names is None:
            self._names = "" if self.parent is None else self.parent._name() + self._part()
        return self._names

    def _part(self) -> str:
        return f"/{_ESCAPED.sub(_percent, str(self.key))[:MAX_NAME_PART]}"


def _percent(match: re.Match[str]) -> str:
    return f"%{ord(match[0]):02X}"


def type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
