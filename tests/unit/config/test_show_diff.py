"""``kvtier config show`` and ``diff``: values with their origin, and differences with what becomes of stored pages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from kvtier import build
from kvtier.cli.config_text import size_text, time_text
from kvtier.config import parse_bytes, parse_config, parse_seconds

from .blocks import ADAPTER, COLD, HOST, NVME, REDIS, TWO, VARIABLES, Run, block

# ---- show


def test_what_is_shown_reads_as_the_same_and_says_where_it_is_from(run: Run, write: Callable[..., str]) -> None:
    users = [{"name": "a", "password_file": "/run/a", "prefixes": ["a:"], "quota": "5GB"}]
    given = block(
        {**NVME, "path": ["/a", "/b"], "ttl": "36h"},
        {**REDIS, "ttl": "90s"},
        promote_deadline="250ms",
        server={"listen": ["unix:/s"], "users": users},
        http={"port": 9404, "names": ["kvtier.example"]},
        kv_cache_compression_config=[{**COLD, "quant": "nvfp4", "rope_quant": "fp8"}],
    )
    file = write(given)
    code, text, _ = run("show", file)
    assert code == 0
    assert parse_config(yaml.safe_load(text)) == parse_config(given)
    rows = {line.split("#")[0].strip(" -"): line.rpartition("# ")[2] for line in text.splitlines() if "#" in line}
    assert rows["quant: nvfp4"] == "file" and rows["global_scale: page"] == "default"
    assert rows["ttl: 36h"] == "file" and rows["quota: 5GB"] == "file" and rows["promote_deadline: 250ms"] == "file"
    assert rows["lease: 30s"] == "default" and rows["host: 127.0.0.1"] == "default" and rows["port: 9404"] == "file"
    told = json.loads(run("show", file, "--json")[1])
    assert told["options"]["tiers[1].ttl"] == {"value": "36h", "origin": "file"}
    assert told["options"]["tiers[1].io_threads"] == {"value": 8, "origin": "default"}


def test_a_part_that_is_not_given_is_all_default(run: Run, write: Callable[..., str]) -> None:
    told = json.loads(run("show", write(block()), "--json")[1])
    assert {row["origin"] for name, row in told["options"].items() if name.startswith("kv_cache")} == {"default"}
    assert told["options"]["tiers[0].capacity"]["origin"] == "file"


def test_an_engines_own_options_are_shown_too(run: Run, write: Callable[..., str]) -> None:
    params = {"attention": "vllm", "workers": 3}
    text = run("show", write(json.dumps({**ADAPTER, "adapter_params": params})))[1]
    assert re.search(r"workers: 3 +# file", text)
    assert re.search(r"capacity: 4GiB +# default", text), "LMCache's door has tiers of its own"
    code, _, err = run("show", write(json.dumps({**ADAPTER, "adapter_params": {"attention": "x"}})))
    assert code == 2 and "vllm, sglang" in err
    assert "give a whole block" in run("show", write({"kv_cache_compression_config": []}))[2]


def test_options_of_serve_are_an_origin(run: Run) -> None:
    code, text, _ = run(
        "show", "--host-capacity", "4GiB", "--nvme", "/d:1GiB", "--listen", "unix:/s", "--http", "127.0.0.1:1"
    )
    assert code == 0
    assert re.search(r"capacity: 4GiB +# option", text) and re.search(r"listen: \['unix:/s'\] +# option", text)
    assert re.search(r"port: 1 +# option", text) and re.search(r"max_connections: 256 +# default", text)
    assert "nothing to show" in run("show")[2]
    assert "either a file" in run("show", "x.yaml", "--http", "127.0.0.1:1")[2]


def test_secrets_of_the_environment_are_named_and_masked(
    run: Run, write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "hunter2")
    file = write(block({**REDIS, "password_file": "/run/redis"}, salt="hunter2", http={"port": 1}))
    text = run("show", file)[1]
    assert "hunter2" not in text and re.search(r"salt: '\*\*\*' +# file", text)
    assert "# KVTIER_HTTP_TOKEN = ***, from the environment: the http block's secret" in text
    assert "# KVTIER_SERVER_PASSWORD = ***, from the environment: not used, there is no server block" in text
    assert "# KVTIER_REDIS_PASSWORD = ***, from the environment: not used, redis has password_file" in text
    told = json.loads(run("show", file, "--json")[1])
    assert [name for name, what in told["environment"].items() if what["used"]] == [VARIABLES[1], VARIABLES[3]]


@pytest.mark.parametrize("nbytes", [1, 1000, 1024, 4097, 10**6, 10**9, 1 << 40, 3 << 30, 1536 << 20, 400 * 10**9])
def test_sizes_are_written_exactly(nbytes: int) -> None:
    assert parse_bytes(size_text(nbytes)) == nbytes


@pytest.mark.parametrize("seconds", [0.001, 0.25, 0.0005, 1.0, 1.5, 90.0, 3600.0, 86400.0, 129600.0])
def test_times_are_written_exactly(seconds: float) -> None:
    assert parse_seconds(time_text(seconds)) == seconds


# ---- diff


def changes(told: dict[str, Any]) -> dict[str, list[str]]:
    return {one["option"]: one["effects"] for one in told["differences"]}


@pytest.mark.parametrize(
    ("before", "after", "expected", "namespace"),
    [
        (block(), block(promote_deadline=2, lease="30s", kv_cache_compression_config=[COLD]), {}, False),
        (block(), {"tiers": [{**HOST, "capacity": 4 << 30}]}, {}, False),
        (block(NVME), block({**NVME, "path": ["/var/lib/kvtier"], "capacity": "8192MiB"}), {}, False),
        (block(NVME, REDIS), block(REDIS, NVME), {}, False),
        (block(), block(salt="x"), {"salt": ["namespace", "restart"]}, True),
        (block(), block(lease="31s"), {"lease": ["restart"]}, False),
        (block(), {"tiers": [{**HOST, "capacity": "3GiB"}]}, {"tiers[host].capacity": ["shrink", "restart"]}, False),
        (block(), {"tiers": [{**HOST, "capacity": "5GiB"}]}, {"tiers[host].capacity": ["restart"]}, False),
        (
            block(),
            block(kv_cache_compression_config=[{**COLD, "quant": "k8v4"}]),
            {"quantization_for_cold_page.quant": ["namespace", "restart"]},
            True,
        ),
        (
            block(),
            block(kv_cache_compression_config=[{**COLD, "max_relative_error": 0.1}]),
            {"quantization_for_cold_page.max_relative_error": ["restart"]},
            False,
        ),
        (
            block(kv_cache_compression_config=[{**COLD, "quant": "nvfp4"}]),
            block(kv_cache_compression_config=[{**COLD, "quant": "nvfp4", "global_scale": "identity"}]),
            {"quantization_for_cold_page.global_scale": ["namespace", "restart"]},
            True,
        ),
        (
            block(),
            block(kv_cache_compression_config=[]),
            {"quantization_for_cold_page": ["namespace", "restart"]},
            True,
        ),
        (block(), block(record="/r.jsonl"), {"record": ["restart"]}, False),
        (block(REDIS), block({**REDIS, "prefix": "m:1:"}), {"tiers[redis].prefix": ["place", "restart"]}, False),
        (block(REDIS), block({**REDIS, "timeout": "2s"}), {"tiers[redis].timeout": ["restart"]}, False),
        (block(NVME), block(), {"tiers[nvme]": ["place", "restart"]}, False),
        (block(), block(NVME), {"tiers[nvme]": ["restart"]}, False),
        (block(TWO), block({**TWO, "path": "/a"}), {"tiers[nvme].path": ["place", "restart"]}, False),
        (block({**TWO, "path": "/a"}), block(TWO), {"tiers[nvme].path": ["restart"]}, False),
        (block(), block(http={"port": 1}), {"http": ["restart"]}, False),
        (
            block(server={"listen": ["unix:/a"]}),
            block(server={"listen": ["unix:/b"]}, salt="x"),
            {"server.listen": ["restart"], "salt": ["restart"]},
            False,
        ),
    ],
)  # fmt: skip
def test_differences_and_what_they_mean(
    before: Any, after: Any, expected: dict[str, list[str]], namespace: bool, run: Run, write: Callable[..., str]
) -> None:
    a, b = write(before), write(after)
    code, out, _ = run("diff", a, b, "--json")
    told = json.loads(out)
    assert changes(told) == expected
    assert (told["same"], told["namespace_changes"], code) == (not expected, namespace, bool(expected))
    code, text, _ = run("diff", a, b)
    assert code == bool(expected)
    assert ("NOT found" in text) is namespace
    assert ("no difference in effect" in text) is not bool(expected)
    assert run("diff", a, a)[0] == 0


def test_a_difference_is_written_as_in_a_file(run: Run, write: Callable[..., str]) -> None:
    _, text, _ = run("diff", write(block(TWO)), write(block({**TWO, "path": "/a"}, break_even=False)))
    lines = text.splitlines()
    assert "tiers[nvme].path: [/b, /a] -> [/a]" in lines and "break_even: true -> false" in lines
    assert "2 differences; restart the engine to have them" in text and "not looked for in every place" in text
    assert "1 difference; restart the engine to have it" in run("diff", write(block()), write(block(lease="31s")))[1]
    _, text, _ = run("diff", write(block(NVME)), write(block({**NVME, "capacity": "5GB"})))
    assert "tiers[nvme].capacity: 8GiB -> 5GB" in text
    _, text, _ = run("diff", write(block()), write(block(server={"listen": ["unix:/a"]})))
    assert "server: (none) -> listen ['unix:/a']" in text


def test_a_difference_of_the_form_tells_nothing_of_pages_that_are_not_there(
    run: Run, write: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    build._tell_plain.cache_clear()
    other = write(block(kv_cache_compression_config=[{**COLD, "quant": "nvfp4"}]))
    assert "NOT found" in run("diff", write(block()), other)[1]
    assert not caplog.records
    build._tell_plain.cache_clear()


def test_the_policies_behind_a_difference_are_the_real_ones() -> None:
    """Each option of the cold page, changed alone: it changes the namespace exactly if the codec's policy changes."""
    from kvtier.cli.config_diff import Effect, _policies, differences

    base = parse_config(block(kv_cache_compression_config=[{**COLD, "quant": "nvfp4"}]))
    for change in (
        {"quant": "2fp4"}, {"quant": "auto"}, {"quant": "none"}, {"quant": "lossless"}, {"global_scale": "identity"},
        {"rope_quant": "fp8"}, {"skip_rope_quantization": True}, {"max_relative_error": 0.1}, {"quality_sample": 0.1},
    ):  # fmt: skip
        other = parse_config(block(kv_cache_compression_config=[{**COLD, "quant": "nvfp4", **change}]))
        lost = any(Effect.NAMESPACE in one.effects for one in differences(base, other))
        assert lost is (_policies(base) != _policies(other)), change


def test_secrets_are_not_shown_and_mistakes_are_told(run: Run, write: Callable[..., str]) -> None:
    a, b = write(block(salt="hunter2")), write(block(salt="hunter3"))
    code, text, _ = run("diff", a, b)
    assert code == 1 and "hunter" not in text and "salt: *** -> ***" in text
    code, _, err = run("diff", a, write(block(lase=1)))
    assert code == 2 and "did you mean 'lease'" in err
    two = json.dumps([{**ADAPTER, "adapter_params": {}}] * 2)
    assert "holds 2 blocks" in run("diff", a, write(two))[2]
