"""Codecs on one core: kvtier's forms, torchao's NVFP4 and LMCache's FP8 on the same K and V.

    python -m tests.benchmarks.compare.codecs KV ROUNDS

prints rows as JSON. kvtier reads pages where they lie in a pool (NHD) and writes checksummed cold pages; the others get
their values one behind the other, and have no checksum. ``encode`` and ``decode`` are of everything in one call,
``encode one`` and ``decode one`` of one page. What is compared takes turns."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.cli import bench_codec_others as others
from kvtier.cli.bench_codec import aligned
from kvtier.codecs.registry import codec
from kvtier.hot import HotLayout, HotPool
from kvtier.spec import DType, PageSpec
from tests.benchmarks.compare.kv import KV, float32
from tests.benchmarks.compare.samples import Row, Samples

PAGE_TOKENS = 64
FORMS = ("raw", "nvfp4", "k8v4", "lossless")
AGAIN = "kvtier nvfp4, again"

Works = dict[str, list[Callable[[], object]]]
"""By operation: what is done in a round, one after the other, each a sample."""


class _System(Protocol):
    def works(self) -> Works: ...

    def at_rest(self) -> float:
        """Bytes at rest for one hot byte."""

    def error(self) -> float: ...


class _Form:
    def __init__(self, name: str, kv: KV) -> None:
        _, layers, tokens, heads, dim = kv.shape
        self._kv = kv
        self._spec = PageSpec.mha(
            layers=layers, kv_heads=heads, head_dim=dim, page_tokens=PAGE_TOKENS, dtype=DType.BF16
        )
        self._codec = codec(name)
        self._layout = self._codec.layout(self._spec)
        pages = tokens // PAGE_TOKENS
        hot = [aligned(kv[side, layer]) for layer in range(layers) for side in (0, 1)]
        self._back = [aligned(np.ones_like(x)) for x in hot]
        self._hot = HotPool.of(self._spec, hot, HotLayout.NHD)
        self._target = HotPool.of(self._spec, self._back, HotLayout.NHD)
        self._arena = np.ones(pages * self._layout.cold_page_bytes, np.uint8)
        self._pages = np.arange(pages, dtype=np.int64)
        self._nbytes = np.full(pages, self._layout.cold_page_bytes, np.int64)

    def works(self) -> Works:
        each = [self._pages[n : n + 1] for n in self._pages]
        return {
            "encode": [lambda: self._encode(self._pages)],
            "decode": [lambda: self._decode(self._pages)],
            "encode one": [partial(self._encode, ids) for ids in each],
            "decode one": [partial(self._decode, ids) for ids in each],
        }

    def _encode(self, ids: npt.NDArray[np.int64]) -> None:
        valid, offsets = np.full(len(ids), PAGE_TOKENS, np.int32), ids * self._layout.cold_page_bytes
        result = self._codec.encode(self._layout, self._hot, ids, valid, self._arena, offsets, ids.astype(np.uint64))
        if result.refused.any():
            raise RuntimeError("pages were refused")
        if result.nbytes is not None:
            self._nbytes[ids] = result.nbytes

    def _decode(self, ids: npt.NDArray[np.int64]) -> None:
        valid, offsets = np.full(len(ids), PAGE_TOKENS, np.int32), ids * self._layout.cold_page_bytes
        self._codec.decode(self._layout, self._target, ids, valid, self._arena, offsets)

    def at_rest(self) -> float:
        return float(self._nbytes.sum()) / (self._spec.hot_page_bytes * len(self._pages))

    def error(self) -> float:
        tokens = len(self._pages) * PAGE_TOKENS
        want = [self._kv[side, layer, :tokens] for layer in range(self._kv.shape[1]) for side in (0, 1)]
        return relative_error(np.stack([x[:tokens] for x in self._back]), np.stack(want))


class _Other:
    def __init__(self, name: str, kv: KV) -> None:
        _, layers, tokens, heads, dim = kv.shape
        pages = tokens // PAGE_TOKENS
        paged = kv[:, :, : pages * PAGE_TOKENS].reshape(2, layers, pages, PAGE_TOKENS, heads * dim)
        self._values = np.ascontiguousarray(paged.transpose(2, 1, 0, 3, 4)).reshape(pages, -1)
        self._ops = ("encode", "decode")
        whole = others.work([self._values.reshape(-1)], "bf16", torchao_share=1)
        self._whole = {op: whole[name, op] for op in self._ops}
        each = [others.work([page], "bf16", torchao_share=1) for page in self._values]
        self._each = {op: [page[name, op] for page in each] for op in self._ops}

    def works(self) -> Works:
        works: Works = {op: [self._whole[op].call] for op in self._ops}
        return works | {f"{op} one": [page.call for page in self._each[op]] for op in self._ops}

    def at_rest(self) -> float:
        return self._whole["encode"].cold_bytes / self._values.nbytes

    def error(self) -> float:
        decoded = self._whole["decode"].decoded
        if decoded is None:
            raise RuntimeError("the decoded values are not told")
        return relative_error(decoded(), self._values.reshape(-1))


class _Memcpy:
    """numpy.copyto of the same bytes, for comparison."""

    def __init__(self, kv: KV) -> None:
        pages = kv.shape[2] // PAGE_TOKENS
        self._source = np.ones((pages, kv[:, :, :PAGE_TOKENS].nbytes), np.uint8)
        self._sink = np.ones_like(self._source)

    def works(self) -> Works:
        each = zip(self._sink, self._source, strict=True)
        return {
            "copy": [partial(np.copyto, self._sink, self._source)],
            "copy one": [partial(np.copyto, sink, source) for sink, source in each],
        }

    def at_rest(self) -> float:
        return 1.0

    def error(self) -> float:
        return 0.0


def run(kv: KV, rounds: int) -> list[Row]:
    """``{"system", "op", ..., "at_rest", "relative_error"}``; those of torchao and LMCache where they are installed."""
    kv = kv[:, :, : kv.shape[2] // PAGE_TOKENS * PAGE_TOKENS]
    systems: dict[str, _System] = {f"kvtier {form}": _Form(form, kv) for form in FORMS}
    systems |= {name: _Other(name, kv) for name in dict.fromkeys(n for n, _ in others.work([kv[0, 0]], "bf16"))}
    systems |= {AGAIN: _Form("nvfp4", kv), "memcpy": _Memcpy(kv)}
    samples: dict[tuple[str, str], Samples] = {}
    for n in range(rounds + 1):
        for name, system in systems.items():
            for op, works in system.works().items():
                into = samples.setdefault((name, op), Samples(kv.nbytes // len(works)))
                for work in works:
                    with (into if n else Samples(1)).one():  # before the first round, nothing had been touched
                        work()
    quality = {name: (round(s.at_rest(), 4), round(s.error(), 5)) for name, s in systems.items()}
    return [
        {"system": name, "op": op, **taken.figures(), "at_rest": quality[name][0], "relative_error": quality[name][1]}
        for (name, op), taken in samples.items()
    ]


def relative_error(got: KV, want: KV) -> float:
    """Norm of the difference over the norm."""
    a, b = float32(got).astype(np.float64), float32(want).astype(np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def main() -> None:
    sys.stdout.write(json.dumps(run(np.load(Path(sys.argv[1])), int(sys.argv[2]))) + "\n")


if __name__ == "__main__":
    main()
