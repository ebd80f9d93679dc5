"""The compose file and the images keep what docs/CONTAINERS.md promises, and start programs that exist."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import shlex
import socket
import ssl
import subprocess
import sys
import time
import tomllib
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml  # type: ignore[import-untyped]
from torch.distributed.run import get_args_parser

from ckptd.cli.main import app
from ckptd.service import settings
from ckptd.testing.seaweed import SeaweedProcess
from ckptd_trainer.config import parse_config

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
TRAINERS = ["trainer-0", "trainer-1"]
DOCKERFILES = {"ckptd": ROOT / "ckptd" / "Dockerfile", "ckptd-trainer": ROOT / "trainer" / "Dockerfile"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VARIABLE = re.compile(r"\$\{(\w+)(:[-?][^}]*)?\}")
KEYS = {
    "S3_BUCKET": "ckpts",
    "CKPTD_S3_KEY": "serviceKey",
    "CKPTD_S3_SECRET": "serviceSecret1234",
    "TRAINER_S3_KEY": "trainerKey",
    "TRAINER_S3_SECRET": "trainerSecret1234",
}


def _instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments, continued lines joined, comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines()) if word]


def _last(path: Path, instruction: str) -> str:
    return [rest for word, rest in _instructions(path) if word == instruction][-1]


def _variables(path: Path) -> dict[str, str]:
    return dict(
        pair.split("=", 1) for word, rest in _instructions(path) if word == "ENV" for pair in shlex.split(rest)
    )


def _serve_options(words: list[str]) -> dict[str, Any]:
    """What the command line makes of the words; it refuses what it does not know."""
    group = typer.main.get_command(app)
    name, *arguments = words
    serve = getattr(group, "commands")[name]  # noqa: B009 - typer's own types hide click's group
    options: dict[str, Any] = serve.make_context("serve", arguments).params
    return options


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_has_no_more_rights_than_it_needs(name: str) -> None:
    service = SERVICES[name]
    user, _, group = service["user"].partition(":")
    assert int(user) > 0
    assert int(group) > 0
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.keys() & {"privileged", "cap_add", "devices", "pid", "ipc"}


@pytest.mark.parametrize("name", SERVICES)
def test_an_image_has_a_version(name: str) -> None:
    assert re.fullmatch(r"[a-z/-]+:\d+\.\d+(\.\d+)?", SERVICES[name]["image"])


@pytest.mark.parametrize("name", ["ckptd", "s3"])
def test_a_server_has_a_health_check_and_comes_back(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert {"interval", "timeout", "retries", "start_period"} <= service["healthcheck"].keys()
    assert service["restart"] == "unless-stopped"
    assert "stop_grace_period" in service


@pytest.mark.parametrize("name", SERVICES)
def test_what_lasts_is_in_a_named_volume(name: str) -> None:
    for volume in SERVICES[name].get("volumes", []):
        source, *_, last = volume.split(":")
        if source.startswith("."):
            assert last == "ro"
            assert (ROOT / source).is_file()
        else:
            assert source in COMPOSE["volumes"]


def test_the_starts_wait_for_each_other() -> None:
    made = {"condition": "service_completed_successfully"}
    healthy = {"condition": "service_healthy"}
    assert SERVICES["s3-bucket"]["depends_on"] == {"s3": healthy}
    assert SERVICES["ckptd"]["depends_on"] == {"s3": healthy, "s3-bucket": made}
    assert all(SERVICES[name]["depends_on"] == {"ckptd": healthy} for name in TRAINERS)


def test_no_secret_is_in_the_file() -> None:
    """Keys and tokens are variables without a default, and each program gets its own and no other's."""
    secrets = {
        name: {
            variable: value
            for variable, value in service.get("environment", {}).items()
            if re.search("TOKEN|KEY|SECRET", variable)
        }
        for name, service in SERVICES.items()
    }
    for found in secrets.values():
        assert all(re.fullmatch(r"\$\{\w+:\?[^}]+\}", value) for value in found.values())
    users = {
        name: VARIABLE.search(found["AWS_ACCESS_KEY_ID"])
        for name, found in secrets.items()
        if "AWS_ACCESS_KEY_ID" in found
    }
    assert {name: user[1] for name, user in users.items() if user} == {
        "ckptd": "CKPTD_S3_KEY",
        **dict.fromkeys(TRAINERS, "TRAINER_S3_KEY"),
    }
    assert "CKPTD_TOKEN" not in secrets["s3"]


def test_every_variable_is_in_the_example() -> None:
    used = {name for name, _ in VARIABLE.findall((ROOT / "docker-compose.yml").read_text())}
    example = (ROOT / ".env.example").read_text()
    assert used == set(re.findall(r"^#?([A-Z0-9_]+)=", example, re.MULTILINE))
    assert re.findall(r"^(\w+)=(.+)$", example, re.MULTILINE) == [], "an example secret is one that gets used"


def test_the_service_is_started_with_options_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    service = SERVICES["ckptd"]
    options = _serve_options(service["command"])
    assert options["init_storage"] is True
    monkeypatch.setenv("CKPTD_TOKEN", "token")
    chosen = settings.load(
        storage=service["environment"]["CKPTD_STORAGE"], host=options["host"], port=options["port"]
    )
    (port,) = service["ports"]
    assert port.startswith("127.0.0.1:")
    assert port.endswith(f":{chosen.port}")
    assert f"127.0.0.1', {chosen.port}" in service["healthcheck"]["test"][-1]
    assert {SERVICES[name]["environment"]["CKPTD_URL"] for name in TRAINERS} == {f"http://ckptd:{chosen.port}"}


def test_all_use_the_one_bucket() -> None:
    bucket = SERVICES["s3"]["environment"]["S3_BUCKET"]
    assert SERVICES["s3-bucket"]["environment"]["S3_BUCKET"] == bucket
    assert f"s3://{bucket}/" in SERVICES["ckptd"]["environment"]["CKPTD_STORAGE"]
    endpoints = {SERVICES[name]["environment"]["AWS_ENDPOINT_URL"] for name in ["ckptd", *TRAINERS]}
    assert endpoints == {"http://s3:8333"}
    assert "-s3.port=8333" in SERVICES["s3"]["command"]


def test_only_the_s3_port_of_the_s3_server_is_open() -> None:
    """SeaweedFS's other ports ask nobody for a key."""
    command = SERVICES["s3"]["command"]
    assert {"-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3.ip.bind=0.0.0.0"} <= set(command)
    assert {"-s3.autoCreateBucket=false", "-s3.iam=false", "-master.telemetry=false"} <= set(command)
    assert f"-s3.config={SERVICES['s3']['environment']['S3_CONFIG']}" in command
    assert SERVICES["s3-bucket"]["network_mode"] == "service:s3"


class ComposedS3(SeaweedProcess):
    """The S3 server as the compose file starts it, on free ports, with 127.0.0.2 as the address that others see."""

    others = "127.0.0.2"

    def port(self, server: str, *, grpc: bool = False) -> int:
        return self._ports[2 * ["s3", "master", "volume", "filer"].index(server) + grpc]

    def _launch(self) -> subprocess.Popen[bytes]:
        service, folder = SERVICES["s3"], self.folder
        (folder / "data").mkdir()
        words = [word.replace("0.0.0.0", self.others) for word in service["command"]]
        words += [f"-dir={folder / 'data'}", f"-s3.config={folder / 's3.json'}"]  # the last one counts
        for server in ("s3", "master", "volume", "filer"):
            words += [f"-{server}.port={self.port(server)}", f"-{server}.port.grpc={self.port(server, grpc=True)}"]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {"PATH": path, "HOME": str(folder), **KEYS, "S3_CONFIG": str(folder / "s3.json")}
        entry = [word.replace("/scripts/", f"{ROOT}/scripts/") for word in service["entrypoint"]]
        with self.log.open("ab") as log:
            return subprocess.Popen([*entry, *words], cwd=folder, env=env, stdout=log, stderr=log)

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        give_up_at = time.monotonic() + 60
        while not self._is_healthy():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
                raise self._failed("ended")
            if time.monotonic() > give_up_at:
                raise self._failed("was not healthy within 60 s")

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(self.others, self.port("s3"), timeout=5)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def listens(self) -> set[tuple[str, int]]:
        """The addresses and ports of its listening TCP sockets."""
        own = {os.readlink(fd) for fd in Path(f"/proc/{self.pid}/fd").iterdir() if fd.is_symlink()}
        rows = [line.split() for line in Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()[1:]]
        found = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
        assert "0A" not in {row.split()[3] for row in self._tcp6() if f"socket:[{row.split()[9]}]" in own}
        return {(str(ip_address(bytes.fromhex(host)[::-1])), int(port, 16)) for host, port in found}

    def _tcp6(self) -> list[str]:
        return Path(f"/proc/{self.pid}/net/tcp6").read_text().splitlines()[1:]


def _speaks_grpc(address: tuple[str, int], tls: ssl.SSLContext | None = None) -> bool:
    """Whether a client of HTTP/2 is answered, in the clear or by `tls`, as gRPC does before any call."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    with contextlib.ExitStack() as stack:
        try:
            wire: socket.socket = stack.enter_context(socket.create_connection(address, timeout=20))
            if tls is not None:
                wire = stack.enter_context(tls.wrap_socket(wire))
            wire.sendall(preface)
            head = wire.recv(9)
        except (ssl.SSLError, ConnectionError):
            return False
        return len(head) == 9 and head[3] == 4  # the server's settings


def test_whoever_is_beside_the_s3_server_gets_no_further_than_its_keys(tmp_path: Path) -> None:
    """Its gRPC port has calls that make an administrator, and ask for no key."""
    with ComposedS3(tmp_path) as server:
        beyond = {port for address, port in server.listens() if address != "127.0.0.1"}
        assert beyond == {server.port("s3"), server.port("s3", grpc=True)}
        assert _speaks_grpc(("127.0.0.1", server.port("filer", grpc=True))), "how an open one answers"
        anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
        anybody.set_alpn_protocols(["h2"])
        twin = (server.others, server.port("s3", grpc=True))
        assert not _speaks_grpc(twin)
        assert not _speaks_grpc(twin, anybody)
        anybody.load_cert_chain(tmp_path / "s3-grpc.pem", tmp_path / "s3-grpc.key")  # what the repository shows
        assert not _speaks_grpc(twin, anybody)


def test_two_nodes_meet() -> None:
    nodes: list[argparse.Namespace] = [get_args_parser().parse_args(SERVICES[name]["command"]) for name in TRAINERS]
    for name, node in zip(TRAINERS, nodes, strict=True):
        assert SERVICES[name]["profiles"] == ["demo"]
        assert SERVICES[name]["environment"]["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
        assert node.local_addr == SERVICES[name]["hostname"] == name
        assert (node.nnodes, node.rdzv_backend, node.rdzv_id) == ("2", "c10d", "demo")
        assert node.rdzv_endpoint.partition(":")[0] == TRAINERS[0]
        assert (node.module, node.training_script) == (True, "ckptd_trainer")
        config = parse_config([*node.training_script_args, "--url", "http://ckptd:8440", "--run-name", "demo"])
        assert any(volume.endswith(f":{config.output}") for volume in SERVICES[name]["volumes"])
    assert [node.rdzv_conf for node in nodes] == ["is_host=1", "is_host=0"]


@pytest.mark.parametrize("image", DOCKERFILES)
def test_an_image_is_small_pinned_and_not_roots(image: str) -> None:
    path = DOCKERFILES[image]
    found = _instructions(path)
    bases = [rest for word, rest in found if word == "FROM"]
    assert bases == ["${PYTHON_IMAGE} AS build", "${PYTHON_IMAGE}"]
    assert re.fullmatch(r"PYTHON_IMAGE=docker\.io/library/python:3\.1[1-9]-slim-\w+", found[0][1])
    assert _last(path, "USER") == "10001:10001"
    for word, rest in found:
        if word == "RUN" and re.search(r"(pip|python) install ", rest):
            assert "-c constraints.txt" in rest
            assert "--no-cache-dir" in rest
    variables = _variables(path)
    assert variables["PATH"].startswith("/opt/ckptd/bin:")
    assert variables["HOME"] == "/tmp", "the only folder that can be written when the root is read-only"
    assert any(word == "LABEL" and "org.opencontainers.image.version" in rest for word, rest in found)
    assert ("ARG", f"VERSION={PROJECT['version']}") in found
    built = {s["image"]: s["build"] for s in SERVICES.values() if "build" in s}
    assert built[f"{image}:{PROJECT['version']}"]["dockerfile"] == str(path.relative_to(ROOT))


def test_the_service_image_starts_the_service_and_asks_it_for_its_health() -> None:
    path = DOCKERFILES["ckptd"]
    assert json.loads(_last(path, "ENTRYPOINT"))[0] in PROJECT["scripts"]
    assert _serve_options(json.loads(_last(path, "CMD")))["host"] == "0.0.0.0"
    assert "/health/ready" in _last(path, "HEALTHCHECK")
    assert _last(path, "EXPOSE") == _variables(path)["CKPTD_PORT"]
    (installs,) = [rest for word, rest in _instructions(path) if word == "RUN" and "ckptd-*.whl" in rest]
    (extras,) = re.findall(r"\.whl\)\[([a-z0-9,]+)\]", installs)
    assert set(extras.split(",")) == {"service", "s3"}
    assert not any("torch" in requirement for extra in extras.split(",") for requirement in _requirements(extra))


def test_the_trainer_image_starts_the_trainer() -> None:
    path = DOCKERFILES["ckptd-trainer"]
    assert json.loads(_last(path, "ENTRYPOINT")) == ["torchrun"]
    node = get_args_parser().parse_args(json.loads(_last(path, "CMD")))
    assert (node.module, node.training_script) == (True, "ckptd_trainer")
    parse_config([*node.training_script_args, "--url", "http://ckptd:8440", "--run-name", "demo"])
    variables = _variables(path)
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    copied = [rest.split() for word, rest in _instructions(path) if word == "COPY"]
    assert ["trainer/ckptd_trainer", f"{variables['PYTHONPATH']}/ckptd_trainer"] in copied


def test_the_build_gets_what_it_copies_and_no_secrets() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*", "everything is left out but what is named"
    let_in = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = {
        source.partition("/")[0]
        for path in DOCKERFILES.values()
        for word, rest in _instructions(path)
        if word == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    assert copied == let_in


def _requirements(extra: str) -> list[str]:
    found: list[str] = PROJECT["optional-dependencies"][extra]
    return found


def _s3_config(folder: Path, **changed: str) -> subprocess.CompletedProcess[str]:
    file = folder / "s3.json"
    env = {"PATH": os.environ["PATH"], "S3_CONFIG": str(file), **KEYS, **changed}
    command = ["sh", str(ROOT / "scripts" / "s3-config"), "sh", "-c", f"cat {file}; env"]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_the_s3_server_gets_two_users_for_one_bucket(tmp_path: Path) -> None:
    done = _s3_config(tmp_path)
    assert done.returncode == 0, done.stderr
    config, environment = done.stdout.split("\n", 1)
    rights = ["Read:ckpts", "Write:ckpts", "List:ckpts"]
    assert json.loads(config)["identities"] == [
        {
            "name": "ckptd",
            "credentials": [{"accessKey": "serviceKey", "secretKey": "serviceSecret1234"}],
            "actions": rights,
        },
        {
            "name": "trainer",
            "credentials": [{"accessKey": "trainerKey", "secretKey": "trainerSecret1234"}],
            "actions": rights,
        },
    ]
    assert (tmp_path / "s3.json").stat().st_mode & 0o077 == 0
    assert "Secret1234" not in environment


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"CKPTD_S3_SECRET": ""}, "CKPTD_S3_SECRET: expected letters and digits"),
        ({"TRAINER_S3_SECRET": 'x", "actions": ["Admin'}, "TRAINER_S3_SECRET: expected letters and digits"),
        ({"TRAINER_S3_SECRET": "short"}, "expected at least 16 characters, found 5"),
        ({"TRAINER_S3_KEY": "serviceKey"}, "expected two different keys"),
        ({"S3_BUCKET": "a/b"}, "S3_BUCKET: expected lower-case letters"),
    ],
)
def test_the_s3_server_does_not_start_with_bad_keys(tmp_path: Path, changed: dict[str, str], reason: str) -> None:
    done = _s3_config(tmp_path, **changed)
    assert done.returncode == 2
    assert reason in done.stderr
    assert not (tmp_path / "s3.json").exists()
