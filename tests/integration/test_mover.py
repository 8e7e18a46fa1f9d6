"""A page's whole way: hot pool -> cold page in host memory -> NVMe -> host memory -> hot pool, over the real tiers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.abc.codec import Form
from kvtier.abc.tier import PageMeta, Slot
from kvtier.build import open_codec, open_store
from kvtier.config import Config, parse_config
from kvtier.errors import ConfigError, SpecError
from kvtier.hot import HotLayout, HotPool
from kvtier.keys import Namespace, checksum
from kvtier.ledger import OffloadOutcome
from kvtier.mover import PageMover, policy_of
from kvtier.spec import DType, PageSpec

LAYERS, HEADS, DIM, TOKENS, PAGES = 3, 2, 32, 16, 24
SPEC = PageSpec.mha(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, page_tokens=TOKENS, dtype=DType.BF16)
HASHES = [b"page-%04d" % i for i in range(PAGES)]


def config(directory: Path, quant: str = "nvfp4", host: str = "4MiB", write: str = "through") -> Config:
    return parse_config(
        {
            "kv_cache_compression_config": [{"algorithm": "quantization_for_cold_page", "quant": quant}],
            "promote_deadline": "120s",
            "tiers": [
                {"type": "host", "capacity": host},
                {"type": "nvme", "path": str(directory), "capacity": "8MiB", "io_threads": 2, "write": write},
            ],
        }
    )


def open_mover(config: Config, spec: PageSpec = SPEC, **identity: str) -> PageMover:
    codec = open_codec(config, spec)
    namespace = Namespace.of(
        spec, policy_of(codec), model="m", weights="00", dtype=spec.buffers[0].dtype.value, **identity
    )
    return PageMover(open_store(config), spec, namespace, codec, offload_wait_s=60.0)


def close(mover: PageMover) -> None:
    assert mover.drain(120.0)
    assert mover.store.flush(120.0)
    mover.close()
    mover.store.close()


@pytest.fixture
def mover(tmp_path: Path) -> Iterator[PageMover]:
    mover = open_mover(config(tmp_path))
    yield mover
    close(mover)


def bf16(values: npt.NDArray[np.floating]) -> npt.NDArray[np.uint16]:
    return (np.ascontiguousarray(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)


def as_float(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def arrays(seed: int = 0, layout: HotLayout = HotLayout.NHD) -> list[npt.NDArray[np.uint16]]:
    """Random bf16 K and V for every layer; the same values whatever the layout."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(2 * LAYERS):
        nhd = bf16(rng.standard_normal((PAGES * TOKENS, HEADS, DIM)))
        if layout is HotLayout.HND:
            nhd = np.ascontiguousarray(nhd.reshape(PAGES, TOKENS, HEADS, DIM).transpose(0, 2, 1, 3))
        elif layout is HotLayout.SEQ:
            nhd = np.ascontiguousarray(nhd.transpose(1, 0, 2))
        made.append(nhd)
    return made


def offload(
    mover: PageMover, data: list[npt.NDArray[np.uint16]], layout: HotLayout = HotLayout.NHD
) -> dict[OffloadOutcome, int]:
    pool = HotPool.of(mover.spec, data, layout)
    return mover.offload(pool, HASHES, range(PAGES)).result(120.0).outcomes


def restore(
    mover: PageMover, request: str = "r", layout: HotLayout = HotLayout.NHD
) -> tuple[list[npt.NDArray[np.uint16]], int]:
    out = [np.full_like(a, 0x7FC0) for a in arrays(layout=layout)]
    lookup = mover.store.lookup(request, mover.namespace.page_keys(HASHES))
    ready = mover.store.wait(lookup)
    layers: list[int] = []
    result = mover.onboard(lookup, HotPool.of(mover.spec, out, layout), range(ready), on_layer=layers.append).result(
        10.0
    )
    mover.store.settle(request)
    assert result.ok, result
    assert layers == list(range(LAYERS))
    return out, ready


@pytest.mark.parametrize("layout", list(HotLayout))
def test_raw_comes_back_bit_for_bit(tmp_path: Path, layout: HotLayout) -> None:
    mover = open_mover(config(tmp_path, "none"))
    data = arrays(layout=layout)
    assert offload(mover, data, layout) == {OffloadOutcome.STORED: PAGES}
    out, ready = restore(mover, layout=layout)
    assert ready == PAGES
    assert all(np.array_equal(a, b) for a, b in zip(data, out, strict=True))
    close(mover)


def test_nvfp4_comes_back_within_its_bound_and_counts_bytes(mover: PageMover) -> None:
    data = arrays()
    assert offload(mover, data) == {OffloadOutcome.STORED: PAGES}
    out, _ = restore(mover)
    for a, b in zip(data, out, strict=True):
        x, y = as_float(a), as_float(b)
        assert 0.05 < np.linalg.norm(x - y) / np.linalg.norm(x) < 0.11
    snapshot = mover.store.ledger.snapshot()
    assert snapshot.hits["host"] == PAGES == snapshot.lookups
    assert snapshot.hot_bytes["offload"] == snapshot.hot_bytes["onboard"] == PAGES * SPEC.hot_page_bytes
    assert snapshot.cold_bytes["offload"] == PAGES * mover.layout(open_codec(config(Path("/")), SPEC)).cold_page_bytes


def test_pages_cross_layouts(tmp_path: Path) -> None:
    mover = open_mover(config(tmp_path, "none"))
    offload(mover, arrays(layout=HotLayout.HND), HotLayout.HND)
    out, _ = restore(mover, layout=HotLayout.NHD)
    assert all(np.array_equal(a, b) for a, b in zip(arrays(), out, strict=True))
    close(mover)


def test_second_offload_encodes_nothing(mover: PageMover) -> None:
    data = arrays()
    offload(mover, data)
    cold = mover.store.ledger.snapshot().cold_bytes
    assert offload(mover, data) == {OffloadOutcome.EXISTS: PAGES}
    assert mover.store.ledger.snapshot().cold_bytes == cold


def test_a_host_tier_too_small_spills_and_a_new_store_restores_from_nvme(tmp_path: Path) -> None:
    small = config(tmp_path, "none", host="144KiB")
    mover = open_mover(small)
    data = arrays()
    assert offload(mover, data) == {OffloadOutcome.STORED: PAGES}
    close(mover)
    mover = open_mover(small)
    lookup = mover.store.lookup("r", mover.namespace.page_keys(HASHES[:8]))
    assert mover.store.wait(lookup) == 8
    out = [np.zeros_like(a) for a in data]
    assert mover.onboard(lookup, HotPool.of(SPEC, out, HotLayout.NHD), range(8)).result(120.0).ok
    mover.store.settle("r")
    assert all(np.array_equal(a[: 8 * TOKENS], b[: 8 * TOKENS]) for a, b in zip(data, out, strict=True))
    assert mover.store.ledger.snapshot().hits == {"host": 0, "nvme": 8}
    close(mover)


@pytest.mark.parametrize("field", ["salt", "lora", "generation", "shard"])
def test_another_identity_never_hits(tmp_path: Path, field: str) -> None:
    mover = open_mover(config(tmp_path))
    offload(mover, arrays())
    close(mover)
    other = open_mover(config(tmp_path), SPEC, **{field: "x"})
    assert other.store.lookup("r", other.namespace.page_keys(HASHES)).ready_pages == 0
    close(other)


def test_a_page_with_nan_is_stored_raw_counted_and_told_once(
    mover: PageMover, caplog: pytest.LogCaptureFixture
) -> None:
    data = arrays()
    data[3][5 * TOKENS + 2, 1, 7] = 0x7FC0
    assert offload(mover, data) == {OffloadOutcome.STORED: PAGES - 1, OffloadOutcome.STORED_RAW: 1}
    pool = HotPool.of(SPEC, data, HotLayout.NHD)
    assert mover.offload(pool, [b"another"], [5]).result(120.0).outcomes == {OffloadOutcome.STORED_RAW: 1}
    (told,) = caplog.records
    assert HASHES[5].hex() in told.message and "NaN" in told.message and "nvfp4" in told.message
    out, ready = restore(mover)
    assert ready == PAGES
    rows = slice(5 * TOKENS, 6 * TOKENS)
    assert all(np.array_equal(a[rows], b[rows]) for a, b in zip(data, out, strict=True))


def test_rows_past_the_valid_tokens_are_zeros(mover: PageMover) -> None:
    data = arrays()
    for a in data:
        a[5:TOKENS] = 0x7F80
    pool = HotPool.of(SPEC, data, HotLayout.NHD)
    assert mover.offload(pool, HASHES[:1], [0], valid_tokens=[5]).result(120.0).outcomes == {OffloadOutcome.STORED: 1}
    out = [np.full_like(a, 0x7FC0) for a in data]
    lookup = mover.store.lookup("r", mover.namespace.page_keys(HASHES[:1]))
    assert mover.onboard(lookup, HotPool.of(SPEC, out, HotLayout.NHD), [7]).result(120.0).ok
    mover.store.settle("r")
    for a, b in zip(data, out, strict=True):
        page = as_float(b[7 * TOKENS : 8 * TOKENS])
        assert not page[5:].any()
        assert np.abs(page[:5] - as_float(a[:5])).max() < 0.8


def test_a_bit_flipped_in_host_memory_fails_the_load_and_only_that_page(mover: PageMover) -> None:
    offload(mover, arrays())
    assert mover.store.flush(120.0)
    lookup = mover.store.lookup("r", mover.namespace.page_keys(HASHES))
    slot, _ = lookup.ready_slots(4)[3]
    mover.store.host.view(slot)[17] ^= 4
    pool = HotPool.of(SPEC, [np.zeros_like(a) for a in arrays()], HotLayout.NHD)
    assert mover.onboard(lookup, pool, range(PAGES)).result(120.0).failed_pages == (3,)
    mover.store.settle("r")
    snapshot = mover.store.ledger.snapshot()
    assert snapshot.hits["host"] == 3
    assert {k: v for k, v in snapshot.misses.items() if v} == {"corrupt": 1, "after_gap": PAGES - 4}
    assert snapshot.load_failures == 1
    again = mover.store.lookup("again", mover.namespace.page_keys(HASHES))
    assert mover.store.wait(again) == PAGES, "the good copy below is found"
    mover.store.settle("again")
    assert mover.store.ledger.snapshot().hits["nvme"] == 1


@pytest.mark.parametrize("behind_whole_ones", [False, True])
@pytest.mark.parametrize("quant", ["nvfp4", "none"])
def test_a_record_without_its_last_buffer_is_partial(tmp_path: Path, quant: str, behind_whole_ones: bool) -> None:
    """Its checksum is right, so it was written like this: by another version, or by somebody else."""
    mover = open_mover(config(tmp_path, quant))
    if behind_whole_ones:
        pool = HotPool.of(SPEC, arrays(), HotLayout.NHD)
        assert mover.offload(pool, HASHES[1:], range(1, PAGES)).result(120.0).ok
        whole = mover.store.lookup("whole", mover.namespace.page_keys(HASHES[1:]))
        assert mover.onboard(whole, pool, range(1, PAGES)).result(120.0).ok
        mover.store.settle("whole")
    (key,) = mover.namespace.page_keys(HASHES[:1])
    nbytes = mover.layout(open_codec(config(tmp_path, quant), SPEC)).cold_page_bytes - 64
    (slot,) = mover.store.reserve([key], [nbytes])
    assert isinstance(slot, Slot)
    form = {"nvfp4": Form.NVFP4, "none": Form.RAW}[quant]
    meta = PageMeta(nbytes, form, TOKENS, checksum(mover.store.host.view(slot), key), SPEC.fingerprint, HASHES[0])
    mover.store.commit([key], [slot], [meta])
    lookup = mover.store.lookup("r", [key])
    pool = HotPool.of(SPEC, arrays(), HotLayout.NHD)
    result = mover.onboard(lookup, pool, range(1)).result(120.0)
    assert (result.ok, result.failed_pages) == (False, (0,))
    mover.store.settle("r")
    assert {r: n for r, n in mover.store.ledger.snapshot().misses.items() if n} == {"partial": 1}
    assert mover.store.host.usage().quarantined_pages == 1
    close(mover)


def test_the_ready_event_is_waited_for_before_the_first_read(mover: PageMover) -> None:
    data = arrays()
    for a in data:
        a[:] = 0
    asked, event = threading.Event(), threading.Event()

    def ready() -> None:
        asked.set()
        event.wait()

    ticket = mover.offload(HotPool.of(SPEC, data, HotLayout.NHD), HASHES, range(PAGES), ready=ready)
    assert asked.wait(60.0), "nobody waits for the event"
    assert not ticket.done()
    for a, b in zip(data, arrays(), strict=True):
        a[:] = b
    event.set()
    assert ticket.result(120.0).ok
    out, _ = restore(mover)
    assert all(as_float(a).any() for a in out)


def test_a_failing_ready_event_stores_nothing_and_is_counted(mover: PageMover) -> None:
    def broken() -> None:
        raise RuntimeError("device lost")

    pool = HotPool.of(SPEC, arrays(), HotLayout.NHD)
    result = mover.offload(pool, HASHES, range(PAGES), ready=broken).result(120.0)
    assert result.outcomes == {OffloadOutcome.FAILED: PAGES} and not result.ok
    assert mover.store.ledger.snapshot().errors["offload"] == 1
    assert mover.store.lookup("r", mover.namespace.page_keys(HASHES)).ready_pages == 0
    mover.store.settle("r")


def test_after_close_pages_are_refused_and_counted(tmp_path: Path) -> None:
    mover = open_mover(config(tmp_path))
    mover.close()
    result = mover.offload(HotPool.of(SPEC, arrays(), HotLayout.NHD), HASHES, range(PAGES)).result(120.0)
    assert result.outcomes == {OffloadOutcome.CLOSED: PAGES}
    mover.store.close()


def test_a_mover_without_workers_is_refused(mover: PageMover) -> None:
    codec = open_codec(config(Path("unused")), SPEC)
    with pytest.raises(ConfigError, match="workers = 0: must be at least 1"):
        PageMover(mover.store, SPEC, mover.namespace, codec, workers=0)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"ranks": 0}, "rank = 0 of ranks = 0"),
        ({"rank": 2, "ranks": 2}, "rank = 2 of ranks = 2"),
        ({"rank": -1}, "rank = -1"),
        ({"shard": "../other"}, r"shard = '../other': .* without"),
        ({"shard": "/other"}, "shard = '/other'"),
    ],
)
def test_a_place_outside_the_tiers_directory_is_refused(tmp_path: Path, place: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(config(tmp_path), **place)
    assert not list(tmp_path.iterdir())


def test_another_models_geometry_is_refused(tmp_path: Path) -> None:
    mover = open_mover(config(tmp_path))
    other = PageSpec.mha(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, page_tokens=32, dtype=DType.BF16)
    with pytest.raises(SpecError, match="another page geometry"):
        PageMover(mover.store, other, mover.namespace, open_codec(config(tmp_path), SPEC))
    with pytest.raises(SpecError, match="codec policy"):
        PageMover(mover.store, SPEC, mover.namespace, open_codec(config(tmp_path, "none"), SPEC))
    close(mover)


def test_an_offload_waits_for_room_once_however_many_pages_it_has(tmp_path: Path) -> None:
    """Every batch of it used to wait for itself: an offload of 64 batches held a worker for 64 times as long."""
    one = config(tmp_path, host="64KiB")
    codec = open_codec(one, SPEC)
    namespace = Namespace.of(SPEC, policy_of(codec), model="m", weights="00", dtype="bf16")
    mover = PageMover(open_store(one), SPEC, namespace, codec, workers=1, offload_wait_s=4.0)
    filler = [bytes([n]) * 32 for n in range(16)]
    slots = mover.store.host.reserve_many(filler, [4096] * 16)
    assert all(isinstance(slot, Slot) for slot in slots)
    pages = 16 * PAGES  # as many batches as the pool has pages
    start = time.monotonic()
    outcomes = mover.offload(
        HotPool.of(SPEC, arrays(), HotLayout.NHD), [b"%d" % n for n in range(pages)], [n % PAGES for n in range(pages)]
    ).result(120.0)
    assert outcomes.outcomes == {OffloadOutcome.FULL: pages}
    assert 3.5 < time.monotonic() - start < 4.0 * 8, "24 batches would take 96 s"
    mover.store.host.abort_many(filler, [slot for slot in slots if isinstance(slot, Slot)])
    close(mover)


def test_what_is_written_back_survives_an_orderly_end_and_not_a_kill(tmp_path: Path) -> None:
    mover = open_mover(config(tmp_path, write="back"))
    assert offload(mover, arrays()) == {OffloadOutcome.STORED: PAGES}
    assert mover.store.drain(120.0) and mover.store.lower[0].usage().resident_pages == 0
    mover.close()
    mover.store.close(30.0)
    again = open_mover(config(tmp_path, write="back"))
    assert again.store.lower[0].usage().recovered_pages == PAGES
    assert restore(again)[1] == PAGES
    close(again)
    killed = tmp_path / "killed"
    child = subprocess.run(
        [sys.executable, "-c", KILLED, str(killed), str(Path(__file__).parent)], capture_output=True, timeout=600
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    after = open_mover(config(killed, write="back"))
    assert restore(after)[1] == 0, "documented: what was in host memory alone is gone"
    assert after.store.ledger.snapshot().misses["absent"] == PAGES
    close(after)


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_mover as t
mover = t.open_mover(t.config(Path(sys.argv[1]), write="back"))
t.offload(mover, t.arrays())
os.kill(os.getpid(), signal.SIGKILL)
"""

CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_mover as t
mover = t.open_mover(t.config(Path(sys.argv[1])))
print("open", flush=True)
round_ = 0
while True:
    data = t.arrays(round_)
    hashes = [b"%d-%d" % (round_, i) for i in range(t.PAGES)]
    mover.offload(t.HotPool.of(t.SPEC, data, t.HotLayout.NHD), hashes, range(t.PAGES)).result(120.0)
    mover.store.flush(120.0)
    print(round_, flush=True)
    round_ += 1
"""


@pytest.mark.parametrize("delay_s", [0.02, 0.05, 0.11, 0.17])
def test_kill_during_offload_keeps_every_flushed_page_and_serves_no_wrong_byte(tmp_path: Path, delay_s: float) -> None:
    """kill -9 at some moment of a stream of offloads; everything that was flushed and not evicted since restores to
    exactly what a fresh encode of it gives, everything else is a miss."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    flushed = -1
    for line in child.stdout:
        if line.strip() != "open":
            flushed = int(line)
        if flushed == 3:
            break
    time.sleep(delay_s)  # the moment of the kill, not a wait for anything
    os.kill(child.pid, signal.SIGKILL)
    rest = [int(line) for line in child.stdout if line.strip().isdigit()]
    child.stdout.close()
    child.wait()
    flushed = max([flushed, *rest])
    mover = open_mover(config(tmp_path))
    found = 0
    for round_ in range(flushed + 3):
        hashes = [b"%d-%d" % (round_, i) for i in range(PAGES)]
        keys = mover.namespace.page_keys(hashes)
        for i, key in enumerate(keys):
            request = f"{round_}-{i}"
            lookup = mover.store.lookup(request, [key])
            if mover.store.wait(lookup):
                found += 1
                out = [np.zeros_like(a) for a in arrays()]
                assert mover.onboard(lookup, HotPool.of(SPEC, out, HotLayout.NHD), [i]).result(120.0).ok
                rows = slice(i * TOKENS, (i + 1) * TOKENS)
                for a, b in zip(arrays(round_), out, strict=True):
                    x, y = as_float(a[rows]), as_float(b[rows])
                    assert np.linalg.norm(x - y) / np.linalg.norm(x) < 0.12
            mover.store.settle(request)
    nvme = mover.store.lower[0].usage()
    assert nvme.quarantined_pages == 0
    assert found >= min((flushed + 1) * PAGES, nvme.recovered_pages) > 0
    close(mover)
