"""Where the methods for live caches are named, what they exclude, and how they reach SGLang's workers.

Runs in the process that parses the command line or builds `Engine`, before any worker starts, so that a mistake is
one message and not a worker's traceback.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.config import CompressionOptions, load_live, parse_live
from kvtier.connectors.sglang import options
from kvtier.connectors.sglang.options import CONFIG_OPTION, CONNECTOR_OPTION, LINKER_MODULE, Excluded, refuse_excluded
from kvtier.errors import ConfigError

OPTION = "kv_cache_compression_config"
FLAG = "--kv-cache-compression-config"
VARIABLE = "KVTIER_SGLANG_COMPRESSION"
"""Environment variable, inherited by the workers: a path, or the block itself as JSON. Never set it by hand: it is set
or removed whenever an engine's arguments are parsed."""

_OFF = (None, False)
_ONE = (None, 0, 1)
_MOVES = "it moves or shares rows of running requests"
_UNTESTED = "the two were never tested together"
EXCLUDED = (
    Excluded("speculative_algorithm", _OFF, "draft rows would have to move with the kept ones"),
    Excluded("disaggregation_mode", (None, "null"), "prefill and decode must share one cache"),
    Excluded("enable_mixed_chunk", _OFF, "a decode step must not be a part of a prefill"),
    Excluded("enable_streaming_session", _OFF, "a session would go on with a cache that is not that of its tokens"),
    Excluded("enable_session_radix_cache", _OFF, "a session would go on with a cache that is not that of its tokens"),
    Excluded("enable_unified_memory", _OFF, _MOVES),
    Excluded("enable_hisparse", _OFF, _MOVES),
    Excluded("enable_page_major_kv_layout", _OFF, "this version packs one buffer per layer"),
    Excluded("enable_kv_cache_sharding", _OFF, _MOVES),
    Excluded("radix_cache_backend", _OFF, "another prefix cache may publish generated rows"),
    Excluded("enable_hierarchical_cache", _OFF, _UNTESTED),
    Excluded("enable_lmcache", _OFF, _UNTESTED),
    Excluded("enable_flexkv", _OFF, _UNTESTED),
    Excluded("enable_two_batch_overlap", _OFF, _UNTESTED),
    Excluded("enable_pdmux", _OFF, _UNTESTED),
    Excluded("dllm_algorithm", _OFF, _UNTESTED),
    Excluded("encoder_only", _OFF, _UNTESTED),
    Excluded("pp_size", _ONE, _UNTESTED),
    Excluded("dp_size", _ONE, _UNTESTED),
    Excluded("dcp_size", _ONE, _MOVES),
    Excluded("attn_cp_size", _ONE, _MOVES),
    Excluded("kv_cache_dtype", (None, "auto", "bf16", "bfloat16"), "keys are scored as they lie in the cache"),
)


def reference_of(given: Mapping[str, Any]) -> str | None:
    """What the workers must know of the methods that an engine was given: a path, or a block as JSON; None without a
    method for live caches. Looked up in our own option, then in the connector's configuration, whether the connector
    has translated that already or not. ConfigError where the option names no such method, or both do."""
    own, connector = given.get(OPTION), _connector_config(given)
    of_connector = _of_connector(connector) if connector is not None else None
    if own is None:
        return of_connector
    if isinstance(own, Mapping) or (isinstance(own, Sequence) and not isinstance(own, str)):
        found = parse_live(own if isinstance(own, Mapping) else {OPTION: own})
        reference = found.model_dump_json()
    else:
        reference = str(options.file_of(own, FLAG))
        found = load_live(reference)
    if not found.live:
        raise ConfigError(
            f"{FLAG} names no method that acts on a live cache: add {{algorithm: triattention, ...}}, or leave it out. "
            "Cold pages need --kv-connector kvtier"
        )
    if of_connector is not None:
        raise ConfigError(f"{FLAG} and the connector's configuration both name a method for live caches: leave one out")
    return reference


def check(given: Mapping[str, Any], reference: str) -> None:
    """ConfigError for options of SGLang that exclude eviction, and for a calibration that cannot be read."""
    from kvtier.compression.triattention.calibration import load_calibration

    refuse_excluded(given, EXCLUDED, asked=FLAG)
    for method in resolve(reference).live:
        load_calibration(Path(method.calibration_path).expanduser())


def tell_workers(reference: str | None) -> None:
    """Set the variable for the workers that start from here on, or remove it."""
    if reference is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = reference


def resolve(reference: str) -> CompressionOptions:
    """The options that `reference_of` referred to; a file is read again by each worker."""
    return parse_live(json.loads(reference)) if reference.startswith("{") else load_live(reference)


def _connector_config(given: Mapping[str, Any]) -> Any:
    """The connector's configuration, from its own options or from SGLang's, into which they were translated."""
    if given.get(CONNECTOR_OPTION) is not None:
        return given.get(CONFIG_OPTION)
    linker = given.get("unified_cache_external_linker_config")
    if isinstance(linker, Mapping) and linker.get("linker_module_path") == LINKER_MODULE:
        extra = linker.get("linker_extra_config", {})
        return extra.get("config_file", extra.get("config"))
    return None


def _of_connector(config: Any) -> str | None:
    """A file by its absolute path, so that passwords in it stay there; of a block only the part for live caches."""
    reference = options.reference_of(config)
    found = options.resolve_config(reference).compression
    if not found.live:
        return None
    return str(reference["config_file"]) if "config_file" in reference else found.model_dump_json()
