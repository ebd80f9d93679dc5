"""A run on a drive of 8 MiB that its own checkpoints fill. Run as a program, in a mount namespace of its own:

    unshare -Urm python -m tests.storage.full_disk FOLDER with|without

Ends with 0 if all is as it must be, with or without the reserve.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from ckptd import layout
from ckptd.errors import OutcomeUnknown, Unavailable
from ckptd.keeper import Keeper
from ckptd.ledger import Ledger
from ckptd.retention import Policy
from ckptd.service.holds import Holds
from ckptd.service.housekeeping import Housekeeper
from ckptd.storage import init_root, open_storage
from ckptd.storage.reserve import SLOTS
from ckptd.storage.root import refill_reserve
from ckptd.testing.auditor import Auditor
from ckptd.wire import AbortRequest
from tests.service import writing

RUN = "en-it"


def fill_up(folder: Path) -> Path:
    """Somebody else takes what space there is, to the last byte."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
    found = os.statvfs(folder)
    require(found.f_bavail == 0, f"{found.f_bavail} blocks are free")
    return filler


def require(true: bool, said: object) -> None:
    if not true:
        raise AssertionError(said)


def save_until_full(ledger: Ledger) -> tuple[list[str], str]:
    """The saves that were committed, and the one that found no space."""
    generation = writing.start(ledger, RUN).generation
    durable: list[str] = []
    for step in range(1, 20):
        try:
            commit = writing.write_save(ledger.storage, RUN, generation, step)
        except Unavailable as error:
            require("the storage is full" in error.message, error)
            return durable, layout.save_id(generation, step, all_ranks=True, count=1)
        ledger.commit(RUN, commit)
        durable.append(commit.save)
    raise AssertionError("the drive never got full")


def main(folder: Path, reserve: bool) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=True)
    url = f"file://{folder}"
    init_root(url)
    ledger = Ledger(open_storage(url), deadline_seconds=30.0 if reserve else 0.5)
    if reserve:
        refill_reserve(ledger.storage)
        assert len(os.listdir(folder / layout.RESERVE)) == SLOTS
    writing.PAYLOAD = os.urandom(1 << 20)
    durable, failed = save_until_full(ledger)
    assert len(durable) >= 4
    assert os.listdir(folder / "runs" / RUN / "tmp" / "g00000001") == []  # the failed save gave back what it took
    filler = fill_up(folder)
    housekeeper = Housekeeper(Keeper(ledger), Holds(silent_seconds=60), Policy(keep_last=2), interval_seconds=60)
    abort = AbortRequest(generation=1, reason="the storage is full")
    if not reserve:
        try:
            ledger.abort(RUN, failed, abort)
            raise AssertionError("a record found space on a full drive")
        except OutcomeUnknown as error:
            require("the storage is full" in error.message, error)
        assert not housekeeper.pass_once()
        (told,) = housekeeper.info().runs
        assert "ENOSPC" in (told.error or ""), told
        filler.unlink()
        assert housekeeper.pass_once()
        return
    ledger.abort(RUN, failed, abort)
    assert ledger.save_status(RUN, failed).status == "aborted"
    assert len(os.listdir(folder / layout.RESERVE)) < SLOTS
    assert housekeeper.pass_once()
    (told,) = housekeeper.info().runs
    assert (told.retired, told.verified, told.error) == (len(durable) - 2, 2, None), told
    filler.unlink()
    ledger.commit(RUN, writing.write_save(ledger.storage, RUN, 1, 50))
    housekeeper.pass_once()
    assert len(os.listdir(folder / layout.RESERVE)) == SLOTS
    latest = ledger.latest(RUN)
    assert latest.checkpoint is not None
    assert latest.checkpoint.step == 50
    Auditor(ledger.storage, RUN).assert_clean(acknowledged=durable[-2:])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "with")
