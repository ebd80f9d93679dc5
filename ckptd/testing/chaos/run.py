"""A whole run: the undisturbed job, then the disturbed one, one fault after the other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptd.errors import CkptdError, describe
from ckptd.storage import init_root
from ckptd.testing.chaos import plan, strikes, surroundings
from ckptd.testing.chaos.checks import Checks, Curve, curve_of
from ckptd.testing.chaos.job import MODULES, NODES, ChaosFailed, Job
from ckptd.testing.chaos.plan import Fault, last_step, make_plan
from ckptd.testing.chaos.ports import free_port
from ckptd.testing.chaos.report import Report, Struck
from ckptd.testing.chaos.site import Site
from ckptd.testing.chaos.zygote import Zygote

RUN = "chaos"
PAUSE_SECONDS = 0.01
GIVE_UP_AFTER = 3  # faults that the job did not come through as it must
CUT_SECONDS = 10.0  # after so long without an answer a rank takes its peers for gone
STRIKES = {**strikes.STRIKES, **surroundings.STRIKES}


@dataclass(frozen=True)
class Settings:
    seed: int
    faults: int
    storage: str
    folder: Path
    kinds: tuple[str, ...] = ()
    """Only these; all that this machine can do if there are none."""
    minutes: float = 0.0
    """Strike no more after so long; 0: no such end."""
    apart: bool = False
    """Two network namespaces, and a cable that can be cut; then without a service."""


def chaos(settings: Settings, say: Callable[[str], None]) -> Report:
    """Everything. The report says whether all held; it is also written to the folder."""
    with stage(settings.folder, settings.storage, apart=settings.apart) as (site, zygotes):
        report = run_on(settings, site, zygotes, say)
        report.write(settings.folder / "report.json")
    return report


@contextlib.contextmanager
def stage(folder: Path, storage: str, *, apart: bool = False) -> Iterator[tuple[Site, list[Zygote]]]:
    """What several runs can share: a storage, a service, and a zygote for each node."""
    site = Site(folder, storage, apart=apart)
    envs = [clock.env if clock is not None else {} for clock in site.node_clocks]
    with contextlib.ExitStack() as stack:
        zygotes = [
            Zygote(folder / f"z{n}", MODULES, log=folder / f"zygote{n}.log", env=env) for n, env in enumerate(envs)
        ]
        for zygote in zygotes:
            stack.callback(zygote.kill)
            zygote.launch()
        stack.enter_context(site)
        for zygote in zygotes:
            zygote.start()
        yield site, zygotes


def run_on(settings: Settings, site: Site, zygotes: list[Zygote], say: Callable[[str], None]) -> Report:
    """The two jobs, on a stage that is there."""
    began = time.monotonic()
    kinds, missing = possible(site)
    if settings.kinds:
        kinds = [kind for kind in kinds if kind in settings.kinds]
    faults = make_plan(settings.seed, settings.faults, kinds)
    say(f"[{time.monotonic() - began:4.0f} s] {site.url}, {len(kinds)} kinds of faults; the undisturbed run first")
    reference = undisturbed(settings, zygotes, last_step(len(faults)))
    say(f"[{time.monotonic() - began:4.0f} s] {len(reference)} losses to compare with")
    report = Report(settings.seed, settings.storage, missing)
    job = Job(settings.folder, RUN, url=site.way, seed=settings.seed, pause=PAUSE_SECONDS)
    if settings.apart:
        job.tell(group_seconds=CUT_SECONDS)
    with contextlib.closing(job):
        disturbed(job, site, zygotes, faults, reference, report, say, settings.minutes)
    return report


def possible(site: Site) -> tuple[list[str], list[str]]:
    """The kinds of faults that can be had here, and those that cannot."""
    groups: list[tuple[Sequence[str], bool]] = [
        ([kind for kind in plan.ALWAYS if kind not in plan.OF_THE_SERVICE], True),
        ([kind for kind in plan.ALWAYS if kind in plan.OF_THE_SERVICE], site.network is None),
        (plan.WITH_NETWORK, site.network is not None),
        (plan.WITH_MOUNT, site.mount is not None),
        (plan.WITH_CLOCK, site.clock is not None and site.network is None),
        (plan.WITH_S3, site.kind == "s3"),
    ]
    return [k for kinds, have in groups if have for k in kinds], [
        k for kinds, have in groups if not have for k in kinds
    ]


def undisturbed(settings: Settings, zygotes: list[Zygote], steps: int) -> Curve:
    """The same job on a storage of its own, left alone and saving once."""
    (settings.folder / "undisturbed").mkdir()
    url = f"file://{settings.folder}/undisturbed/root"
    init_root(url)
    job = Job(settings.folder, "undisturbed", url=url, seed=settings.seed, save_every=10**9)
    try:
        job.start(zygotes, free_port(), [{}] * NODES)
        job.until_generation(0)
        job.tell(limit=steps)
        step = -1
        while step < steps:  # a long run may take longer than one phase
            step = job.until("a step of the undisturbed run", lambda before=step: job.step > before and job.step)  # type: ignore[misc]
        job.settle(steps)
    finally:
        job.close()
    return curve_of(job)


def disturbed(
    job: Job, site: Site, zygotes: list[Zygote], faults: list[Fault], reference: Curve, report: Report,
    say: Callable[[str], None], minutes: float,
) -> None:  # fmt: skip
    began = time.monotonic()
    checks = Checks(job, site, reference)
    job.start(zygotes, free_port(), site.node_envs(), site.addresses)
    job.until_generation(0)
    for fault in faults:
        if minutes and time.monotonic() - began > 60 * minutes:
            break
        job.settle(max(fault.step, job.step))
        struck = strike(job, site, fault)
        report.struck.append(struck)
        checks.look(str(fault))
        say(f"[{time.monotonic() - began:4.0f} s] {fault} -> {struck.told}")
        for finding in checks.findings[report.told :]:
            say(f"FINDING {finding}")
        report.told = len(checks.findings)
        if not struck.fired:
            site.reset()
            if sum(not struck.fired for struck in report.struck) == GIVE_UP_AFTER:
                break
    job.settle(job.control["limit"] + 2)
    checks.look("at the end")
    report.finish(job, checks, time.monotonic() - began)


def strike(job: Job, site: Site, fault: Fault) -> Struck:
    """One fault, from ranks that wait at its step to a job that commits again."""
    began, before = time.monotonic(), job.generation
    job.tell(url=site.url if fault.direct else site.way)
    try:
        told = STRIKES[fault.kind](job, site, fault)
        job.tell(orders="")
        progress(job)
    except (ChaosFailed, CkptdError) as error:
        job.tell(orders="")
        return Struck(fault, False, describe(error), 0, time.monotonic() - began)
    new = job.generation - before
    if fault.kind in plan.UNDISTURBING and new:
        return Struck(fault, False, f"{new} new generations without need; {told}", new, time.monotonic() - began)
    return Struck(fault, True, told, new, time.monotonic() - began)


def progress(job: Job) -> None:
    """Each generation commits, or five starts would put a good checkpoint in doubt."""
    generation = job.generation
    job.settle(max(job.control["limit"], job.step))
    for _ in range(2):
        if job.named("durable", generation=generation, rank=0, step=job.step - job.step % 2):
            return
        job.settle(job.control["limit"] + 2 - job.control["limit"] % 2)
    raise ChaosFailed(f"generation {generation} has no commit at step {job.step}")
