"""What a rank of the engine opens: how the pages of its pools are named and written, its tiers, the compacted prefixes
that it serves. What cannot be served is refused here, before anything is opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtier.build import open_store
from kvtier.config import Config
from kvtier.connectors.sglang import identity, options
from kvtier.connectors.sglang.compacted import Compacted, EngineRank, load
from kvtier.connectors.sglang.movers import Stored, check_device, codec_for, shared_by_one
from kvtier.connectors.sglang.pools.engine import EnginePools
from kvtier.connectors.sglang.ranks import Place
from kvtier.errors import EngineError
from kvtier.keys import Namespace
from kvtier.mover import policy_of
from kvtier.spec import Role
from kvtier.store import TieredStore


def refuse_unsupported(args: Any, model_config: Any) -> None:
    """Once more, of what became of the options when the engine had resolved them. Raises EngineError."""
    options.refuse_excluded({e.option: getattr(args, e.option, None) for e in options.EXCLUDED}, options.EXCLUDED)
    if model_config.is_multimodal and not args.language_model_only:
        raise EngineError(
            "this model takes images or sound, which kvtier was not tested with. Give --language-model-only, or start "
            "without --kv-connector"
        )


def stored_pools(config: Config, pools: EnginePools, engine: identity.EngineIdentity, place: Place) -> list[Stored]:
    """Every pool of the rank, the KV pool first."""
    stored = []
    for pool in pools.all:
        codec = codec_for(config, pool)
        check_device(codec, pool)
        dtypes = dict.fromkeys(b.dtype.value for b in pool.spec.buffers if b.role is not Role.INDEX_KEY)
        namespace = Namespace.of(
            pool.spec,
            policy_of(codec),
            model=engine.model,
            weights=engine.weights,
            dtype="+".join([*dtypes, *filter(None, [pool.variant])]),
            shard=place.replicated_shard if pools.replicated else place.shard,
            lora=engine.lora,
            salt=config.salt,
        )
        stored.append(Stored(pool, namespace, codec))
    return stored


def compacted_prefixes(
    config: Config, stored: Sequence[Stored], place: Place, model_config: Any, args: Any
) -> Compacted:
    """Those that the configuration names, fit to the engine's pages."""
    kv, served = stored[0], []
    if config.compacted:
        if config.compression.live or len(stored) > 1:
            raise EngineError(
                "the option compacted cannot be combined with compression of live caches, nor with models that have "
                "windows or recurrent states beside full attention: remove one of the two"
            )
        served = load(config.compacted, kv, EngineRank.of(kv.pool, place, model_config, args))
    return Compacted(served, kv, positions=model_config.context_len)


def open_tiers(config: Config, place: Place, *, replicated: bool) -> TieredStore:
    """The rank's own store. replicated: all tensor-parallel ranks hold the same pages."""
    return open_store(
        shared_by_one(config, place.tp_rank) if replicated else config,
        shard=place.folder,
        rank=place.node_rank,
        ranks=place.node_ranks,
        several=place.ranks > 1,
    )
