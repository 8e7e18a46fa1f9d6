"""Options of a block that LMCache's doors refuse at the start."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from kvtier.cli.config_checks import Remark
from kvtier.cli.config_sources import SERDE, Block
from kvtier.config import Config, TriAttentionConfig

_SERDE_USES = {"kv_cache_compression_config", "salt"}


def lmcache_remarks(config: BaseModel, block: Block) -> Iterator[Remark]:
    """On a block that was validated, where it is behind one of LMCache's doors."""
    if not block.what.startswith("LMCache") or not isinstance(config, Config):
        return
    if config.compacted:
        text = "only SGLang serves compacted prefixes (--kv-connector kvtier)"
        yield Remark("error", ("compacted",), block.options["compacted"], text, "leave it out")
    if config.kv_events is not None:
        text = "LMCache names chunks by hashes of its own, which are no engine's block hashes"
        yield Remark(
            "error",
            ("kv_events",),
            block.options["kv_events"],
            text,
            "leave it out, and have LMCache publish its events",
        )
    for n, method in enumerate(config.kv_cache_compression_config):
        if isinstance(method, TriAttentionConfig):
            text = "evicts in an engine's live cache, of which LMCache has no part"
            yield Remark("error", ("kv_cache_compression_config", n), method.algorithm, text, "leave it out")
    if block.what == SERDE:
        for option in sorted(set(block.options) - _SERDE_USES):
            text = "is of the adapter: a serde has neither tiers nor threads or ports of its own"
            yield Remark("error", (option,), block.options[option], text, "leave it out")
