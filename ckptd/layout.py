"""Every storage key, in one place.

User strings never become path parts, except the run name, which must match `RUN_NAME`. Every other name is
derived from numbers, digests and nonces made here, so nothing a trainer sends leads outside its run.
"""

from __future__ import annotations

import re
import secrets

from ckptd.errors import Invalid

FORMAT = 1
ROOT_MARKER = "ckptd-root.json"
RESERVE = "ckptd-reserve"
RUNS = "runs"

RUN_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
SAVE_ID = re.compile(r"g[0-9]{8}-[0-9]{12}-[ra][0-9]{1,6}")
TOKEN_ID = re.compile(r"[0-9a-f]{32}")
LOG_NAME = re.compile(r"([0-9]{16})\.json")
SEGMENT_NAME = re.compile(r"[0-9]{14}")
SNAPSHOT_NAME = re.compile(r"([0-9]{16})-([0-9a-f]{12})\.state")
PROBE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
GENERATION_FOLDER = re.compile(r"g[0-9]{8}")
PART_DIGEST_LENGTH = 16
PART_NAME = re.compile(r"part-([0-9]{1,6})-[0-9a-f]{16}\.json")

SEGMENT_SLOTS = 100  # of one folder of the log, so that no look at the log's end lists more
MAX_STEP = 10**12 - 1
MAX_WRITERS = 10**6


def check_run(run: str) -> str:
    if not isinstance(run, str) or not RUN_NAME.fullmatch(run):
        raise Invalid(
            f"run name {str(run)[:160]!r} is not allowed: expected {RUN_NAME.pattern}",
            do="Use lower-case letters, digits, '.', '_' and '-', at most 128, starting with a letter or digit.",
            field="run",
        )
    return run


def check_save(save: str) -> str:
    if not isinstance(save, str) or not SAVE_ID.fullmatch(save):
        raise Invalid(f"save id {str(save)[:160]!r} is not allowed: expected {SAVE_ID.pattern}", field="save")
    return save


def check_step(step: int) -> int:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
        raise Invalid(f"step {step!r} is not allowed: expected an int from 0 to {MAX_STEP}", field="step")
    return step


def new_attempt() -> str:
    """A fresh name for an incarnation: 128 random bits, never a restart count or a rendezvous id."""
    return secrets.token_hex(16)


def new_nonce() -> str:
    """Makes a payload name that is never used twice."""
    return secrets.token_hex(8)


def save_id(generation: int, step: int, *, all_ranks: bool, count: int) -> str:
    """The name of one try to save, which every rank derives alike without a word to the others.

    `count` is the how-manieth save of this kind at this step this process is asked for. Saves that all
    ranks take part in are counted apart from those of rank 0 alone, because only the former are called
    equally often everywhere.
    """
    return f"g{generation:08d}-{check_step(step):012d}-{'a' if all_ranks else 'r'}{count}"


def run_folder(run: str) -> str:
    return f"{RUNS}/{check_run(run)}"


def log_folder(run: str) -> str:
    return f"{run_folder(run)}/log"


def segment_folder(run: str, segment: int) -> str:
    """Where the slots `segment` * SEGMENT_SLOTS and the following lie."""
    return f"{log_folder(run)}/{segment_name(segment)}"


def segment_name(segment: int) -> str:
    return f"{segment:014d}"


def segment_of(name: str) -> int | None:
    """The number of a folder of slots, None for any other name in the log's folder."""
    return int(name) if SEGMENT_NAME.fullmatch(name) else None


def log_key(run: str, seq: int) -> str:
    return f"{segment_folder(run, seq // SEGMENT_SLOTS)}/{seq:016d}.json"


def is_record(key: str) -> bool:
    """Whether an object is a slot of a log."""
    parts = key.split("/")
    return len(parts) == 5 and parts[0] == RUNS and parts[2] == "log"


def segment_before(key: str) -> str | None:
    """The folder of the slots that the first slot of a folder follows; None for all other keys."""
    parts = key.split("/")
    seq = seq_of(parts[-1]) if is_record(key) else None
    if not seq or seq % SEGMENT_SLOTS:
        return None
    return segment_folder(parts[1], seq // SEGMENT_SLOTS - 1)


def seq_of(name: str) -> int | None:
    """The number of a log slot, None for any other name in a folder of slots."""
    match = LOG_NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def snapshots_folder(run: str) -> str:
    return f"{run_folder(run)}/snapshots"


def snapshot_key(run: str, seq: int, sha256: str) -> str:
    """Where a snapshot of the state after slot `seq` lies, whose bytes have this digest."""
    return f"{snapshots_folder(run)}/{seq:016d}-{sha256[:12]}.state"


def snapshot_of(name: str) -> tuple[int, str] | None:
    """The slot of a snapshot and the beginning of its digest, None for any other name in the folder."""
    match = SNAPSHOT_NAME.fullmatch(name)
    return (int(match.group(1)), match.group(2)) if match else None


def manifest_folder(run: str, save: str) -> str:
    return f"{run_folder(run)}/manifests/{check_save(save)}"


def manifests_folder(run: str) -> str:
    return f"{run_folder(run)}/manifests"


def part_key(run: str, save: str, writer: int, sha256: str) -> str:
    """Where a writer's part manifest with this digest lies. So its name tells a reader whether it read it right."""
    return f"{manifest_folder(run, save)}/part-{writer}-{sha256[:PART_DIGEST_LENGTH]}.json"


def writer_of(name: str) -> int | None:
    """The writer of a part manifest, None for any other name in the folder."""
    match = PART_NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def manifest_key(run: str, save: str, sha256: str) -> str:
    return f"{manifest_folder(run, save)}/manifest-{sha256[:12]}.json"


def generation_of(save: str) -> int:
    return int(check_save(save)[1:9])


def step_of(save: str) -> int:
    return int(check_save(save)[10:22])


def data_folder(run: str) -> str:
    return f"{run_folder(run)}/data"


def generation_of_folder(name: str) -> int | None:
    """The generation of a folder of payload, None for any other name."""
    return int(name[1:]) if GENERATION_FOLDER.fullmatch(name) else None


def payload_folder(run: str, save: str) -> str:
    return f"{data_folder(run)}/g{generation_of(save):08d}/{save}"


def payload_key(run: str, save: str, writer: int, nonce: str) -> str:
    return f"{payload_folder(run, save)}/{writer}-{nonce}.safetensors"


def save_of(key: str) -> str | None:
    """The save that wrote an object of payload, None for any other key."""
    parts = key.split("/")
    return parts[4] if len(parts) == 6 and parts[2] == "data" else None


def probe_key(folder: str, name: str) -> str:
    """Where a probe of the storage writes: beside the runs, in a folder of its own."""
    for word in (folder, name):
        if not isinstance(word, str) or not PROBE_NAME.fullmatch(word):
            raise Invalid(
                f"probe name {str(word)[:160]!r} is not allowed: expected {PROBE_NAME.pattern}", field="probe"
            )
    return f"probe/{folder}/{name}"


def tmp_folder(key: str) -> str:
    """Where an object is written before it gets its name: in the same run, so on the same file system. What is of a
    save lies apart by generation, records and snapshots by segment of the log, so that what a killed writer left can
    be told from what is being written."""
    parts = key.split("/")
    if parts[0] != RUNS or len(parts) < 3:
        return "tmp"
    return "/".join([*parts[:2], "tmp", *filter(None, [_epoch(parts)])])


def _epoch(parts: list[str]) -> str | None:
    """What the name of an object's folder says about when it may be written, None if nothing does."""
    if parts[2] == "data" and GENERATION_FOLDER.fullmatch(parts[3]):
        return parts[3]
    if parts[2] == "manifests" and SAVE_ID.fullmatch(parts[3]):
        return f"g{generation_of(parts[3]):08d}"
    if parts[2] == "log" and SEGMENT_NAME.fullmatch(parts[3]):
        return parts[3]
    snapshot = snapshot_of(parts[-1]) if parts[2] == "snapshots" else None
    return segment_name(snapshot[0] // SEGMENT_SLOTS) if snapshot is not None else None


def unnamed_folder(run: str) -> str:
    """Where the objects of a run are that have no name yet."""
    return f"{run_folder(run)}/tmp"
