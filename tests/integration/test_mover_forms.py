"""Every form of the cold page through the mover and the real tiers; the error budget and the quality sample."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.abc.codec import FINER, Form
from kvtier.abc.tier import PageMeta, Slot
from kvtier.build import _tell_plain, open_codec
from kvtier.codecs.registry import codec
from kvtier.config import Config, parse_config
from kvtier.errors import ConfigError, SpecError
from kvtier.hot import HotLayout, HotPool
from kvtier.keys import Namespace, checksum
from kvtier.ledger import OffloadOutcome
from kvtier.mover import PageMover, policy_of
from kvtier.spec import BufferSpec, DType, PageSpec, Role
from tests.mover_pages import DIM, HEADS, LAYERS, PAGES, SPEC, TOKENS, Bits, open_mover

HASHES = [b"page-%04d" % i for i in range(PAGES)]


def values() -> list[Bits]:
    rng = np.random.default_rng(2)
    shape = (PAGES * TOKENS, HEADS, DIM)
    return [(rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for _ in range(4)]


def floats(bits: Bits) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def offload(mover: PageMover, data: list[Bits]) -> dict[OffloadOutcome, int]:
    pool = HotPool.of(SPEC, data, HotLayout.NHD)
    return mover.offload(pool, HASHES, range(PAGES)).result(120.0).outcomes


def restore(mover: PageMover) -> list[Bits]:
    out = [np.zeros((PAGES * TOKENS, HEADS, DIM), np.uint16) for _ in range(4)]
    lookup = mover.store.lookup("r", mover.namespace.page_keys(HASHES))
    ready = mover.store.wait(lookup)
    assert ready == PAGES
    result = mover.onboard(lookup, HotPool.of(SPEC, out, HotLayout.NHD), range(ready)).result(120.0)
    mover.store.settle("r")
    assert result.ok, result
    return out


@pytest.mark.parametrize(
    ("options", "largest"),
    [
        ({"quant": "nvfp4"}, 0.1),
        ({"quant": "nvfp4_offset"}, 0.1),
        ({"quant": "nvfp4_token"}, 0.1),
        ({"quant": "k8v4"}, 0.03),
        ({"quant": "2fp4"}, 0.01),
        ({"skip_rope_quantization": True}, 0.09),
        ({"rope_quant": "fp8"}, 0.09),
        ({"rope_quant": "2fp4"}, 0.09),
        ({"quant": "lossless"}, 0.0),
        ({"quant": "none"}, 0.0),
    ],
    ids=str,
)
def test_pages_come_back_after_a_restart(tmp_path: Path, options: dict[str, Any], largest: float) -> None:
    """K within `largest`, V within what NVFP4 costs; from disk, so that the record's form is what is read."""
    if options.get("quant") == "lossless":
        pytest.importorskip("zstandard", reason="zstandard is not installed: pip install 'kvtier[lossless]'")
    data = values()
    with open_mover(tmp_path, **options) as mover:
        assert offload(mover, data) == {OffloadOutcome.STORED: PAGES}
        assert mover.store.flush(120.0)
    with open_mover(tmp_path, **options) as mover:
        out = restore(mover)
    for n, (got, exact) in enumerate(zip(out, data, strict=True)):
        bound = largest if n % 2 == 0 or not largest else 0.1
        if not bound:
            np.testing.assert_array_equal(got, exact)
        else:
            error = np.linalg.norm(floats(got) - floats(exact)) / np.linalg.norm(floats(exact))
            assert error < bound, (n, error)


@pytest.mark.parametrize("quant", ["nvfp4_offset", "nvfp4_token", "k8v4"])
def test_pages_too_small_for_a_form_are_refused_at_once(tmp_path: Path, quant: str) -> None:
    spec = PageSpec.mha(layers=1, kv_heads=1, head_dim=16, page_tokens=8, dtype=DType.BF16)
    with open_mover(tmp_path) as mover, pytest.raises(SpecError, match=f"quant = {quant} needs pages of .* not 8"):
        namespace = Namespace.of(spec, policy_of(codec(quant)), model="m", weights="00", dtype="bf16")
        PageMover(mover.store, spec, namespace, codec(quant))


def test_rotary_options_are_refused_where_all_of_k_rotates(tmp_path: Path) -> None:
    spec = PageSpec.mha(layers=1, kv_heads=1, head_dim=16, page_tokens=16, dtype=DType.BF16)
    which = codec("nvfp4", rope="keep")
    with open_mover(tmp_path) as mover, pytest.raises(SpecError, match="skip_rope_quantization"):
        PageMover(mover.store, spec, Namespace.of(spec, policy_of(which), model="m", weights="00", dtype="bf16"), which)


def test_lossless_pages_take_less_than_raw_ones(tmp_path: Path) -> None:
    pytest.importorskip("zstandard", reason="zstandard is not installed: pip install 'kvtier[lossless]'")
    with open_mover(tmp_path, quant="lossless") as mover:
        offload(mover, values())
        snapshot = mover.store.ledger.snapshot()
    assert snapshot.cold_bytes["offload"] < 0.9 * snapshot.hot_bytes["offload"]


def test_pages_over_the_error_budget_are_stored_without_loss_and_counted(tmp_path: Path) -> None:
    data = values()
    # Beside a 6, every 5 becomes a 4.
    data[0][:TOKENS], data[0][:TOKENS, :, ::16] = 0x40A0, 0x40C0
    data[0][3 * TOKENS, 0, 5] = 0x7FC0
    with open_mover(tmp_path, quant="nvfp4", max_relative_error=0.12) as mover:
        assert offload(mover, data) == {
            OffloadOutcome.STORED: PAGES - 2,
            OffloadOutcome.STORED_OVER_BUDGET: 1,
            OffloadOutcome.STORED_RAW: 1,
        }
        registry = mover.store.ledger.registry
        counted = {
            outcome: registry.get_sample_value("kvtier_offload_pages_total", {"outcome": outcome})
            for outcome in ("stored", "stored_raw", "stored_over_budget")
        }
        assert counted == {"stored": PAGES - 2, "stored_raw": 1, "stored_over_budget": 1}
        cold = mover.layout(mover._codec).cold_page_bytes
        assert mover.store.ledger.snapshot().cold_bytes["offload"] == (PAGES - 2) * cold + 2 * SPEC.hot_page_bytes
        assert mover.store.flush(120.0)
    with open_mover(tmp_path, quant="nvfp4") as mover:  # from disk; the budget is not part of what a page is
        out = restore(mover)
    for got, exact in zip(out, data, strict=True):
        np.testing.assert_array_equal(got[:TOKENS], exact[:TOKENS])
        np.testing.assert_array_equal(got[3 * TOKENS : 4 * TOKENS], exact[3 * TOKENS : 4 * TOKENS])


def test_the_quality_sample_shows_k_and_v_of_each_layer(tmp_path: Path) -> None:
    with open_mover(tmp_path, quant="k8v4", quality_sample=1.0) as mover:
        offload(mover, values())
        registry = mover.store.ledger.registry
        for layer in ("0", "1"):
            means = {}
            for role in ("k", "v"):
                labels = {"layer": layer, "role": role}
                assert registry.get_sample_value("kvtier_relative_error_count", labels) == PAGES
                total = registry.get_sample_value("kvtier_relative_error_sum", labels)
                assert total is not None
                means[role] = total / PAGES
            assert 0.01 < means["k"] < 0.03 < 0.09 < means["v"] < 0.1
    with open_mover(tmp_path / "other", quant="k8v4") as mover:
        offload(mover, values())
        name = "kvtier_relative_error_count"
        assert mover.store.ledger.registry.get_sample_value(name, {"layer": "0", "role": "k"}) is None


@pytest.fixture
def fresh_warnings() -> Iterator[None]:
    """Warnings are told once per process: as if none had been."""
    _tell_plain.cache_clear()
    yield
    _tell_plain.cache_clear()


def page_of(tokens: int, role: Role = Role.K) -> PageSpec:
    return PageSpec(tokens, (BufferSpec(role, 0, 1, tokens, 32, DType.BF16),))


def cold_page(**options: Any) -> Config:
    methods = [{"algorithm": "quantization_for_cold_page", **options}]
    return parse_config({"kv_cache_compression_config": methods, "tiers": [{"type": "host", "capacity": "1MiB"}]})


@pytest.mark.parametrize("tokens", [16, 48, 64])
def test_the_default_is_the_cheapest_form_that_passes_the_gates(
    fresh_warnings: None, caplog: pytest.LogCaptureFixture, tokens: int
) -> None:
    assert open_codec(cold_page(), page_of(tokens)).id == "nvfp4_token"
    assert open_codec(parse_config({"tiers": [{"type": "host", "capacity": "1MiB"}]}), page_of(tokens)).id == (
        "nvfp4_token"
    )
    assert not caplog.records


@pytest.mark.parametrize("tokens", [1, 8, 24])
def test_pages_too_short_for_the_default_are_plain_nvfp4_with_one_warning(
    fresh_warnings: None, caplog: pytest.LogCaptureFixture, tokens: int
) -> None:
    for _ in range(3):
        which = open_codec(cold_page(max_relative_error=0.5), page_of(tokens))
        assert (which.id, which.config) == ("nvfp4", {"global_scale": "page"})
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"pages of {tokens} tokens are stored as plain nvfp4" in record.getMessage()
    advised = record.getMessage().rsplit("quant: ", 1)[1]
    assert advised in ("k8v4", "2fp4")
    open_codec(cold_page(quant=advised), page_of(tokens)).layout(page_of(tokens))  # takes such pages
    with pytest.raises(SpecError, match=f"quant = nvfp4_token needs pages of a multiple of 16 tokens, not {tokens}"):
        open_codec(cold_page(quant="nvfp4_token"), page_of(tokens)).layout(page_of(tokens))


def test_the_default_is_plain_where_no_key_gains_and_where_its_options_are_set(
    fresh_warnings: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Latents are nvfp4 in every form; keys whose width cannot be compressed are kept."""
    assert open_codec(cold_page(), page_of(8, Role.LATENT)).id == "nvfp4"
    assert open_codec(cold_page(), PageSpec(8, (BufferSpec(Role.K, 0, 1, 8, 40, DType.BF16),))).id == "nvfp4"
    for options in ({"skip_rope_quantization": True}, {"rope_quant": "fp8"}, {"global_scale": "identity"}):
        assert open_codec(cold_page(**options), page_of(16)).id == "nvfp4"
    assert not any("plain nvfp4" in r.getMessage() for r in caplog.records)


def switches(mover: PageMover) -> dict[str, float | None]:
    registry = mover.store.ledger.registry
    return {
        role: registry.get_sample_value("kvtier_precision_switches_total", {"role": role})
        for role in ("k", "v", "latent")
    }


def errors_of(got: list[Bits], exact: list[Bits], pages: slice) -> list[float]:
    rows = slice(pages.start * TOKENS, pages.stop * TOKENS)
    pairs = [(floats(a[rows]), floats(b[rows])) for a, b in zip(got, exact, strict=True)]
    return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs]


@pytest.mark.parametrize("quant", ["auto", "nvfp4", "nvfp4_offset", "k8v4", "2fp4"])
def test_a_layer_that_stays_over_its_budget_goes_to_the_next_precision(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, quant: str
) -> None:
    """V of layer 1 is made of values that NVFP4 rounds badly; the budget lies between its error and all others."""
    data = values()
    # Beside a 6, every 5 becomes a 4.
    data[3][:], data[3][:, :, ::16] = 0x40A0, 0x40C0
    options = {"quant": quant, "quality_sample": 1.0, "quality_budget": 0.12}
    pool = HotPool.of(SPEC, data, HotLayout.NHD)
    first, rest = slice(0, PAGES // 2), slice(PAGES // 2, PAGES)
    with open_mover(tmp_path, **options) as mover:
        assert switches(mover) == {"k": 0, "v": 0, "latent": 0}
        before = mover.offload(pool, HASHES[first], range(PAGES)[first]).result(120.0)
        assert before.outcomes == {OffloadOutcome.STORED: PAGES // 2}
        assert switches(mover)["v"] == 0, "half a window of samples must not switch"
        # Other pages fill the window, so that the rest is stored finer.
        other = mover.offload(pool, [b"other-%04d" % i for i in range(PAGES)], range(PAGES)).result(120.0)
        after = mover.offload(pool, HASHES[rest], range(PAGES)[rest]).result(120.0)
        assert other.ok and after.ok
        assert switches(mover) == {"k": 0, "v": 1, "latent": 0}
        plain, finer = (mover.layout(mover._codec, levels).cold_page_bytes for levels in ((), (0, 0, 0, 1)))
        snapshot = mover.store.ledger.snapshot()
        assert snapshot.cold_bytes["offload"] == (PAGES // 2 + PAGES) * plain + (PAGES // 2) * finer
        out = restore(mover)
        assert mover.store.flush(120.0)
    said = [r.getMessage() for r in caplog.records if "quality_budget" in r.getMessage()]
    assert len(said) == 1 and "layer 1, v" in said[0] and "two NVFP4 components" in said[0]
    assert errors_of(out, data, first)[3] > 0.12 > 0.02 > errors_of(out, data, rest)[3]

    with open_mover(tmp_path, **options) as mover:  # from disk, by a process that has not switched
        again = restore(mover)
        assert switches(mover)["v"] == 0
    for got, same in zip(again, out, strict=True):
        np.testing.assert_array_equal(got, same)
    # Without the guard it is the same policy: pages are found and read.
    with open_mover(tmp_path, quant=quant) as mover:
        for got, same in zip(restore(mover), out, strict=True):
            np.testing.assert_array_equal(got, same)


def test_the_precision_after_the_next_loses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = values()
    pool = HotPool.of(SPEC, data, HotLayout.NHD)
    with open_mover(tmp_path, quant="k8v4", quality_sample=1.0, quality_budget=0.001) as mover:
        for n in range(3):
            mover.offload(pool, [b"%d-%04d" % (n, i) for i in range(PAGES)], range(PAGES)).result(120.0)
        assert switches(mover) == {"k": 4, "v": 4, "latent": 0}, "two steps in each of two layers"
        assert offload(mover, data) == {OffloadOutcome.STORED: PAGES}
        for got, exact in zip(restore(mover), data, strict=True):
            np.testing.assert_array_equal(got, exact)
    assert sum("quality_budget" in r.getMessage() for r in caplog.records) == 8


def test_a_budget_without_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"quality_budget = 0.1 needs quality_sample, such as 0.001"):
        cold_page(quality_budget=0.1)


def write_scales(path: Path, key: float, value: float) -> Path:
    """A safetensors file with the same scales in every layer."""
    names = [f"model.layers.{n}.self_attn.{x}_proj.{x}_scale" for n in range(LAYERS) for x in "kv"]
    header = {name: {"dtype": "F32", "shape": [], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + struct.pack("<2f", key, value) * LAYERS)
    return path


def test_pages_with_a_checkpoints_scales_are_found_with_these_scales_only(tmp_path: Path) -> None:
    data, tier = values(), tmp_path / "tier"
    one, other = write_scales(tmp_path / "one.safetensors", 0.01, 0.02), tmp_path / "other.safetensors"
    write_scales(other, 0.01, 0.03)
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    (copy / "model.safetensors").write_bytes(one.read_bytes())
    options: dict[str, Any] = {"global_scale": "checkpoint"}
    with open_mover(tier, **options, scale_checkpoint_path=str(one)) as mover:
        assert offload(mover, data) == {OffloadOutcome.STORED: PAGES}
        assert mover.store.flush(120.0)
    for different in ({**options, "scale_checkpoint_path": str(other)}, {"quant": "nvfp4"}):
        with open_mover(tier, **different) as mover:
            assert mover.store.wait(mover.store.lookup("r", mover.namespace.page_keys(HASHES))) == 0
            mover.store.settle("r")
    # The same scales at another place are the same scales.
    with open_mover(tier, **options, scale_checkpoint_path=str(copy)) as mover:
        out = restore(mover)
    assert all(0.05 < error < 0.11 for error in errors_of(out, data, slice(0, PAGES)))


@pytest.mark.parametrize(
    ("form", "last", "said"),
    [
        (99, 0, "page of form 99 is not one"),
        (99 | FINER, 0, "page of form 355 is not one"),
        (Form.NVFP4 | FINER, 3, "page of form 258 is not one"),
    ],
)
def test_a_page_of_a_form_that_is_not_known_is_dropped_and_not_met_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, form: int, last: int, said: str
) -> None:
    """Another version of kvtier wrote it, under the same key: nobody may wait for it again and again."""
    with open_mover(tmp_path, quant="nvfp4") as mover:
        key = mover.namespace.page_keys(HASHES[:1])[0]
        page = np.full(4096, last, np.uint8)
        (slot,) = mover.store.reserve([key], [page.size], 1.0)
        assert isinstance(slot, Slot)
        mover.store.host.arena[slot.offset : slot.offset + page.size] = page
        mover.store.commit(
            [key], [slot], [PageMeta(page.size, form, TOKENS, checksum(page.tobytes(), key), SPEC.fingerprint, b"")]
        )
        assert mover.store.flush(120.0)  # it lies in the lower tier as well
        lookup = mover.store.lookup("r", [key])
        assert mover.store.wait(lookup) == 1
        pool = HotPool.of(SPEC, [np.zeros((TOKENS, HEADS, DIM), np.uint16) for _ in range(4)], HotLayout.NHD)
        assert mover.onboard(lookup, pool, [0]).result(120.0).failed_pages == (0,)
        mover.store.settle("r")
        for n in range(3):
            assert mover.store.wait(mover.store.lookup(f"again {n}", [key])) == 0
            mover.store.settle(f"again {n}")
        assert mover.store.flush(120.0)
        # The page is written anew in a form that is known.
        assert offload(mover, values()) == {OffloadOutcome.STORED: PAGES}
        restore(mover)
    assert caplog.text.count(said) == 1
