"""The faults of what the job runs on: the service, the network to it, the storage, its bytes, the clock.

Training goes on during all of them but damage, which is met at the next start.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from ckptd import layout
from ckptd.ledger import Ledger
from ckptd.storage.base import Storage
from ckptd.testing.chaos.job import WORLD, ChaosFailed, Job, signal_rank
from ckptd.testing.chaos.plan import Fault
from ckptd.testing.chaos.site import Site
from ckptd.testing.chaos.strikes import MORE_STEPS, Strike, kill_all, pause
from ckptd.testing.torchrun import stopped

JUMP_SECONDS = 400 * 24 * 3600


def cut_network(job: Job, site: Site, fault: Fault) -> str:
    """Between the two nodes, in training; healed when both sides have noticed."""
    assert site.network is not None
    generation, pids = job.generation, {event["pid"]: event["node"] for event in job.ranks().values()}
    with site.network.cut():
        job.tell(limit=fault.step + MORE_STEPS)
        job.until(
            "the end of a rank on both sides",
            lambda: (
                len({pids[e["pid"]] for e in job.events if e["event"] in ("gone", "ended") and e["pid"] in pids}) == 2
            ),
        )
    job.until_generation(generation)
    return f"both sides gave generation {generation} up"


def kill_service(job: Job, site: Site, fault: Fault) -> str:
    """Saves go around it. It comes back a while later."""
    site.service.kill()
    job.tell(limit=fault.step + MORE_STEPS)
    pause(job, fault.seconds)
    site.restart_service()
    job.settle(fault.step + MORE_STEPS)
    return f"away for {fault.seconds} s"


def kill_service_in_append(job: Job, site: Site, fault: Fault) -> str:
    """It dies while it writes a record, before or after the record is in the log."""
    site.restart_service(f"{fault.place}:kill")
    job.tell(limit=fault.step + MORE_STEPS)
    job.until("the death of the service", lambda: not site.service.alive)
    site.restart_service()
    job.settle(fault.step + MORE_STEPS)
    return f"died at {fault.place}"


def stop_service(job: Job, site: Site, fault: Fault) -> str:
    with stopped(site.service.pid):
        job.tell(limit=fault.step + MORE_STEPS)
        pause(job, fault.seconds)
    job.settle(fault.step + MORE_STEPS)
    return f"stopped for {fault.seconds} s"


def cut_off_service(job: Job, site: Site, fault: Fault) -> str:
    """Requests vanish, answers vanish, or connections are refused."""
    plans = {
        "flip": lambda: site.proxy.black_hole(one_way=True),
        "cut": site.proxy.black_hole,
        "delete": site.proxy.refuse,
    }
    wall = plans[fault.how]()
    job.tell(limit=fault.step + MORE_STEPS)
    job.until("a request that met the fault", lambda: wall.fired)
    pause(job, fault.seconds)
    wall.heal()
    job.settle(fault.step + MORE_STEPS)
    site.proxy.reset()
    return f"{type(wall).__name__} met {wall.fired} requests"


def disk_full(job: Job, site: Site, fault: Fault) -> str:
    with site.full() as fill:
        told = _save_fails(job, fault, fill)
    return told


def read_only(job: Job, site: Site, fault: Fault) -> str:
    with site.read_only():
        told = _save_fails(job, fault)
    return told


def clock_jump(job: Job, site: Site, fault: Fault) -> str:
    """The service's clock, more than a year forth or back, during saves and a start."""
    assert site.clock is not None
    seconds = JUMP_SECONDS if fault.node == 1 else -JUMP_SECONDS
    with site.clock.jumped(seconds):
        off = site.clock.seen() - time.time()
        job.settle(fault.step + 2)
    job.settle(fault.step + MORE_STEPS)
    if abs(off - seconds) > 60:
        raise ChaosFailed(f"the clock is {off} s off, expected {seconds}")
    return f"{off / 86400:+.0f} days"


def clock_jump_of_nodes(job: Job, site: Site, fault: Fault) -> str:
    """First one node's clock during saves, then both for a start of agents and ranks: torchrun itself compares its
    agents' clocks, and forms no group of agents that differ, or whose clocks went on under them; so they start anew
    once more when the clocks are right."""
    clocks = [clock for clock in site.node_clocks if clock is not None]
    if fault.node == 2:
        clocks.reverse()
    seconds = JUMP_SECONDS if fault.how == "flip" else -JUMP_SECONDS
    with clocks[0].jumped(seconds):
        off = clocks[0].seen() - time.time()
        job.settle(fault.step + 2)
        with clocks[1].jumped(seconds):
            kill_all(job, site, fault)
            job.settle(fault.step + MORE_STEPS)
    kill_all(job, site, fault)
    if abs(off - seconds) > 60:
        raise ChaosFailed(f"the clock of node {fault.node} is {off} s off, expected {seconds}")
    return f"node {fault.node} {off / 86400:+.0f} days, then both"


def frozen_storage(job: Job, site: Site, fault: Fault) -> str:
    """What writes to it waits in the kernel. Training goes on to the next save, and that one gets through."""
    with site.frozen():
        job.tell(limit=fault.step + MORE_STEPS)
        job.until("a save that waits", lambda: job.named("queued", step=fault.step + 2, generation=job.generation))
        pause(job, fault.seconds)
    job.settle(fault.step + MORE_STEPS)
    return f"frozen for {fault.seconds} s"


def slow_storage(job: Job, site: Site, fault: Fault) -> str:
    """It takes writes for a tenth of the time."""
    job.tell(limit=fault.step + MORE_STEPS)
    rounds = 0
    until = time.monotonic() + fault.seconds
    while time.monotonic() < until:
        with site.frozen():
            pause(job, 0.18)
        pause(job, 0.02)
        rounds += 1
    job.settle(fault.step + MORE_STEPS)
    return f"{rounds} times 0.18 s"


def damage_payload(job: Job, site: Site, fault: Fault) -> str:
    return _damage(job, site, fault, manifest=False)


def damage_manifest(job: Job, site: Site, fault: Fault) -> str:
    return _damage(job, site, fault, manifest=True)


def damage_two(job: Job, site: Site, fault: Fault) -> str:
    """The newest two: one as payload, one as manifest."""
    return _damage(job, site, fault, manifest=fault.rank % 2 == 0, count=2)


def restart_s3(job: Job, site: Site, fault: Fault) -> str:
    job.tell(limit=fault.step + MORE_STEPS)
    site.s3.restart()
    job.settle(fault.step + MORE_STEPS)
    return f"SIGKILL and a new process {site.s3.pid}"


def stop_s3(job: Job, site: Site, fault: Fault) -> str:
    with stopped(site.s3.pid):
        job.tell(limit=fault.step + MORE_STEPS)
        pause(job, fault.seconds)
    job.settle(fault.step + MORE_STEPS)
    return f"stopped for {fault.seconds} s"


def cut_off_s3(job: Job, site: Site, fault: Fault) -> str:
    """From the ranks; the service still reaches it."""
    assert site.s3_proxy is not None
    wall = site.s3_proxy.black_hole(one_way=fault.how == "flip")
    job.tell(limit=fault.step + MORE_STEPS)
    job.until("a request that met the fault", lambda: wall.fired)
    pause(job, fault.seconds)
    wall.heal()
    job.settle(fault.step + MORE_STEPS)
    site.s3_proxy.reset()
    return f"{wall.fired} requests vanished"


def slow_s3(job: Job, site: Site, fault: Fault) -> str:
    """It works for a tenth of the time."""
    job.tell(limit=fault.step + MORE_STEPS)
    rounds = 0
    until = time.monotonic() + fault.seconds
    while time.monotonic() < until:
        with stopped(site.s3.pid):
            pause(job, 0.18)
        pause(job, 0.02)
        rounds += 1
    job.settle(fault.step + MORE_STEPS)
    return f"{rounds} times 0.18 s"


def _save_fails(job: Job, fault: Fault, meanwhile: Callable[[], None] = lambda: None) -> str:
    """The first save that meets it; retention may make room for one just before the last page is taken again."""
    generation = job.generation
    for step in range(fault.step + 2, fault.step + 8, 2):
        job.tell(limit=step)

        def over(step: int = step) -> bool:
            meanwhile()
            outcome = [job.named(name, step=step, generation=generation, rank=0) for name in ("failed", "durable")]
            return any(outcome)

        job.until("the outcome of a save", over)
        job.settle(step)
        if job.named("failed", step=step, generation=generation, rank=0):
            break
    told = job.named("failed", step=step, generation=generation)
    if len(told) != WORLD:
        raise ChaosFailed(f"{len(told)} of {WORLD} ranks know that the save of step {step} failed")
    return str(told[0]["reason"])[:160]


def _damage(job: Job, site: Site, fault: Fault, *, manifest: bool, count: int = 1) -> str:
    """The newest checkpoint's bytes at rest, or those of the newest `count`, then a restart: all ranks go to the one
    before."""
    spoiled = []
    for victim in Ledger(site.storage).checkpoints(job.run)[-count:]:
        folder = layout.payload_folder(job.run, victim.save)
        keys = [victim.manifest.key] if manifest else [f"{folder}/{name}" for name in site.storage.list(folder)]
        key = keys[fault.rank % len(keys)]
        spoil(site.storage, key, fault.how)
        job.damaged.add(victim.save)
        spoiled.append((victim.step, key))
        manifest = not manifest
    generation = job.generation
    signal_rank(job.ranks()[fault.rank], signal.SIGKILL)
    job.until_generation(generation)
    start = job.ranks()[0]["step"]
    if start >= spoiled[0][0]:
        raise ChaosFailed(f"started from step {start}, whose {spoiled[0][1]} was damaged ({fault.how})")
    return f"{fault.how} {', '.join(key for _, key in spoiled)}; all ranks went to step {start}"


def spoil(storage: Storage, key: str, how: str) -> None:
    """Bits rot, a file is cut, an object is lost: past all that a storage allows."""
    if how == "delete":
        storage.delete(key)
        return
    with storage.reader(key, fresh=True) as reader:
        data = bytearray(reader.size)
        reader.read_into(0, memoryview(data))
    data[len(data) // 2] ^= 0x10
    changed = bytes(data[: len(data) // 2]) if how == "cut" else bytes(data)
    if storage.url.startswith("file://"):
        path = Path(storage.url.removeprefix("file://")) / key
        mode = path.stat().st_mode
        os.chmod(path, 0o600)
        with path.open("r+b") as stream:
            stream.write(changed)
            stream.truncate()
        os.chmod(path, mode)
    else:
        storage.delete(key)
        storage.put(key, [changed], len(changed))


STRIKES: dict[str, Strike] = {
    "cut network": cut_network,
    "kill service": kill_service,
    "kill service in append": kill_service_in_append,
    "stop service": stop_service,
    "cut off service": cut_off_service,
    "disk full": disk_full,
    "read-only": read_only,
    "frozen storage": frozen_storage,
    "slow storage": slow_storage,
    "clock jump": clock_jump,
    "clock jump of nodes": clock_jump_of_nodes,
    "damage payload": damage_payload,
    "damage manifest": damage_manifest,
    "damage two": damage_two,
    "restart S3": restart_s3,
    "stop S3": stop_s3,
    "cut off S3": cut_off_s3,
    "slow S3": slow_s3,
}
