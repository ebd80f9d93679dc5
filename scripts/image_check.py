"""`make image-check`: builds both images and runs them, on a machine without a container engine or a registry.

The base image is a stand-in, a small Debian 12 with Python 3.11 made by debootstrap; buildah builds the Dockerfile on
it with `--isolation chroot`. Then the images' own commands run: the service's with `buildah run` as it is, both in
namespaces of their own with a read-only root, without capabilities and as process 1, as docker-compose.yml asks for.
Needs root, and about 4 GB (1 GB with --service-only) in the temporary folder, which is empty again at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from chroot_images import UID, Images, command, install_tools, say

TOKEN = "image-check-token"
START_SECONDS = 60


class Check(Images):
    """The images, and which checks of them failed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.failed: list[str] = []

    def holds(self, what: str, held: bool, found: object = "") -> None:
        say(f"{'ok    ' if held else 'FAILED'} {what}" + ("" if held else f": found {found!r}"))
        if not held:
            self.failed.append(what)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def status(port: int, path: str, token: str | None = None) -> int:
    """Status of a GET; 0 while nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def wait_for(process: subprocess.Popen[bytes], port: int) -> int:
    """Status of /health/live once the service answers, or 0 if it ends or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if found := status(port, "/health/live"):
            return found
        time.sleep(0.1)
    return 0


def below(pid: int) -> list[int]:
    """All descendants of a process, nearest first."""
    children = []
    with contextlib.suppress(FileNotFoundError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += [int(child) for child in (task / "children").read_text().split()]
    return children + [deeper for child in children for deeper in below(child)]


def service_below(pid: int) -> int:
    """The service's own process, which is the innermost one."""
    return below(pid)[-1]


def check_with_buildah(check: Check, image: str) -> None:
    say("\nThe image's own user and command, by `buildah run`")
    config = check.config(image)
    container = check.buildah("from", "--pull-never", image)
    data = check.folder / "data"
    data.mkdir()
    os.chown(data, UID, UID)
    run = [*check.tool, "run", "--isolation", "chroot", "--network", "host", "-v", f"{data}:/data"]
    found = command(*run, container, "--", "id", "-u", env=check.env).strip()
    check.holds(f"it runs as uid {UID}", found == str(UID), found)
    probe = "import importlib.util as u; print([n for n in ('torch', 'numpy', 'pip') if u.find_spec(n)])"
    found = command(*run, container, "--", "python", "-c", probe, env=check.env).strip()
    check.holds("torch, numpy and pip are not importable", found == "[]", found)
    found = command(*run, container, "--", "python", "-c", "import s3fs; print('s3fs')", env=check.env).strip()
    check.holds("s3fs is", found == "s3fs", found)

    port = free_port()
    settings = ["-e", "CKPTD_STORAGE=file:///data/ckpts", "-e", f"CKPTD_PORT={port}"]
    words = config["Entrypoint"] + config["Cmd"]
    refused = subprocess.run(
        [*map(str, run), *settings, container, "--", *words],
        env=check.env,
        capture_output=True,
        text=True,
        check=False,
    )
    held = refused.returncode == 2 and "CKPTD_TOKEN" in refused.stderr
    check.holds(f"`{' '.join(words)}` without a token is refused with exit code 2", held, refused.stderr[-500:])

    served = [*run, *settings, "-e", f"CKPTD_TOKEN={TOKEN}", container, "--", *words, "--init"]
    log = check.folder / "buildah-run.log"
    with check.running(served, log) as process:
        check_answers(check, process, port, log)
        own = service_below(process.pid)
        uids = set(Path(f"/proc/{own}/status").read_text().split("Uid:")[1].splitlines()[0].split())
        check.holds(f"the serving process has uid {UID}", uids == {str(UID)}, uids)
        os.kill(own, signal.SIGTERM)
        check.holds("SIGTERM ends it with exit code 0", process.wait(60) == 0, log.read_text()[-800:])
    check.buildah("rm", container)


def check_answers(check: Check, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    found = wait_for(process, port)
    check.holds("/health/live answers 200", found == 200, f"{found} {log.read_text()[-800:]}")
    for path, token, expected in (
        ("/health/ready", None, 200),
        ("/v1/runs", None, 401),
        ("/v1/runs", TOKEN, 200),
    ):
        found = status(port, path, token)
        check.holds(f"{path} {'with' if token else 'without'} the token answers {expected}", found == expected, found)


def check_hardened(check: Check, image: str) -> None:
    say("\nRead-only root, no capabilities, process 1 of its own process space")
    config = check.config(image)
    container = check.buildah("from", "--pull-never", image)
    mounted = check.buildah("mount", container)
    port = free_port()
    # Both this and the image's variables are given to the program alone.
    settings = [
        *config["Env"],
        f"CKPTD_PORT={port}",
        f"CKPTD_TOKEN={TOKEN}",
        "CKPTD_STORAGE=file:///data/ckpts",
    ]
    health = config["Healthcheck"]["Test"]
    space = check.hardened(mounted, {"data": check.folder / "data"})
    probe = (
        "import os, pathlib\n"
        "def writes(p):\n"
        "    try: pathlib.Path(p).write_text('x'); return True\n"
        "    except OSError as e: return e.strerror\n"
        "print([writes('/opt/ckptd/x'), writes('/x'), writes('/tmp/x'), os.getpid(),"
        " [l.split()[1] for l in open('/proc/self/status') if l.startswith(('CapEff', 'CapBnd', 'NoNewPrivs'))]])"
    )
    found = command(*space, *settings, "python", "-c", probe).strip()
    none = "0000000000000000"
    expected = str(["Read-only file system", "Read-only file system", True, 1, [none, none, "1"]])
    check.holds("only /tmp and /data can be written; no capabilities; pid 1", found == expected, found)
    log = check.folder / "hardened.log"
    words = [*settings, *config["Entrypoint"], *config["Cmd"], "--init"]
    with check.running([*space, *words], log) as process:
        check_answers(check, process, port, log)
        own = service_below(process.pid)
        into = ["nsenter", "--target", str(own), "--mount", "--pid", "--root", "--setuid", str(UID), "env", "-i"]
        done = subprocess.run([*into, *settings, *health[1:]], capture_output=True, text=True, check=False)
        check.holds("the image's health check passes", done.returncode == 0, done.stderr[-500:])
        os.kill(own, signal.SIGTERM)
        check.holds("SIGTERM ends process 1 with exit code 0", process.wait(60) == 0, log.read_text()[-800:])
    check.buildah("umount", container)
    check.buildah("rm", container)


def check_trainer(check: Check, image: str) -> None:
    say("\nThe trainer image: read-only root, no capabilities, process 1, on the network of this machine")
    config = check.config(image)
    container = check.buildah("from", "--pull-never", image)
    mounted = check.buildah("mount", container)
    folders = {name: check.folder / f"trainer-{name}" for name in ("data", "output")}
    for folder in folders.values():
        folder.mkdir()
        os.chown(folder, UID, UID)
    space = check.hardened(mounted, folders)
    settings = [*config["Env"], "CKPTD_URL=file:///data/ckpts", "CKPTD_RUN=check"]
    probe = "import importlib.util as u; print([n for n in ('pip', 'fastapi') if u.find_spec(n)])"
    found = command(*space, *settings, "python", "-c", probe).strip()
    check.holds("pip and FastAPI are not importable", found == "[]", found)
    torchrun = ["python", "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
    found = command(*space, *settings, *torchrun, "--nproc-per-node=1", "-m", "ckptd_trainer", "--help")
    check.holds("torch.distributed.run starts ckptd_trainer --help", "--run-name" in found, found[-800:])
    command(*space, *settings, "ckptd", "init", "file:///data/ckpts")
    # The image's own command, with two ranks and a small training.
    words = [word.replace("per-node=1", "per-node=2") for word in [*config["Entrypoint"], *config["Cmd"]]]
    command(*space, *settings, *words, "--limit", "200", "--epochs", "1", "--save-every", "1")
    listed = json.loads(command(*space, *settings, "ckptd", "ls", "check", "--json"))
    check.holds("its own command, with two ranks, trains and commits checkpoints", len(listed) > 1, listed)
    owners = {path.stat().st_uid for path in folders["output"].rglob("*")}
    check.holds(f"what it wrote to /output is of uid {UID}", owners == {UID}, owners)
    check.buildah("umount", container)
    check.buildah("rm", container)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--service-only", action="store_true", help="leave the trainer image out")
    parser.add_argument("--torch-index", default="", help="where torch comes from (default: pip's own settings)")
    parser.add_argument("--mirror", default="", help="Debian mirror for the stand-in (debootstrap's own)")
    chosen = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("image-check needs root: it makes a Debian root and mounts; run it as root on a machine of your own")
    install_tools()
    with tempfile.TemporaryDirectory(prefix="ckptd-image-check-", ignore_cleanup_errors=False) as name:
        check = Check(Path(name))
        # Containers' users look up what is mounted from here.
        check.folder.chmod(0o711)
        try:
            say(f"A stand-in for the base image, in {check.folder}")
            check.make_base(chosen.mirror)
            say("\nThe service image")
            check.build("ckptd/Dockerfile", "localhost/ckptd:check")
            check_with_buildah(check, "localhost/ckptd:check")
            check_hardened(check, "localhost/ckptd:check")
            if not chosen.service_only:
                check.build(
                    "trainer/Dockerfile",
                    "localhost/ckptd-trainer:check",
                    "--build-arg",
                    f"TORCH_INDEX={chosen.torch_index}",
                )
                check_trainer(check, "localhost/ckptd-trainer:check")
        finally:
            check.clean_up()
    say(
        f"\n{len(check.failed)} checks failed"
        if check.failed
        else "\nall checks held; everything made for them is gone"
    )
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
