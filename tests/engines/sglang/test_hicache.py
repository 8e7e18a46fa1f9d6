"""Storage behind the engine's hierarchical cache: what it answers, what it counts, and what it refuses."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kvtier.errors import ClosedError, ConfigError, EngineError

pytestmark = pytest.mark.usefixtures("engine_hooks")


# -- types -------------------------------------------------------------------------------------------------------------


def every_call(lab: Any, storage: Any) -> dict[str, tuple[Any, Any]]:
    """What each method answers for two pages, and what it must answer when nothing works."""
    keys, at = lab.names(2), lab.slots([0, 1])
    beside = [lab.transfer(lab.PoolName.SWA, keys, at), lab.transfer(lab.PoolName.MAMBA, None, None)]
    none = {lab.PoolName.SWA: [False, False], lab.PoolName.MAMBA: []}
    from sglang.srt.mem_cache.hicache_storage import PoolTransferResult
    from sglang.srt.observability.metrics_collector import StorageMetrics

    return {
        "exists": (storage.exists(keys[0]), False),
        "batch_exists": (storage.batch_exists(keys), 0),
        "batch_exists_v2": (storage.batch_exists_v2(keys, beside), PoolTransferResult(0, {}, [])),
        "batch_get_v1": (storage.batch_get_v1(keys, at), [False, False]),
        "batch_get_v2": (storage.batch_get_v2(beside), none),
        "batch_set_v1": (storage.batch_set_v1(keys, at), [False, False]),
        "batch_set_v2": (storage.batch_set_v2(beside), none),
        "get": (storage.get(keys[0]), None),
        "batch_get": (storage.batch_get(keys), [None, None]),
        "set": (storage.set(keys[0], at), False),
        "batch_set": (storage.batch_set(keys, at), False),
        "get_stats": (storage.get_stats(), StorageMetrics()),
        "clear": (storage.clear(), None),
        "weights_changed": (storage.weights_changed(), None),
        "cache_reset": (storage.cache_reset(), None),
        "batch_built": (storage.batch_built(["r"], lambda: set()), None),
        "request_dropped": (storage.request_dropped("r"), None),
        "prefilled": (storage.prefilled(10, 1.0), None),
    }


STORE_CALLS = (
    "lookup", "hold", "wait", "settle", "reserve", "commit", "known_below", "may_have", "delete",
)  # fmt: skip


@pytest.mark.parametrize("error", [OSError("injected"), ClosedError("injected"), KeyError("injected")])
def test_every_answer_has_its_exact_type_whatever_fails(lab: Any, opened: Callable[..., Any], error: Exception) -> None:
    """None in the place of a list would end the engine's thread, and storage with it."""
    window = lab.mha_pool("page_first")
    storage = opened(beside={lab.PoolName.SWA: window})

    def fail(*_: Any, **__: Any) -> None:
        raise error

    failing: dict[str, Any] = dict.fromkeys(STORE_CALLS, fail)
    with patch.multiple(storage._store, **failing), storage.reads.serving("r"):
        answers = every_call(lab, storage)
    for method, (answer, expected) in answers.items():
        if method == "batch_exists_v2":
            assert answer.kv_hit_pages == 0 and answer.extra_pool_hit_pages == {} and not answer.restorable_prefix_pages
            continue
        assert type(answer) is type(expected) and answer == expected, method
    errors = storage.ledger.snapshot().errors
    assert (errors["engine"] > 0) == (not isinstance(error, ClosedError)), errors


def test_every_answer_has_its_exact_type_without_pools_with_odd_arguments_and_after_closing(
    lab: Any, opened: Callable[..., Any]
) -> None:
    storage = opened()
    keys = lab.names(2)
    assert storage.batch_exists([]) == 0 and storage.batch_get_v1([], lab.slots([])) == []
    assert storage.batch_set_v1([], lab.slots([])) == [] and storage.batch_get_v2([]) == {}
    assert storage.batch_get_v1(keys, lab.slots([0])) == [False, False]  # indices of another length
    assert storage.batch_set_v1(keys, torch.arange(8, 40)) == [False, False]  # no whole pages
    assert storage.batch_set_v1(["not hexadecimal"], lab.slots([0])) == [False]
    assert storage.batch_exists(["not hexadecimal"]) == 0
    assert storage.batch_exists_v2(keys, [lab.transfer("nowhere", keys, None)]).kv_hit_pages == 0
    storage.close()
    storage.close()
    for method, (answer, expected) in every_call(lab, storage).items():
        assert type(answer) is type(expected), method
        assert method == "batch_exists_v2" or answer == expected, method


def test_pages_that_find_no_room_are_told_one_by_one(lab: Any, opened: Callable[..., Any]) -> None:
    pool = lab.mha_pool("page_first", pages=24)
    nbytes = 3 * 2 * 2 * 32 * 16 * 2
    block = lab.config(host=f"{4 * nbytes}B", offload_wait="50ms")
    storage = opened(pool, block)
    held = storage._store.lookup("holder", [])
    assert held is not None and storage.batch_set_v1(lab.names(4), lab.slots([0, 1, 2, 3])) == [True] * 4
    with storage.reads.serving("r"):
        assert storage.batch_exists(lab.names(4)) == 4  # all pinned
    answers = storage.batch_set_v1(lab.names(3, 3), lab.slots([3, 4, 5]))
    assert answers == [True, False, False]  # the first is there already
    storage.request_dropped("r")
    storage._store.settle("holder")


# -- counts ------------------------------------------------------------------------------------------------------------


def test_a_page_counts_once_per_request_however_it_is_asked_for(lab: Any, opened: Callable[..., Any]) -> None:
    storage = opened()
    keys, at = lab.names(6), lab.slots([6, 7, 8, 9, 10, 11])
    assert storage.batch_set_v1(keys[:4], lab.slots([0, 1, 2, 3])) == [True] * 4

    # Asked twice, loaded in two calls, of six pages four.
    with storage.reads.serving("whole"):
        assert storage.batch_exists(keys) == 4 and storage.batch_exists(keys) == 4
        assert storage.batch_get_v1(keys[:2], at[:32]) == [True, True]
        assert storage.batch_get_v1(keys[2:4], at[32:64]) == [True, True]
    assert storage.reads.open == 1
    storage.batch_built(["whole"], lambda: set())
    counts = lab.add_up(storage)
    assert (counts.lookups, counts.hits["host"], counts.misses["absent"]) == (6, 4, 2)

    # The device has the first page by the time the rest is loaded.
    with storage.reads.serving("trimmed"):
        assert storage.batch_exists(keys[:4]) == 4
        assert storage.batch_get_v1(keys[1:4], at[:48]) == [True] * 3
    storage.batch_built(["trimmed"], lambda: set())
    counts = lab.add_up(storage)
    assert (counts.lookups, counts.hits["host"], counts.misses["superseded"]) == (10, 7, 1)

    # Promised, and not fetched; then only a part of it is.
    with storage.reads.serving("dropped"):
        assert storage.batch_exists(keys[:4]) == 4
    storage.request_dropped("dropped")
    with storage.reads.serving("partly"):
        assert storage.batch_exists(keys[:4]) == 4
        assert storage.batch_get_v1(keys[:1], at[:16]) == [True]
    storage.batch_built(["partly"], lambda: set())
    counts = lab.add_up(storage)
    assert (counts.lookups, counts.hits["host"], counts.misses["dropped"]) == (18, 8, 7)

    # Nothing there, asked again and again; stored by another meanwhile.
    late = lab.names(2, 20)
    with storage.reads.serving("retried"):
        assert [storage.batch_exists(late) for _ in range(5)] == [0] * 5
        assert storage.batch_set_v1(late, lab.slots([4, 5])) == [True, True]
        assert storage.batch_exists(late) == 2 and storage.batch_get_v1(late, at[:32]) == [True, True]
    storage.batch_built(["retried"], lambda: set())
    counts = lab.add_up(storage)
    assert (counts.lookups, counts.hits["host"]) == (20, 10) and counts.lookup_polls > 0

    # Without a request's name: a question counts nothing, a load counts itself.
    assert storage.batch_exists(keys) == 4 and storage.exists(keys[0]) and not storage.exists(keys[5])
    assert storage.ledger.snapshot().lookups == 20
    assert storage.batch_get_v1(keys, at) == [True] * 4 + [False] * 2
    counts = lab.add_up(storage)
    assert (counts.lookups, counts.hits["host"], counts.misses["absent"]) == (26, 14, 4)


def test_requests_that_vanish_are_let_go(lab: Any, opened: Callable[..., Any]) -> None:
    storage = opened()
    with storage.reads.serving("vanished"):
        storage.batch_exists(lab.names(2))
    with storage.reads.serving("waiting"):
        storage.batch_exists(lab.names(3))
    storage.batch_built([], lambda: {"waiting"})
    assert storage.reads.open == 2  # it may be in a queue that is not looked into
    with patch("kvtier.connectors.sglang.hicache_reads._FORGOTTEN_S", -1.0):
        storage.batch_built([], lambda: {"waiting"})
    assert storage.reads.open == 1
    storage.cache_reset()
    assert lab.add_up(storage).misses["absent"] == 5


def test_a_request_that_starts_during_its_load_keeps_its_pages_until_it_ends(
    lab: Any, opened: Callable[..., Any]
) -> None:
    """SGLang gives a load up when its time is over, while the thread that loads still writes into its pages."""
    storage = opened()
    keys = lab.names(2)
    assert storage.batch_set_v1(keys, lab.slots([0, 1])) == [True, True]
    mover, inside, go_on = storage._pools["kv"].mover, threading.Event(), threading.Event()
    real = mover.onboard

    def slow(lookup: Any, *args: Any, **kwargs: Any) -> Any:
        inside.set()
        assert go_on.wait(60)
        assert all(pin >= 0 for pin in lookup.pins)
        return real(lookup, *args, **kwargs)

    answers: list[Any] = []

    def load() -> None:
        with storage.reads.serving("r"):
            storage.batch_exists(keys)
            answers.append(storage.batch_get_v1(keys, lab.slots([4, 5])))

    with patch.object(mover, "onboard", slow):
        thread = threading.Thread(target=load, name="load")
        thread.start()
        assert inside.wait(60)
        storage.batch_built(["r"], lambda: set())
        assert storage._store.open_requests() == ["r"]
        go_on.set()
        thread.join(60)
    assert answers == [[True, True]]
    assert lab.add_up(storage).hits["host"] == 2


def test_a_name_that_is_used_again_during_a_load_leaves_its_pages_pinned(lab: Any, opened: Callable[..., Any]) -> None:
    storage = opened()
    keys = lab.names(4)
    assert storage.batch_set_v1(keys, lab.slots(range(4))) == [True] * 4
    mover = storage._pools["kv"].mover
    real, answers = mover.onboard, list[str]()

    def interrupted(lookup: Any, *args: Any, **kwargs: Any) -> Any:
        if not answers:
            answers.append("asked")
            pins = list(lookup.pins)
            storage.request_dropped("r")
            with storage.reads.serving("r"):  # as another request of the same name does
                assert storage.batch_exists(keys[2:]) == 2
            assert lookup.pins == pins and len(storage._store.open_requests()) == 2
        return real(lookup, *args, **kwargs)

    with patch.object(mover, "onboard", interrupted), storage.reads.serving("r"):
        assert storage.batch_exists(keys[:2]) == 2
        assert storage.batch_get_v1(keys[:2], lab.slots([4, 5])) == [True, True]
    assert storage.batch_get_v1([], lab.slots([])) == []
    assert len(storage._store.open_requests()) == 1
    with storage.reads.serving("r"):
        assert storage.batch_get_v1(keys[2:], lab.slots([6, 7])) == [True, True]
    storage.batch_built(["r"], lambda: set())
    counts = lab.add_up(storage)
    assert (counts.lookups, counts.hits["host"]) == (4, 4)


def test_three_threads_at_once(lab: Any, opened: Callable[..., Any], tmp_path: Path) -> None:
    """As SGLang calls it: one asks, one loads, one stores; and the scheduler starts and drops requests meanwhile."""
    pool = lab.mha_pool("page_first_direct", pages=40)
    storage = opened(pool, lab.config(tmp_path / "kv", host="128KiB"))
    rounds, failures = 40, []
    asked: list[threading.Event] = [threading.Event() for _ in range(rounds)]
    begun, found = threading.Event(), [0] * rounds
    want = {n: pool.kv_buffer[:, n].clone() for n in range(10)}

    def keys(n: int) -> list[str]:
        named: list[str] = lab.names(5, 5 * (n % 2))
        return named

    def guarded(work: Callable[[int], None]) -> None:
        try:
            for n in range(rounds):
                work(n)
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            failures.append(error)

    def store(n: int) -> None:
        first = 5 * (n % 2)
        answer = storage.batch_set_v1(keys(n), lab.slots(range(first, first + 5)))
        assert type(answer) is list and len(answer) == 5
        if n:
            begun.set()  # or all questions might come before there is anything

    def ask(n: int) -> None:
        assert begun.wait(60)
        with storage.reads.serving(f"r{n}"):
            found[n] = storage.batch_exists(keys(n))
        asked[n].set()

    def load(n: int) -> None:
        assert asked[n].wait(60)
        with storage.reads.serving(f"r{n}"):
            answer = storage.batch_get_v1(keys(n)[: found[n]], lab.slots(range(20, 20 + found[n])))
        for at, ok in enumerate(answer):
            if ok:
                assert torch.equal(pool.kv_buffer[:, 20 + at], want[5 * (n % 2) + at])
        storage.batch_built([f"r{n}"], lambda: {f"r{m}" for m in range(rounds)})

    threads = [threading.Thread(target=guarded, args=(work,), name=work.__name__) for work in (store, ask, load)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures, failures[0]
    counts = lab.add_up(storage)
    assert counts.lookups == 5 * rounds and sum(counts.hits.values()) > 0
    assert storage.ledger.snapshot().errors["engine"] == 0


# -- tiers -------------------------------------------------------------------------------------------------------------


def test_a_new_engine_restores_from_nvme_and_bad_pages_are_recomputed(
    lab: Any, opened: Callable[..., Any], tmp_path: Path
) -> None:
    block = lab.config(tmp_path / "kv")
    pool = lab.mha_pool("page_first", pages=24)
    keys = lab.names(6)
    storage = opened(pool, block)
    want = [pool.get_data_page(n * 16).clone() for n in range(6)]
    assert storage.batch_set_v1(keys, lab.slots(range(6))) == [True] * 6
    lab.end(storage)

    pool.kv_buffer.zero_()
    storage = opened(pool, block)
    with storage.reads.serving("r"):
        assert storage.batch_exists(keys) == 6
        assert storage.batch_get_v1(keys, lab.slots(range(6))) == [True] * 6
    storage.batch_built(["r"], lambda: set())
    assert all(torch.equal(pool.get_data_page(n * 16), want[n]) for n in range(6))
    counts = lab.add_up(storage)
    assert counts.hits == {"host": 0, "nvme": 6}
    stats = storage.get_stats()
    assert stats.prefetch_pgs == [6] and len(stats.prefetch_bandwidth) == 1 and stats.prefetch_bandwidth[0] > 0
    assert storage.get_stats().prefetch_pgs == []

    # A page that changed in host memory is found out before anything is decoded; what lies before it is restored.
    page_keys = storage._pools["kv"].namespace.page_keys(bytes.fromhex(key) for key in keys)
    (pin,) = storage._store.host.pin_many([page_keys[3]])
    ((slot, _),) = storage._store.host.pinned_many([pin])
    storage._store.host.arena[slot.offset + 7] ^= 1
    storage._store.host.unpin_many([pin])
    pool.kv_buffer.fill_(3.0)
    with storage.reads.serving("bad"):
        assert storage.batch_exists(keys) == 6
        assert storage.batch_get_v1(keys, lab.slots(range(6))) == [True] * 3 + [False] * 3
    storage.batch_built(["bad"], lambda: set())
    assert all(torch.equal(pool.get_data_page(n * 16), want[n]) for n in range(3))
    assert bool((pool.get_data_page(3 * 16) == 3.0).all())
    counts = lab.add_up(storage)
    assert counts.misses["corrupt"] == 1 and counts.lookups == 12


def test_pages_of_other_weights_salts_and_codecs_are_not_found(
    lab: Any, opened: Callable[..., Any], tiny: Path, other: Path, tmp_path: Path
) -> None:
    block = lab.config(tmp_path / "kv")
    keys = lab.names(3)
    storage = opened(None, block)
    assert storage.batch_set_v1(keys, lab.slots(range(3))) == [True] * 3 and storage.batch_exists(keys) == 3

    # An update in place: nothing before it, nor what was stored between it and the flush.
    storage.weights_changed()
    assert storage.batch_exists(keys) == 0
    assert storage.batch_set_v1(keys[:1], lab.slots([0])) == [True] and storage.batch_exists(keys[:1]) == 1
    storage.cache_reset()
    assert storage.batch_exists(keys[:1]) == 0
    assert storage.batch_set_v1(keys[:2], lab.slots([0, 1])) == [True, True]
    storage.cache_reset()
    assert storage.batch_exists(keys) == 2  # a flush alone forgets nothing
    lab.end(storage)
    for model, more in ((other, {}), (tiny, {"salt": "tenant"}), (tiny, {"raw": False})):
        block = {**lab.config(tmp_path / "kv", **more)}
        storage = lab.open_storage(model, block, lab.mha_pool("page_first"))
        assert storage.batch_exists(keys) == 0, more
        lab.end(storage)
    storage = opened(None, lab.config(tmp_path / "kv"))
    assert storage.batch_exists(keys) == 3


def test_clearing_deletes_this_models_pages_only(lab: Any, opened: Callable[..., Any], tmp_path: Path) -> None:
    block = lab.config(tmp_path / "kv")
    keys = lab.names(3)
    storage = opened(None, block)
    assert storage.batch_set_v1(keys, lab.slots(range(3))) == [True] * 3
    lab.end(storage)
    salted = opened(None, {**block, "salt": "tenant"})
    assert salted.batch_set_v1(keys, lab.slots(range(3))) == [True] * 3
    assert salted.clear() is None and salted.batch_exists(keys) == 0
    lab.end(salted)
    storage = opened(None, {**block, "salt": "tenant"})
    assert storage.batch_exists(keys) == 0
    lab.end(storage)
    assert opened(None, block).batch_exists(keys) == 3


def test_a_store_of_other_form_versions_and_half_an_interface_are_refused(
    lab: Any, opened: Callable[..., Any], tiny: Path
) -> None:
    from types import SimpleNamespace

    storage = opened()
    plain = SimpleNamespace(extra_config={"config": lab.config()}, tp_rank=0, tp_size=1, is_mla_model=False)
    with pytest.raises(ConfigError, match="interface_v1"):
        lab.KVTierStorage(plain, {})
    replicas = SimpleNamespace(extra_config={"interface_v1": 1}, tp_rank=0, tp_size=2, is_mla_model=True)
    with pytest.raises(EngineError, match=r"--tp-size.*kv-connector kvtier"):
        lab.KVTierStorage(replicas, {})
    # A pool that is not served: the storage closes itself, since after the first pool nobody else would.
    broken = lab.mha_pool("page_first")
    broken.layout = "page_unified"
    with pytest.raises(EngineError, match="page_unified"):
        storage.register_mem_host_pool_v2(broken, lab.PoolName.SWA)
    assert storage._closed and storage.batch_exists(lab.names(1)) == 0


def test_an_engine_without_its_hooks_is_refused(lab: Any, opened: Callable[..., Any]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from kvtier.connectors.sglang.hicache_hooks import scheduler_hooks

    for hook in scheduler_hooks():
        without = patch.object(HookRegistry, "_patched", HookRegistry._patched - {hook.target})
        with without, pytest.raises(EngineError, match=hook.target.rsplit(".", 1)[1]):
            opened()


# -- options -----------------------------------------------------------------------------------------------------------


def staged(**given: Any) -> dict[str, Any]:
    from kvtier.connectors.sglang.arguments import translate

    return translate({"kv_connector": "kvtier-hicache", "page_size": 64, **given})


def test_the_options_that_it_becomes(tmp_path: Path) -> None:
    import json

    path = tmp_path / "kvtier.yaml"
    path.write_text("tiers: [{type: host, capacity: 1GiB}]\npromote_deadline: 3s\n")
    options = staged(kv_connector_config=str(path), hicache_mem_layout="page_head", hicache_size=8)
    extra = json.loads(options.pop("hicache_storage_backend_extra_config"))
    assert extra["config_file"] == str(path) and extra["interface_v1"] == 1 and extra["prefetch_timeout_base"] == 3.0
    assert extra["prefetch_threshold"] == 64
    assert options == {
        "page_size": 64,
        "hicache_mem_layout": "page_head",
        "hicache_size": 8,
        "enable_hierarchical_cache": True,
        "hicache_host_memory_mode": "buffer_only",
        "hicache_storage_backend": "dynamic",
    }
    assert staged(page_size=None)["page_size"] == 64
    assert staged(disaggregation_mode="prefill", tp_size=2)["enable_hierarchical_cache"] is True


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"hicache_storage_backend": "file"}, "--hicache-storage-backend = 'file'"),
        ({"hicache_storage_backend_extra_config": "{}"}, "--kv-connector-config"),
        ({"disable_radix_cache": True}, "--disable-radix-cache"),
        ({"enable_lmcache": True}, "--enable-lmcache"),
        ({"enable_unified_cache_external_linker": True}, "a linker replaces"),
        ({"disaggregation_mode": "decode"}, "give it to the prefill instances"),
        ({"disaggregation_decode_enable_offload_kvcache": True}, "bypass"),
        (
            {"disaggregation_mode": "prefill", "disaggregation_decode_allocation_policy": "prefill_complete"},
            "no storage behind its prefill instances",
        ),
        ({"pp_size": 2}, "--pp-size = 2"),
        ({"dcp_size": 2}, "--dcp-size = 2"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype"),
    ],
)
def test_what_cannot_be_combined_is_a_message(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        staged(**given)
    assert told in str(caught.value) and "kvtier-hicache" in str(caught.value)


@pytest.mark.parametrize("option", [{"enable_hierarchical_cache": True}, {"hicache_storage_backend": "file"}])
def test_the_direct_path_names_the_staged_one(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--kv-connector kvtier-hicache"):
        staged(**option, kv_connector="kvtier")
    with pytest.raises(ConfigError, match="kvtier-hicache"):
        staged(kv_connector="another")


def test_the_command_line_takes_one_of_the_two() -> None:
    from kvtier.connectors.sglang.arguments import add_flags

    parser = argparse.ArgumentParser()
    add_flags(None, parser)
    assert parser.parse_args(["--kv-connector", "kvtier-hicache"]).kv_connector == "kvtier-hicache"
    with pytest.raises(SystemExit):
        parser.parse_args(["--kv-connector", "kvtier-other"])
