"""The rows of `kvtier bench codec`, on a small input."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.cli import bench, bench_codec, bench_codec_others
from kvtier.cli.bench_codec_others import Other
from kvtier.errors import ConfigError
from kvtier.hot import HotLayout
from kvtier.kernels import _native
from kvtier.spec import DType

COLUMNS = [
    "codec",
    "shape",
    "op",
    "dtype",
    "impl",
    "threads",
    "gb_per_s",
    "memcpy_gb_per_s",
    "over_memcpy",
    "over_nvfp4",
    "over_torchao",
    "over_lmcache_fp8",
]
SMALL: dict[str, Any] = {"rounds": 1, "input_bytes": 4 << 20}


@pytest.mark.parametrize("hot_layout", ["nhd", "hnd", "seq"])
def test_rows(hot_layout: str) -> None:
    before, isas = _native.isa(), _native.isas()
    rows = bench_codec.run(
        codecs=("nvfp4", "raw"),
        dtypes=("fp16",),
        impls=(*isas, "reference"),
        threads=(1, 2),
        shapes=("mha",),
        hot_layout=hot_layout,
        **SMALL,
    )
    assert all(list(row) == COLUMNS for row in rows)
    assert all(row["gb_per_s"] > 0 and row["memcpy_gb_per_s"] > 0 for row in rows)
    native = {(r["codec"], r["op"], r["impl"], r["threads"]) for r in rows if r["impl"] != "reference"}
    assert native == {
        (c, o, i, t) for c in ("nvfp4", "raw") for o in ("encode", "decode") for i in isas for t in (1, 2)
    }
    reference = [(r["codec"], r["op"], r["threads"]) for r in rows if r["impl"] == "reference"]
    assert reference == [("nvfp4", "encode", 1), ("nvfp4", "decode", 1)]
    assert _native.isa() == before


@pytest.mark.parametrize("dtype", bench_codec.DTYPES)
def test_every_form_is_measured_beside_plain_nvfp4(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_codec_others, "work", lambda arrays, dtype: {})
    rows = bench_codec.run(dtypes=(dtype,), impls=(_native.isas()[0],), **SMALL)
    measured = {shape: {r["codec"] for r in rows if r["shape"] == shape} for shape in bench_codec.SHAPES}
    assert measured["mha"] == set(bench_codec.CODECS)
    assert measured["mla"] == set(bench_codec.CODECS) - set(bench_codec.KEY_FORMS)
    for row in rows:
        assert (row["over_nvfp4"] is None) == (row["codec"] == "nvfp4")
        assert row["over_torchao"] is row["over_lmcache_fp8"] is None


def test_others_are_measured_in_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def work(arrays: list[Any], dtype: str) -> dict[tuple[str, str], Other]:
        return {
            (bench_codec_others.TORCHAO, "encode"): Other(lambda: calls.append("torchao"), 1 << 20),
            (bench_codec_others.LMCACHE, "decode"): Other(lambda: calls.append("lmcache"), 1 << 20),
        }

    monkeypatch.setattr(bench_codec_others, "work", work)
    rows = bench_codec.run(
        codecs=("nvfp4",), dtypes=("bf16",), impls=(_native.isas()[0],), shapes=("mha",), rounds=2, input_bytes=4 << 20
    )
    assert calls == ["torchao", "lmcache"] * 3
    ours = {row["op"]: row for row in rows if row["codec"] == "nvfp4"}
    assert ours["encode"]["over_torchao"] is not None and ours["encode"]["over_lmcache_fp8"] is None
    assert ours["decode"]["over_torchao"] is None and ours["decode"]["over_lmcache_fp8"] is not None
    assert {row["impl"] for row in rows} == {_native.isas()[0], bench_codec_others.TORCHAO, bench_codec_others.LMCACHE}


def test_torchao_takes_the_benchs_values() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao")
    pages = bench_codec._Pages("mha", DType.BF16, HotLayout.HND, 4 << 20)
    found = bench_codec_others.work(pages.arrays, "bf16")
    other = found[bench_codec_others.TORCHAO, "encode"]
    other.call()
    assert other.input_bytes == pages.arrays[0].nbytes // 16
    assert bench_codec_others.work(pages.arrays, "fp16") == {}


def test_the_command_offers_what_the_bench_measures() -> None:
    assert (bench._CODECS, bench._CODEC_DTYPES) == (bench_codec.CODECS, bench_codec.DTYPES)
    with pytest.raises(ConfigError, match="shape = 'cube': use one of mha, mla"):
        bench_codec.run(shapes=("cube",), **SMALL)
