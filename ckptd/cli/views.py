"""What each command prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import typer
from pydantic import BaseModel

from ckptd.cli.tables import print_table, size
from ckptd.manifest import Manifest
from ckptd.wire import CheckpointInfo, Latest, RunInfo


def print_json(value: Any) -> None:
    """Models, and lists and dicts of them, as one JSON document."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=True, default=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} is not printed as JSON")


def print_runs(runs: Sequence[RunInfo]) -> None:
    print_table(
        (
            "run",
            "resume step",
            "tip step",
            "checkpoints",
            "size",
            "generation",
            "records",
            "void",
            "last commit",
            "state",
        ),
        [
            (
                run.run,
                run.resume_step,
                run.tip_step,
                run.checkpoints,
                size(run.stored_bytes),
                run.generation,
                run.records,
                run.void_records,
                run.last_commit,
                _run_state(run),
            )
            for run in runs
        ],
    )


def _run_state(run: RunInfo) -> str:
    if run.problem:
        return "damaged"
    if run.closed:
        return "closed"
    if run.ended:
        return "reopened" if run.ended == "closed" else run.ended
    return "ready" if run.ready else "loading" if run.generation else "new"


def print_checkpoints(found: Sequence[CheckpointInfo]) -> None:
    print_table(
        ("step", "generation", "size", "writers", "committed", "state", "kept for", "metrics", "save"),
        [
            (
                c.step,
                c.generation,
                size(c.payload_bytes),
                c.writers,
                c.time,
                ", ".join(filter(None, (c.status, marks(c)))),
                kept_for(c) or None,
                metrics(c),
                c.save,
            )
            for c in found
        ],
    )


def print_checkpoint(info: CheckpointInfo, manifest: Manifest | None, lineage: Sequence[CheckpointInfo]) -> None:
    print_table(
        ("field", "value"),
        [
            ("step", info.step),
            ("save", info.save),
            ("generation", info.generation),
            ("state", ", ".join(filter(None, (info.status, marks(info))))),
            ("kept for", kept_for(info) or None),
            ("committed", info.time),
            ("size", size(info.payload_bytes)),
            ("shared", shared(info) or None),
            ("writers", info.writers),
            ("metrics", metrics(info) or None),
            ("lineage", " <- ".join(str(c.step) for c in lineage)),
            ("manifest", info.manifest.key),
            ("manifest sha256", info.manifest.sha256),
            ("world", manifest.world if manifest else None),
            ("producer", manifest.producer if manifest else None),
        ],
    )
    if manifest is not None and manifest.contract:
        typer.echo("")
        print_table(("contract", "saved with"), sorted(manifest.contract.items()))
    if manifest is not None:
        typer.echo("")
        print_table(
            ("writer", "size", "digest", "chunks", "object"),
            [
                (
                    part.writer,
                    size(part.payload.size),
                    f"{part.payload.digest}:{','.join(part.payload.chunks[:4])}",
                    len(part.payload.chunks),
                    part.payload.key,
                )
                for part in manifest.parts
                if part.payload is not None
            ],
        )
        if manifest.borrows:
            typer.echo("")
            print_table(
                ("borrowed from", "size", "tensors", "object"),
                [
                    (item.save, size(item.object.size), len(item.names), item.object.key)
                    for part in manifest.parts
                    for item in part.borrowed
                ],
            )


def print_latest(answer: Latest) -> None:
    where = f"step {answer.checkpoint.step}, save {answer.checkpoint.save}" if answer.checkpoint else "-"
    print_table(
        ("answer", "run", "generation", "resume from"), [(answer.answer, answer.run, answer.generation, where)]
    )
    if answer.candidates:
        typer.echo("")
        print_table(
            ("step", "valid", "save", "reason"),
            [(c.step, "yes" if c.valid else "no", c.save, c.reason) for c in answer.candidates],
        )


def lineage(found: Sequence[CheckpointInfo], info: CheckpointInfo) -> list[CheckpointInfo]:
    """The checkpoint and its ancestors, newest first."""
    by_save = {c.save: c for c in found}
    line = [info]
    while line[-1].parent in by_save:
        line.append(by_save[line[-1].parent])
    return line


def marks(info: CheckpointInfo) -> str:
    """What a checkpoint is now, beside its status."""
    said = {
        "verified": info.verified,
        "tip": info.is_tip,
        "resume point": info.is_resume_point,
        "off the line": not info.on_line,
    }
    return ", ".join(word for word, true in said.items() if true)


def kept_for(info: CheckpointInfo) -> str:
    kept = [f"pinned by {who}" for who in info.pinned_by] + [f"held by {who}" for who in info.held_by]
    if info.needed_by and info.status == "retired":
        kept.append(f"the sake of {', '.join(info.needed_by[-3:])}")
    return ", ".join(kept)


def shared(info: CheckpointInfo) -> str:
    """What of a checkpoint lies in objects of others."""
    if not info.borrows:
        return ""
    return f"{size(info.borrowed_bytes)} in objects of {', '.join(info.borrows)}"


def metrics(info: CheckpointInfo) -> str:
    return " ".join(f"{name}={value:g}" for name, value in sorted(info.metrics.items()))
