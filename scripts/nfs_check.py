"""`make nfs`: ckptd on a real NFS server and two real NFS clients, inside User-Mode Linux, on any machine.

The guest kernel boots on the host's own files and runs `nfs_guest.sh`: an export of memory, mounted twice without a
shared cache, as two hosts would; on both the storage contract, two ledgers that alternate and race, and
`ckptd doctor --other`. Needs root and apt-get install user-mode-linux kmod nfs-kernel-server nfs-common rpcbind;
takes a few minutes, as the guest has one slow processor.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

from uml import NO_AVX

ROOT = Path(__file__).resolve().parents[1]
NEEDED = {
    "linux.uml": "user-mode-linux",
    "modprobe": "kmod",
    "rpc.nfsd": "nfs-kernel-server",
    "mount.nfs": "nfs-common",
    "rpcbind": "rpcbind",
}
DEADLINE_SECONDS = 1800


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", default=["4.2", "3"])
    parser.add_argument("--keep", action="store_true", help="leave the logs")
    args = parser.parse_args()
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [package for program, package in NEEDED.items() if shutil.which(program, path=path) is None]
    if missing or os.geteuid() != 0:
        say(f"run this as root, after: apt-get install {' '.join(missing)}" if missing else "run this as root")
        return 2
    work = Path(tempfile.mkdtemp(prefix="ckptd-nfs-", dir="/var/tmp"))
    try:
        seconds = boot(work, args.versions)
        rows = [row(work / f"v{version}", version) for version in args.versions]
        say("| NFS | mounted | storage contract | two hosts | ckptd doctor --other | failed |")
        say("|---|---|---|---|---|---|")
        for cells, _ in rows:
            say(f"| {' | '.join(cells)} |")
        say(f"{seconds:.0f} s")
        if all(held for _, held in rows):
            return 0
        say(f"FAILED; logs in {work}")
        args.keep = True
        return 1
    finally:
        if not args.keep:
            shutil.rmtree(work)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def boot(work: Path, versions: list[str]) -> float:
    """Run the guest to its end; seconds. It is killed past the deadline, and then its results are missing."""
    settings = {"CKPTD_WORK": str(work), "CKPTD_PYTHON": sys.executable, "CKPTD_REPO": str(ROOT), **NO_AVX}
    uml = str(ROOT / "scripts" / "uml.py")
    kernel = [
        sys.executable,
        uml,
        "linux.uml",
        "mem=1024M",
        "rootfstype=hostfs",
        "rw",
        "quiet",
        "con=null",
        "con0=null,fd:1",
    ]
    options = [f"init={ROOT / 'scripts' / 'nfs_guest.sh'}", *(f"{name}={value}" for name, value in settings.items())]
    began = time.monotonic()
    with (work / "console.log").open("wb") as console:
        guest = subprocess.Popen(
            [*kernel, *options, f'CKPTD_VERSIONS="{" ".join(versions)}"'],
            stdout=console,
            stderr=console,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            guest.wait(DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            say(f"the guest did not end within {DEADLINE_SECONDS} s")
        finally:
            if guest.poll() is None:
                os.killpg(guest.pid, 9)  # a session of its own: its processes and no others
                guest.wait()
    return time.monotonic() - began


def row(results: Path, version: str) -> tuple[list[str], bool]:
    """A line of the table, and whether all held. What is missing did not hold."""
    if not (results / "doctor.code").exists() or not (results / "tests.xml").exists():
        return [f"v{version}", "no results", "", "", "", "everything"], False
    mounts = (results / "mounts").read_text().splitlines()
    kinds = sorted({line.split()[2] for line in mounts})
    contract, hosts, failed = [0, 0], [0, 0], []
    for case in ET.parse(results / "tests.xml").iter("testcase"):
        good = not any(child.tag in ("failure", "error", "skipped") for child in case)
        counts = contract if "TestOnNfs" in case.get("classname", "") else hosts
        counts[0] += good
        counts[1] += 1
        if not good:
            failed.append(str(case.get("name")))
    code = int((results / "doctor.code").read_text())
    report = json.loads((results / "doctor.json").read_text() or "{}")
    findings = report.get("findings", [])
    verdicts = {word: [f["name"] for f in findings if f["verdict"] == word] for word in ("ok", "warn", "unfit")}
    doctor = (
        f"exit {code}: {len(verdicts['ok'])} ok, {len(verdicts['warn'])} warnings, {len(verdicts['unfit'])} unfit"
    )
    if verdicts["warn"]:
        doctor += f" ({', '.join(verdicts['warn'])})"
    held = not failed and code == 0 and len(mounts) == 2 and contract[1] > 0 and hosts[1] > 0
    told = ", ".join([*failed, *verdicts["unfit"]]) or "nothing"
    mounted = f"{len(mounts)} × {'/'.join(kinds)}"
    return [f"v{version}", mounted, "{} of {}".format(*contract), "{} of {}".format(*hosts), doctor, told], held


if __name__ == "__main__":
    sys.exit(main())
