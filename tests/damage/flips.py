"""Single wrong bits, anywhere in a run's payload, manifests and log, met by a client that starts.

    python -m tests.damage.flips --flips 10000 --seed 7

Each flip is made in a file of a finished run, a new client restores, and the file is put back. A flip in what the
start reads must be found before anything is installed: the start fails, or goes to the checkpoint before, with
exactly the values that were saved there. A flip elsewhere changes nothing.
"""

from __future__ import annotations

import argparse
import logging
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from ckptd.errors import Corrupt
from ckptd.ledger import Ledger
from ckptd.manifest import ManifestRef, ObjectRef
from ckptd.records import Observer
from ckptd.second import Reading, read_here
from ckptd.storage import init_root
from ckptd.storage.base import Storage
from ckptd_client import CheckpointClient, transport

RUN = "flips"
STEPS = (1, 2, 3)


def state_at(step: int) -> dict[str, object]:
    """What was saved at `step`."""
    generator = torch.Generator().manual_seed(step)
    return {"weight": torch.randn(300, generator=generator), "bias": torch.randn(7, generator=generator), "n": step}


def _read_again(storage: Storage, ref: ObjectRef | ManifestRef) -> Reading:
    """Another reader, without the cost of another process."""
    return Reading(reader=Observer(host="other", process="the second reader"), damage=read_here(storage, ref).damage)


@dataclass(frozen=True)
class Flip:
    """One bit of one file."""

    path: Path
    offset: int
    bit: int

    @property
    def kind(self) -> str:
        name = self.path.name
        if name.startswith("part-"):
            return "part manifest"
        return "manifest" if name.startswith("manifest-") else "payload" if name.endswith(".safetensors") else "log"

    @contextmanager
    def made(self) -> Iterator[None]:
        whole = self.path.read_bytes()
        spoilt = bytearray(whole)
        spoilt[self.offset] ^= 1 << self.bit
        self._write(bytes(spoilt))
        try:
            yield
        finally:
            self._write(whole)

    def _write(self, data: bytes) -> None:
        self.path.chmod(0o644)
        self.path.write_bytes(data)


class Scene:
    """A finished run in `folder`, and clients that start from it."""

    def __init__(self, folder: Path) -> None:
        self.url = f"file://{folder}/root"
        self.runs = folder / "root" / "runs" / RUN
        init_root(self.url)
        with CheckpointClient(self.url, RUN, rank=0, world_size=1) as client:
            client.restore({})
            for step in STEPS:
                client.save(state_at(step), step=step, wait=True)
        self.files = sorted(p for p in self.runs.rglob("*") if p.is_file())
        self.needed = {p for p in self.files if p.parent.parent.name == "log" or self._of_newest(p)}

    def _of_newest(self, path: Path) -> bool:
        return f"-{STEPS[-1]:012d}-" in path.parent.name and not path.name.startswith("part-")

    def meet(self, flip: Flip) -> str:
        """What a start makes of it: "found" (an error, or the checkpoint before), or "harmless"."""
        state: dict[str, object] = {"weight": torch.zeros(300), "bias": torch.zeros(7), "n": -1}
        try:
            with flip.made(), CheckpointClient(self.url, RUN, rank=0, world_size=1) as client:
                step = client.restore(state)
        except Corrupt:
            assert state["n"] == -1, f"{flip}: an error, and something was installed"
            assert not torch.as_tensor(state["weight"]).any(), f"{flip}: an error, and something was installed"
            return "found"
        finally:
            self._forget()
        saved = state_at(step)
        for name, value in saved.items():
            assert torch.equal(torch.as_tensor(state[name]), torch.as_tensor(value)), f"{flip}: {name} is wrong"
        return "harmless" if step == STEPS[-1] else "found"

    def _forget(self) -> None:
        """Take away the records of the start, so that the next flip meets the same run."""
        for path in self.runs.rglob("*"):
            if path.is_file() and path not in self.files:
                path.unlink()

    def random_flip(self, chance: random.Random) -> Flip:
        """Mostly in what a start reads. Kinds of files first, for most bytes are payload."""
        read = chance.random() < 0.95
        kinds: dict[str, list[Path]] = {}
        for path in self.files:
            if (path in self.needed) == read:
                kinds.setdefault(Flip(path, 0, 0).kind, []).append(path)
        path = chance.choice(kinds[chance.choice(sorted(kinds))])
        return Flip(path, chance.randrange(path.stat().st_size), chance.randrange(8))


def meet_flips(folder: Path, flips: int, seed: int) -> Counter[tuple[str, str]]:
    """How many flips of each kind ended how. AssertionError, naming flip and seed, for one that was missed."""
    scene, chance, ends = Scene(folder), random.Random(seed), Counter[tuple[str, str]]()
    with patch.object(transport, "Ledger", partial(Ledger, second_reader=_read_again)):
        for number in range(flips):
            flip = scene.random_flip(chance)
            end = scene.meet(flip)
            expected = "found" if flip.path in scene.needed else "harmless"
            assert end == expected, f"flip {number} of seed {seed} was {end}, expected {expected}: {flip}"
            ends[flip.kind, end] += 1
    return ends


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    asked = parser.parse_args()
    print(f"{asked.flips} flips, seed {asked.seed}", flush=True)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # thousands of reports of the damage that is made here
    with tempfile.TemporaryDirectory() as place:
        for (kind, end), count in sorted(meet_flips(Path(place), asked.flips, asked.seed).items()):
            print(f"{kind:15}{end:10}{count:8}")
