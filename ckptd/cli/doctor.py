"""`ckptd doctor`: probe a storage, tell what was found, and end with 8 where it is unfit."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from ckptd.cli.tables import clean, print_table
from ckptd.cli.views import print_json
from ckptd.errors import Unfit
from ckptd.storage.probe import RACERS, ROUNDS, Report, probe


def doctor(
    url: Annotated[str, typer.Argument(help="Storage URL, such as file:///mnt/shared/ckpts.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    racers: Annotated[int, typer.Option(min=2, max=256, help="Writers that race for one key.")] = RACERS,
    rounds: Annotated[int, typer.Option(min=1, max=10_000, help="How often they do.")] = ROUNDS,
    other: Annotated[
        str | None,
        typer.Option(help="The same storage at another mount, such as a second one that stands for another host."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave what was written below probe/.")] = False,
) -> None:
    """Probe whether a storage does what ckptd relies on. Writes below probe/ and removes it again."""
    report = probe(url, racers=racers, rounds=rounds, keep=keep, other=other, tell=_tell)
    _print(report, as_json)
    if report.unfit:
        raise Unfit(
            f"storage {report.url} is unfit: {', '.join(finding.name for finding in report.unfit)}",
            do=report.unfit[0].do,
            url=report.url,
        )
    if report.interrupted is not None:
        raise report.interrupted
    if not as_json:
        typer.echo(f"{clean(report.url)} is fit; objects are created by {clean(report.tier)}", err=True)


def _print(report: Report, as_json: bool) -> None:
    if as_json:
        fit = None if report.interrupted is not None else True
        print_json(
            {
                "url": report.url,
                "uuid": report.uuid,
                "fit": False if report.unfit else fit,
                "tier": report.tier,
                "facts": report.facts,
                "findings": [asdict(finding) for finding in report.findings],
            }
        )
    else:
        rows = [(finding.verdict, finding.name, finding.detail, finding.do) for finding in report.findings]
        print_table(("verdict", "probe", "found", "what to do"), rows)


def _tell(step: str) -> None:
    """What is being done, for a person who waits."""
    if sys.stderr.isatty():
        typer.echo(f"probing: {step}", err=True)
