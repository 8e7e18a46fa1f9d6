"""``kvtier config init`` and ``validate``: valid and sized files, mistakes with place and way out."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.cli import config_init
from kvtier.cli.config_presets import Preset
from kvtier.cli.config_sources import LMCACHE_ATTENTION, LMCACHE_OWN
from kvtier.config import load_config, parse_bytes, parse_config

from .blocks import ADAPTER, COLD, GIB, HOST, NVME, REDIS, ROOT, Run, block

# ---- init


@pytest.mark.parametrize("preset", Preset)
def test_every_preset_is_valid_and_has_the_given_sizes(preset: Preset, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "k.yaml"
    disk = tmp_path / "pages"
    arguments = ("--preset", preset.value, "--memory", "6GiB", "--disk", "7GiB", "--path", str(disk))
    code, out, _ = run("init", str(file), *arguments, "--socket", "/run/k/cache.sock")
    assert code == 0 and "kvtier config validate" in out
    config = load_config(file)
    sizes = {tier.type: getattr(tier, "capacity", None) for tier in config.tiers}
    assert sizes["host"] == 6 * GIB
    assert sizes.get("nvme", 7 * GIB) == 7 * GIB
    assert (config.server is not None) is (preset in (Preset.SIDECAR, Preset.NODE))
    if preset is Preset.CLIENT:
        assert "unix:///run/k/cache.sock" in file.read_text()
    elif config.server is not None:
        assert config.server.listen == ("unix:/run/k/cache.sock",)
    code, out, _ = run("validate", str(file))
    assert code == 0, out


@pytest.mark.parametrize("preset", Preset)
def test_what_is_commented_out_can_be_switched_on(preset: Preset, run: Run, tmp_path: Path) -> None:
    """Each option behind a # alone, where it stands: the comments of a file must not rot."""
    code, text, _ = run("init", "-", "--preset", preset.value, "--memory", "1GiB", "--disk", "1GiB")
    assert code == 0
    lines = text.splitlines()
    hidden = [
        n for n, line in enumerate(lines) if re.match(r"\s*# [a-z_]+: \S", line) and not line.startswith("# Start")
    ]
    assert len(hidden) >= 4, text
    for n in hidden:
        if re.match(r"# (SGLang|Start|Every)", lines[n]):
            continue
        switched = [*lines[:n], lines[n].replace("# ", "", 1), *lines[n + 1 :]]
        given = yaml.safe_load("\n".join(switched))
        assert parse_config(given) is not None, lines[n]


def test_a_file_is_not_overwritten_unless_it_is_asked_for(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "k.yaml"
    file.write_text("mine")
    code, _, err = run("init", str(file), "--memory", "1GiB", "--disk", "1GiB")
    assert code == 2 and "--force" in err and file.read_text() == "mine"
    assert run("init", str(file), "--memory", "1GiB", "--disk", "1GiB", "--force")[0] == 0
    assert load_config(file).tiers[0].type == "host"
    assert "cannot be written" in run("init", str(tmp_path / "no" / "k.yaml"), "--memory", "1GiB", "--disk", "1GiB")[2]
    code, _, err = run("init", "-", "--memory", "64")
    assert code == 2 and "--memory 64" in err and "give it a unit" in err
    code, _, err = run("init", "-", "--memory", "lots")
    assert code == 2 and "--memory 'lots'" in err


def test_without_sizes_the_machine_is_looked_at(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_init, "_most_of_disk", lambda path: 5 * GIB)
    code, text, _ = run("init", "-")
    assert code == 0
    assert [t["capacity"] for t in yaml.safe_load(text)["tiers"]] == ["32GiB", "5GiB"]


@pytest.mark.parametrize("server", [Preset.NODE, Preset.SIDECAR])
def test_an_engine_and_its_cache_server_fit_on_one_machine(server: Preset, run: Run) -> None:
    files = [
        yaml.safe_load(run("init", "-", "--preset", p.value, "--disk", "1GiB")[1]) for p in (server, Preset.CLIENT)
    ]
    assert files[0]["http"]["port"] != files[1]["http"]["port"]
    memory = [parse_bytes(file["tiers"][0]["capacity"]) for file in files]
    assert memory == [32 * GIB, 8 * GIB], "of 64 GiB"


# ---- validate


def test_a_good_file_and_its_exit_status(run: Run, write: Callable[..., str]) -> None:
    code, out, _ = run("validate", write(block(NVME)), write({"kv_cache_compression_config": []}))
    assert code == 0
    assert "tiers host, nvme" in out and "methods for live caches" in out and "0 mistakes, 0 warnings" in out


def test_each_mistake_has_its_line_option_value_and_way_out(run: Run, write: Callable[..., str]) -> None:
    text = "tiers:\n  - {type: host, capacity: 4GiB}\n  - type: nvme\n    path: /d\n    capasity: 1GiB\nworkrs: 2\n"
    file = write(text)
    code, out, _ = run("validate", file)
    assert code == 1
    assert f"FAIL {file}:5: unknown option 'tiers[1].capasity' (value '1GiB') -> did you mean 'capacity'?" in out
    assert f"FAIL {file}:3: option 'tiers[1].capacity' is missing -> give it a value" in out
    assert f"FAIL {file}:6: unknown option 'workrs' (value 2) -> did you mean 'workers'?" in out
    code, out, _ = run("validate", file, "--json")
    told = json.loads(out)
    assert code == 1 and not told["ok"]
    assert {"file": file, "line": 6, "option": "workrs", "value": 2} == {
        name: told["findings"][-1][name] for name in ("file", "line", "option", "value")
    }
    assert all(finding["fix"] for finding in told["findings"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (block({**REDIS, "url": "redis://me:hunter2@cache:1"}), ["holds a password", "password_file"]),
        (block({**REDIS, "tls_ca": "/ca.pem"}), ["does not use TLS", "rediss://"]),
        (block({**REDIS, "url": "rediss://c:1", "tls_cert": "/c.pem"}), ["belong together", "give both or neither"]),
        (block({**REDIS, "mode": "sentinel"}), ["service"]),
        (block(server={"listen": ["tcp:0.0.0.0:1"]}), ["nobody needs a password", "KVTIER_SERVER_PASSWORD"]),
        (block(server={"listen": ["tls:127.0.0.1:1"]}), ["needs a certificate", "tls_cert"]),
        (block(server={"listen": ["http:x"]}), ["must be unix:PATH"]),
        (block(server={}), ["at least one place"]),
        (block(http={"host": "0.0.0.0"}), ["allow_remote"]),
        (block(http={"host": "0.0.0.0", "allow_remote": True}), ["needs a token"]),
        (block({"type": "nvme", "dir": "/x", "capacity": "1GiB"}), ["'tiers[1].dir'", "did you mean 'path'"]),
        (block(password="hunter2"), ["unknown option 'password' (value '***')"]),
        (block(saltt="hunter2"), ["'***'", "did you mean 'salt'"]),
        (block(salt=["hunter2"]), ["option 'salt' = '***'"]),
        (block({**NVME, "capacity": "64Gi"}), ["'64Gi'", "64GiB or 400GB"]),
        ({"kv_cache_compression_config": [{**COLD, "quant": "fp4"}], "tiers": [HOST]}, ["'fp4'", "nvfp4"]),
    ],
)
def test_what_a_process_would_refuse_is_refused_here(
    options: dict[str, Any], words: list[str], run: Run, write: Callable[..., str]
) -> None:
    code, out, _ = run("validate", write(options))
    assert code == 1 and "FAIL" in out
    for word in words:
        assert word in out
    assert "hunter2" not in out


@pytest.mark.parametrize(
    ("options", "way_out"),
    [
        (block(workers=0), "'workers' = 0 -> give a value greater than or equal to 1"),
        (block(workers="2"), "'workers' = '2' -> give integer"),
        (block(priority="top"), "-> give 'low', 'normal' or 'high'"),
        (block(http={"port": 70000}), "-> give a value less than or equal to 65535"),
        (block({**NVME, "capacity": "lots"}), "'lots' -> give a size such as 64GiB or 400GB"),
        (block(lease="soon"), "'soon' -> give a time such as 500ms, 2s or 1d"),
        (block(server=5), "'server' = 5 -> give a mapping of options"),
        ({"tiers": [NVME]}, "-> put {type: host"),
        ({"tiers": [HOST, {"type": "tape"}]}, "'host', 'nvme'"),
    ],
)
def test_each_has_its_way_out(options: Any, way_out: str, run: Run, write: Callable[..., str]) -> None:
    code, out, _ = run("validate", write(options))
    assert code == 1 and way_out in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tiers": [{"type": "host", "capacity": "100GiB"}]}, ["100GiB", "64.0 GiB"]),
        ({"tiers": [{"type": "host", "capacity": "60GiB"}]}, ["less than a tenth"]),
        (block({**NVME, "capacity": 64}), ["has no unit", "64 bytes", "64GiB"]),
        (block({**NVME, "capacity": "4096000000000"}), ["has no unit"]),
        (block({**NVME, "capacity": "1000TiB"}), ["than the file system of", "mount the disk"]),
        (block({**NVME, "capacity": "2GiB"}), ["holds the same pages", "write: back"]),
        (block({**NVME, "path": "/tmp/pages"}), ["cleared by many systems"]),
        (block({**NVME, "path": "pages"}), ["is relative", "absolute path"]),
        (
            block({**REDIS, "url": "redis://cache:1", "password_file": "/nowhere"}),
            ["in the clear", "cannot be read here"],
        ),
        (block({**REDIS, "url": "rediss://cache:1"}), ["no password is set"]),
        (block({**REDIS, "prefix": "mine:"}), ["names no version", "mine:1:"]),
        (block({**REDIS, "url": "rediss://127.0.0.1", "tls_check_hostname": False}), ["any certificate"]),
        (block(server={"listen": ["unix:/s"], "max_value": "5GiB"}), ["refused all the same"]),
        (block(workers=64), ["cores"]),
        (block(server={"listen": ["unix:/s"]}, record="/r"), ["'record' = '/r'", "is of engines"]),
        ("tiers: []\ntiers: [{type: host, capacity: 1GiB}]\n", ["given twice", "the last one counts"]),
    ],
)
def test_plausible_mistakes_are_warnings(
    options: Any, words: list[str], run: Run, write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    file = write(options)
    code, out, _ = run("validate", file)
    assert code == 0 and "warn" in out, out
    for word in words:
        assert word in out
    assert run("validate", "--strict", file)[0] == 1


def test_secrets_that_others_can_read_are_told(run: Run, write: Callable[..., str], tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2\n")
    secret.chmod(0o644)
    server = {"listen": ["tcp:0.0.0.0:1"], "password_file": str(secret)}
    file = write(block(salt="s3cret", server=server), 0o644)
    code, out, _ = run("validate", file)
    assert code == 0
    assert f"chmod 600 {file}" in out and f"chmod 600 {secret}" in out and "in the clear" in out
    assert "s3cret" not in out and "hunter2" not in out
    secret.chmod(0o600)
    Path(file).chmod(0o600)
    assert "chmod" not in run("validate", file)[1]
    secret.write_text("\n")
    assert "is empty" in run("validate", file)[1]


def test_files_that_are_no_configuration(run: Run, write: Callable[..., str], tmp_path: Path) -> None:
    for content, word in (("tiers: [", "is not YAML"), ("7", "must hold a mapping"), ("[1]", "without any block")):
        code, out, _ = run("validate", write(content))
        assert code == 1 and word in out
    assert "cannot be read" in run("validate", str(tmp_path / "nothing"))[1]
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in run("validate", str(tmp_path / "binary"))[1]


STORAGE = {"backend_name": "kvtier-hicache", "module_path": "kvtier.connectors.sglang.hicache"}
REMOTE = "remote_storage_plugin.kvtier."
LOSSLESS = {"kv_cache_compression_config": [{"algorithm": "quantization_for_cold_page", "quant": "lossless"}]}


@pytest.mark.parametrize(
    ("document", "line", "words"),
    [
        ({**ADAPTER, "adapter_params": {"attention": "vllm"}}, "", []),
        ([{**ADAPTER, "adapter_params": {"tiers": [HOST], "workerz": 1}}], "workerz", ["did you mean 'workers'"]),
        ({**ADAPTER, "adapter_params": {"attention": "vlm"}}, "attention", ["'vlm'", "vllm, sglang"]),
        ({**ADAPTER, "adapter_params": {"rope_dim": 7}}, "rope_dim", ["multiple of 16"]),
        ({**ADAPTER, "adapter_params": {"rope_dim": 64, "attention": "vllm"}}, "rope_dim", ["is for attention = mla"]),
        ({**ADAPTER, "adapter_params": {"rope_dim": 64, "attention": "mla"}}, "", []),
        ({**ADAPTER, "adapter_params": {"config": "/x.yaml", "salt": "x"}}, "config", ["write them into the file"]),
        ({"type": "fs", "serde": {"type": "kvtier_nvfp4", "tears": 1}}, "tears", ["did you mean 'tiers'"]),
        ({"type": "fs", "serde": {"type": "kvtier_nvfp4", **LOSSLESS}}, "quant", ["'lossless'", "instead of a serde"]),
        ({**ADAPTER, "adapter_params": LOSSLESS}, "", []),
        (
            {"extra_config": {f"{REMOTE}module_path": "kvtier.connectors.lmcache.remote", f"{REMOTE}workers": 0}},
            "extra_config",
            ["greater than or equal to 1"],
        ),
        ({"kv_connector": "kvtier", "kv-connector-config": {"tiers": [HOST], "lase": "1s"}}, "lase", ["'lease'"]),
        (
            {
                "unified_cache_external_linker_config": {
                    "linker_module_path": "kvtier.connectors.sglang.linker",
                    "linker_extra_config": {"config": {"tiers": [NVME]}},
                }
            },
            "tiers",
            ["first tier must be of type host"],
        ),
        (
            {"hicache_storage_backend_extra_config": json.dumps({**STORAGE, "config": {"tiers": [HOST], "lase": 1}})},
            "hicache_storage_backend_extra_config",
            ["'lase'", "did you mean 'lease'"],
        ),
        ({"l2-adapter": json.dumps({**ADAPTER, "adapter_params": {"rope_dim": 7}})}, "l2-adapter", ["multiple of 16"]),
    ],
)
def test_blocks_inside_the_engines_own_options(
    document: Any, line: str, words: list[str], run: Run, write: Callable[..., str]
) -> None:
    text = json.dumps(document, indent=1)
    file = write(text)
    code, out, _ = run("validate", file)
    assert code == bool(line), out
    for word in words:
        assert word in out
    if line and line != "tiers":
        number = next(n for n, row in enumerate(text.splitlines(), 1) if f'"{line}"' in row)
        assert f"{file}:{number}:" in out


def test_lmcaches_own_options_are_the_ones_known_here() -> None:
    """The connector cannot be imported without LMCache, so its source is read."""
    tree = ast.parse((ROOT / "connectors" / "lmcache" / "options.py").read_text())
    (own,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "_OWN")
    assert ast.literal_eval(own) == LMCACHE_OWN
    source = ast.parse((ROOT / "connectors" / "lmcache" / "chunks.py").read_text())
    (attention,) = (n for n in source.body if isinstance(n, ast.ClassDef) and n.name == "Attention")
    values = [ast.literal_eval(n.value) for n in attention.body if isinstance(n, ast.Assign)]
    assert values == list(LMCACHE_ATTENTION)
