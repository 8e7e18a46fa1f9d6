"""Pages of a pool that lies on a GPU: the same bytes as the native codec's, by Triton, straight into their slots.

A call has two halves. Enqueueing checks everything, queues one launch on a stream of the calling thread, and waits for
nothing. Finishing waits for that launch alone, and computes the checksums: on the CPU, from the bytes that arrived in
host memory, so that they cover the way over the bus as well. Programs that never ran leave a mark that fails the call.
`NativeCodec` comes here by itself for such pools; its calls are both halves in one, made by the mover's worker threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvtier.abc.codec import EncodeResult
from kvtier.codecs import native, pinned
from kvtier.codecs.native import Pages
from kvtier.codecs.ranges import device_range
from kvtier.errors import CodecError, missing_extra
from kvtier.hot import HotBuffer, HotPool
from kvtier.kernels import _native
from kvtier.spec import ColdLayout

if TYPE_CHECKING:
    import torch

    from kvtier.kernels.nvfp4.triton import DevicePlan

_CACHED_PLANS = 64
_plans: dict[tuple[int, int, bytes], DevicePlan] = {}
_of_thread = threading.local()


@dataclass(frozen=True, slots=True)
class Encoding:
    """A queued encode. Pool pages and slots are in use until `finish` returned or `done` is true."""

    layout: ColdLayout
    pages: Pages
    slots: pinned.Mapped
    status: torch.Tensor
    event: Any

    def done(self) -> bool:
        """Never waits."""
        return self.event is None or bool(self.event.query())

    def finish(self, seeds: npt.NDArray[np.uint64]) -> EncodeResult:
        """Wait for the launch, then compute the checksums. Raises CodecError if a part was never written."""
        from kvtier.kernels.nvfp4.triton import DONE, UNWRITTEN

        with device_range(self.event is not None, "encode, waiting", len(self.pages.ids)):
            if self.event is not None:
                self.event.synchronize()
            self.slots.bring_back(self.pages.offsets, self.layout.cold_page_bytes)
        status = self.status.flatten(1).numpy()
        if (status == UNWRITTEN).any():
            raise CodecError("the device did not write all parts of all pages; nothing of them may be used")
        checksums = np.zeros((len(status), 16), np.uint8)
        offsets = np.ascontiguousarray(self.pages.offsets, np.int64)
        seeds = np.ascontiguousarray(seeds, np.uint64)
        _native.checksum_pages(self.pages.arena, offsets, self.layout.cold_page_bytes, seeds, checksums)
        return EncodeResult(checksums, (status != DONE).any(axis=1))


@dataclass(frozen=True, slots=True)
class Decoding:
    """A queued decode. Slots are in use, and pool pages incomplete, until `finish` returned or `done` is true; work
    that is queued behind `event` needs neither."""

    slots: pinned.Mapped
    event: Any

    def done(self) -> bool:
        """Never waits."""
        return self.event is None or bool(self.event.query())

    def finish(self) -> None:
        with device_range(self.event is not None, "decode, waiting", len(self.slots.offsets)):
            if self.event is not None:
                self.event.synchronize()


def encode(layout: ColdLayout, pool: HotPool, pages: Pages, seeds: npt.NDArray[np.uint64]) -> EncodeResult:
    """As `native.encode`."""
    return enqueue_encode(layout, pool, pages).finish(seeds)


def decode(layout: ColdLayout, pool: HotPool, pages: Pages, buffers: range | None) -> None:
    """As `native.decode`."""
    enqueue_decode(layout, pool, pages, buffers).finish()


def errors(layout: ColdLayout, pool: HotPool, pages: Pages) -> npt.NDArray[np.float64]:
    """As `native.errors`: of copies of the pages in host memory, since it is asked of few."""
    raw = ColdLayout.of(layout.spec, quantize=False)
    count = len(pages.ids)
    ids = np.arange(count, dtype=np.int64)
    copies = Pages(
        pages.ids, pages.valid_tokens, np.zeros(count * raw.cold_page_bytes, np.uint8), ids * raw.cold_page_bytes
    )
    encode(raw, pool, copies, np.zeros(count, np.uint64))
    buffers = []
    for part in raw.parts:
        b = raw.spec.buffers[part.buffer]
        row_bytes = b.dim * b.dtype.itemsize
        address = copies.arena.ctypes.data + part.data_offset
        tokens = count * layout.spec.page_tokens
        buffers.append(
            HotBuffer(address, raw.cold_page_bytes, b.tokens * row_bytes, row_bytes, tokens, copies.arena)
        )  # fmt: skip
    in_host = HotPool(layout.spec, tuple(buffers))
    return native.errors(layout, in_host, Pages(ids, pages.valid_tokens, pages.arena, pages.offsets))


def check(layout: ColdLayout, pool: HotPool) -> None:
    """Raises CodecError, or an ImportError that names the extra, where such pages cannot be read on the pool's device:
    for a start, so that no page has to find out."""
    _prepare(layout, pool)


def enqueue_encode(layout: ColdLayout, pool: HotPool, pages: Pages) -> Encoding:
    """Check, and queue one launch. Work queued before on other streams is not waited for: the caller has made sure that
    the pages are computed. Raises CodecError before anything is queued."""
    if not pages.arena.flags.writeable:
        raise CodecError("the arena must be a contiguous, writable numpy array of bytes")
    # Slots have no table yet that could be checked.
    check = replace(layout, scale_table_offset=-1)
    native.decode_parts(check, native.plan_of(layout, pool), pages, range(0))
    kernels, plan = _prepare(layout, pool)
    count = len(pages.ids)
    slots = _map(pool, pages, layout.cold_page_bytes, before=False)
    with device_range(pool.device != "cpu", "encode", count), _stream(pool.device) as stream:
        rows, table = _upload(plan, pages, slots, pool.device)
        size = (count, plan.parts, kernels.splits_for(count, plan.parts))
        status = _torch().zeros(size, dtype=_torch().uint8, device=pool.device)
        kernels.enqueue_encode(plan, rows, table, slots.address, status)
        return Encoding(layout, pages, slots, stream.bring(status), stream.event())


def enqueue_decode(layout: ColdLayout, pool: HotPool, pages: Pages, buffers: range | None = None) -> Decoding:
    """Check, and queue one launch. Raises CodecError before anything is queued."""
    parts = native.parts_of(layout, buffers)
    native.decode_parts(layout, native.plan_of(layout, pool), pages, range(0))
    kernels, plan = _prepare(layout, pool)
    slots = _map(pool, pages, layout.cold_page_bytes, before=True)
    with device_range(pool.device != "cpu", "decode", len(pages.ids)), _stream(pool.device) as stream:
        rows, table = _upload(plan, pages, slots, pool.device)
        kernels.enqueue_decode(plan, rows, table, slots.address, parts.start, parts.stop)
        return Decoding(slots, stream.event())


def _torch() -> Any:
    try:
        import torch
    except ImportError as e:
        raise missing_extra("torch", "triton") from e
    return torch


def _kernels() -> Any:
    _torch()
    try:
        from kvtier.kernels.nvfp4 import triton
    except ImportError as e:
        raise missing_extra("triton", "triton") from e
    return triton


def _prepare(layout: ColdLayout, pool: HotPool) -> tuple[Any, DevicePlan]:
    kernels = _kernels()
    rows = native.plan_of(layout, pool)
    key = (layout.cold_page_bytes, layout.scale_table_offset, rows.tobytes())
    plan = _plans.get(key)
    if plan is None:
        try:
            plan = kernels.prepare(rows, layout.spec.page_tokens, layout.cold_page_bytes, layout.scale_table_offset)
        except ValueError as e:
            raise CodecError(str(e)) from e
        if len(_plans) >= _CACHED_PLANS:
            _plans.clear()
        _plans[key] = plan
    return kernels, plan


def _map(pool: HotPool, pages: Pages, cold_bytes: int, *, before: bool) -> pinned.Mapped:
    kernels = _kernels()
    if pool.device == "cpu":  # the interpreter, which reads and writes any memory
        slots = pinned.Mapped(pages.arena.ctypes.data, pages.offsets)
    else:
        slots = pinned.mapped(pages.arena, pages.offsets, cold_bytes, filled=before)
    if any((slots.address + n) % kernels.SLOT_ALIGN for n in slots.offsets.tolist()):
        raise CodecError(f"a slot's address is no multiple of {kernels.SLOT_ALIGN}, which a device needs")
    return slots


def _upload(plan: DevicePlan, pages: Pages, slots: pinned.Mapped, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The plan's rows, and ``[pages, 3]`` of page, valid tokens and offset: one copy, which nothing waits for."""
    torch = _torch()
    table = np.stack([pages.ids, pages.valid_tokens, slots.offsets], axis=1).astype(np.int64)
    both = torch.from_numpy(np.concatenate([plan.rows.reshape(-1), table.reshape(-1)]))
    if device != "cpu":
        both = both.pin_memory().to(device, non_blocking=True)
    return both[: plan.rows.size].view(plan.rows.shape), both[plan.rows.size :].view(table.shape)


class _Stream:
    """Makes a stream of its own current, for one thread and device; nothing for the interpreter."""

    def __init__(self, device: str) -> None:
        self._context: Any = None
        self._stream: Any = None
        if device == "cpu":
            return
        streams: dict[str, Any] = getattr(_of_thread, "streams", None) or {}
        _of_thread.streams = streams
        if device not in streams:
            streams[device] = _torch().cuda.Stream(device)
        self._stream = streams[device]
        self._context = _torch().cuda.stream(self._stream)

    def __enter__(self) -> _Stream:
        if self._context is not None:
            self._context.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._context is not None:
            self._context.__exit__(*exc)

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, there once the event is."""
        if self._stream is None:
            return tensor
        out = _torch().empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        out.copy_(tensor, non_blocking=True)
        return out  # type: ignore[no-any-return]

    def event(self) -> Any:
        return None if self._stream is None else self._stream.record_event()


_stream: Callable[[str], _Stream] = _Stream
