"""`make bench`: everything that is measured, in one command; tables for people, JSON for machines.

python -m benchmarks --quick                    about five minutes on two cores
python -m benchmarks --full --write-docs        all sizes, and the figures into docs/BENCHMARKS.md
python -m benchmarks --only saving --only s3    some groups
python -m benchmarks --from FILE --write-docs   figures of an earlier run
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.document import write_figures
from benchmarks.jobs import FULL, GROUPS, QUICK, Job
from benchmarks.results import Part, Report
from benchmarks.running import JobFailed, run_job
from benchmarks.tables import goal_grid, grid

TABLE_COLUMNS = 150


def main(argv: Sequence[str] | None = None) -> int:
    """0 when everything was measured, whatever the figures; 1 when something could not be."""
    args = _arguments(argv)
    console = Console(width=max(TABLE_COLUMNS, Console().width), highlight=False)
    if args.report is not None:
        report = Report.model_validate_json(args.report.read_text())
    else:
        args.output.mkdir(parents=True, exist_ok=True)
        mode = "full" if args.full else "quick"
        jobs = [job for job in (FULL if args.full else QUICK) if not args.only or job.group in args.only]
        report = measure(mode, jobs, args.output.resolve(), args.json or args.output / "bench.json", console)
    console.print(goal_grid(report))
    for problem in report.problems:
        console.print(f"not measured: {problem}", style="red", markup=False)
    if args.write_docs:
        write_figures(report)
    return 1 if report.problems else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--quick", action="store_true", help="a few sizes and rounds (the default)")
    modes.add_argument("--full", action="store_true", help="all sizes, more rounds")
    modes.add_argument("--from", dest="report", type=Path, metavar="FILE", help="measure nothing, show this JSON")
    parser.add_argument("--only", action="append", choices=GROUPS, metavar="NAME", help=" ".join(GROUPS))
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="folder for all files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the JSON goes (OUTPUT/bench.json)")
    parser.add_argument("--write-docs", action="store_true", help="put the figures into docs/BENCHMARKS.md")
    return parser.parse_args(argv)


def measure(mode: str, jobs: Sequence[Job], output: Path, path: Path, console: Console) -> Report:
    """Run the jobs, print each one's tables, and write the JSON after each, so that an end midway loses nothing."""
    began, started = time.monotonic(), datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    parts: list[Part] = []
    problems: list[str] = []
    report = _report(mode, started, 0.0, parts, problems)
    errors = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task("", total=None)
        for number, job in enumerate(jobs, 1):
            name = f"{number} of {len(jobs)}: {job.group}{f', {job.label}' if job.gigabytes else ''}"
            if not errors.is_terminal:
                errors.print(f"{time.monotonic() - began:5.0f} s  {name}", markup=False)

            def tell(doing: str, name: str = name) -> None:
                progress.update(task, description=f"{name}: {doing}")

            try:
                parts.append(run_job(job, output, tell))
            except JobFailed as failure:
                problems.append(f"{name}: {failure}")
            else:
                for table in parts[-1].tables:
                    console.print(grid(table))
            report = _report(mode, started, time.monotonic() - began, parts, problems)
            path.write_text(report.model_dump_json(indent=1))
    return report


def _report(mode: str, started: str, seconds: float, parts: list[Part], problems: list[str]) -> Report:
    return Report.of(parts, mode=mode, started=started, seconds=seconds, machine=machine(), problems=tuple(problems))


def machine() -> dict[str, str]:
    """What the figures depend on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "Python": platform.python_version(),
        "torch": version("torch"),
        "ckptd": version("ckptd"),
    }


if __name__ == "__main__":
    sys.exit(main())
