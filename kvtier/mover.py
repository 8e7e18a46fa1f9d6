"""PageMover: moves an engine's pages between its hot pool and a TieredStore, encoded on the way out, decoded on the
way in. Worker threads do the work; a caller's thread only queues it."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtier.abc.codec import FINER, Codec
from kvtier.abc.tier import CHECKSUM_BYTES, PageMeta, PutStatus, Slot
from kvtier.codecs import registry
from kvtier.errors import ClosedError, ConfigError, SpecError
from kvtier.hot import HotPool
from kvtier.keys import CodecPolicy, Namespace, seeds_of
from kvtier.ledger import Direction, OffloadOutcome
from kvtier.lookup import Lookup
from kvtier.quality import QualityGuard
from kvtier.reader import PageReader
from kvtier.spec import ColdLayout, PageSpec
from kvtier.store import TieredStore
from kvtier.tickets import OffloadResult, OnboardResult, Ticket
from kvtier.workers import WorkerPool

_log = logging.getLogger(__name__)

_BATCH_PAGES = 16
_OUTCOME_OF = {
    PutStatus.EXISTS: OffloadOutcome.EXISTS,
    PutStatus.FULL: OffloadOutcome.FULL,
    PutStatus.TOO_LARGE: OffloadOutcome.TOO_LARGE,
}


@dataclass(frozen=True, slots=True)
class _Given:
    """The pages of one offload; what is done with some of them names them by their index here."""

    pool: HotPool
    keys: Sequence[bytes]
    origins: Sequence[bytes]
    ids: npt.NDArray[np.int64]
    valid: npt.NDArray[np.int32]
    give_up: float

    def wait_s(self) -> float:
        """How long may still be waited for room."""
        return max(0.0, self.give_up - time.monotonic())


class PageMover:
    """Binds a store to one engine's page geometry, namespace and codec. Thread-safe; close it before the store.

    offload_wait_s: how long a worker waits for room in the host tier, for all pages of one offload together, before it
    drops the rest (counted). priority: of the pages (`PageMeta.priority`). beside: pages that lie beside those that
    requests are counted in (a recurrent state, a window); they say nothing of what a page costs.
    """

    def __init__(
        self,
        store: TieredStore,
        spec: PageSpec,
        namespace: Namespace,
        codec: Codec,
        *,
        workers: int = 2,
        offload_wait_s: float = 5.0,
        priority: int = 0,
        beside: bool = False,
    ) -> None:
        if namespace.spec not in ("", spec.fingerprint.hex()):
            raise SpecError("the namespace was made for another page geometry; build it from this PageSpec")
        if namespace.codec != policy_of(codec).encoded():
            raise SpecError(
                f"the namespace was made for codec policy {namespace.codec}, not {policy_of(codec).encoded()}"
            )
        if workers < 1:
            raise ConfigError(f"workers = {workers}: must be at least 1, or nothing would ever move")
        self.store = store
        self.spec = spec
        self.namespace = namespace
        self._codec = codec
        self._fingerprint = spec.fingerprint  # a hash over every buffer: too dear for each page
        self._raw = registry.codec("raw")
        self._layouts: dict[tuple[bool, int, tuple[int, ...]], ColdLayout] = {}
        layout = self.layout(codec)  # a form that cannot hold such pages is refused here, not page by page
        self._guard: QualityGuard | None = None
        if codec.quality_budget is not None:
            self._guard = QualityGuard(layout, codec.quality_budget, store.ledger.precision_switched)
        self._ledger = store.ledger
        self._reader = PageReader(spec, self.layout, store.host, self._ledger)
        self._offload_wait_s = offload_wait_s
        self._priority = priority
        self._beside = beside
        if not beside:
            store.break_even.page_holds(spec.page_tokens)
            store.observer.page_holds(spec.page_tokens, self._fingerprint)
        store.inventory.describe(namespace, spec.hot_page_bytes if namespace.spec else 0, priority)
        self._told_refused = False
        self._sample = random.Random(0)  # which pages are measured is no secret
        self._out = WorkerPool("kvtier-offload", workers, partial(self._worker_error, "offload"))
        self._in = WorkerPool("kvtier-onboard", workers, partial(self._worker_error, "load"))

    def layout(self, codec: Codec, levels: tuple[int, ...] = ()) -> ColdLayout:
        """The cold layout of this mover's pages in `codec`'s form, with some buffers stored finer where `levels` are
        given."""
        # One for reading lacks what only writing needs: the scales of a checkpoint.
        key = (codec is self._codec, int(codec.form), levels)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = codec.finer_layout(self.spec, levels) if levels else codec.layout(self.spec)
        return layout

    # -- offload -----------------------------------------------------------------------------------------------------

    def offload(
        self,
        pool: HotPool,
        page_hashes: Sequence[bytes],
        page_ids: Sequence[int] | npt.NDArray[np.int64],
        *,
        valid_tokens: Sequence[int] | None = None,
        ready: Callable[[], object] | None = None,
    ) -> Ticket[OffloadResult]:
        """Queue pages for storage; returns at once. `page_hashes[i]` is the engine's own hash of pool page
        `page_ids[i]`. A worker calls `ready()` before the first read of the pool. The pages must not change until the
        ticket is done. Errors end in the ticket's outcomes, never in an exception."""
        ticket: Ticket[OffloadResult] = Ticket()
        job = partial(self._offload, ticket, pool, page_hashes, page_ids, valid_tokens, ready)
        if not self._out.submit(job):
            self._finish_offload(ticket, Counter({OffloadOutcome.CLOSED: len(page_hashes)}))
        return ticket

    def _offload(
        self,
        ticket: Ticket[OffloadResult],
        pool: HotPool,
        page_hashes: Sequence[bytes],
        page_ids: Sequence[int] | npt.NDArray[np.int64],
        valid_tokens: Sequence[int] | None,
        ready: Callable[[], object] | None,
    ) -> None:
        outcomes: Counter[OffloadOutcome] = Counter()
        try:
            if ready is not None:
                ready()
            keys = self.namespace.page_keys(page_hashes)
            ids = np.asarray(page_ids, dtype=np.int64)
            if valid_tokens is None:
                valid = np.full(len(ids), self.spec.page_tokens, dtype=np.int32)
            else:
                valid = np.asarray(valid_tokens, dtype=np.int32)
            below = self.store.known_below(keys)
            fresh = [i for i, known in enumerate(below) if not known]
            outcomes[OffloadOutcome.EXISTS] += len(keys) - len(fresh)
            given = _Given(pool, keys, page_hashes, ids, valid, time.monotonic() + self._offload_wait_s)
            encode = self._encode_varying if self._codec.varies else self._encode
            for at in range(0, len(fresh), _BATCH_PAGES):
                outcomes += encode(self._codec, given, fresh[at : at + _BATCH_PAGES])
        except ClosedError:
            outcomes[OffloadOutcome.CLOSED] += len(page_hashes) - outcomes.total()
        except Exception as error:  # noqa: BLE001 - counted below; the engine keeps serving
            self._worker_error("offload", error)
        finally:
            outcomes[OffloadOutcome.FAILED] += len(page_hashes) - outcomes.total()
            self._finish_offload(ticket, +outcomes)

    def _encode(
        self, codec: Codec, given: _Given, pages: list[int], stored: OffloadOutcome = OffloadOutcome.STORED
    ) -> Counter[OffloadOutcome]:
        levels = self._guard.levels if self._guard is not None and codec is self._codec else ()
        layout = self.layout(codec, levels)
        outcomes: Counter[OffloadOutcome] = Counter()
        while pages:
            nbytes = [layout.cold_page_bytes] * len(pages)
            answers = self.store.reserve([given.keys[i] for i in pages], nbytes, given.wait_s())
            slots = [a for a in answers if isinstance(a, Slot)]
            taken = [i for i, a in zip(pages, answers, strict=True) if isinstance(a, Slot)]
            refused = self._fill(codec, layout, given, taken, slots)
            outcomes[stored] += len(slots) - sum(len(group) for group in refused.values())
            for why, group in refused.items():
                if group and why is OffloadOutcome.STORED_RAW:
                    self._tell_refused(codec, given.origins[group[0]])
                outcomes += self._encode(self._raw, given, group, why)
            again = []
            for i, answer in zip(pages, answers, strict=True):
                if answer is PutStatus.FULL and slots:
                    again.append(i)
                elif isinstance(answer, PutStatus):
                    outcomes[_OUTCOME_OF[answer]] += 1
            pages = again
        return outcomes

    def _tell_refused(self, codec: Codec, page_hash: bytes) -> None:
        """One log line: the ledger counts the pages."""
        if not self._told_refused:
            self._told_refused = True
            _log.warning(
                "page %s holds NaN, infinity or a number too large for quant = %s: it is stored uncompressed, as are "
                "further ones (counted as %s); if they are many, look for an overflow in the model",
                page_hash.hex(),
                codec.id,
                OffloadOutcome.STORED_RAW.value,
            )

    def _fill(
        self, codec: Codec, layout: ColdLayout, given: _Given, pages: list[int], slots: list[Slot]
    ) -> dict[OffloadOutcome, list[int]]:
        """Encode pages into their slots and commit them; returns the pages that the codec refused, by what they count
        as once they are stored raw."""
        if not slots:
            return {}
        keys = [given.keys[i] for i in pages]
        committed = False
        try:
            ids, valid = given.ids[pages], given.valid[pages]
            start = time.perf_counter()
            arena, offsets = self.store.host.arena, np.array([slot.offset for slot in slots], dtype=np.int64)
            result = codec.encode(layout, given.pool, ids, valid, arena, offsets, seeds_of(keys))
            self._ledger.time_codec("encode", time.perf_counter() - start)
            error = result.relative_error
            # Only a page that could be encoded has an error. Those over their budget are what the guard is to see.
            lost = result.refused if error is None else result.refused & ~np.isfinite(error)
            self._measure_some(codec, layout, given.pool, ids, valid, offsets, lost)
            form = codec.form | FINER if layout.levels else codec.form
            metas = self._metas(given, pages, layout.cold_page_bytes, form, result.checksums)
            flags = result.refused.tolist()
            bad = [n for n, refused in enumerate(flags) if refused]
            if bad:
                self.store.abort([keys[n] for n in bad], [slots[n] for n in bad])
            committed = True
            good = range(len(pages)) if not bad else [n for n, refused in enumerate(flags) if not refused]
            metas = [metas[n] for n in good]
            self.store.commit([keys[n] for n in good], [slots[n] for n in good], metas)
            self._count_moved(Direction.OFFLOAD, metas)
            groups: dict[OffloadOutcome, list[int]] = {}
            for n in bad:
                measured = error is not None and np.isfinite(error[n])
                why = OffloadOutcome.STORED_OVER_BUDGET if measured else OffloadOutcome.STORED_RAW
                groups.setdefault(why, []).append(pages[n])
            return groups
        finally:
            if not committed:
                self.store.abort(keys, slots)

    def _measure_some(
        self,
        codec: Codec,
        layout: ColdLayout,
        pool: HotPool,
        ids: npt.NDArray[np.int64],
        valid: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int64],
        lost: npt.NDArray[np.bool_],
    ) -> None:
        """The quality sample: relative errors of some of the pages just encoded, by layer and role. `lost` could not
        be."""
        if not codec.quality_sample:
            return
        some = [i for i, bad in enumerate(lost.tolist()) if not bad and self._sample.random() < codec.quality_sample]
        if not some:
            return
        sums = codec.errors(layout, pool, ids[some], valid[some], self.store.host.arena, offsets[some])
        for page in sums:
            for n, (buffer, (lost, whole)) in enumerate(zip(self.spec.buffers, page.tolist(), strict=True)):
                if whole > 0:
                    self._ledger.sampled(buffer.layer, buffer.role.value, (lost / whole) ** 0.5)
                    if self._guard is not None:
                        self._guard.observe(layout.levels, n, (lost / whole) ** 0.5)

    def _encode_varying(self, codec: Codec, given: _Given, pages: list[int]) -> Counter[OffloadOutcome]:
        """As `_encode`, for a form whose pages vary in size: a slot is reserved once the size is known."""
        layout = self.layout(codec)
        outcomes: Counter[OffloadOutcome] = Counter()
        scratch, start_at = np.empty(layout.cold_page_bytes, np.uint8), np.zeros(1, np.int64)
        for i in pages:
            start, key = time.perf_counter(), given.keys[i]
            ids, valid = given.ids[i : i + 1], given.valid[i : i + 1]
            result = codec.encode(layout, given.pool, ids, valid, scratch, start_at, seeds_of([key]))
            self._ledger.time_codec("encode", time.perf_counter() - start)
            nbytes = layout.cold_page_bytes if result.nbytes is None else int(result.nbytes[0])
            (meta,) = self._metas(given, [i], nbytes, codec.form, result.checksums)
            answer = self.store.reserve([key], [nbytes], given.wait_s())[0]
            if isinstance(answer, PutStatus):
                outcomes[_OUTCOME_OF[answer]] += 1
                continue
            self.store.host.arena[answer.offset : answer.offset + nbytes] = scratch[:nbytes]
            self.store.commit([key], [answer], [meta])
            self._count_moved(Direction.OFFLOAD, [meta])
            outcomes[OffloadOutcome.STORED] += 1
        return outcomes

    def _metas(
        self, given: _Given, pages: list[int], nbytes: int, form: int, checksums: npt.NDArray[np.uint8]
    ) -> list[PageMeta]:
        """checksums: ``[len(pages), 16]``."""
        sums = np.frombuffer(checksums.tobytes(), f"V{CHECKSUM_BYTES}").tolist()
        spec, origins, priority = self._fingerprint, given.origins, self._priority
        new = tuple.__new__  # named construction would take most of the time
        return [
            new(PageMeta, (nbytes, form, valid, check, spec, origins[i], priority))
            for i, valid, check in zip(pages, given.valid[pages].tolist(), sums, strict=True)
        ]

    def _finish_offload(self, ticket: Ticket[OffloadResult], outcomes: Counter[OffloadOutcome]) -> None:
        self._ledger.offloaded(outcomes)
        self.store.observer.offloaded(ticket.began_s, {outcome.value: n for outcome, n in outcomes.items()})
        ticket.finish(OffloadResult(dict(outcomes)))

    # -- onboard -----------------------------------------------------------------------------------------------------

    def onboard(
        self,
        lookup: Lookup,
        pool: HotPool,
        page_ids: Sequence[int] | npt.NDArray[np.int64],
        *,
        pages: Sequence[int] | None = None,
        on_layer: Callable[[int], None] | None = None,
        ready: Callable[[], object] | None = None,
    ) -> Ticket[OnboardResult]:
        """Queue the load of ready pages of `lookup` into pool pages `page_ids`: of its first ones, or of those with the
        indices `pages`; returns at once. They stay pinned until `TieredStore.settle`. A worker calls `ready()`, which
        may raise ClosedError, before it touches the pool, verifies every page, then decodes layer by layer and calls
        ``on_layer(l)`` after layer l (0-based, in order) is complete. A page that is found bad is quarantined and
        becomes a miss; nothing of the load may then be used."""
        wanted = range(len(page_ids)) if pages is None else pages
        pins = self.store.take(lookup, wanted)
        ticket: Ticket[OnboardResult] = Ticket()
        keys = [lookup.keys[i] for i in wanted]  # the request may ask for others by the time a worker is free
        job = partial(self._onboard, ticket, lookup, keys, pins, wanted, pool, page_ids, on_layer, ready)
        if not self._in.submit(job):
            ticket.finish(OnboardResult((), "closed"))
        return ticket

    def _onboard(
        self,
        ticket: Ticket[OnboardResult],
        lookup: Lookup,
        keys: Sequence[bytes],
        held: list[int],
        pages: Sequence[int],
        pool: HotPool,
        page_ids: Sequence[int] | npt.NDArray[np.int64],
        on_layer: Callable[[int], None] | None,
        ready: Callable[[], object] | None,
    ) -> None:
        result = OnboardResult((), "not run")
        try:
            if ready is not None:
                ready()
            pins = self.store.host.pinned_many(held)
            bad = self._reader.find_bad(keys, pins)
            if bad:
                for i, reason in bad.items():
                    self.store.fail(lookup, keys[i], reason)
                # What lies below is the same page: it would come up, and fail, again and again.
                self.store.delete([keys[i] for i in bad if not self._reader.readable(*pins[i])])
                self._ledger.load_failed()
                result = OnboardResult(tuple(pages[i] for i in bad), "stored pages do not match their checksums")
                return
            seconds = self._reader.decode(pins, pool, np.asarray(page_ids, dtype=np.int64), on_layer)
            if not self._beside:
                self.store.break_even.decoded(len(pins), seconds)
            self._count_moved(Direction.ONBOARD, [meta for _, meta in pins])
            result = OnboardResult(())
        except ClosedError:
            result = OnboardResult((), "closed")
        except Exception as error:  # noqa: BLE001 - reported to the engine through the ticket
            self._worker_error("load", error)
            self._ledger.load_failed()
            result = OnboardResult((), f"{type(error).__name__}: {error}")
        finally:
            lookup.load_s += time.monotonic() - ticket.began_s
            ticket.finish(result)

    # -- house-keeping -----------------------------------------------------------------------------------------------

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until everything queued has ended; False on timeout."""
        return self._out.drain(timeout_s) and self._in.drain(timeout_s)

    def close(self, timeout_s: float = 1.5) -> None:
        """Take no more work and let what is queued end, for at most `timeout_s`. Does not close the store."""
        give_up = time.monotonic() + timeout_s
        for pool in (self._in, self._out):
            if not pool.close(max(0.05, give_up - time.monotonic())):
                _log.warning("closed while pages were still moving")

    def _count_moved(self, direction: Direction, metas: Sequence[PageMeta]) -> None:
        self._ledger.moved(
            direction,
            hot=self.spec.hot_page_bytes * len(metas),
            hot_16bit=self.spec.hot_page_bytes_16bit * len(metas),
            cold=sum(meta.nbytes for meta in metas),
        )

    def _worker_error(self, site: str, error: BaseException) -> None:
        self._ledger.error(site)
        _log.error("%s failed: %s", site, error, exc_info=error)


def policy_of(codec: Codec) -> CodecPolicy:
    """The codec's part of a namespace."""
    return CodecPolicy(codec.id, codec.version, codec.config)
