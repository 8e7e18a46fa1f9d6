"""``kvtier eval lossless``: how much smaller the lossless form makes a real model's K and V, and how fast."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.cli.eval_cold_page import PAGE_TOKENS, ColdPageEval, Layers
from kvtier.cli.options import at_least
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    import torch

DTYPES = ("bf16", "fp16", "fp32", "fp8_e4m3")
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class LosslessRecord:
    """ratio: hot over cold bytes. GB are 10**9 hot bytes, medians of `ROUNDS`, one thread."""

    dtype: str
    tokens: int
    hot_bytes: int
    cold_bytes: int
    ratio: float
    encode_gb_per_s: float
    decode_gb_per_s: float
    bytes_equal: bool


def evaluate(
    tokens: Annotated[int, typer.Option(help="Tokens whose K and V are measured.")] = 1024,
    model: Annotated[Path | None, typer.Option(help="Folder of a model; by default SmolLM2-135M-Instruct.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Ratio and speed of the lossless form on a real model's K and V, on the CPU."""
    at_least(PAGE_TOKENS, tokens=tokens)
    if tokens % PAGE_TOKENS:
        raise ConfigError(f"--tokens {tokens}: give a multiple of {PAGE_TOKENS}, the tokens of a page")
    bench = ColdPageEval.load(model)  # says which extra is missing, if one is
    import torch

    with torch.inference_mode():
        layers = bench.cache_of(bench.windows(1, tokens))
        records = [measure(layers, dtype) for dtype in DTYPES]
    if as_json:
        sys.stdout.write(json.dumps([asdict(record) for record in records]) + "\n")
        return
    _print(records)


def measure(layers: Layers, dtype: str) -> LosslessRecord:
    import numpy as np

    from kvtier.codecs.registry import codec
    from kvtier.hot import HotLayout, HotPool
    from kvtier.spec import DType, PageSpec

    _, heads, tokens, dim = layers[0][0].shape
    spec = PageSpec.mha(layers=len(layers), kv_heads=heads, head_dim=dim, page_tokens=PAGE_TOKENS, dtype=DType(dtype))
    hot = [_as(x[0], dtype) for kv in layers for x in kv]
    back = [x.clone().zero_() for x in hot]
    which = codec("lossless")
    layout, pages = which.layout(spec), tokens // PAGE_TOKENS
    ids, valid = np.arange(pages, dtype=np.int64), np.full(pages, PAGE_TOKENS, np.int32)
    arena, offsets = np.zeros(pages * layout.cold_page_bytes, np.uint8), ids * layout.cold_page_bytes
    source, target = HotPool.of(spec, hot, HotLayout.SEQ), HotPool.of(spec, back, HotLayout.SEQ)
    seconds: dict[str, list[float]] = {"encode": [], "decode": []}
    cold = 0
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        result = which.encode(layout, source, ids, valid, arena, offsets, np.zeros(pages, np.uint64))
        between = time.perf_counter()
        which.decode(layout, target, ids, valid, arena, offsets)
        seconds["encode"].append(between - start)
        seconds["decode"].append(time.perf_counter() - between)
        cold = 0 if result.nbytes is None else int(result.nbytes.sum())
    nbytes = spec.hot_page_bytes * pages
    encode, decode = (nbytes / median(seconds[op][1:]) / 1e9 for op in ("encode", "decode"))
    equal = all(_bytes(a) == _bytes(b) for a, b in zip(hot, back, strict=True))
    return LosslessRecord(
        dtype, tokens, nbytes, cold, round(nbytes / cold, 4), round(encode, 3), round(decode, 3), equal
    )


def _as(x: torch.Tensor, dtype: str) -> Any:
    import torch

    if dtype == "fp8_e4m3":
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).contiguous()
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    return x.to(kind).contiguous()


def _bytes(x: torch.Tensor) -> bytes:
    import torch

    raw: bytes = x.view(torch.uint8).numpy().tobytes()
    return raw


def _print(records: list[LosslessRecord]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="lossless, on the K and V of a real model; GB of hot bytes, one thread")
    for name in ("values", "hot bytes", "cold bytes", "ratio", "encode GB/s", "decode GB/s", "same bytes back"):
        table.add_column(name, justify="left" if name == "values" else "right")
    for r in records:
        table.add_row(
            r.dtype, f"{r.hot_bytes:,}", f"{r.cold_bytes:,}", f"{r.ratio:.3f}", f"{r.encode_gb_per_s:.2f}",
            f"{r.decode_gb_per_s:.2f}", "yes" if r.bytes_equal else "NO",
        )  # fmt: skip
    Console().print(table)
