"""What is watched while a store works: explained, recorded and slow requests, spans, and sums that hold."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import generate_latest

from kvtier.abc.tier import Slot, TierUsage
from kvtier.breakeven import BreakEven
from kvtier.build import open_store
from kvtier.config import parse_config
from kvtier.errors import TierPathError
from kvtier.explain import Explainer
from kvtier.ledger import Ledger, MissReason
from kvtier.lookup import Lookup
from kvtier.observe import ObserveOptions, Observer, Watch, usage_faults
from kvtier.origins import Origins
from kvtier.replay.recorded import read_recorded
from kvtier.storage_backends.host.tier import HostTier
from kvtier.store import TieredStore
from kvtier.telemetry import Spans
from kvtier.testing.dict_tier import DictTier
from kvtier.testing.store_machine import page_key
from tests.store_pages import PATIENCE_S, SLOT, keys, put_value


def put(store: TieredStore, *pages: int, origin: bytes = b"") -> None:
    for page in pages:
        data = bytes([page]) * SLOT
        assert isinstance(put_value(store, page_key(page), data, 16, origin=origin), Slot)
    assert store.flush(PATIENCE_S)


def request(store: TieredStore, name: str, pages: list[bytes], **more: Any) -> Lookup:
    """Look pages up, wait for them, and start."""
    lookup = store.lookup(name, pages, **more)
    assert store.hold(lookup, store.wait(lookup, PATIENCE_S))
    store.settle(name)
    return lookup


class Watched:
    """A store of 8 pages over a dict, and its watch."""

    def __init__(self, lower: DictTier | None = None, break_even: BreakEven | None = None, **options: Any) -> None:
        self.lower = lower if lower is not None else DictTier("nvme")
        self.host = HostTier(8 * SLOT)
        self.ledger = Ledger(["host", "nvme"])
        usages = {"host": self.host.usage, "nvme": lambda: TierUsage(64 * SLOT, 0, 0, 0, 0, 0, 0, 0, 0, 0)}
        self.watch = Watch(ObserveOptions(**{"debug": True, **options}), self.ledger, usages, break_even)
        self.store = TieredStore(
            self.host,
            [self.lower],
            self.ledger,
            promote_deadline_s=PATIENCE_S,
            break_even=break_even,
            observer=self.watch,
        )

    def series(self) -> dict[str, float]:
        lines = generate_latest(self.ledger.registry).decode().splitlines()
        return {name: float(v) for name, _, v in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


@pytest.fixture
def made() -> Iterator[list[Watched]]:
    """Stores to close, whatever happens."""
    made: list[Watched] = []
    yield made
    for watched in made:
        watched.lower.gate.set()
        watched.store.close()
        assert watched.ledger.violations == 0
        assert sum(watched.ledger.snapshot().errors.values()) == 0


# ---- explain


def test_each_page_of_a_request_is_explained(made: list[Watched]) -> None:
    made.append(w := Watched(explain_sample=1.0))
    put(w.store, *range(1, 9))
    put(w.store, 11, 12, 13, 14)  # 1 to 4 are below only
    request(w.store, "r1", keys(11, 12, 2, 3, 99, 4))
    record = w.watch.explain("r1")
    assert record is not None
    assert [page["outcome"] for page in record["pages"]] == [
        "hit: host", "hit: host", "hit: nvme", "hit: nvme", "miss: absent", "miss: after_gap",
    ]  # fmt: skip
    assert [page["bytes"] for page in record["pages"]] == [SLOT] * 4 + [0, 0]
    ready = [page["ready_s"] for page in record["pages"]]
    assert ready[:2] == [0.0, 0.0]
    assert 0 < ready[2] <= record["waited_s"]
    assert ready[4:] == [None, None]
    assert record["pages"][0]["key"] == page_key(11).hex()[:16]
    assert re.match(r"r1: 4 of 6 pages found, 16,384 bytes; waited \d+\.", record["summary"])
    assert w.watch.explain("r2") is None


def test_of_requests_with_one_name_the_latest_is_explained(made: list[Watched]) -> None:
    made.append(w := Watched(explain_sample=1.0))
    for number, page in enumerate((1, 2)):
        request(w.store, f"chat#{number}", keys(page))
    record = w.watch.explain("chat")
    assert record is not None
    assert record["pages"][0]["key"] == page_key(2).hex()[:16]


def test_a_dropped_request_has_no_hits(made: list[Watched]) -> None:
    made.append(w := Watched(explain_sample=1.0))
    put(w.store, 1)
    w.store.lookup("r", keys(1, 2))
    w.store.settle("r", loaded=False)
    record = w.watch.explain("r")
    assert record is not None
    assert [page["outcome"] for page in record["pages"]] == ["miss: dropped", "miss: absent"]
    assert record["loaded"] is False


def test_explained_requests_are_a_share_and_bounded() -> None:
    host = HostTier(8 * SLOT)

    def lookup(name: str, pages: int) -> Lookup:
        lookup = Lookup(name, 1.0, host)
        lookup.replace(keys(*range(pages)))
        lookup.misses = dict.fromkeys(range(pages), MissReason.ABSENT)
        return lookup

    explainer = Explainer(0.5, max_requests=10, max_pages=100)
    assert 400 < sum(explainer.wants() for _ in range(1000)) < 600
    assert not any(Explainer(0.0).wants() for _ in range(1000))
    for number in range(20):
        explainer.add(lookup(f"r{number}", 2), loaded=True, waited_s=0.0, saved_s=None)
    assert [n for n in range(20) if explainer.find(f"r{n}")] == list(range(10, 20))
    explainer.add(lookup("long", 95), loaded=True, waited_s=0.0, saved_s=None)
    assert [n for n in range(20) if explainer.find(f"r{n}")] == [18, 19]
    explainer.add(lookup("longer", 200), loaded=True, waited_s=0.0, saved_s=None)
    record = explainer.find("longer")
    assert record is not None
    assert len(record["pages"]) == 100
    host.close()


# ---- reasons


def test_pages_under_another_namespace_are_told_from_absent_ones(made: list[Watched]) -> None:
    made.append(w := Watched())
    put(w.store, 1, origin=b"text of page one")
    asked = keys(51, 52)
    request(w.store, "r", asked, hashes=[b"text of page one", b"text of page two"])
    assert {r: n for r, n in w.ledger.snapshot().misses.items() if n} == {"namespace": 1, "absent": 1}
    request(w.store, "again", asked)  # nothing to tell them by
    assert w.ledger.snapshot().misses["absent"] == 3


def test_origins_forget_before_they_grow() -> None:
    origins = Origins(rows=64)
    hashes = [b"hash %d" % n for n in range(1000)]
    origins.stored([*hashes, b""], keys(*range(1001)))
    assert origins.elsewhere(hashes, keys(*range(1000))).sum() == 0, "under the same key nothing is elsewhere"
    found = origins.elsewhere(hashes, keys(*range(1000, 2000)))
    assert found.sum() == 64
    assert not origins.elsewhere([b""], keys(1)).any()


def test_how_long_ago_evicted_pages_left(made: list[Watched]) -> None:
    made.append(w := Watched(lower=DictTier("nvme", capacity_pages=0)))
    put(w.store, *range(1, 17))
    request(w.store, "r", keys(1, 2, 30))
    series = w.series()
    assert w.ledger.snapshot().misses["evicted"] == 2
    assert series["kvtier_evicted_age_seconds_count"] == 2
    assert 0 < series["kvtier_evicted_age_seconds_sum"] < 2 * PATIENCE_S
    assert series['kvtier_evicted_age_seconds_bucket{le="86400.0"}'] == 2


def test_ages_fall_into_their_buckets() -> None:
    ledger = Ledger(["host"])
    ledger.evicted_ages([0.5, 1.0, 4.0, 1e9])
    lines = generate_latest(ledger.registry).decode()
    for bound, count in (("1.0", 2), ("5.0", 3), ("86400.0", 3), ("+Inf", 4)):
        assert f'kvtier_evicted_age_seconds_bucket{{le="{bound}"}} {count}.0\n' in lines


# ---- slow restores


def test_slow_restores_are_counted_and_one_a_second_is_logged(
    made: list[Watched], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.observe._LOG_EVERY_S", 100 * PATIENCE_S)
    made.append(w := Watched(slow_restore_s=0.005))
    put(w.store, *range(1, 9))
    put(w.store, *range(11, 19))
    for number in range(3):
        lookup = w.store.lookup(f"r{number}", keys(11 + number))
        assert w.store.hold(lookup, 1)
        lookup.load_s = 0.25
        w.store.settle(f"r{number}")
    request(w.store, "quick", keys(14))
    assert w.series()["kvtier_slow_restores_total"] == 3
    assert w.series()["kvtier_restore_seconds_count"] == 4
    (record,) = [r for r in caplog.records if r.name == "kvtier.observe"]
    name, _, text = record.getMessage().partition("{")
    line = json.loads("{" + text)
    assert (name, record.levelno) == ("slow restore ", logging.WARNING)
    assert line == record.kvtier  # type: ignore[attr-defined]  # for handlers that keep structure
    assert line["request"] == "r0"
    assert (line["load_s"], line["waited_s"], line["hits"]) == (0.25, 0.0, {"host": 1})
    w.watch._logged_s = float("-inf")
    lookup = w.store.lookup("r9", keys(15))
    assert w.store.hold(lookup, 1)
    lookup.load_s = 0.25
    w.store.settle("r9")
    assert json.loads(caplog.records[-1].getMessage().removeprefix("slow restore "))["unlogged"] == 2


def test_the_wait_for_a_lower_tier_is_part_of_a_restore(made: list[Watched]) -> None:
    made.append(w := Watched(slow_restore_s=0.05, explain_sample=1.0))
    put(w.store, *range(1, 9))
    put(w.store, *range(11, 19))
    w.lower.gate.clear()
    lookup = w.store.lookup("r", keys(1))
    threading.Timer(0.1, w.lower.gate.set).start()
    assert w.store.hold(lookup, w.store.wait(lookup, PATIENCE_S))
    w.store.settle("r")
    record = w.watch.explain("r")
    assert record is not None
    assert record["waited_s"] >= 0.09
    assert w.series()["kvtier_slow_restores_total"] == 1


# ---- time saved


def test_time_saved_is_prefill_less_load(made: list[Watched]) -> None:
    break_even = BreakEven(["nvme"], prefill_s_per_token=0.001)
    made.append(w := Watched(break_even=break_even))
    break_even.page_holds(16)
    w.watch.page_holds(16)
    put(w.store, 1, 2)
    assert w.series()["kvtier_ttft_saved_seconds_total"] == 0
    request(w.store, "r", keys(1, 2, 3))
    assert w.series()["kvtier_ttft_saved_seconds_total"] == pytest.approx(2 * 16 * 0.001)
    for _ in range(20):
        break_even.decoded(1, 0.004)
    request(w.store, "s", keys(1))
    assert w.series()["kvtier_ttft_saved_seconds_total"] == pytest.approx(2 * 0.016 + 0.016 - 0.004)


# ---- ghosts


def test_ghosts_count_what_the_ledger_counts(made: list[Watched]) -> None:
    made.append(w := Watched())
    put(w.store, *range(1, 9))
    for number in range(20):
        request(w.store, f"r{number}", keys(*range(1, 9 + number % 3)))
    curves = w.watch.curves()
    assert curves is not None
    assert curves.lookups == w.ledger.snapshot().lookups
    w.store.delete(keys(1))
    request(w.store, "after", keys(1))
    assert w.watch._ghosts is not None
    assert w.watch._ghosts.keys == 7
    made.append(without := Watched(ghosts=False))
    assert without.watch.curves() is None


# ---- recorded lookups


def test_requests_are_recorded_without_their_text(tmp_path: Path) -> None:
    path = tmp_path / "lookups.jsonl"
    config = {"tiers": [{"type": "host", "capacity": "1MiB"}], "record": str(path), "debug": True}
    store = open_store(parse_config(config))
    store.observer.page_holds(16)
    put(store, 1, 2)
    for name, pages in (("a", (1, 2, 3)), ("b", (1, 2, 4)), ("c", (1, 2, 3))):
        request(store, name, keys(*pages))
    store.close()
    trace = read_recorded(path)
    assert trace.block_tokens == 16
    assert [trace.blocks_of(r).tolist() for r in range(trace.requests)] == [[0, 1, 2], [0, 1, 3], [0, 1, 2]]
    assert trace.input_tokens.tolist() == [48] * 3
    text = path.read_text()
    assert page_key(1).hex()[:16] not in text


def test_a_record_that_cannot_be_written_is_refused_before_anything_moves(tmp_path: Path) -> None:
    config = {"tiers": [{"type": "host", "capacity": "1MiB"}], "record": str(tmp_path / "none" / "lookups.jsonl")}
    store = open_store(parse_config(config))
    with pytest.raises(TierPathError, match=r"record = .*lookups\.jsonl.* cannot be created"):
        store.observer.page_holds(16)
    store.close()


def test_ranks_record_into_files_of_their_own(tmp_path: Path) -> None:
    config = parse_config({"tiers": [{"type": "host", "capacity": "1MiB"}], "record": str(tmp_path / "lookups.jsonl")})
    for rank in range(2):
        store = open_store(config, rank=rank, ranks=2)
        store.observer.page_holds(16)
        store.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lookups.rank0.jsonl", "lookups.rank1.jsonl"]


# ---- spans


def test_spans_of_requests_and_offloads(made: list[Watched]) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    made.append(w := Watched())
    w.watch._spans = Spans(provider)
    put(w.store, *range(1, 9))
    put(w.store, *range(11, 19))
    lookup = w.store.lookup("r1", keys(1, 2, 99))
    assert w.store.hold(lookup, w.store.wait(lookup, PATIENCE_S))
    lookup.load_s = 0.001
    w.store.settle("r1")
    w.watch.offloaded(lookup.began, {"stored": 3, "exists": 0})
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"kvtier.restore", "kvtier.promote", "kvtier.load", "kvtier.offload"}
    restore = spans["kvtier.restore"]
    assert dict(restore.attributes or {}) == {
        "kvtier.request_id": "r1", "kvtier.pages": 3, "kvtier.pages.hit": 2, "kvtier.loaded": True,
        "kvtier.hits.nvme": 2, "kvtier.misses.absent": 1,
    }  # fmt: skip
    for name in ("kvtier.promote", "kvtier.load"):
        part = spans[name]
        assert part.parent is not None
        assert part.parent.span_id == restore.context.span_id
        assert part.start_time is not None and part.end_time is not None
        assert restore.start_time is not None and restore.end_time is not None
        slack_ns = 10_000_000_000  # of one clock against the other
        assert restore.start_time - slack_ns <= part.start_time <= part.end_time <= restore.end_time + slack_ns
    assert dict(spans["kvtier.offload"].attributes or {}) == {"kvtier.pages": 3, "kvtier.outcomes.stored": 3}
    provider.shutdown()


def test_spans_are_off_unless_asked_for(made: list[Watched]) -> None:
    off, on = Watched(), Watched(opentelemetry=True)
    made += [off, on]
    assert off.watch._spans is None
    assert isinstance(on.watch._spans, Spans)


# ---- sums


def test_a_page_that_is_not_counted_is_noticed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = Watched()
    put(w.store, 1)
    real = Lookup.tally
    monkeypatch.setattr(Lookup, "tally", lambda self: ({**real(self)[0], "host": 0}, real(self)[1]))
    request(w.store, "r", keys(1, 2))
    assert w.ledger.violations == 2
    assert "request 'r' asked for 2 pages, 1 were counted" in caplog.text
    assert w.series()["kvtier_accounting_violations_total"] == 2
    w.store.close()


def test_sums_of_ledger_and_tiers_are_checked() -> None:
    usages = {
        "good": lambda: TierUsage(100, 50, 2, 1, 4, 1, 1, 1, 0, 0),
        "lost": lambda: TierUsage(100, 50, 3, 1, 4, 1, 1, 1, 0, 0),
        "full": lambda: TierUsage(100, 101, 2, 1, 4, 1, 1, 1, 0, 0),
    }
    assert usage_faults(usages) == [
        "tier lost should have 2 pages and has 3",
        "tier full uses 101 bytes of 100",
    ]
    ledger = Ledger(["host"])
    watch = Watch(ObserveOptions(ghosts=False), ledger, usages)
    ledger.settle({"host": 2}, {})
    watch.check()
    assert ledger.violations == 2
    ledger._lookups += 1
    watch.check()
    assert ledger.violations == 5


def test_what_fails_while_watching_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Watched()
    monkeypatch.setattr(w.watch, "_saved_s", lambda hits: 1 / 0)
    put(w.store, 1)
    request(w.store, "r", keys(1))
    assert w.ledger.snapshot().errors["observe"] == 1
    assert w.ledger.snapshot().hits["host"] == 1
    w.store.close()


def test_a_store_without_an_observer_has_one_that_does_nothing() -> None:
    store = TieredStore(HostTier(8 * SLOT))
    put(store, 1)
    request(store, "r", keys(1), hashes=[b"h"])
    assert type(store.observer) is Observer
    assert (store.observer.curves(), store.observer.explain("r")) == (None, None)
    store.close()
