"""A folder on the local disk where the bytes of a save wait until the storage is back.

Each save has a file of its own, with the bytes that its payload object will have. The digest of every chunk stays in
memory: what is read back from the local disk is compared before it goes to the storage. A file is of no use to
another process: only the generation that captured it may commit it. So a start removes what older ones left.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from ckptd import layout
from ckptd.digests import CHUNK_BYTES, chunk_digest
from ckptd.errors import Corrupt, Invalid, Unavailable
from ckptd.wire import Answer
from ckptd_client.payload import PayloadFile
from ckptd_client.snapshot import Captured

log = logging.getLogger("ckptd")
STORAGE_DIGITS = 8
NAME = re.compile(
    rf"(?P<run>{layout.RUN_NAME.pattern})-(?P<storage>[0-9a-f]{{{STORAGE_DIGITS}}})-r(?P<rank>[0-9]{{1,6}})"
    rf"-(?P<attempt>{layout.TOKEN_ID.pattern})-(?P<save>{layout.SAVE_ID.pattern})-(?P<nonce>[0-9a-f]{{16}})\.spool"
)


class SpoolFile:
    """The bytes of one payload object, in order, as often as they are asked for; compared before they are given.

    `moved` is called for each chunk that is taken. Once `refusal` is set, the next chunk raises it.
    """

    def __init__(self, path: Path, size: int, chunk_bytes: int, chunks: tuple[str, ...]) -> None:
        self.path, self.size, self.chunk_bytes, self.chunks = path, size, chunk_bytes, chunks
        self.refusal: Exception | None = None
        self.moved: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[bytes]:
        try:
            with self.path.open("rb", buffering=0) as file:
                for index, digest in enumerate(self.chunks):
                    self._refuse()
                    chunk = _read(file.fileno(), min(self.chunk_bytes, self.size - index * self.chunk_bytes))
                    found = chunk_digest(chunk)
                    if found != digest:
                        raise Corrupt(
                            f"the spool file {self.path} does not hold what was written to it: chunk {index} has"
                            f" digest {found}, expected {digest}",
                            do="Check the local disk, or spool elsewhere. The save is lost, the training is not.",
                        )
                    self.moved()
                    yield chunk
        except OSError as error:
            self._refuse()
            raise Corrupt(
                f"the spool file {self.path} cannot be read back: {error}",
                do="Check the local disk, or spool elsewhere. The save is lost, the training is not.",
            ) from error

    def remove(self) -> None:
        """Any thread; also while it is read."""
        with suppress(FileNotFoundError):
            self.path.unlink()

    def _refuse(self) -> None:
        if self.refusal is not None:
            raise self.refusal


class Spool:
    """The files of one rank in one incarnation. Anything else in the folder is left alone."""

    def __init__(self, folder: Path, run: str, storage_uuid: str, rank: int, attempt: str) -> None:
        self.folder = folder
        self._run, self._attempt = run, attempt
        self._storage = re.sub("[^0-9a-f]", "", storage_uuid.lower())[:STORAGE_DIGITS].ljust(STORAGE_DIGITS, "0")
        self._start = f"{run}-{self._storage}-r{rank}-{attempt}"

    def remove_old(self, generation: int) -> None:
        """At the start, when `generation` has begun: what older incarnations of the run left here counts no more.
        Of all ranks, because a host may have had others before."""
        for name in sorted(os.listdir(self.folder)):
            found = NAME.fullmatch(name)
            if (
                found is not None
                and (found["run"], found["storage"]) == (self._run, self._storage)
                and found["attempt"] != self._attempt
                and layout.generation_of(found["save"]) < generation
            ):
                log.info("removing %s from the spool: its generation has ended", name)
                (self.folder / name).unlink(missing_ok=True)

    def write(self, save: str, captured: Captured, *, chunk_bytes: int = CHUNK_BYTES) -> SpoolFile:
        """The bytes of one save, on the local disk at return. `Unavailable` if that does not take them: nothing is
        left then. The caller releases `captured`."""
        path = self.folder / f"{self._start}-{save}-{layout.new_nonce()}.spool"
        source = PayloadFile(captured, chunk_bytes)
        try:
            try:
                with open(path, "xb", buffering=0, opener=_for_me_alone) as file:
                    for piece in source:
                        _write(file.fileno(), piece)
                    os.fsync(file.fileno())
                _sync_folder(self.folder)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise Unavailable(
                f"the spool {self.folder} does not take the {source.size} bytes of save {save}: {error}",
                do="Make room on the local disk, or spool fewer saves. The save is lost, the training is not.",
                save=save,
            ) from error
        return SpoolFile(path, source.size, chunk_bytes, tuple(source.digests))


def open_spool(folder: Path, run: str, rank: int, answer: Answer) -> Spool:
    """The spool of one rank, once its generation has begun."""
    spool = Spool(folder, run, answer.storage_uuid, rank, answer.attempt)
    spool.remove_old(answer.generation)
    return spool


def spool_folder(given: str | os.PathLike[str] | None) -> Path | None:
    """The folder, made if it is not there; None without one. `Invalid` if it cannot be written to."""
    if not given:
        return None
    folder = Path(given)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = folder / f".{layout.new_nonce()}"
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise Invalid(
            f"the spool {folder} cannot be used: {error}",
            do="Name a folder on a local disk that this process may write to.",
            field="spool",
        ) from error
    return folder


def _for_me_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _write(descriptor: int, data: memoryview) -> None:
    while data.nbytes:
        data = data[os.write(descriptor, data) :]


def _read(descriptor: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = os.read(descriptor, size - len(data))
        if not more:
            raise OSError(f"it ends {size - len(data)} bytes too early")
        data += more
    return bytes(data)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
