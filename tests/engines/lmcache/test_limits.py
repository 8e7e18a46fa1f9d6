"""What LMCache cannot serve is refused by name at the start, and memory that may be another chunk's is not read."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import KVTierError

HOST = {"type": "host", "capacity": "1MiB"}
EVICTS = {"algorithm": "triattention", "calibration_path": "/x"}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"kv_cache_compression_config": [EVICTS]}, "triattention evicts in an engine's live cache"),
        ({"compacted": ["/x"]}, "only SGLang serves compacted prefixes"),
        (
            {"offload_wait": "10m"},
            "offload_wait = 600 s: LMCache takes a chunk's memory back after 300 s, and",
        ),
        ({"promote_deadline": "241s"}, "promote_deadline = 241 s"),
    ],
)
@pytest.mark.parametrize("in_a_file", [False, True])
def test_what_lmcache_cannot_serve_is_refused_by_name(
    params: dict[str, Any], message: str, in_a_file: bool, tmp_path: Path
) -> None:
    import yaml

    from kvtier.connectors.lmcache import KvtierL2AdapterConfig

    block = {"tiers": [HOST], **params}
    (tmp_path / "kvtier.yaml").write_text(yaml.safe_dump(block))
    with pytest.raises(ValueError, match=re.escape(message)):
        KvtierL2AdapterConfig.from_dict({"config": str(tmp_path / "kvtier.yaml")} if in_a_file else block)
    allowed = {"offload_wait": "240s", "promote_deadline": "240s", "lease": "1d"}
    assert KvtierL2AdapterConfig.from_dict({"tiers": [HOST], **allowed}).options.config.offload_wait == 240.0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"tiers": [HOST]}, "the serde kvtier_nvfp4 takes attention, rope_dim, weights,"),
        ({"http": {"port": 9404}}, "http = {'port': 9404}: the serde"),
        ({"workers": 2}, "workers = 2: the serde"),
        ({"instance": "a"}, "give it to the adapter kvtier.connectors.lmcache, or leave it out"),
        ({"max_workers": True}, "max_workers = True: give a number of threads"),
        ({"max_workers": 0}, "max_workers = 0: give a number of threads"),
        ({"atention": "vllm"}, "did you mean 'attention'"),
    ],
)
def test_a_serde_refuses_what_it_has_no_use_for(params: dict[str, Any], message: str) -> None:
    from kvtier.connectors.lmcache.serde import make_serde

    with pytest.raises(ValueError, match=re.escape(message)):
        make_serde({"type": "kvtier_nvfp4", **params})
    make_serde({"type": "kvtier_nvfp4", "attention": "vllm", "salt": "s", "max_workers": 2}).close()


def test_capacity_is_what_lmcache_understands_where_a_tier_has_no_limit(drive: Any) -> None:
    limited = drive(tiers=[HOST])
    assert limited.adapter.get_usage().total_capacity_bytes == 1 << 20
    shared = {"type": "redis", "url": "redis://127.0.0.1:1"}  # nobody is there to say how much it may use
    usage = drive(tiers=[HOST, shared]).adapter.get_usage()
    assert usage.total_capacity_bytes == 0 and usage.usage_fraction == -1.0


def test_a_store_that_would_begin_after_its_memory_was_taken_back_fails_unread(
    drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs wait for one another where nothing makes room, so the last one may begin minutes after its task."""
    from kvtier.connectors.lmcache import chunk_store
    from kvtier.mover import PageMover

    from .storage import keys

    driver = drive()
    read: list[int] = []
    real = PageMover._fill

    def fill(self: Any, codec: Any, layout: Any, given: Any, pages: list[int], slots: Any) -> Any:
        read.extend(pages)
        return real(self, codec, layout, given, pages, slots)

    monkeypatch.setattr(PageMover, "_fill", fill)
    with monkeypatch.context() as patch:
        patch.setattr(chunk_store, "LENT_S", 0.0)
        result = driver.store(keys(3), driver.objects(3, fill=1))
    assert not result.is_successful() and read == []
    status = driver.adapter.report_status()
    assert status["offloads"]["failed"] == 3 and status["errors"]["offload"] == 1
    assert driver.lookup(keys(3)) == []
    assert driver.store(keys(3), driver.objects(3, fill=1)).is_successful() and len(read) == 3


def test_memory_is_lent_for_as_long_as_is_believed_here() -> None:
    import dataclasses

    from lmcache.integration.vllm.vllm_multi_process_adapter import DEFAULT_MQ_TIMEOUT
    from lmcache.v1.distributed.config import L1ManagerConfig

    from kvtier.connectors.lmcache.options import LENT_S

    theirs: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(L1ManagerConfig)}
    assert min(theirs["read_ttl_seconds"], theirs["write_ttl_seconds"], DEFAULT_MQ_TIMEOUT) >= LENT_S


def test_the_gate_lets_nobody_in_who_comes_too_late() -> None:
    from kvtier.connectors.lmcache.gate import Gate

    gate = Gate()
    late, early = gate.passage(time.monotonic()), gate.passage(time.monotonic() + 3600.0)
    with pytest.raises(KVTierError, match="may have given its memory"):
        late.enter()
    late.leave()
    early.enter()
    gate.shut()
    assert not gate.wait(0.0), "the other one is inside"
    early.leave()
    assert gate.wait(0.0)
