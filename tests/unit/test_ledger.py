"""The ledger adds up, and shows every series from the start."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from kvtier.abc.tier import PutStatus, TierUsage
from kvtier.errors import KVTierError
from kvtier.ledger import ERROR_SITES, Direction, Ledger, MissReason, OffloadOutcome


def exposed(ledger: Ledger) -> dict[str, float]:
    lines = generate_latest(ledger.registry).decode().splitlines()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))
    }


def test_every_series_exists_at_zero() -> None:
    ledger = Ledger(["host", "nvme"])
    ledger.watch("host", lambda: TierUsage(1, 0, 0, 0, 0, 0, 0, 0, 0, 0))
    series = exposed(ledger)
    expected = ["kvtier_lookups_total", "kvtier_lookup_polls_total", "kvtier_load_failures_total"]
    expected += [f'kvtier_hits_total{{tier="{t}"}}' for t in ("host", "nvme")]
    expected += [f'kvtier_misses_total{{reason="{r.value}"}}' for r in MissReason]
    expected += [f'kvtier_offload_pages_total{{outcome="{o.value}"}}' for o in OffloadOutcome]
    expected += [f'kvtier_{kind}_bytes_total{{direction="{d.value}"}}' for kind in ("hot", "cold") for d in Direction]
    expected += [f'kvtier_spill_pages_total{{status="{s.value}",tier="nvme"}}' for s in PutStatus]
    expected += [f'kvtier_errors_total{{site="{s}"}}' for s in ERROR_SITES]
    expected += [f'kvtier_codec_seconds_count{{op="{op}"}}' for op in ("encode", "decode", "verify")]
    expected += [
        f'kvtier_tier_seconds_count{{op="{op}",tier="{t}"}}' for op in ("get", "put") for t in ("host", "nvme")
    ]
    expected += ['kvtier_tier_evicted_pages_total{tier="host"}', 'kvtier_tier_used_bytes{tier="host"}']
    assert [name for name in expected if series.get(name) != 0] == []


def test_snapshot_and_exposition_agree() -> None:
    ledger = Ledger(["host", "nvme"])
    ledger.settle({"host": 3, "nvme": 2}, {MissReason.ABSENT: 4, MissReason.AFTER_GAP: 1})
    ledger.polled()
    ledger.moved(Direction.OFFLOAD, hot=400, hot_16bit=200, cold=60)
    ledger.spilled("nvme", [PutStatus.STORED, PutStatus.STORED, PutStatus.FULL])
    ledger.offloaded({OffloadOutcome.STORED: 2})
    ledger.error("spill")
    snapshot, series = ledger.snapshot(), exposed(ledger)
    assert snapshot.lookups == 10 == sum(snapshot.hits.values()) + sum(snapshot.misses.values())
    assert series["kvtier_lookups_total"] == 10
    assert series['kvtier_hits_total{tier="nvme"}'] == snapshot.hits["nvme"] == 2
    assert series['kvtier_misses_total{reason="absent"}'] == snapshot.misses["absent"] == 4
    assert series['kvtier_cold_bytes_total{direction="offload"}'] == snapshot.cold_bytes["offload"] == 60
    assert snapshot.hot_bytes_16bit == {"offload": 200, "onboard": 0}
    assert series['kvtier_spill_pages_total{status="stored",tier="nvme"}'] == 2
    assert series["kvtier_lookup_polls_total"] == series['kvtier_errors_total{site="spill"}'] == 1


def test_an_unknown_tier_or_site_is_a_bug_that_shows() -> None:
    ledger = Ledger(["host"])
    with pytest.raises(KeyError):
        ledger.settle({"tape": 1}, {})
    with pytest.raises(KeyError):
        ledger.error("nowhere")
    with pytest.raises(KVTierError):
        Ledger(["a", "a"])
