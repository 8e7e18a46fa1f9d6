"""The codec against its bounds. `kvtier bench codec` tells the truth; this fails beyond twice a bound.

Best of a few, because a neighbour on the machine slows one side of a ratio only."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.cli import bench_codec
from kvtier.cli.bench_codec_others import TORCHAO
from kvtier.kernels import _native

ENCODE_OVER_MEMCPY = 0.65
DECODE_OVER_MEMCPY = 1.5
TWO_THREADS_OVER_ONE = 1.6
FORM_OVER_NVFP4 = 0.5
ENCODE_OVER_TORCHAO = 40
ATTEMPTS = 5
SLACK = 0.5

pytestmark = [
    pytest.mark.speed,
    pytest.mark.skipif(
        _native.isas() == ["scalar"], reason="the bounds are those of AVX2 and AVX-512, and this CPU has neither"
    ),
]


def reaches(measured: Callable[[], dict[str, float]]) -> None:
    """Shares of bounds, by name: each must come to `SLACK` once."""
    best: dict[str, float] = {}
    for _ in range(ATTEMPTS):
        for name, share in measured().items():
            best[name] = max(best.get(name, 0.0), share)
        if min(best.values()) >= SLACK:
            return
    raise AssertionError(f"shares of the bounds: {best}, all must reach {SLACK}")


def test_bf16_pages_against_memcpy_and_torchao() -> None:
    def measured() -> dict[str, float]:
        rows = bench_codec.run(
            codecs=("nvfp4",), dtypes=("bf16",), impls=(_native.isas()[0],), threads=(1, 2), shapes=("mha",), rounds=5
        )
        by = {(r["op"], r["threads"]): r for r in rows if r["codec"] == "nvfp4"}
        shares = {
            "encode": by["encode", 1]["over_memcpy"] / ENCODE_OVER_MEMCPY,
            "decode": by["decode", 1]["over_memcpy"] / DECODE_OVER_MEMCPY,
            "encode on two threads": by["encode", 2]["gb_per_s"] / by["encode", 1]["gb_per_s"] / TWO_THREADS_OVER_ONE,
        }
        if any(r["codec"] == TORCHAO for r in rows):
            shares["encode over torchao"] = by["encode", 1]["over_torchao"] / ENCODE_OVER_TORCHAO
        return shares

    reaches(measured)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8_e4m3"])
@pytest.mark.parametrize("shape", bench_codec.SHAPES)
def test_forms_against_plain_nvfp4(shape: str, dtype: str) -> None:
    def measured() -> dict[str, float]:
        rows = bench_codec.run(
            codecs=("nvfp4", *bench_codec.KEY_FORMS, *bench_codec.ROTARY_FORMS),
            dtypes=(dtype,),
            impls=(_native.isas()[0],),
            shapes=(shape,),
            hot_layout="hnd",
            rounds=3,
            input_bytes=32 << 20,
        )
        return {
            f"{row['codec']} {row['op']}": row["over_nvfp4"] / FORM_OVER_NVFP4
            for row in rows
            if row["over_nvfp4"] is not None and row["codec"] != TORCHAO
        }

    reaches(measured)


@pytest.mark.parametrize("dtype", ["fp16", "fp8_e4m3"])
def test_other_hot_types_against_bf16(dtype: str) -> None:
    """In values: the bytes of FP8 pages are half."""

    def measured() -> dict[str, float]:
        speed = {
            (row["dtype"], row["op"]): row["gb_per_s"]
            for row in bench_codec.run(
                codecs=("nvfp4",),
                dtypes=("bf16", dtype),
                impls=(_native.isas()[0],),
                shapes=("mha",),
                rounds=3,
                input_bytes=32 << 20,
            )
        }
        return {op: speed[dtype, op] / speed["bf16", op] / FORM_OVER_NVFP4 for op in ("encode", "decode")}

    reaches(measured)
