"""What `ckptd why` and `ckptd fsck` print."""

from __future__ import annotations

import typer

from ckptd.cli.tables import clean, print_table, size
from ckptd.cli.views import marks
from ckptd.fsck import FsckAnswer
from ckptd.why import Why, WhyCheckpoint, WhyGeneration

_ANSWERS = {
    "found": "A start would resume from step {step} ({save}).",
    "none": "A start would begin from zero: nothing was committed yet.",
    "corrupt": "A start would fail: there are checkpoints, and none of the line is valid.",
}


def print_why(why: Why) -> None:
    point = why.latest.checkpoint
    step, save = (point.step, point.save) if point is not None else (None, None)
    typer.echo(_ANSWERS[why.latest.answer].format(step=step, save=save))
    if why.closed:
        typer.echo(clean(f"But the run is {why.closed}. `ckptd reopen {why.run}` lets it go on."))
    if why.next_start:
        typer.echo(clean(f"Crash loop: {why.next_start}."))
    typer.echo(clean(_generation(why.generation)))
    if why.line:
        _print_checkpoints("the line, from its tip on", why.line)
    if why.beside:
        _print_checkpoints("off the line", why.beside)
    if why.more:
        typer.echo(f"and {why.more} older ones, see `ckptd ls`")
    if why.void_records:
        typer.echo(f"\n{why.void_records} records did not count:")
        print_table(("slot", "reason"), [(void.slot, void.reason) for void in why.void])


def _generation(generation: WhyGeneration | None) -> str:
    if generation is None:
        return "Nobody has started yet."
    start = f"from step {generation.resume_step}" if generation.resume_save else "from zero"
    fallback = f", as a fallback of generation {generation.fallback_of}" if generation.fallback_of else ""
    heard = f"; heard of {generation.seconds_ago:.0f} s ago" if generation.seconds_ago is not None else ""
    return (
        f"Generation {generation.generation} is {generation.state}: job {generation.job} on {generation.host},"
        f" {generation.world} ranks, started {generation.started} {start}{fallback}{heard}."
    )


def _print_checkpoints(title: str, told: tuple[WhyCheckpoint, ...]) -> None:
    typer.echo(f"\n{title}:")
    print_table(
        ("step", "verdict", "marks", "starts", "reason", "save"),
        [
            (t.checkpoint.step, t.verdict, marks(t.checkpoint) or None, t.starts or None, t.reason, t.checkpoint.save)
            for t in told
        ],
    )


def print_fsck(answer: FsckAnswer) -> None:
    print_table(
        ("severity", "object", "found"),
        [(finding.severity, finding.object, finding.detail) for finding in answer.findings],
    )
    read = f", {size(answer.read_bytes)} of payload read" if answer.deep else ""
    damage = sum(finding.severity == "damage" for finding in answer.findings)
    typer.echo(
        clean(
            f"run {answer.run}: {answer.records} records, {answer.checkpoints} checkpoints,"
            f" {answer.objects} objects looked at{read}: {damage or 'no'} damage"
        ),
        err=True,
    )
