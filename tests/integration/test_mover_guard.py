"""The quality guard where things happen at once, in another order, or beside options that it must not undo."""

from __future__ import annotations

import json
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.build import open_codec
from kvtier.config import parse_config
from kvtier.hot import HotLayout, HotPool
from kvtier.keys import Namespace
from kvtier.ledger import OffloadOutcome
from kvtier.mover import PageMover, policy_of
from kvtier.spec import DType, PageSpec
from tests.mover_pages import DIM, HEADS, LAYERS, PAGES, SPEC, TOKENS, Bits, open_mover


def floats(bits: Bits) -> npt.NDArray[np.float64]:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def values(pages: int = PAGES, *, bad: tuple[int, ...] = (), seed: int = 2) -> list[Bits]:
    """K and V of two layers. Buffers of `bad` hold what NVFP4 rounds worst: beside a 6, every 5 becomes a 4."""
    rng = np.random.default_rng(seed)
    shape = (pages * TOKENS, HEADS, DIM)
    out = [(rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for _ in range(4)]
    for n in bad:
        out[n][:], out[n][:, :, ::16] = 0x40A0, 0x40C0
    return out


def names(what: str, pages: int = PAGES) -> list[bytes]:
    return [f"{what}-{i:04}".encode() for i in range(pages)]


def offload(mover: PageMover, data: list[Bits], hashes: list[bytes]) -> dict[OffloadOutcome, int]:
    return mover.offload(HotPool.of(SPEC, data, HotLayout.NHD), hashes, range(len(hashes))).result(120.0).outcomes


def restore(mover: PageMover, hashes: list[bytes]) -> list[Bits]:
    out = [np.zeros((len(hashes) * TOKENS, HEADS, DIM), np.uint16) for _ in range(4)]
    lookup = mover.store.lookup("r", mover.namespace.page_keys(hashes))
    assert mover.store.wait(lookup) == len(hashes)
    result = mover.onboard(lookup, HotPool.of(SPEC, out, HotLayout.NHD), range(len(hashes))).result(120.0)
    mover.store.settle("r")
    assert result.ok, result
    return out


def stored_levels(mover: PageMover, hashes: list[bytes]) -> set[tuple[int, ...]]:
    lookup = mover.store.lookup("levels", mover.namespace.page_keys(hashes))
    assert mover.store.wait(lookup) == len(hashes)
    found = {mover._reader.levels_of(*pin) for pin in lookup.slots_of(range(len(hashes)))}
    mover.store.settle("levels")
    return found


def error(got: Bits, exact: Bits) -> float:
    return float(np.linalg.norm(floats(got) - floats(exact)) / np.linalg.norm(floats(exact)))


def write_scales(path: Path, scale: float) -> Path:
    names = [f"model.layers.{n}.self_attn.{x}_proj.{x}_scale" for n in range(LAYERS) for x in "kv"]
    header = {name: {"dtype": "F32", "shape": [], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + struct.pack("<f", scale) * len(names))
    return path


def test_pages_read_before_a_switch_do_not_change_what_is_written_after_it(tmp_path: Path) -> None:
    """Reading needs no scales, since a page holds its own; a layout made for reading must not be used to write."""
    scale = 2.0**-9
    options = {
        "global_scale": "checkpoint",
        "scale_checkpoint_path": str(write_scales(tmp_path / "scales.safetensors", scale)),
        "quality_sample": 1.0,
        "quality_budget": 0.12,
    }
    data = [(bits - (9 << 7)).astype(np.uint16) for bits in values(bad=(3,))]  # 2**-9 as large: lost at scale 1
    with open_mover(tmp_path / "tier", **options) as mover:
        offload(mover, data, names("first"))
        offload(mover, data, names("second"))
        assert stored_levels(mover, names("second")) == {(0, 0, 0, 1)}
    with open_mover(tmp_path / "tier", **options) as mover:
        restored = restore(mover, names("second"))
        offload(mover, data, names("third"))
        offload(mover, data, names("fourth"))
        assert stored_levels(mover, names("fourth")) == {(0, 0, 0, 1)}
        for again, before in zip(restore(mover, names("fourth")), restored, strict=True):
            np.testing.assert_array_equal(again, before)


def test_two_workers_a_restart_and_pages_of_before_and_after_a_switch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Many small offloads at once: each buffer switches once a step, no page is lost, whichever worker stored it."""
    options = {"quant": "auto", "quality_sample": 1.0, "quality_budget": 0.12}
    data = values(4, bad=(3,))
    batches = [names(f"batch{n}", 4) for n in range(24)]
    with open_mover(tmp_path, **options) as mover:
        before = names("before", 4)
        offload(mover, data, before)
        start, pool = threading.Barrier(3), HotPool.of(SPEC, data, HotLayout.NHD)
        tickets: list[Any] = []

        def submit(mine: list[list[bytes]]) -> None:
            start.wait(30.0)
            tickets.extend(mover.offload(pool, hashes, range(4)) for hashes in mine)

        threads = [threading.Thread(target=submit, args=(batches[n::2],)) for n in range(2)]
        for thread in threads:
            thread.start()
        start.wait(30.0)
        for thread in threads:
            thread.join(60.0)
            assert not thread.is_alive()
        assert [t.result(120.0).outcomes for t in tickets] == [{OffloadOutcome.STORED: 4}] * len(batches)
        registry = mover.store.ledger.registry
        assert registry.get_sample_value("kvtier_precision_switches_total", {"role": "v"}) == 1
        assert registry.get_sample_value("kvtier_precision_switches_total", {"role": "k"}) == 0
        seen = [stored_levels(mover, batch) for batch in batches]
        assert set().union(*seen) == {(), (0, 0, 0, 1)} or seen == [{(0, 0, 0, 1)}] * len(batches)
        assert stored_levels(mover, before) == {()}
        out = {tuple(batch): restore(mover, batch) for batch in [before, *batches]}
    assert sum("quality_budget" in r.getMessage() for r in caplog.records) == 1
    for batch, levels in zip([before, *batches], [{()}, *seen], strict=True):
        worst = 0.02 if levels == {(0, 0, 0, 1)} else 0.25
        assert error(out[tuple(batch)][3], data[3]) < worst
    with open_mover(tmp_path, **options) as mover:  # a restart in between: old pages are read, new ones switch anew
        for batch in [before, *batches]:
            for got, same in zip(restore(mover, batch), out[tuple(batch)], strict=True):
                np.testing.assert_array_equal(got, same)
        offload(mover, data, names("after-a", 4))
        assert stored_levels(mover, names("after-a", 4)) == {()}
        offload(mover, data, names("after-b", 4))
        offload(mover, data, names("after-c", 4))
        assert stored_levels(mover, names("after-c", 4)) == {(0, 0, 0, 1)}


def test_columns_that_are_to_be_kept_are_kept_after_a_switch(tmp_path: Path) -> None:
    """The next precision of a key whose rotary columns lie there as they are is not one that rounds them."""
    data = values(bad=(0,))
    options = {"skip_rope_quantization": True, "quality_sample": 1.0, "quality_budget": 0.12}
    with open_mover(tmp_path, **options) as mover:
        for n in range(3):
            assert offload(mover, data, names(f"{n}")) == {OffloadOutcome.STORED: PAGES}
            for key, exact in zip(restore(mover, names(f"{n}"))[::2], data[::2], strict=True):
                np.testing.assert_array_equal(key[:, :, :16], exact[:, :, :16])
        assert stored_levels(mover, names("2")) == {(2, 0, 0, 0)}


def test_keys_that_have_two_components_already_are_stored_whole_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_mover(tmp_path, quant="2fp4", quality_sample=1.0, quality_budget=0.004) as mover:
        offload(mover, values(), names("first"))
        said = [r.getMessage() for r in caplog.records if "quality_budget" in r.getMessage()]
        offload(mover, values(), names("second"))
        assert stored_levels(mover, names("second")) == {(2, 1, 2, 1)}
    assert sorted(message.rsplit(" as ", 1)[1] for message in said) == [
        "two NVFP4 components", "two NVFP4 components", "uncompressed values", "uncompressed values",
    ]  # fmt: skip


def test_the_guard_sees_pages_that_are_over_their_own_budget(tmp_path: Path) -> None:
    """Else a bad layer would leave every page uncompressed for good, and nobody would ask why."""
    data = values(bad=(1, 3))
    options = {"quant": "auto", "max_relative_error": 0.12, "quality_sample": 1.0, "quality_budget": 0.12}
    with open_mover(tmp_path, **options) as mover:
        assert offload(mover, data, names("first")) == {OffloadOutcome.STORED_OVER_BUDGET: PAGES}
        assert offload(mover, data, names("second")) == {OffloadOutcome.STORED: PAGES}
        assert stored_levels(mover, names("second")) == {(0, 1, 0, 1)}


@pytest.mark.parametrize(
    ("options", "loss"),
    [
        ({"quant": "auto"}, 0.12),
        ({"quant": "nvfp4"}, 0.12),
        ({"quant": "nvfp4", "global_scale": "identity"}, 0.12),
        ({"quant": "nvfp4", "skip_rope_quantization": True}, 0.12),
        ({"quant": "nvfp4", "rope_quant": "2fp4"}, 0.12),
        ({"quant": "nvfp4", "rope_quant": "fp8"}, 0.12),
        ({"quant": "nvfp4_offset"}, 0.12),
        ({"quant": "nvfp4_token"}, 0.12),
        ({"quant": "k8v4"}, 0.12),
        ({"quant": "2fp4"}, 0.12),
    ],
    ids=lambda o: "-".join(map(str, o.values())) if isinstance(o, dict) else "",
)
def test_every_form_keeps_the_error_budget(tmp_path: Path, options: dict[str, Any], loss: float) -> None:
    """V is bad in every other page; every form stores V in NVFP4, so these pages and no others are over it."""
    data = values()
    for page in range(0, PAGES, 2):
        rows = slice(page * TOKENS, (page + 1) * TOKENS)
        for n in (1, 3):
            data[n][rows], data[n][rows, :, ::16] = 0x40A0, 0x40C0
    with open_mover(tmp_path, **options, max_relative_error=loss) as mover:
        assert offload(mover, data, names("x")) == {
            OffloadOutcome.STORED: PAGES // 2,
            OffloadOutcome.STORED_OVER_BUDGET: PAGES // 2,
        }
    with open_mover(tmp_path, **options) as mover:
        for got, exact in zip(restore(mover, names("x")), data, strict=True):
            for page in range(PAGES):
                rows = slice(page * TOKENS, (page + 1) * TOKENS)
                assert np.array_equal(got[rows], exact[rows]) == (page % 2 == 0), page


def digest(spec: PageSpec, **options: Any) -> str:
    methods = [{"algorithm": "quantization_for_cold_page", **options}]
    which = open_codec(
        parse_config({"tiers": [{"type": "host", "capacity": "1MiB"}], "kv_cache_compression_config": methods}), spec
    )
    return Namespace.of(spec, policy_of(which), model="m", weights="00", dtype="bf16").digest.hex()


def test_the_namespace_of_auto_is_that_of_the_form_it_became() -> None:
    """Never one of its own: a later default must not read pages of this one, an engine that names the form may."""

    def keys(tokens: int) -> PageSpec:
        return PageSpec.mha(layers=1, kv_heads=1, head_dim=32, page_tokens=tokens, dtype=DType.BF16)

    def latents(tokens: int) -> PageSpec:
        return PageSpec.mla(layers=1, page_tokens=tokens, dtype=DType.BF16)

    assert digest(keys(16)) == digest(keys(16), quant="nvfp4_token") != digest(keys(16), quant="nvfp4")
    assert digest(keys(8)) == digest(keys(8), quant="nvfp4")
    for tokens in (8, 16):
        assert digest(latents(tokens)) == digest(latents(tokens), quant="nvfp4")
    # A target of latents with a draft of keys is one page, and its keys gain.
    both = latents(16).with_draft(keys(16))
    assert digest(both) == digest(both, quant="nvfp4_token")
    specs = [keys(8), keys(16), keys(32), latents(8), latents(16), both]
    assert len({digest(spec) for spec in specs}) == len(specs)
