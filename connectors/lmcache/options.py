"""The adapter's parameters: kvtier's own configuration block, and what LMCache cannot tell about its chunks."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.config import Config, TriAttentionConfig, parse_config, read_block
from kvtier.connectors.lmcache.chunks import Attention
from kvtier.errors import ConfigError

_OWN = ("attention", "rope_dim", "instance", "weights", "config")
DEFAULT_CONFIG: Mapping[str, Any] = {"tiers": [{"type": "host", "capacity": "4GiB"}]}
HELP = """\
kvtier: KV chunks as cold pages in host memory, on NVMe and in Redis.
- attention (str): how the engine lays out attention: vllm, sglang, mla, or none (default): nothing is
  quantized, chunks are stored as they are
- rope_dim (int): with mla only, columns at the end of a row that carry a rotary position (default 0: not told apart)
- instance (str): name of this adapter in its metrics and status (default kvtier)
- weights (str): what tells models of one name apart, such as a revision (default none)
- config (str): a file with kvtier's configuration block; or its options right here: tiers,
  kv_cache_compression_config, http, promote_deadline, ... (default: 4 GiB of host memory)"""
LENT_S = 300.0
"""How long LMCache keeps the memory of a chunk that is being stored for us (its ``--l1-read-ttl-seconds``)."""
_LONGEST_WAIT_S = 240.0


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """See `HELP`."""

    config: Config
    attention: Attention = Attention.NONE
    rope_dim: int = 0
    instance: str = "kvtier"
    weights: str = ""

    @staticmethod
    def of(params: Mapping[str, Any]) -> AdapterOptions:
        """From `adapter_params`. Raises ConfigError."""
        own = {name: params[name] for name in _OWN if name in params}
        block = {name: value for name, value in params.items() if name not in _OWN}
        _refuse_misspelt(block)
        file = own.pop("config", None)
        if file is not None:
            if block:
                raise ConfigError(
                    f"config = {file!r} is given together with {', '.join(sorted(block))}: write them into the file"
                )
            if not isinstance(file, str):
                raise ConfigError(f"config = {file!r}: give the path of a configuration file")
            config = _from_file(file)
        else:
            config = parse_config(block if "tiers" in block else {**DEFAULT_CONFIG, **block})
        _refuse_unserved(config)
        attention = _attention(own.get("attention", "none"))
        return AdapterOptions(
            config,
            attention,
            _rope_dim(own.get("rope_dim", 0), attention),
            _text("instance", own.get("instance", "kvtier")),
            _text("weights", own.get("weights", "")),
        )


def _refuse_misspelt(block: Mapping[str, Any]) -> None:
    """Names that are meant for one of `_OWN`, of which the block's own check knows nothing."""
    for name in sorted(block.keys() - Config.model_fields.keys()):
        near = difflib.get_close_matches(name, (*_OWN, *Config.model_fields), n=1)
        if near and near[0] in _OWN:
            value = block[name]
            raise ConfigError(f"unknown option {name!r} (value {value!r}); did you mean {near[0]!r}? Else remove it")


def _refuse_unserved(config: Config) -> None:
    if config.compacted:
        raise ConfigError("compacted: only SGLang serves compacted prefixes (--kv-connector kvtier); leave it out")
    if any(isinstance(method, TriAttentionConfig) for method in config.kv_cache_compression_config):
        raise ConfigError(
            "kv_cache_compression_config: triattention evicts in an engine's live cache, of which LMCache has no part; "
            "leave it out"
        )
    for option in ("offload_wait", "promote_deadline"):
        if (value := getattr(config, option)) > _LONGEST_WAIT_S:
            raise ConfigError(
                f"{option} = {value:g} s: LMCache takes a chunk's memory back after {LENT_S:g} s, and its engines wait "
                f"no longer; give at most {_LONGEST_WAIT_S:g}s"
            )


def _from_file(path: str) -> Config:
    block = read_block(path, "tiers")
    misplaced = [name for name in _OWN if name in block]
    if misplaced:
        given = ", ".join(f"{name} = {block[name]!r}" for name in misplaced)
        raise ConfigError(f"config = {path!r} holds {given}, which is no option of the file: write it beside config")
    return parse_config(block)


def _attention(value: Any) -> Attention:
    try:
        return Attention(value)
    except ValueError:
        known = ", ".join(a.value for a in Attention)
        raise ConfigError(f"attention = {value!r}: give one of {known}") from None


def _rope_dim(value: Any, attention: Attention) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0 or value % 16:
        raise ConfigError(f"rope_dim = {value!r}: give a multiple of 16, or 0")
    if value and attention is not Attention.MLA:
        raise ConfigError(
            f"rope_dim = {value!r}: only rows of MLA hold a rotary part beside another, and attention = "
            f"{attention.value!r}; leave rope_dim out, or set attention to mla"
        )
    return value


def _text(option: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{option} = {value!r}: give text")
    return value
