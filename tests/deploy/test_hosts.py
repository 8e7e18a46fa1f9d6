"""Without Kubernetes: the systemd unit and the compose file."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.config import parse_bytes, parse_config

from .chart import DEPLOY

UNIT = DEPLOY / "systemd" / "kvtier.service"
COMPOSE = DEPLOY / "compose" / "docker-compose.yaml"


def configured(path: Path) -> Any:
    return parse_config(yaml.safe_load(path.read_text()))


def settings() -> dict[str, str]:
    return dict(line.split("=", 1) for line in UNIT.read_text().splitlines() if re.match(r"[A-Z]\w+=", line))


def verify(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """systemd-analyze verify, with a program that is there in place of kvtier's."""
    unit = folder / "kvtier.service"
    unit.write_text(text.replace("/opt/kvtier/bin/kvtier", shutil.which("true") or "/bin/true"))
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze: apt-get install systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    done = verify(UNIT.read_text(), tmp_path)
    assert done.returncode == 0 and "kvtier" not in done.stderr, done.stderr
    wrong = verify(UNIT.read_text().replace("ProtectSystem=", "ProtectSytem="), tmp_path)
    assert "ProtectSytem" in wrong.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze: apt-get install systemd")
def test_the_unit_is_hardened(tmp_path: Path) -> None:
    """systemd's own measure, 10 for a service that may do anything; this one scores 1.2."""
    command = ["systemd-analyze", "security", "--offline=yes", "--no-pager", "--threshold=20", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if "Unknown" in done.stderr or "unrecognized" in done.stderr:
        pytest.skip("this systemd-analyze is too old to look at files")
    assert done.returncode == 0, done.stdout[-500:] + done.stderr


def test_the_unit_and_its_configuration_agree() -> None:
    found, config = settings(), configured(DEPLOY / "systemd" / "server.yaml")
    assert found["User"] not in ("root", "") and found["NoNewPrivileges"] == "yes"
    assert config.server.listen[0] == f"unix:/run/{found['RuntimeDirectory']}/cache.sock"
    assert str(config.tiers[1].path[0]) == f"/var/lib/{found['StateDirectory']}"
    name, _, _ = found["LoadCredential"].partition(":")
    assert str(config.http.token_file) == f"/run/credentials/{UNIT.name}/{name}"
    assert int(found["TimeoutStopSec"]) >= config.server.drain + 15
    assert parse_bytes(found["MemoryMax"] + "iB") > config.tiers[0].capacity + (1 << 30)
    assert "--" not in found["ExecStart"].replace("--config", "")


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return found


def check(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_the_compose_file_is_one(tmp_path: Path) -> None:
    done = check(COMPOSE)
    assert done.returncode == 0, done.stdout + done.stderr
    bad = tmp_path / "docker-compose.yaml"
    bad.write_text(COMPOSE.read_text().replace("mem_limit", "mem_limt"))
    assert "mem_limt" in check(bad).stdout


def services_faults(found: dict[str, Any]) -> list[str]:
    wrong = []
    for name, service in found["services"].items():
        tag = service["image"].rpartition("/")[2].partition(":")[2]
        if tag in ("", "latest"):
            wrong.append(f"{name}: {service['image']} is not pinned")
        if not re.fullmatch(r"[1-9]\d*:[1-9]\d*", service.get("user", "")):
            wrong.append(f"{name}: may be root")
        if service.get("cap_drop") != ["ALL"] or "no-new-privileges:true" not in service.get("security_opt", []):
            wrong.append(f"{name}: may gain privileges")
        if "mem_limit" not in service or "cpus" not in service:
            wrong.append(f"{name}: no limits")
        if any(not port.startswith("127.0.0.1:") for port in service.get("ports", [])):
            wrong.append(f"{name}: listens to everybody")
        if any(re.search(r"(?i)passw|secret|token|api_?key", key) for key in service.get("environment", {})):
            wrong.append(f"{name}: a secret in its environment")
    return wrong


def test_services_are_restricted() -> None:
    assert services_faults(compose()) == []
    assert compose()["services"]["cache"]["read_only"] is True


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("image", "kvtier/server", "not pinned"),
        ("user", "root", "may be root"),
        ("cap_drop", [], "gain privileges"),
        ("ports", ["9404:9404"], "listens to everybody"),
        ("environment", {"KVTIER_HTTP_TOKEN": "x"}, "secret"),
    ],
)
def test_services_faults_are_found(key: str, value: Any, fault: str) -> None:
    found = compose()
    found["services"]["cache"][key] = value
    assert any(fault in wrong for wrong in services_faults(found))


def test_the_compose_file_and_its_configurations_agree() -> None:
    found = compose()
    cache, engine = found["services"]["cache"], found["services"]["engine"]
    server, client = configured(COMPOSE.with_name("server.yaml")), configured(COMPOSE.with_name("engine.yaml"))
    assert server.server.listen[0] == client.tiers[1].url.replace("unix://", "unix:")
    assert cache["user"] == engine["user"]  # the socket's mode is 0600
    shared = {volume.split(":")[0] for volume in cache["volumes"]} & {v.split(":")[0] for v in engine["volumes"]}
    assert shared == {"socket"}
    assert int(cache["stop_grace_period"].rstrip("s")) >= server.server.drain + 15
    assert parse_bytes(cache["mem_limit"].upper() + "iB") > server.tiers[0].capacity + (1 << 30)
    assert str(server.http.token_file) == f"/run/secrets/{cache['secrets'][0]}"
    for service in (cache, engine):
        for config in service["configs"]:
            assert COMPOSE.with_name(Path(found["configs"][config["source"]]["file"]).name).exists()
    assert (COMPOSE.parent / cache["build"]["context"] / cache["build"]["dockerfile"]).exists()
