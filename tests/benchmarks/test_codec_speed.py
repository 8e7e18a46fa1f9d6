"""The codec against its bounds, `kvtier bench codec` tells the truth; this fails beyond twice a bound."""

from __future__ import annotations

import pytest

from kvtier.cli import bench_codec
from kvtier.kernels import _native

ENCODE_OVER_MEMCPY = 0.65
DECODE_OVER_MEMCPY = 1.2
TWO_THREADS_OVER_ONE = 1.6
FORM_OVER_NVFP4 = 0.5
ATTEMPTS = 5
SLACK = 0.5


def measured() -> dict[str, float]:
    rows = bench_codec.run(codecs=("nvfp4",), dtypes=("bf16",), impls=(_native.isas()[0],), rounds=5)
    by = {(r["op"], r["threads"]): r for r in rows}
    return {
        "encode": by["encode", 1]["over_memcpy"] / ENCODE_OVER_MEMCPY,
        "decode": by["decode", 1]["over_memcpy"] / DECODE_OVER_MEMCPY,
        "encode on two threads": by["encode", 2]["gb_per_s"] / by["encode", 1]["gb_per_s"] / TWO_THREADS_OVER_ONE,
    }


@pytest.mark.speed
@pytest.mark.skipif(_native.isas() == ["scalar"], reason="the bounds are those of a vector unit")
def test_bf16_pages_against_memcpy() -> None:
    """Best of a few, because a neighbour on the machine slows one side of a ratio only."""
    best: dict[str, float] = {}
    for _ in range(ATTEMPTS):
        for name, share in measured().items():
            best[name] = max(best.get(name, 0.0), share)
        if min(best.values()) >= SLACK:
            return
    raise AssertionError(f"shares of the bounds: {best}, all must reach {SLACK}")


@pytest.mark.speed
@pytest.mark.skipif(_native.isas() == ["scalar"], reason="the bounds are those of a vector unit")
@pytest.mark.parametrize("form", ["nvfp4_token", "k8v4", "2fp4"])
def test_forms_against_plain_nvfp4(form: str) -> None:
    best: dict[str, float] = {}
    for _ in range(ATTEMPTS):
        rows = bench_codec.run(
            codecs=("nvfp4", form),
            dtypes=("bf16",),
            impls=(_native.isas()[0],),
            threads=(1,),
            rounds=3,
            input_bytes=32 << 20,
        )
        speed = {(row["codec"], row["op"]): row["over_memcpy"] for row in rows}
        for op in ("encode", "decode"):
            share = speed[form, op] / speed["nvfp4", op] / FORM_OVER_NVFP4
            best[op] = max(best.get(op, 0.0), share)
        if min(best.values()) >= SLACK:
            return
    raise AssertionError(f"shares of the bound: {best}, all must reach {SLACK}")
