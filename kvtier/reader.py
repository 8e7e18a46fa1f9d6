"""PageReader: verifies records of pages in host memory and decodes them into an engine's pool."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.abc.codec import FINER, Codec
from kvtier.abc.tier import PageMeta, Slot, StagingTier
from kvtier.codecs import registry
from kvtier.errors import CodecError, ConfigError
from kvtier.hot import HotPool
from kvtier.kernels import _native
from kvtier.keys import seeds_of
from kvtier.ledger import Ledger, MissReason
from kvtier.lookup import Pin
from kvtier.spec import LEVEL_MAX, BufferSpec, ColdLayout, PageSpec, levels_bytes

_log = logging.getLogger(__name__)


class PageReader:
    """Of pages of `spec`, in every form that this version knows. Thread-safe.

    layout: the cold layout of a codec's pages, some buffers stored finer where there are levels. The pages
    given to any method are pinned in `host` until it returns.
    """

    def __init__(
        self,
        spec: PageSpec,
        layout: Callable[[Codec, tuple[int, ...]], ColdLayout],
        host: StagingTier,
        ledger: Ledger,
    ) -> None:
        self._spec = spec
        self._fingerprint = spec.fingerprint  # a hash over every buffer: too dear for each page
        self._layout = layout
        self._host = host
        self._ledger = ledger
        self._least_bytes: dict[int, int] = {}
        """By form, the length of the shortest page that could be decoded; not of those that end with their levels."""

    def find_bad(self, keys: Sequence[bytes], pins: Sequence[Pin]) -> dict[int, MissReason]:
        """Pages that must not be decoded, by their place in `pins`, and why."""
        start = time.perf_counter()
        good = _native.verify_pages(
            self._host.arena,
            np.array([slot.offset for slot, _ in pins], dtype=np.int64),
            np.array([meta.nbytes for _, meta in pins], dtype=np.int64),
            seeds_of(keys),
            np.frombuffer(b"".join([meta.checksum for _, meta in pins]), dtype=np.uint8).reshape(-1, 16),
        )
        self._ledger.time_codec("verify", time.perf_counter() - start)
        bad: dict[int, MissReason] = {}
        for i, (ok, (slot, meta)) in enumerate(zip(good.tolist(), pins, strict=True)):
            least = self._least_bytes.get(meta.form)
            if not ok or meta.spec != self._fingerprint:
                bad[i] = MissReason.CORRUPT
            elif (least is None or meta.nbytes < least) and (why := self._unusable(slot, meta)) is not None:
                bad[i] = why
        return bad

    def _unusable(self, slot: Slot, meta: PageMeta) -> MissReason | None:
        """Why a page of this geometry whose bytes are as they were written cannot be decoded."""
        if not self.readable(slot, meta):
            _log.warning("a stored page of form %d is not one that this version reads: it is dropped", meta.form)
            return MissReason.CORRUPT
        if self._lacks_bytes(slot, meta):
            return MissReason.PARTIAL
        if not meta.form & FINER:
            self._least_bytes[meta.form] = min(meta.nbytes, self._least_bytes.get(meta.form, meta.nbytes))
        return None

    def readable(self, slot: Slot, meta: PageMeta) -> bool:
        """Whether this version knows the form of a page, and the levels of one that has some."""
        try:
            registry.codec_for_form(meta.form)
            self.levels_of(slot, meta)
        except (ConfigError, CodecError):
            return False  # told by the caller
        return True

    def _lacks_bytes(self, slot: Slot, meta: PageMeta) -> bool:
        """Whether a record, whose bytes are as they were written, ends before its last buffer does."""
        codec = registry.codec_for_form(meta.form)
        if meta.form & FINER and meta.nbytes < levels_bytes(self._spec):
            return True
        return not codec.varies and meta.nbytes < self._layout(codec, self.levels_of(slot, meta)).cold_page_bytes

    def decode(
        self,
        pins: Sequence[Pin],
        pool: HotPool,
        page_ids: npt.NDArray[np.int64],
        on_layer: Callable[[int], None] | None,
    ) -> float:
        """Decode pages that were found good into pool pages `page_ids`; the seconds that it took. With `on_layer`,
        layer by layer, and ``on_layer(l)`` once layer l (0-based, in order) of all of them is complete."""
        groups = []
        by_form: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for i, (slot, meta) in enumerate(pins):
            levels = self.levels_of(slot, meta) if meta.form & FINER else ()
            by_form.setdefault((meta.form, levels), []).append(i)
        for (form, levels), members in sorted(by_form.items()):
            codec = registry.codec_for_form(form)
            groups.append(
                (
                    codec,
                    self._layout(codec, levels),
                    page_ids[members],
                    np.array([pins[i][1].valid_tokens for i in members], dtype=np.int32),
                    np.array([pins[i][0].offset for i in members], dtype=np.int64),
                )
            )
        start = time.perf_counter()
        whole = [range(len(self._spec.buffers))]
        for number, buffers in enumerate(_by_layer(self._spec.buffers) if on_layer is not None else whole):
            for codec, layout, ids, valid, offsets in groups:
                codec.decode(layout, pool, ids, valid, self._host.arena, offsets, buffers)
            if on_layer is not None:
                on_layer(number)
        seconds = time.perf_counter() - start
        self._ledger.time_codec("decode", seconds)
        return seconds

    def levels_of(self, slot: Slot, meta: PageMeta) -> tuple[int, ...]:
        """How much finer the buffers of a verified page are stored than its form says. CodecError where no page that
        was written says so."""
        if not meta.form & FINER or meta.nbytes < levels_bytes(self._spec):
            return ()
        end = slot.offset + meta.nbytes
        start = end - levels_bytes(self._spec)
        levels = tuple(self._host.arena[start : start + len(self._spec.buffers)].tolist())
        if max(levels) > LEVEL_MAX:
            raise CodecError(f"levels {levels}: the bytes are not those of a page of form {meta.form}")
        return levels


def _by_layer(buffers: Sequence[BufferSpec]) -> Iterable[range]:
    """Index ranges of the buffers of each layer, in order."""
    start = 0
    for i in range(1, len(buffers) + 1):
        if i == len(buffers) or buffers[i].layer != buffers[start].layer:
            yield range(start, i)
            start = i
