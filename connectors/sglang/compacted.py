"""Compacted prefixes that an engine serves: a client names one in `extra_key` and sends a placeholder for each row.

The rows are pages like others, under keys of their own, put into the tiers when the engine starts. The engine's page
hashes chain `extra_key`, which names the very file, so that neither those pages nor what is computed behind them can be
taken for the plain KV of any text. Placeholders are never computed: a request whose rows are not all there is ended
with an error that says so. Positions behind the prefix go on from the length of its original. Everything but `Served`
and `load` runs on the scheduler's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtier.compression.compaction.artefact import CompactPrefix
from kvtier.compression.compaction.manifest import KEY_PREFIX, VERSION, header_bytes, read_header
from kvtier.config import Config
from kvtier.connectors.sglang.compacted_rows import (
    ONE_ROW,
    Heads,
    LatentForm,
    arrays_of,
    check_model,
    check_rows,
)
from kvtier.connectors.sglang.identity import plain_checkpoint
from kvtier.connectors.sglang.movers import Stored
from kvtier.connectors.sglang.pools import KV, DevicePool, page_hashes
from kvtier.connectors.sglang.ranks import Place
from kvtier.connectors.sglang.tool_calls import Text, hash_text
from kvtier.errors import ArtefactError, EngineError
from kvtier.hot import HotLayout, HotPool
from kvtier.mover import PageMover
from kvtier.store import TieredStore
from kvtier.tickets import OffloadResult, Ticket

_log = logging.getLogger(__name__)

PLACEHOLDER = 0
"""The token id that stands for a row."""
_STORE_S = 120.0
_SHIFT = "kvtier_position_shift"


@dataclass(frozen=True, slots=True)
class EngineRank:
    """What is to be known of a rank of an engine. checkpoint: fingerprint of the files that it has loaded as they are,
    None where it has not. form: of an engine of MLA."""

    checkpoint: str | None
    heads: Heads = ONE_ROW
    form: LatentForm | None = None

    @staticmethod
    def of(pool: DevicePool, place: Place, model_config: Any, args: Any) -> EngineRank:
        """`place`: this rank's. `model_config`, `args`: SGLang's. Raises ArtefactError."""
        checkpoint = plain_checkpoint(model_config, args)
        if pool.replicated:
            return EngineRank(checkpoint, form=LatentForm.of(model_config.hf_text_config, pool.hot.device))
        total = model_config.get_total_num_kv_heads()
        return EngineRank(checkpoint, Heads.of(place.tp_rank, place.tp_size, pool.spec.buffers[0].heads, total))


@dataclass(frozen=True, slots=True)
class Served:
    """A prefix whose rows fit this engine's pages. arrays: per buffer of the page, ``[pages, heads, tokens, dim]``."""

    key: str
    rows: int
    tokens: int
    hashes: tuple[bytes, ...]
    keys: tuple[bytes, ...]
    arrays: tuple[torch.Tensor, ...]


def load(paths: Sequence[Path], stored: Stored, rank: EngineRank) -> list[Served]:
    """Read the files that the option ``compacted`` names. stored: the engine's KV pool. Raises ArtefactError, naming
    the file and the way out, for a prefix that this engine cannot serve exactly."""
    return [_load(path, stored, rank) for path in paths]


def _load(path: Path, stored: Stored, rank: EngineRank) -> Served:
    try:
        raw = path.expanduser().read_bytes()
    except OSError as e:
        raise ArtefactError(
            f"compacted: {str(path)!r} cannot be read ({e.strerror}): give files of kvtier compact"
        ) from e
    spec = stored.pool.spec
    try:
        key = read_header(raw[: header_bytes(raw[:8])], len(raw)).key
        prefix = CompactPrefix.from_bytes(raw)
        check_model(prefix, rank.checkpoint)
        check_rows(prefix, stored.pool, rank.heads)
        arrays = arrays_of(prefix, spec, rank.heads, rank.form)
    except ArtefactError as e:
        raise ArtefactError(f"compacted: {path.name}: {e}") from None
    rows = int(prefix.layers[0].kept[0].shape[0])
    hashes = page_hashes(hash_text(Text(([PLACEHOLDER] * rows,), key), spec.page_tokens))
    namespace = replace(stored.namespace, pruning=f"compact {VERSION} sglang {key}")
    return Served(key, rows, prefix.tokens, tuple(hashes), tuple(namespace.page_keys(hashes)), arrays)


class Compacted:
    """The prefixes of one engine. Without any, every method answers at once."""

    def __init__(self, served: Sequence[Served], stored: Stored, *, positions: int) -> None:
        """positions: how many the model has."""
        self._served = {s.key: s for s in served}
        self._stored = stored
        self._positions = positions
        self._waiting: dict[str, Served | None] = {}  # None: named one, and is to be ended
        self.renamed: Mapping[bytes, bytes] = {h: k for s in served for h, k in zip(s.hashes, s.keys, strict=True)}
        """Keys of pages by the engine's hashes, of those that are not in its own namespace."""

    def put(self, store: TieredStore, config: Config) -> None:
        """Put every prefix into the tiers, and keep it from being evicted as long as the engine lives. Blocks. Raises
        EngineError where there is no room."""
        for served in self._served.values():
            result = self._put(store, config, served)
            if not result.ok:
                told = {outcome.value: n for outcome, n in result.outcomes.items() if n}
                raise EngineError(
                    f"the compacted prefix {served.key} ({len(served.keys)} pages) found no room ({told}): give the "
                    "host tier more capacity, or serve fewer"
                )
            protected = store.protect(list(served.keys))
            if not all(protected):
                _log.warning(
                    "%d of %d pages of %s may be evicted: prefixes that are kept take half of the host tier at most",
                    protected.count(False), len(protected), served.key,
                )  # fmt: skip
            _log.info("kvtier: %s is served, %d rows for %d tokens", served.key, served.rows, served.tokens)

    def _put(self, store: TieredStore, config: Config, served: Served) -> OffloadResult:
        namespace = replace(self._stored.namespace, pruning=f"compact {VERSION} sglang {served.key}")
        spec = self._stored.pool.spec
        pool = HotPool.of(spec, served.arrays, HotLayout.HND)
        mover = PageMover(
            store, spec, namespace, self._stored.codec, workers=1, offload_wait_s=config.offload_wait, beside=True
        )
        try:
            ticket: Ticket[OffloadResult] = mover.offload(pool, served.hashes, np.arange(len(served.hashes)))
            return ticket.result(_STORE_S)
        finally:
            mover.close()

    def forget(self) -> None:
        """The weights have changed: these are of others, and requests that wait for their pages will not get them."""
        self._served.clear()
        self.renamed = {}

    # -- requests ------------------------------------------------------------------------------------------------------

    def queued(self, req: Any) -> None:
        """A request joins the queue, maybe again: it is ended if it names a prefix in a way that cannot be served."""
        if not (req.extra_key or "").startswith(KEY_PREFIX) or req.to_finish is not None:
            return
        self._waiting[req.rid] = None
        served = self._served.get(req.extra_key)
        problem = self._problem(req, served)
        if problem or served is None:
            req.set_finish_with_abort(problem)
            req.skip_radix_cache_insert = True
            return
        setattr(req, _SHIFT, served.tokens - served.rows)
        self._waiting[req.rid] = served

    def _problem(self, req: Any, served: Served | None) -> str:
        if served is None:
            known = ", ".join(self._served) or "none"
            return (
                f"extra_key {req.extra_key[:80]!r} names no compacted prefix that this engine serves ({known}): name "
                "one of the option compacted, and no adapter"
            )
        ids = req.origin_input_ids
        if len(ids) <= served.rows or any(token != PLACEHOLDER for token in ids[: served.rows]):
            return (
                f"{served.key} has {served.rows} rows: input_ids must begin with so many times {PLACEHOLDER}, and go "
                "on with the tokens behind the prefix"
            )
        if req.return_logprob and 0 <= req.logprob_start_len < served.rows:
            return (
                f"logprob_start_len = {req.logprob_start_len}: placeholders have none; start at {served.rows} or later"
            )
        end = served.tokens + len(ids) - served.rows + req.sampling_params.max_new_tokens
        if end > self._positions:
            return (
                f"{served.key} stands for {served.tokens} tokens: with the prompt and max_new_tokens the request would "
                f"reach position {end}, the model has {self._positions}"
            )
        return ""

    def started(self, reqs: Sequence[Any], chunked: Any, abort_chunked: Callable[[Any], None]) -> None:
        """A batch was built: a request whose rows were not all restored must not come to an end as if they were."""
        if not self._waiting:
            return
        for req in reqs:
            if req.rid not in self._waiting:
                continue
            served = self._waiting.pop(req.rid)
            if req.to_finish is not None or (served is not None and req.prefix_len >= served.rows):
                continue
            from sglang.srt.managers.schedule_batch import FINISH_ABORT

            req.skip_radix_cache_insert = True
            req.discard_output_reason = FINISH_ABORT(
                f"pages of {req.extra_key} are not there: they were damaged, or evicted from every tier. Restart the "
                "engine, or give its tiers more capacity",
                HTTPStatus.SERVICE_UNAVAILABLE,
            )
            _log.warning("kvtier: request %s was ended: %s", req.rid, req.discard_output_reason.message)
            if req is chunked:
                abort_chunked(req)

    def keep(self, waiting: set[str]) -> None:
        for rid in [rid for rid in self._waiting if rid not in waiting]:
            del self._waiting[rid]

    def plain(self, transfers: Sequence[Any]) -> list[Any] | None:
        """`transfers` of a node without pages of prefixes, which are stored already; None where nothing is left."""
        if not self.renamed:
            return list(transfers)
        kept = []
        for transfer in transfers:
            left = [i for i, h in enumerate(page_hashes(transfer.keys)) if h not in self.renamed]
            if len(left) == len(transfer.keys):
                kept.append(transfer)
            elif left and str(transfer.name) == KV:
                slots = transfer.device_indices.reshape(len(transfer.keys), -1)[torch.tensor(left)].reshape(-1)
                kept.append(replace(transfer, keys=[transfer.keys[i] for i in left], device_indices=slots))
        return kept or None


def positions(forward: Any, cls: Any, batch: Any, model_runner: Any, **kwargs: Any) -> None:
    """After ``ForwardBatch.init_new``: tokens behind a compacted prefix stand where they would behind its original."""
    shifts = [getattr(req, _SHIFT, 0) for req in batch.reqs]
    if not any(shifts):
        return
    shift = torch.tensor(shifts, dtype=forward.positions.dtype)
    if forward.forward_mode.is_extend():
        shift = shift.repeat_interleave(torch.tensor(batch.extend_lens))
    shift = shift.to(forward.positions.device)
    forward.positions = forward.positions + shift
    if forward.mrope_positions is not None:
        forward.mrope_positions = forward.mrope_positions + shift
