"""``kvtier config``: what LMCache's doors refuse, misunderstand or leave unused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from .blocks import ADAPTER, HOST, Run, block

SERDE: dict[str, Any] = {"type": "fs", "serde": {"type": "kvtier_nvfp4", "attention": "vllm"}}
REMOTE = "remote_storage_plugin.kvtier."
EVICTS = {"algorithm": "triattention", "calibration_path": "/x"}


def adapter(**params: Any) -> dict[str, Any]:
    return {**ADAPTER, "adapter_params": params}


def remote(**params: Any) -> dict[str, Any]:
    given = {"module_path": "kvtier.connectors.lmcache.remote", "class_name": "KvtierConnectorAdapter", **params}
    return {"extra_config": {f"{REMOTE}{name}": value for name, value in given.items()}}


@pytest.mark.parametrize("door", [adapter, remote])
def test_a_file_that_the_options_only_name_is_not_taken_for_checked(
    door: Callable[..., Any], run: Run, write: Callable[..., str]
) -> None:
    file = write(json.dumps(door(attention="vllm", config="/etc/kvtier.yaml")))
    code, out, _ = run("validate", file)
    assert code == 0 and "its block is in /etc/kvtier.yaml; validate that file, too" in out
    assert "tiers" not in out, "there are some in the file, and nobody looked"
    code, _, err = run("show", file)
    assert code == 2 and "only names the file of the block: give that one, '/etc/kvtier.yaml'" in err


@pytest.mark.parametrize("door", [adapter, remote])
def test_misspelt_options_of_the_door_are_told_what_they_are_meant_for(
    door: Callable[..., Any], run: Run, write: Callable[..., str]
) -> None:
    code, out, _ = run("validate", write(json.dumps(door(atention="vllm", config="/etc/kvtier.yaml"))))
    assert code == 1 and "(value 'vllm')" in out and "did you mean 'attention'?" in out
    assert "write them into the file" not in out
    code, out, _ = run("validate", write(json.dumps(door(confg="/etc/kvtier.yaml"))))
    assert code == 1 and "did you mean 'config'?" in out and out.count("confg") == 1


def test_a_misspelt_place_of_the_block_is_told_since_lmcache_passes_over_it(
    run: Run, write: Callable[..., str]
) -> None:
    for document in ({**ADAPTER, "adapter_param": {"attention": "vllm"}}, {"l2-adapter": [{**ADAPTER, "persist": 1}]}):
        code, out, _ = run("validate", write(json.dumps(document)))
        wrong = "adapter_param" in document
        assert code == wrong and ("did you mean 'adapter_params'" in out) == wrong


@pytest.mark.parametrize(
    ("params", "option"),
    [
        ({"compacted": ["/x"]}, "compacted"),
        ({"kv_events": {}}, "kv_events"),
        ({"kv_cache_compression_config": [EVICTS]}, "kv_cache_compression_config[0]"),
    ],
)
def test_what_only_engines_can_do_is_remarked_on(
    params: dict[str, Any], option: str, run: Run, write: Callable[..., str]
) -> None:
    for door in (adapter, remote):
        code, out, _ = run("validate", write(json.dumps(door(tiers=[HOST], **params))))
        assert code == 1 and f"'{option}'" in out, out
    assert run("validate", write(block(kv_events={})))[0] == 0, "engines take it"


def test_a_serde_is_told_what_it_has_no_use_for(run: Run, write: Callable[..., str]) -> None:
    code, out, _ = run("validate", write(json.dumps(SERDE)))
    assert code == 0 and "LMCache serde" in out and "tiers" not in out
    given = {**SERDE["serde"], "workers": 2, "http": {"port": 9404}, "salt": "s"}
    code, out, _ = run("validate", write(json.dumps({**SERDE, "serde": given})))
    assert (
        code == 1 and "'workers' = 2 is of the adapter" in out and "'http' =" in out and "'salt' = 's' is of" not in out
    )
