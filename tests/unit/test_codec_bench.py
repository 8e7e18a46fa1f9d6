"""The rows of `kvtier bench codec`, on a small input."""

from __future__ import annotations

import pytest

from kvtier.cli import bench_codec
from kvtier.kernels import _native

COLUMNS = ["codec", "op", "dtype", "impl", "threads", "gb_per_s", "memcpy_gb_per_s", "over_memcpy"]


@pytest.mark.parametrize("hot_layout", ["nhd", "hnd", "seq"])
def test_rows(hot_layout: str) -> None:
    before = _native.isa()
    rows = bench_codec.run(dtypes=("fp16",), rounds=1, input_bytes=4 << 20, hot_layout=hot_layout)
    assert all(list(row) == COLUMNS for row in rows)
    assert all(row["gb_per_s"] > 0 and row["memcpy_gb_per_s"] > 0 for row in rows)
    native = {(r["codec"], r["op"], r["impl"], r["threads"]) for r in rows if r["impl"] != "reference"}
    isas = _native.isas()
    assert native == {
        (c, o, i, t) for c in ("nvfp4", "raw") for o in ("encode", "decode") for i in isas for t in (1, 2)
    }
    reference = [(r["codec"], r["op"], r["threads"]) for r in rows if r["impl"] == "reference"]
    assert reference == [("nvfp4", "encode", 1), ("nvfp4", "decode", 1)]
    assert _native.isa() == before
