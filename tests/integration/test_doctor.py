"""``kvtier doctor``: what it finds, that each finding says what to do, and that it leaves everything as it was."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import os
import resource
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kvtier.abc.tier import GetStatus
from kvtier.cli import doctor_disks, doctor_engines, doctor_machine
from kvtier.cli.app import app
from kvtier.cli.doctor import examine
from kvtier.cli.doctor_line import Finding, State, refused, size
from kvtier.cli.place import place_of
from kvtier.config import HostTierConfig, NvmeTierConfig, parse_config
from kvtier.errors import ConfigError
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.testing.pages import aligned_buffer, item_of, key_of
from tests.doctor_files import HOST, about, write


def nvme(path: Path | list[str], capacity: str = "16MiB") -> dict[str, Any]:
    return {"type": "nvme", "path": path if isinstance(path, list) else str(path), "capacity": capacity}


def everything_in(folder: Path) -> dict[str, str]:
    """Paths, and hashes of what files hold."""
    found = {}
    for path in sorted(folder.rglob("*")):
        found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
    return found


# ---- the command


def test_a_good_configuration_passes_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = write(tmp_path, nvme(tmp_path / "disk" / "pages"))
    before = everything_in(tmp_path)
    result = CliRunner().invoke(app, ["doctor", "--config", str(config)])
    assert result.exit_code == 0, result.stdout
    lines = result.stdout.splitlines()
    assert lines[-1].startswith("0 failed, ")
    assert any(line.startswith("ok") and "host tier: put and got 4 pages" in line for line in lines)
    assert any("disk/pages: put and got 4 pages of 1.0 MiB" in line for line in lines)
    assert any(line.startswith("ok") and "codec and store: 8 of 8 pages found again" in line for line in lines)
    for what in ("memory", "memlock", "/dev/shm", "huge pages", "open files", "clock", "metrics", "SGLang", "LMCache"):
        assert any(line[5:].startswith(f"{what}: ") for line in lines), what
    assert everything_in(tmp_path) == before


def test_json_says_the_same(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--json", "--config", str(write(tmp_path, nvme(tmp_path / "pages")))])
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["ok"] is True
    assert {finding["state"] for finding in found["findings"]} <= {"good", "warning", "none"}
    assert all(set(finding) == {"what", "state", "text", "fix"} for finding in found["findings"])
    assert all(bool(finding["fix"]) == (finding["state"] in ("warning", "bad")) for finding in found["findings"])


@pytest.mark.parametrize(
    ("text", "message", "fix"),
    [
        ("tiers: [", "is not YAML", ""),
        ("tiers: [{type: host}]", "'tiers[0].capacity' is missing", "give it a value"),
        ("tiers: [{type: nvme, path: /x, capacity: 1GiB}]", "first tier must be of type host", "put {type: host"),
    ],
)
def test_a_broken_configuration_fails_with_the_way_out(tmp_path: Path, text: str, message: str, fix: str) -> None:
    path = tmp_path / "kvtier.yaml"
    path.write_text(text)
    result = CliRunner().invoke(app, ["doctor", "--json", "--config", str(path)])
    (finding,) = json.loads(result.stdout)["findings"]
    assert result.exit_code == 1 and finding["state"] == "bad"
    assert message in finding["text"] + finding["fix"] and fix in finding["fix"]


@pytest.mark.parametrize("capacity", [4096, 10_000, 1 << 20, 5 << 20])
def test_a_host_tier_of_any_size_is_tried(capacity: int) -> None:
    (finding,) = doctor_disks.check_host_tier(HostTierConfig(type="host", capacity=capacity))
    assert finding.state is State.GOOD, finding


# ---- directories


def test_a_directory_in_use_is_said_and_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "pages" / "default" / "rank0"
    tier = NvmeTier(folder, 4 << 20)
    tier.put_many([item_of(key_of(n), 20_000) for n in range(20)])
    before = everything_in(tmp_path)
    try:
        findings = about(list(examine(write(tmp_path, nvme(tmp_path / "pages")))), "nvme")
        assert {finding.state for finding in findings} <= {State.GOOD, State.WARNING}
        assert any(f"default/rank0 is in use by process {os.getpid()}" in finding.text for finding in findings)
        assert any(finding.text.startswith("put and got") for finding in findings)
        (tmp_path / "kvtier.yaml").unlink()
        assert everything_in(tmp_path) == before
        out = aligned_buffer(20_000)
        assert tier.get_many_into([key_of(0)], [out])[0].status is GetStatus.HIT
    finally:
        tier.close()
    findings = about(list(examine(write(tmp_path, nvme(tmp_path / "pages")))), "nvme")
    assert not any("in use" in finding.text for finding in findings)


def test_capacity_is_held_against_free_space_and_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def room(capacity: str) -> Finding:
        findings = list(examine(write(tmp_path, nvme(tmp_path / "pages", capacity))))
        return about(findings, "nvme")[0]

    tier = NvmeTier(tmp_path / "pages" / "default" / "rank0", 8 << 20)
    tier.close()
    assert room("16MiB").state is State.GOOD and "8.0 MiB are taken" in room("16MiB").text
    assert room("8MiB").state is State.GOOD, "the log does not count"
    assert room("4MiB").state is State.WARNING and "raise the capacity" in room("4MiB").fix
    assert room("900TiB").state is State.BAD and "set the tier's capacity to " in room("900TiB").fix
    free = os.statvfs(tmp_path)
    left = free.f_bavail * free.f_frsize
    monkeypatch.setattr(doctor_disks, "_stored_bytes", lambda path: left)
    assert room(str(left + left // 2)).state is State.GOOD, "what a tier has taken already is not asked for again"


def test_directories_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    findings = about(list(examine(write(tmp_path, nvme([str(tmp_path / "file"), str(tmp_path / "b")])))), "nvme")
    assert findings[0].state is State.BAD and "is a file" in findings[0].text and findings[0].fix
    other = tmp_path / "other" / "default" / "rank0"
    NvmeTier(other, 1 << 20).close()
    (other / "FORMAT").write_text('{"kvtier_nvme_format": 99}')
    findings = about(list(examine(write(tmp_path, nvme(tmp_path / "other")))), "nvme")
    assert findings[0].state is State.BAD and "format 99" in findings[0].text and "rm -r" in findings[0].fix


def test_a_directory_that_is_not_ours_to_make_is_told_to_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (finding,) = about(list(examine(write(tmp_path, nvme(tmp_path / "pages")))), "nvme")
    assert finding.state is State.BAD
    assert f"install -d -o {os.geteuid()} {tmp_path / 'pages'}" in finding.fix, "not the folder above it"


def room_of(**changed: int) -> SimpleNamespace:
    return SimpleNamespace(**{"f_bavail": 1 << 20, "f_frsize": 4096, "f_flag": 0, **changed})


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that this user may not look into, be it root or not."""
    folder, stat, access = tmp_path / "closed", os.stat, os.access
    folder.mkdir()

    def inside(path: Any) -> bool:
        return isinstance(path, (str, Path)) and folder in Path(path).parents

    def refusing(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if inside(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", refusing)
    monkeypatch.setattr(os, "access", lambda path, *args, **options: path != folder and access(path, *args, **options))
    return folder


def test_places_that_may_not_be_looked_at_are_told(tmp_path: Path, closed: Path) -> None:
    host = {"type": "host", "capacity": "4MiB", "budget": {"path": str(closed / "in" / "budget"), "capacity": "1GiB"}}
    server = {"listen": [f"unix:{closed}/in/k.sock"]}
    path = write(tmp_path, nvme(closed / "in" / "pages"), server=server)
    path.write_text(
        yaml.safe_dump({**yaml.safe_load(path.read_text()), "tiers": [host, nvme(closed / "in" / "pages")]})
    )
    findings = list(examine(path))
    (disk,) = about(findings, "nvme")
    assert disk.state is State.BAD and "cannot be " in disk.text and disk.fix
    assert about(findings, "budget")[0].state is State.BAD
    assert about(findings, "server"), "a socket there is tried"
    validated = CliRunner().invoke(app, ["config", "validate", str(path)])
    assert validated.exit_code == 0 and "block: tiers host, nvme and kvtier serve" in validated.stdout
    with pytest.raises(ConfigError, match="none that this user may look at"):
        place_of(str(closed / "in" / "pages"), None)


def test_a_file_system_that_is_mounted_read_only_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: room_of(f_flag=os.ST_RDONLY))
    tier = NvmeTierConfig(type="nvme", path=(tmp_path / "pages",), capacity=16 << 20)
    (finding,) = doctor_disks.check_directories(tier)
    assert finding.state is State.BAD and "read-only" in finding.text and "another directory" in finding.fix


def test_a_full_disk_is_not_taken_for_a_wrong_capacity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: room_of(f_bavail=1))
    tier = NvmeTierConfig(type="nvme", path=(tmp_path / "pages",), capacity=16 << 20)
    room, tried = doctor_disks.check_directories(tier)
    assert room.state is State.BAD and "or free some space" in room.fix
    assert tried.state is State.BAD and "too little for a put and a get" in tried.text
    assert list(tmp_path.iterdir()) == []


def test_two_directories_of_one_device_are_said(tmp_path: Path) -> None:
    findings = about(list(examine(write(tmp_path, nvme([str(tmp_path / "a"), str(tmp_path / "b")])))), "nvme")
    (shared,) = [finding for finding in findings if finding.what == "nvme"]
    assert shared.state is State.WARNING and shared.fix == "name one directory per device"
    assert sum(finding.text.startswith("put and got") for finding in findings) == 2


def test_directories_that_cannot_hold_a_page_or_are_the_same_are_told(tmp_path: Path) -> None:
    (finding,) = about(list(examine(write(tmp_path, nvme(tmp_path / "pages", "4097B") | {
        "path": [str(tmp_path / "a"), str(tmp_path / "b")]}))), "nvme")  # fmt: skip
    assert finding.state is State.BAD and finding.fix == "set at least 8192 bytes"
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "a").mkdir()
    (finding,) = about(list(examine(write(tmp_path, nvme([str(tmp_path / "a"), str(tmp_path / "link")])))), "nvme")
    assert finding.state is State.BAD and "is named twice" in finding.text


def test_a_device_that_gives_other_bytes_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_disks, "belongs", lambda key, out: False)
    findings = list(examine(write(tmp_path, nvme(tmp_path / "pages"))))
    assert [f.state for f in about(findings, "nvme")][-1] is State.BAD
    assert "other bytes" in about(findings, "nvme")[-1].text


# ---- the machine


def test_limits_are_told_with_their_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config({"tiers": [{"type": "host", "capacity": "8GiB"}, nvme(tmp_path)]})
    monkeypatch.setattr(doctor_machine, "memory_bytes", lambda: (4 << 30, 2 << 30))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    monkeypatch.setattr(Path, "exists", lambda self: True)  # an accelerator
    files = {
        "/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "/proc/meminfo": "HugePages_Total:      12\n",
    }
    monkeypatch.setattr(doctor_machine, "_read", lambda path: files.get(path, ""))
    findings = {finding.what: finding for finding in doctor_machine.check_machine(config)}
    assert findings["memory"].state is State.BAD and "below 4.0 GiB" in findings["memory"].fix
    assert findings["memlock"].state is State.WARNING and "memlock=-1" in findings["memlock"].fix
    assert findings["open files"].state is State.WARNING and "ulimit -n 1280" in findings["open files"].fix
    assert findings["huge pages"].state is State.WARNING and "echo madvise" in findings["huge pages"].fix
    monkeypatch.setattr(doctor_machine, "memory_bytes", lambda: (16 << 30, 2 << 30))
    assert next(iter(doctor_machine.check_machine(config))).state is State.WARNING
    small = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 1, 1, 1, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    findings = {finding.what: finding for finding in doctor_machine.check_machine(config)}
    assert findings["/dev/shm"].state is State.WARNING and "--shm-size" in findings["/dev/shm"].fix


def test_reserved_huge_pages_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = "/sys/kernel/mm/hugepages/hugepages-2048kB"
    files = {"/proc/meminfo": "HugePages_Total: 40\n", "/sys/kernel/mm/transparent_hugepage/enabled": "[always] never"}
    monkeypatch.setattr(doctor_machine, "_read", lambda path: files.get(path, ""))
    host = {"type": "host", "capacity": "64MiB", "huge_pages": "reserved"}
    for total, free, state in ((40, 40, State.GOOD), (40, 5, State.WARNING), (31, 31, State.BAD), ("", "", State.BAD)):
        files |= {f"{folder}/nr_hugepages": f"{total}\n", f"{folder}/free_hugepages": f"{free}\n"}
        found = {f.what: f for f in doctor_machine.check_machine(parse_config({"tiers": [host]}))}
        assert found["memory"].state is state, (total, free)
        assert found["huge pages"].state is State.GOOD
    assert "vm.nr_hugepages=32" in found["memory"].fix
    found = {f.what: f for f in doctor_machine.check_machine(parse_config({"tiers": [HOST]}))}
    assert found["huge pages"].state is State.WARNING and "huge_pages: reserved" in found["huge pages"].fix


def test_a_budget_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    for path, state in (
        (tmp_path / "budget", State.GOOD), (tmp_path, State.BAD), (Path("/proc/budget"), State.BAD),
        (tmp_path / "nowhere" / "budget", State.BAD),
    ):  # fmt: skip
        host = {"type": "host", "capacity": "4MiB", "budget": {"path": str(path), "capacity": "8MiB"}}
        found = {f.what: f for f in doctor_machine.check_machine(parse_config({"tiers": [host]}))}
        assert found["budget"].state is state, path
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nowhere")
    for path in (tmp_path / "loop", tmp_path / "loop" / "below", tmp_path / "gone"):
        (finding,) = about(list(doctor_disks.check_directories(tier_of(path))), "nvme")
        assert finding.state is State.BAD and "link to nothing" in finding.text, path


def tier_of(path: Path) -> NvmeTierConfig:
    tier = parse_config({"tiers": [HOST, nvme(path)]}).tiers[1]
    assert isinstance(tier, NvmeTierConfig)
    return tier


def test_every_finding_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "kvtier.yaml").write_text("{{{{")
    answer = CliRunner().invoke(app, ["doctor", "--config", str(tmp_path / "kvtier.yaml")])
    assert answer.exit_code == 1
    assert len(answer.stdout.splitlines()) == 2 and "not YAML" in answer.stdout


def test_messages_of_our_own_are_split_into_text_and_fix() -> None:
    found = refused("x", "path = '/a' is a file; name a directory")
    assert (found.text, found.fix) == ("path = '/a' is a file", "name a directory")
    found = refused("x", "listen = 'tcp:0.0.0.0:1' is open: set password_file; or listen on 127.0.0.1")
    assert (found.text, found.fix) == ("listen = 'tcp:0.0.0.0:1' is open", "set password_file; or listen on 127.0.0.1")
    for whole in (
        "nothing to split",
        "password_file = '/a' cannot be read: [Errno 2] No such file or directory: '/a'",
        "option 'a' = 1: Input should be 'x' or 'y'; option 'b' is missing; give it a value",
    ):
        assert (refused("x", whole).text, refused("x", whole).fix) == (whole, "see the text")
    assert [size(n) for n in (5, 2048, 3 << 20, 5 << 30, 2 << 40)] == [
        "5 B",
        "2.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
        "2.0 TiB",
    ]


# ---- engines


def test_an_engine_that_does_not_know_kvtier_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"sglang": "9.9", "lmcache": "9.9"}
    monkeypatch.setattr(doctor_engines, "_version", versions.get)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    sglang, lmcache = doctor_engines.check_engines()
    assert sglang.state is State.BAD and "not among its plugins" in sglang.text and "pip install" in sglang.fix
    assert lmcache.state is State.BAD, "an LMCache that cannot be imported"
    monkeypatch.undo()
    monkeypatch.setattr(doctor_engines, "_version", versions.get)
    monkeypatch.setenv("SGLANG_PLUGINS", "others")
    assert "leaves kvtier out" in next(iter(doctor_engines.check_engines())).text


def test_an_extra_that_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvtier.telemetry", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    (finding,) = about(list(examine(write(tmp_path, opentelemetry=True))), "opentelemetry")
    assert finding.state is State.BAD and "kvtier[otel]" in finding.fix


def test_a_codec_that_cannot_be_had_fails(tmp_path: Path) -> None:
    compression = [{"algorithm": "triattention", "calibration_path": str(tmp_path / "nowhere.safetensors")}]
    findings = list(examine(write(tmp_path, kv_cache_compression_config=compression)))
    (finding,) = about(findings, "triattention")
    assert finding.state is State.BAD and "kvtier calibrate" in finding.fix


@pytest.mark.parametrize(
    ("cuda", "triton", "state", "said"),
    [
        (True, True, State.GOOD, "and triton"),
        (True, False, State.WARNING, "kvtier[triton]"),
        (False, False, State.WARNING, "built for CUDA: no"),
    ],
)
def test_a_gpu_needs_a_torch_for_it_and_triton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: bool, triton: bool, state: State, said: str
) -> None:
    assert doctor_engines.check_gpu().state in (State.NONE, State.GOOD, State.WARNING)
    torch = SimpleNamespace(
        __version__="2.13.0",
        cuda=SimpleNamespace(is_available=lambda: cuda),
        version=SimpleNamespace(cuda="13.0" if cuda else None),
    )
    monkeypatch.setattr(doctor_engines, "_NVIDIA", tmp_path)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(doctor_engines, "_installed", lambda name: name == "torch" or triton)
    finding = doctor_engines.check_gpu()
    assert finding.state is state and said in finding.text + finding.fix
    monkeypatch.setattr(doctor_engines, "_installed", lambda name: False)
    assert doctor_engines.check_gpu().state is State.NONE


def test_without_a_file_it_takes_the_one_that_config_init_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    (finding,) = json.loads(result.stdout)["findings"]
    assert result.exit_code == 1 and "'kvtier.yaml' cannot be read" in finding["text"]
    assert "kvtier config init" in finding["fix"]
