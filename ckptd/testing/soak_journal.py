"""What the processes of a soak were told, as lines of JSON: written by one process, read by the one that checks.

A line is written after the answer it tells of, by one `write`, so a process that is killed leaves whole lines only,
and at most forgets what it was told last. The exceptions are written down before they are done: damage, and what a
process `means` to decide.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class Journal:
    """The journal of one process, continued if there is one."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def operation(self, name: str) -> None:
        """An operation begins."""
        self._write(what="operation", name=name)

    def event(self, name: str) -> None:
        """Something that is only counted, such as an answer that did not come."""
        self._write(what="event", name=name)

    def counts(self, run: str, rid: str) -> None:
        """This process was told that the record is in the log and counts."""
        self._write(what="counts", run=run, rid=rid)

    def durable(self, run: str, save: str, rid: str) -> None:
        """This process was told that the save is a checkpoint."""
        self._write(what="durable", run=run, save=save, rid=rid)

    def refused(self, run: str, rid: str) -> None:
        """This process was told that the record will never count."""
        self._write(what="refused", run=run, rid=rid)

    def damaged(self, run: str, save: str, key: str) -> None:
        """This process is about to damage an object."""
        self._write(what="damaged", run=run, save=save, key=key)

    def means(self, run: str, verb: str, save: str, who: str) -> None:
        """This process is about to ask for a decision about a checkpoint."""
        self._write(what="means", run=run, verb=verb, save=save, who=who)

    def told(self, run: str, verb: str, save: str, who: str, at: float) -> None:
        """This process was told that it is decided. `at` is a time, in seconds since the epoch."""
        self._write(what="told", run=run, verb=verb, save=save, who=who, at=at)

    def finding(self, run: str, text: str) -> None:
        """This process was told what must not be."""
        self._write(what="finding", run=run, text=text)

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, **line: Any) -> None:
        data = json.dumps(line).encode() + b"\n"
        written = os.write(self._file, data)
        if written != len(data):
            raise OSError(f"the journal took {written} of {len(data)} bytes")


Decision = tuple[str, str, str]  # what is decided, about which save, for whom


class Tally:
    """All journals of a folder, read on as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: Counter[Path] = Counter()
        self.operations: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.durable: dict[str, set[str]] = defaultdict(set)
        self.counting: dict[str, set[str]] = defaultdict(set)
        self.refused: dict[str, set[str]] = defaultdict(set)
        self.damaged_saves: dict[str, set[str]] = defaultdict(set)
        self.damaged: dict[str, set[str]] = defaultdict(set)
        self.meant: dict[str, set[Decision]] = defaultdict(set)
        self.told: dict[str, dict[Decision, float]] = defaultdict(dict)
        self.findings: list[str] = []

    def read_on(self) -> set[str]:
        """Take in the lines that came since the last look; the runs they are about."""
        touched = set[str]()
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read[path])
                data = file.read()
            whole = data.rpartition(b"\n")[0]
            if not whole:
                continue
            self._read[path] += len(whole) + 1
            for line in map(json.loads, whole.splitlines()):
                self._take(line)
                touched.update({line["run"]} if "run" in line else ())
        return touched

    def _take(self, line: dict[str, Any]) -> None:
        run = line.get("run", "")
        match line["what"]:
            case "operation":
                self.operations[line["name"]] += 1
            case "event":
                self.events[line["name"]] += 1
            case "counts":
                self.counting[run].add(line["rid"])
            case "durable":
                self.durable[run].add(line["save"])
                self.counting[run].add(line["rid"])
            case "refused":
                self.refused[run].add(line["rid"])
            case "damaged":
                self.damaged_saves[run].add(line["save"])
                self.damaged[run].update((line["save"], line["key"]))
            case "means":
                self.meant[run].add((line["verb"], line["save"], line["who"]))
            case "told":
                self.told[run][line["verb"], line["save"], line["who"]] = line["at"]
            case "finding":
                self.findings.append(f"{run}: {line['text']}")


def operations_in(path: Path) -> int:
    """How many operations a journal tells of; 0 where there is none."""
    return path.read_bytes().count(b'{"what": "operation"') if path.exists() else 0
