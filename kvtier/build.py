"""From a configuration block to a running store and codec. Tiers are reached by name and imported when asked for."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvtier.abc.codec import Codec
from kvtier.abc.tier import RemovalListener, StagingTier, Tier
from kvtier.breakeven import BreakEven
from kvtier.codecs.registry import codec
from kvtier.config import PRIORITIES, Config, HostTierConfig, LowerTierConfig, NvmeTierConfig, RedisTierConfig
from kvtier.errors import ConfigError
from kvtier.ledger import Ledger
from kvtier.observe import ObserveOptions, Watch
from kvtier.origins import ROWS
from kvtier.placement import Admission, TierRules, Write
from kvtier.spec import GROUP, PageSpec, Role
from kvtier.store import TieredStore

if TYPE_CHECKING:
    from kvtier.storage_backends.redis.options import RedisOptions

_log = logging.getLogger(__name__)

TIERS = {
    "host": "kvtier.storage_backends.host.tier:HostTier",
    "nvme": "kvtier.storage_backends.nvme.striped:open_nvme",
}
"""Tier types by the name they have in the configuration. Adding a tier is a module and a line here."""


def open_store(
    config: Config,
    *,
    shard: str = "",
    rank: int = 0,
    ranks: int = 1,
    several: bool = False,
    on_removed: RemovalListener | None = None,
    origins: bool = True,
) -> TieredStore:
    """Open every tier of `config` for one of `ranks` ranks of this node.

    A rank takes its share of each capacity, and directories of its own: ``<path>/<shard>/rank<r>``. With several ranks
    pins never end by a clock, since ranks must answer alike. several: there are more of them on other nodes. origins:
    those of pages are an engine's hashes.
    """
    alone = ranks == 1 and not several
    if not 0 <= rank < ranks:
        raise ConfigError(f"rank = {rank} of ranks = {ranks}: ranks are counted from 0 and there must be more of them")
    if Path(shard).is_absolute() or ".." in Path(shard).parts:
        raise ConfigError(
            f"shard = {shard!r}: it is a folder's name inside the tier's path; give a relative one without '..'"
        )
    opened: list[Tier] = []
    watch: Watch | None = None
    try:
        for tier in config.tiers:  # one by one: what was opened before a failure is closed again
            opened += [_open_tier(tier, shard, rank, ranks)]
        # Measured by each rank for itself: several could come to different answers.
        break_even = BreakEven(
            [tier.name for tier in opened[1:]],
            enabled=config.break_even and alone,
            prefill_s_per_token=config.prefill_s_per_token,
        )
        ledger = Ledger([tier.name for tier in opened])
        watch = _watch(config, opened, ledger, break_even, rank if ranks > 1 else None, origins)
        store = TieredStore(
            cast(StagingTier, opened[0]),
            opened[1:],
            ledger,
            promote_deadline_s=config.promote_deadline,
            lease_s=config.lease if alone else None,
            on_removed=on_removed,
            rules={
                tier.type: TierRules(Write(tier.write), Admission(tier.admission), tier.refresh)
                for tier in config.tiers
                if isinstance(tier, LowerTierConfig)
            },
            break_even=break_even,
            observer=watch,
        )
        if priority := PRIORITIES[config.priority]:  # of what was found: tiers do not keep it
            for lower in opened[1:]:
                lower.rank_many([key for key, _ in lower.scan()], priority)
            store.inventory.found_priority = priority
        store.ledger.registry.register(break_even)
        for tier_opened in opened:
            collector = getattr(tier_opened, "collector", None)
            if collector is not None:  # what only this kind of tier counts
                store.ledger.registry.register(collector)
        return store
    except BaseException:
        if watch is not None:
            watch.close()
        for done in opened:
            done.close()
        raise


def _watch(
    config: Config, opened: Sequence[Tier], ledger: Ledger, break_even: BreakEven, rank: int | None, origins: bool
) -> Watch:
    record = None if config.record is None else config.record.expanduser()
    if record is not None and rank is not None:
        record = record.with_name(f"{record.stem}.rank{rank}{record.suffix}")
    options = ObserveOptions(
        ghosts=config.ghosts,
        explain_sample=config.explain_sample,
        slow_restore_s=config.slow_restore,
        record=record,
        opentelemetry=config.opentelemetry,
        debug=config.debug,
        kv_events=config.kv_events if not rank else None,  # the first speaks for all: each has a part of every page
        origins=origins,
    )
    exclusive = any(isinstance(tier, LowerTierConfig) and tier.write == "back" for tier in config.tiers)
    usages = {tier.name: tier.usage for tier in opened}
    holds = {tier.name: tier.contains_many for tier in opened if not tier.capabilities.shared}
    watch = Watch(options, ledger, usages, break_even, exclusive=exclusive, holds=holds)
    for tier in opened[1:]:
        if 0 < tier.usage().recovered_pages <= ROWS:  # of more, reading all takes seconds
            watch.learn(tier.scan())
    return watch


def open_codec(config: Config, spec: PageSpec) -> Codec:
    """The codec that new pages of `spec` are written with. Raises ConfigError, also for a checkpoint without scales."""
    cold_page = config.cold_page
    if cold_page is None or cold_page.quant == "none":
        return codec("raw")
    if cold_page.quant == "lossless":
        return codec("lossless")
    options: dict[str, Any] = {
        "max_relative_error": cold_page.max_relative_error,
        "quality_sample": cold_page.quality_sample,
        "quality_budget": cold_page.quality_budget,
    }
    name: str = cold_page.quant
    if name == "auto":
        name = "nvfp4" if cold_page.plain_options else default_quant(spec)
    if name == "nvfp4":
        rope = "keep" if cold_page.skip_rope_quantization else cold_page.rope_quant
        options |= {"global_scale": cold_page.global_scale, "rope": rope}
        if cold_page.scale_checkpoint_path is not None:
            from kvtier.codecs.checkpoint_scales import CheckpointScales

            options["scales"] = CheckpointScales.load(cold_page.scale_checkpoint_path)
    return codec(name, **options)


def default_quant(spec: PageSpec) -> str:
    """What ``quant: auto`` means for pages of `spec`: the cheapest form that passes the accuracy gates, with keys that
    have an offset too; plain nvfp4 where there are no such keys, and, with one warning, where pages are too short."""
    keys = [b for b in spec.buffers if b.role is Role.K and b.compressible]
    if not keys:
        return "nvfp4"
    if any(b.tokens % GROUP for b in keys):
        _tell_plain(spec.page_tokens)
        return "nvfp4"
    return "nvfp4_token"


@lru_cache(maxsize=64)
def _tell_plain(page_tokens: int) -> None:
    """Once per process: the same pages are described many times."""
    _log.warning(
        "pages of %d tokens are stored as plain nvfp4, since the default form, nvfp4_token, needs a multiple of %d: it "
        "loses more on models with a bias in their key projection; choose such a page size, or quant: %s",
        page_tokens,
        GROUP,
        "k8v4" if page_tokens >= GROUP else "2fp4",  # k8v4 refuses fewer
    )


def _open_tier(config: HostTierConfig | NvmeTierConfig | RedisTierConfig, shard: str, rank: int, ranks: int) -> Tier:
    if isinstance(config, RedisTierConfig):
        return _open_redis(config)
    module, _, name = TIERS[config.type].partition(":")
    make = cast(Callable[..., Tier], getattr(importlib.import_module(module), name))
    share = config.capacity // ranks
    options: dict[str, Any] = {"policy": config.policy, "ttl_s": config.ttl}
    if isinstance(config, HostTierConfig):
        return _open_host(make, config, share, options)
    options["io_threads"] = config.io_threads
    return make([_rank_path(path, shard, rank) for path in config.path], share, **options)


def _open_host(make: Callable[..., Tier], config: HostTierConfig, share: int, options: dict[str, Any]) -> Tier:
    options["huge_pages"] = config.huge_pages
    if config.budget is None:
        return make(share, **options)
    from kvtier.storage_backends.host.budget import NodeBudget

    budget = NodeBudget(config.budget.path.expanduser(), config.budget.capacity, share)
    try:
        return make(budget.granted_bytes, budget=budget, **options)
    except BaseException:
        budget.close()
        raise


def redis_options(config: RedisTierConfig) -> RedisOptions:
    """The block's options, checked; reads the files that it names."""
    from kvtier.storage_backends.redis.options import RedisOptions, TlsOptions

    return RedisOptions.of(
        config.url,
        mode=config.mode,
        service=config.service,
        username=config.username,
        password_file=config.password_file,
        sentinel_password_file=config.sentinel_password_file,
        tls=TlsOptions(config.tls_ca, config.tls_cert, config.tls_key, config.tls_check_hostname),
        prefix=config.prefix,
        ttl_s=config.ttl,
        timeout_s=config.timeout,
        connections=config.connections,
    )


def _open_redis(config: RedisTierConfig) -> Tier:
    from kvtier.storage_backends.redis.tier import RedisTier

    return RedisTier(redis_options(config))


def _rank_path(path: Path, shard: str, rank: int) -> Path:
    return path.expanduser() / (shard or "default") / f"rank{rank}"
