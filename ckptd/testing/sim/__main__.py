"""The command line: one seed in words, or many in numbers. The exit code is 1 if an invariant broke."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptd.testing.sim.search import TRACE, progress, replay_line, search, shrink
from ckptd.testing.sim.weather import FAULTS
from ckptd.testing.sim.world import OPERATIONS, Report, simulate

app = typer.Typer(add_completion=False)


@app.command()
def main(
    seed: Annotated[int | None, typer.Option(help="Replay this seed and tell what happened.")] = None,
    operations: Annotated[int, typer.Option(help="Storage operations: of the seed, or of all seeds together.")] = 0,
    without: Annotated[list[str] | None, typer.Option(help=f"Faults to leave out: {', '.join(FAULTS)}.")] = None,
    first_seed: Annotated[int, typer.Option(help="The first seed of many.")] = 1,
    processes: Annotated[int, typer.Option(help="Seeds that run at the same time.")] = 2,
    trace: Annotated[int, typer.Option(help="Events to show of one seed.")] = TRACE,
) -> None:
    """Simulate clusters on a storage that fails in every way it may, and check every invariant all the time."""
    if seed is not None:
        limit = operations or OPERATIONS
        report = simulate(seed, limit, without=without or ())
        _tell(report, trace)
        raise typer.Exit(report.finding is not None)
    found = search(first_seed, operations or 10**7, processes=processes, say=typer.echo)
    typer.echo(progress(found))
    for name, number in sorted(found.counts.items()):
        typer.echo(f"  {number:10,}  {name}")
    for report in found.failed:
        _tell(report, trace)
        typer.echo(f"again:  {replay_line(report.seed, OPERATIONS, ())}")
        typer.echo(f"fewer:  {replay_line(report.seed, *shrink(report))}")
    raise typer.Exit(bool(found.failed))


def _tell(report: Report, trace: int) -> None:
    for event in report.events[-trace:]:
        typer.echo(event)
    verdict = f"broken: {report.finding}" if report.finding is not None else "nothing is broken"
    typer.echo(
        f"seed {report.seed}: {report.operations} operations, {report.seconds:.0f} s of virtual time, {verdict}"
    )


if __name__ == "__main__":
    app()
