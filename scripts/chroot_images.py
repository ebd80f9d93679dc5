"""Images without a container engine or a registry: buildah in a chroot, on a base that debootstrap makes.

`image_check.py` uses it. Everything is in one folder that the caller removes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOOLS = {"buildah": "buildah", "debootstrap": "debootstrap", "setpriv": "util-linux", "unshare": "util-linux"}
BASE = "localhost/ckptd-image-check/python:3.11-slim-bookworm"
UID = 10001  # of the user in both images
STORE_WORDS = 5  # `buildah` and where its store is


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def say_command(words: Sequence[str | Path]) -> None:
    """As it can be read: without buildah's long store options, which are in each."""
    shown = " ".join(map(str, words))
    if words[0] == "buildah":
        shown = f"buildah {' '.join(map(str, words[STORE_WORDS:]))}"
    say(f"  $ {shown[:300]}")


def command(*words: str | Path, env: dict[str, str] | None = None) -> str:
    """Run it, say so, and give its standard output; a failure ends the check with all it printed."""
    say_command(words)
    done = subprocess.run([str(word) for word in words], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"exit code {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}")
    return done.stdout


class Images:
    """One temporary folder with everything in it: base, images, containers, data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tool = ["buildah", "--root", str(folder / "storage"), "--runroot", str(folder / "run")]
        # Its own blob cache goes there too.
        self.env = {"STORAGE_DRIVER": "overlay", **os.environ, "TMPDIR": str(folder), "BUILDAH_ISOLATION": "chroot"}

    def buildah(self, *words: str | Path) -> str:
        return command(*self.tool, *words, env=self.env).strip()

    def make_base(self, mirror: str) -> None:
        root = self.folder / "base"
        packages = "--include=ca-certificates,python3,python3-venv"
        command("debootstrap", "--variant=minbase", packages, "bookworm", root, *([mirror] if mirror else []))
        (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        shutil.rmtree(root / "var/cache/apt/archives")
        container = self.buildah("from", "scratch")
        self.buildah("add", "--quiet", container, root, "/")
        self.buildah("commit", "--quiet", "--rm", container, BASE)
        shutil.rmtree(root)

    def build(self, dockerfile: str, image: str, *arguments: str) -> None:
        begun = time.monotonic()
        mounts = [option for source in pip_mounts(self.folder) for option in ("-v", source)]
        how = ["--isolation", "chroot", "--pull-never", "--format", "docker", "--build-arg", f"PYTHON_IMAGE={BASE}"]
        self.buildah("bud", *how, *arguments, *mounts, "-f", ROOT / dockerfile, "-t", image, ROOT)
        sizes = json.loads(self.buildah("images", "--json"))
        size = next(i["size"] for i in sizes if any(name.startswith(image) for name in i["names"] or []))
        say(f"  {image}: {size} with the stand-in, {time.monotonic() - begun:.0f} s")

    def config(self, image: str) -> dict[str, Any]:
        """Entrypoint, command and environment, as the image says."""
        found: dict[str, Any] = json.loads(self.buildah("inspect", "--type", "image", image))["Docker"]["config"]
        return found

    def hardened(self, mounted: str, folders: Mapping[str, Path]) -> list[str | Path]:
        """Words before a program's variables and words that run it as docker-compose.yml asks for: the image mounted
        at `mounted` as a read-only root with a tmpfs on /tmp, `folders` at their names in it, no capabilities, a user
        that is not root, and as process 1. The network is the machine's own."""
        lines = ["set -eu", f"mount --bind {mounted} {mounted}", f"mount -o remount,bind,ro {mounted}"]
        lines += [f"mount -t tmpfs -o mode=1777 tmpfs {mounted}/tmp", f"mount -t proc proc {mounted}/proc"]
        lines += [f"mount --bind {path} {mounted}/{name}" for name, path in folders.items()]
        for file in ("/dev/null", "/dev/urandom", "/etc/hosts"):
            Path(mounted, file[1:]).touch()  # the place to mount it on
            lines.append(f"mount --bind {file} {mounted}{file}")
        drop = "--clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all"
        lines.append(f'exec chroot {mounted} setpriv --reuid {UID} --regid {UID} {drop} -- env -i "$@"')
        inside = self.folder / f"inside-{len(list(self.folder.glob('inside-*')))}.sh"
        inside.write_text("\n".join(lines) + "\n")
        return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--ipc", "--uts", "sh", inside]

    def clean_up(self) -> None:
        for words in (["umount", "--all"], ["rm", "--all"], ["rmi", "--all", "--force"]):
            subprocess.run([*self.tool, *words], env=self.env, capture_output=True, check=False)

    @contextlib.contextmanager
    def running(self, words: Sequence[str | Path], log: Path) -> Iterator[subprocess.Popen[bytes]]:
        say_command([*words, "&"])
        with log.open("wb") as out:
            process = subprocess.Popen(
                [str(w) for w in words], env=self.env, stdout=out, stderr=out, start_new_session=True
            )
        try:
            yield process
        finally:
            # Only what this started: its own session.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def pip_mounts(folder: Path) -> list[str]:
    """Mounts that give pip in the build this machine's settings: indexes, certificates, folders with wheels."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    settings: dict[str, str] = {}
    for line in listed.splitlines():  # global first, environment last: the later one counts
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = value.strip().strip("'\"").replace("\\n", " ")
    config = folder / "pip.conf"
    config.touch(mode=0o600)  # an index may be reached with a password
    config.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
    words = {word for value in settings.values() for word in value.split()}
    # An index on disk may point to files beside it.
    found = {str(Path(w.removeprefix("file://")).parent) if w.startswith("file:") else w for w in words}
    paths = sorted(path for path in found if path.startswith("/") and path != "/" and Path(path).exists())
    return [f"{config}:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in paths)]


def install_tools() -> None:
    missing = sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None})
    if missing:
        say(f"installing {', '.join(missing)}")
        command("apt-get", "update", "-q")
        command("apt-get", "install", "-qy", "--no-install-recommends", *missing)
