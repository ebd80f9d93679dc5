"""The faults that end processes. Each strikes, sees to it that it did, and returns when the job trains again.

A strike gets a job whose ranks all wait at the fault's step, and returns what shows that it happened. What must hold
afterwards is for `checks`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from ckptd.slots import last_slot
from ckptd.testing.chaos.job import WORLD, ChaosFailed, Event, Job, is_rank, signal_rank
from ckptd.testing.chaos.plan import Fault
from ckptd.testing.chaos.site import Site
from ckptd.testing.torchrun import end

Strike = Callable[[Job, Site, Fault], str]
MORE_STEPS = 4  # that the job may take while something is wrong; each second one is saved


def kill_rank_in_training(job: Job, site: Site, fault: Fault) -> str:
    victim, generation = job.ranks()[fault.rank], job.generation
    job.tell(limit=fault.step + MORE_STEPS)
    job.until("a step", lambda: job.step > fault.step)
    signal_rank(victim, signal.SIGKILL)
    return _gone(job, victim, generation)


def kill_rank_in_save(job: Job, site: Site, fault: Fault) -> str:
    victim, generation, step = job.ranks()[fault.rank], job.generation, fault.step + 2
    order = f"{fault.place}?rank={fault.rank}&step={step}&generation={generation}:kill"
    job.tell(orders=order, limit=step)
    return _gone(job, victim, generation)


def kill_rank_in_start(job: Job, site: Site, fault: Fault) -> str:
    """Rank 0 dies while it begins: before or after its record is in the log. Then the ranks start once more. Only a
    rank that goes to the storage itself writes records itself."""
    generation, victim = job.generation, job.ranks()[fault.rank]
    # The opened attempt goes before it, and perhaps records of housekeeping.
    first = last_slot(site.storage, job.run) + 2
    orders = [f"{fault.place}?seq={seq}:kill" for seq in range(first, first + 20)]
    url = job.control["url"]
    job.tell(orders=";".join(orders), url=site.url)
    before = len(job.named("gone", rank=0, code=-9))
    signal_rank(victim, signal.SIGKILL)
    own = int(fault.rank == 0)

    def died() -> bool:
        return len(job.named("gone", rank=0, code=-9)) > before + own or job.generation > generation

    job.until("the death of rank 0 in its start", died)
    struck = len(job.named("gone", rank=0, code=-9)) > before + own
    job.tell(orders="", url=url)
    job.until_generation(generation)
    if not struck:
        raise ChaosFailed(f"{fault} never fired: its records came after {first + 19}")
    return f"rank 0 died at record {first} or soon after"


def kill_node(job: Job, site: Site, fault: Fault) -> str:
    return _kill_nodes(job, [fault.node])


def kill_all(job: Job, site: Site, fault: Fault) -> str:
    return _kill_nodes(job, [1, 2])


def kill_agent(job: Job, site: Site, fault: Fault) -> str:
    """Its ranks live on as orphans. Those of node 2 train on with the others, and nobody notices."""
    orphans, generation = _on(job, [fault.node]), job.generation
    job.nodes[fault.node - 1].kill_agent()
    told = f"{len(orphans)} orphans"
    if fault.node == 2:
        limit = fault.step + 2
        job.tell(limit=limit)
        job.until("a step of orphans", lambda: job.step >= limit, watch=False)
        told += f" trained on to step {limit}"
    job.tell(limit=fault.step + MORE_STEPS)
    job.until_generation(generation)
    return told + _orphans_end(job, orphans)


def kill_both_agents(job: Job, site: Site, fault: Fault) -> str:
    """A whole job of orphans, which is complete and trains on, beside the one that takes its place."""
    orphans, generation = _on(job, [1, 2]), job.generation
    for node in job.nodes:
        node.kill_agent()
    job.until_generation(generation)
    job.settle(fault.step + MORE_STEPS)
    fenced = len(job.named("fenced", generation=generation))
    return f"{len(orphans)} orphans, fenced {fenced}" + _orphans_end(job, orphans)


def zombie(job: Job, site: Site, fault: Fault) -> str:
    """Rank 0 is stopped in a save, its agent dies, another generation takes over, and rank 0 wakes up."""
    sleeper, generation, step = job.ranks()[0], job.generation, fault.step + 2
    place = fault.place if fault.rank == 0 else "before-commit"
    job.tell(orders=f"{place}?rank=0&step={step}&generation={generation}:stop", limit=step)
    job.until("the stop", lambda: _state(sleeper["pid"]) == "T")
    job.nodes[int(sleeper["node"]) - 1].kill_agent()
    others = [event for event in _on(job, [int(sleeper["node"])]) if event is not sleeper]
    try:
        job.until_generation(generation)
        job.tell(orders="")
        job.settle(fault.step + MORE_STEPS)
    finally:
        signal_rank(sleeper, signal.SIGCONT)
    told = _orphans_end(job, [sleeper, *others])
    after = [e for e in job.named("durable", generation=generation, rank=0) if e["step"] == step]
    fenced = bool(job.named("fenced", generation=generation, rank=0))
    if after and place != "after-commit":
        raise ChaosFailed(f"a zombie was told that its save is durable: {after}")
    return f"stopped at {place}, {'fenced' if fenced else 'ended'}{told}"


def stop_rank(job: Job, site: Site, fault: Fault) -> str:
    """A pause, as of a machine that swaps: nothing may change."""
    victim = job.ranks()[fault.rank]
    job.tell(limit=fault.step + MORE_STEPS)
    signal_rank(victim, signal.SIGSTOP)
    try:
        job.until("the stop", lambda: _state(victim["pid"]) == "T")
        pause(job, fault.seconds)
    finally:
        signal_rank(victim, signal.SIGCONT)
    job.settle(fault.step + MORE_STEPS)
    return f"stopped for {fault.seconds} s"


def fail_in_save(job: Job, site: Site, fault: Fault) -> str:
    """One rank cannot write. All learn of it, and training goes on."""
    generation, step = job.generation, fault.step + 2
    job.tell(orders=f"{fault.place}?rank={fault.rank}&step={step}&generation={generation}:fail", limit=step)
    failed = lambda: len(job.named("failed", step=step, generation=generation)) == WORLD  # noqa: E731
    job.until("the failure of the save on all ranks", failed)
    clocks = [event["clock"] for event in job.named("failed", step=step, generation=generation)]
    job.tell(orders="")
    job.settle(fault.step + MORE_STEPS)
    return f"all ranks knew within {max(clocks) - min(clocks):.1f} s"


def pause(job: Job, seconds: float) -> None:
    """Let the fault last. The job is looked after meanwhile."""
    import time

    until = time.monotonic() + seconds
    job.until("the end of the fault", lambda: time.monotonic() >= until)


def _gone(job: Job, victim: Event, generation: int) -> str:
    job.until(f"the death of rank {victim['rank']}", lambda: job.named("gone", pid=victim["pid"], code=-9))
    job.until_generation(generation)
    job.tell(orders="")
    return f"process {victim['pid']} was killed"


def _kill_nodes(job: Job, numbers: list[int]) -> str:
    victims, generation = _on(job, numbers), job.generation
    for number in numbers:
        job.nodes[number - 1].kill_agent()
    for victim in victims:
        end(victim["pid"])
    job.until("the deaths", lambda: not any(is_rank(victim["pid"]) for victim in victims), watch=False)
    job.until_generation(generation)
    return f"{len(victims)} ranks and {len(numbers)} agents were killed"


def _on(job: Job, nodes: list[int]) -> list[Event]:
    return [event for event in job.ranks().values() if int(event["node"]) in nodes]


def _orphans_end(job: Job, orphans: list[Event]) -> str:
    """They find out by themselves: by their peers' death, or by the fence at their next save."""
    job.settle(job.control["limit"] + 2)  # those that wait where the others wait try a step as well
    job.until("the end of the orphans", lambda: not any(is_rank(orphan["pid"]) for orphan in orphans))
    return ", which ended by themselves"


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stream:
        return stream.read().rpartition(")")[2].split()[0]


STRIKES: dict[str, Strike] = {
    "kill rank in training": kill_rank_in_training,
    "kill rank in save": kill_rank_in_save,
    "kill rank in start": kill_rank_in_start,
    "kill agent": kill_agent,
    "kill both agents": kill_both_agents,
    "kill node": kill_node,
    "kill all": kill_all,
    "zombie": zombie,
    "stop rank": stop_rank,
    "fail in save": fail_in_save,
}
