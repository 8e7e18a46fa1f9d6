"""What `tests/gpu/run.sh` runs: pages encoded and decoded on the device against the CPU's kernels, then timed."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

from kvtier.abc.codec import Codec
from kvtier.codecs import device, native
from kvtier.codecs.registry import codec
from kvtier.hot import HotLayout, HotPool
from kvtier.spec import ColdLayout, DType, PageSpec
from kvtier.storage_backends.host.arena import Arena

FORMS: tuple[tuple[str, dict[str, str]], ...] = (
    ("raw", {}),
    ("nvfp4", {}),
    ("nvfp4", {"global_scale": "identity"}),
    ("nvfp4_offset", {}),
    ("nvfp4_token", {}),
    ("k8v4", {}),
    ("2fp4", {}),
)
ROPES: tuple[tuple[str, dict[str, str]], ...] = tuple(("nvfp4", {"rope": r}) for r in ("2fp4", "fp8", "keep"))
_TORCH = {
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
    DType.FP32: torch.float32,
    DType.FP8_E4M3: torch.float8_e4m3fn,
    DType.UINT8: torch.uint8,
}
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one batch, in microseconds: device time of a launch, and of a plain pinned copy of the same hot bytes."""

    form: str
    pages: int
    hot_bytes: int
    cold_bytes: int
    offload_us: float
    copy_out_us: float
    onboard_us: float
    copy_in_us: float


class DifferenceError(Exception):
    """What differs."""


def tensors_of(spec: PageSpec, pages: int, layout: HotLayout, where: str, generator: torch.Generator) -> list[Any]:
    """Normal values of very different size by row, with a constant in some channels; or random bytes."""
    out = []
    for b in spec.buffers:
        if b.tokens != spec.page_tokens:
            shape: tuple[int, ...] = (pages, b.heads, b.dim)
        elif layout is HotLayout.HND:
            shape = (pages, b.heads, b.tokens, b.dim)
        else:
            shape = (pages * b.tokens, b.heads, b.dim)
        if b.dtype is DType.UINT8:
            out.append(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator, device=where))
            continue
        x = torch.randn(shape, generator=generator, device=where)
        x *= torch.exp2(torch.randint(-4, 4, (*shape[:-1], 1), generator=generator, device=where).float())
        x += 20.0 * (torch.arange(b.dim, device=where) % 13 == 5)
        out.append(x.to(_TORCH[b.dtype]))
    return out


def arena_of(layout: ColdLayout, pages: int) -> tuple[Any, np.ndarray[Any, np.dtype[np.int64]]]:
    """Memory as the host tier has it, and the slots' offsets in it, in reverse order."""
    slot = -(-layout.cold_page_bytes // _PAGE_BYTES) * _PAGE_BYTES
    arena = Arena(max(1, pages) * slot, pretouch=True).bytes_
    arena[:] = 0xA5
    return arena, np.arange(pages, dtype=np.int64)[::-1] * slot


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def compare(
    which: Codec, spec: PageSpec, pages: int, hot: HotLayout, where: str, generator: torch.Generator, valid: list[int]
) -> None:
    """Raise DifferenceError where the device and the CPU differ in a byte, a checksum or a refusal."""
    tensors = tensors_of(spec, max(1, pages), hot, where, generator)
    layout = which.layout(spec)
    ids, lengths = np.arange(pages, dtype=np.int64), np.array(valid, np.int32)
    seeds = np.arange(pages, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    arenas, results = [], []
    twins = [t.cpu().clone() for t in tensors]
    for on_device, ts in ((True, tensors), (False, twins)):
        arena, offsets = arena_of(layout, pages)
        with the_device(where) if on_device else nullcontext():
            pool = HotPool.of(spec, ts, hot)
            results.append(which.encode(layout, pool, ids, lengths, arena, offsets, seeds))
        arenas.append(arena)
    if not (arenas[0] == arenas[1]).all():
        raise DifferenceError(f"{int((arenas[0] != arenas[1]).sum())} cold bytes differ")
    if not (results[0].checksums == results[1].checksums).all():
        raise DifferenceError("checksums differ")
    if (results[0].refused != results[1].refused).any() or results[0].refused.any():
        raise DifferenceError("refusals differ, or good pages were refused")
    for on_device, ts in ((True, tensors), (False, twins)):
        for t in ts:
            t.view(torch.uint8).fill_(0x3B)
        with the_device(where) if on_device else nullcontext():
            which.decode(layout, HotPool.of(spec, ts, hot), ids, lengths, arenas[0], offsets)
    if any(bits(a) != bits(b) for a, b in zip(tensors, twins, strict=True)):
        raise DifferenceError("decoded values differ")


def the_device(where: str) -> Any:
    """In a dry run codecs are led the device's way for pools in memory."""
    if where != "cpu":
        return nullcontext()
    return mock.patch.multiple(native, encode=device.encode, decode=device.decode)


def cases(dry: bool) -> Iterator[tuple[str, Codec, PageSpec, int, HotLayout, list[int]]]:
    """(name, codec, spec, pages, hot layout, valid tokens)"""
    tokens, heads, dim = (16, 2, 32) if dry else (32, 8, 128)
    layouts = (HotLayout.NHD, HotLayout.HND)
    for n, dtype in enumerate((DType.BF16, DType.FP16, DType.FP32, DType.FP8_E4M3)):
        scale = 0.7 if dtype is DType.FP8_E4M3 else 1.0
        spec = PageSpec.mha(
            layers=1 if dry else 3, kv_heads=heads, head_dim=dim, page_tokens=tokens, dtype=dtype, fp8_scale=scale
        )
        for name, options in FORMS if not dry else FORMS[n : n + 2]:
            which = codec(name, **options)
            pages = 1 if dry else 9
            valid = [tokens - i % tokens for i in range(pages)]
            yield f"{name} {options} {dtype.value}", which, spec, pages, layouts[n % 2], valid
    for dtype in (DType.BF16, DType.FP8_E4M3):
        spec = PageSpec.mla(
            layers=1 if dry else 3, page_tokens=16, dtype=dtype, index_layers=[0], index_page_bytes=2112
        )
        for name, options in ROPES if not dry else ROPES[:1]:
            yield f"MLA {options} {dtype.value}", codec(name, **options), spec, 1 if dry else 5, HotLayout.NHD, [
                16, 9, 0, 1, 15,
            ][: 1 if dry else 5]  # fmt: skip
    odd = PageSpec.mha(layers=1, kv_heads=3, head_dim=80, page_tokens=20, dtype=DType.BF16)
    for name in ("k8v4",) if dry else ("nvfp4", "nvfp4_offset", "k8v4"):
        yield f"{name}, odd sizes", codec(name), odd, 1, HotLayout.HND, [17]
    small = PageSpec.mha(layers=1, kv_heads=1, head_dim=16, page_tokens=2, dtype=DType.BF16)
    for pages in (0, 1, 3) if dry else (0, 1, 257, 4096):
        yield f"{pages} pages", codec("nvfp4"), small, pages, HotLayout.NHD, [2] * pages


def eviction(where: str, generator: torch.Generator) -> Iterator[tuple[str, bool]]:
    """TriAttention's steps and row packing against the torch versions, which have oracles of their own."""
    from kvtier.kernels.rowpack import fast as fast_pack
    from kvtier.kernels.rowpack import triton as pack
    from kvtier.kernels.rowpack.sequences import PagedSequence
    from kvtier.kernels.triattention import fast
    from kvtier.kernels.triattention import triton as steps

    dry, at = where == "cpu", torch.device(where)
    layers, kv_heads, heads, half, page_tokens, count = (1, 1, 2, 8, 4, 20) if dry else (4, 8, 32, 64, 16, 4000)
    pages = -(-count // page_tokens)
    omega = 10000.0 ** (-np.arange(half) / half)
    real, imag = np.arange(half), np.arange(half) + half
    rng = np.random.default_rng(1)
    mean = (rng.normal(size=(heads, half)) + 1j * rng.normal(size=(heads, half))).astype(np.complex64)
    absolute = (np.abs(mean) + rng.random((heads, half))).astype(np.float32)
    tables = [fast.layer_table(mean, absolute, omega, np.ones(half), real, imag, kv_heads, at) for _ in range(layers)]
    table = steps.ModelTable.of(tables, torch.from_numpy(real), torch.from_numpy(imag), at)
    shape = (pages, page_tokens, kv_heads, 2 * half)
    pools = [torch.randn(shape, generator=generator, device=where).to(torch.bfloat16) for _ in range(layers)]
    order = torch.randperm(pages, generator=generator, device=where)
    scores = steps.score(pools, order, 0, count, table, steps.phase_rows(table, 95_000))
    phase = fast.mean_phase(omega, 95_000)
    expected = torch.stack(
        [
            fast.score(p[order].reshape(-1, kv_heads, 2 * half)[:count].transpose(0, 1), t, phase)
            for p, t in zip(pools, tables, strict=True)
        ]
    )
    yield "scores over pages", bool(torch.allclose(scores, expected, atol=5e-3, rtol=0))
    for mode in ("union", "per_head", "per_layer_perhead"):
        reduction = fast.Reduction(mode, kv_heads)
        for one in scores:
            reduction.add(one)
        yield (
            f"reduction {mode}",
            bool(torch.allclose(steps.reduce(scores, kv_heads, mode), reduction.result(), atol=1e-4)),
        )
    coarse = (scores * 2).round()  # many ties
    budget = count // 2
    yield "selection", bool(torch.equal(steps.select(coarse, budget), fast.select(coarse, budget)))
    kept = fast.select(coarse[:, :: heads // kv_heads], budget)
    sequence = PagedSequence(order, count, 0, kept)
    twins = [[p.clone()] for p in pools]
    fast_pack.pack(twins, [sequence])
    pack.pack([[p] for p in pools], [sequence])
    rows = [
        x[order].reshape(-1, kv_heads, 2 * half)[:budget] for p, (q,) in zip(pools, twins, strict=True) for x in (p, q)
    ]
    yield "row packing", all(torch.equal(a, b) for a, b in zip(rows[::2], rows[1::2], strict=True))


def microseconds(call: Callable[[], object], rounds: int = 9) -> float:
    """Median device time of what `call` enqueues on the current stream."""
    times = []
    for n in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        if n > 1:
            times.append(begin.elapsed_time(end) * 1000)
    return float(np.median(times))


def time_form(which: Codec, name: str, spec: PageSpec, pages: int, generator: torch.Generator) -> Timing:
    from kvtier.codecs import pinned
    from kvtier.kernels.nvfp4 import triton as kernels

    tensors = tensors_of(spec, pages, HotLayout.NHD, "cuda", generator)
    pool, layout = HotPool.of(spec, tensors, HotLayout.NHD), which.layout(spec)
    arena, offsets = arena_of(layout, pages)
    ids, valid = np.arange(pages, dtype=np.int64), np.full(pages, spec.page_tokens, np.int32)
    which.encode(layout, pool, ids, valid, arena, offsets, np.zeros(pages, np.uint64))
    address = pinned.register(arena)
    plan = kernels.prepare(
        native.plan_of(layout, pool), spec.page_tokens, layout.cold_page_bytes, layout.scale_table_offset
    )
    rows = torch.from_numpy(plan.rows).cuda()
    table = torch.from_numpy(np.stack([ids, valid, offsets], axis=1).astype(np.int64)).cuda()
    status = torch.zeros((pages, plan.parts, kernels.splits_for(pages, plan.parts)), dtype=torch.uint8, device="cuda")
    hot = torch.empty(spec.hot_page_bytes * pages, dtype=torch.uint8, device="cuda")
    host = torch.empty(hot.shape, dtype=torch.uint8, pin_memory=True)
    return Timing(
        name,
        pages,
        spec.hot_page_bytes,
        layout.cold_page_bytes,
        microseconds(lambda: kernels.enqueue_encode(plan, rows, table, address, status)),
        microseconds(lambda: host.copy_(hot, non_blocking=True)),
        microseconds(lambda: kernels.enqueue_decode(plan, rows, table, address, 0, plan.parts)),
        microseconds(lambda: hot.copy_(host, non_blocking=True)),
    )


def timings(generator: torch.Generator, until: float) -> Iterator[Timing]:
    """Pages of a model of 8 billion parameters, 4.5 MiB each; fewer batches where time runs short."""
    spec = PageSpec.mha(layers=36, kv_heads=8, head_dim=128, page_tokens=32, dtype=DType.BF16)
    for pages in (16, 1, 257):
        for name, options in FORMS:
            if time.monotonic() > until:
                return
            yield time_form(codec(name, **options), " ".join((name, *options.values())), spec, pages, generator)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="in Triton's interpreter, on tiny pages, nothing timed")
    parser.add_argument("--json", action="store_true", help="timings as JSON, one a line")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="of the random pages")
    options = parser.parse_args()
    started = time.monotonic()
    where = "cpu" if options.dry else "cuda:0"
    generator = torch.Generator(where).manual_seed(options.seed)
    print(f"seed {options.seed}, {'interpreted' if options.dry else torch.cuda.get_device_name()}", flush=True)
    failed = 0
    for name, which, spec, pages, hot, valid in cases(options.dry):
        try:
            compare(which, spec, pages, hot, where, generator, valid)
            print(f"same bytes: {name}", flush=True)
        except DifferenceError as failure:  # noqa: PERF203 - all of them are told
            failed += 1
            print(f"FAILED: {name}: {failure}", flush=True)
    for name, good in eviction(where, generator):
        failed += not good
        print(f"{'as in torch' if good else 'FAILED'}: {name}", flush=True)
    if options.dry:
        print("not timed: no GPU was used")
        return failed > 0
    if not options.json:
        print(f"\n{'form':22} pages  offload us  GB/s  copy out us  onboard us  GB/s  copy in us")
    for t in timings(generator, started + 150):
        if options.json:
            print(json.dumps(asdict(t)), flush=True)
            continue
        hot_mb = t.hot_bytes * t.pages / 1e3
        print(
            f"{t.form:22} {t.pages:5} {t.offload_us:11.1f} {hot_mb / t.offload_us:5.0f} {t.copy_out_us:12.1f} "
            f"{t.onboard_us:11.1f} {hot_mb / t.onboard_us:5.0f} {t.copy_in_us:11.1f}",
            flush=True,
        )
    print(f"{time.monotonic() - started:.0f} s in all")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
