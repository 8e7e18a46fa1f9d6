"""``--kv-connector kvtier-hicache`` translated into SGLang's options of its hierarchical cache, and what it excludes.

Runs in the process that parses the command line or builds `Engine`, before any worker starts, so that a mistake is one
message; once more where the storage is built, since storage can be attached to an engine that runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from kvtier.connectors.sglang import options
from kvtier.connectors.sglang.options import Excluded
from kvtier.connectors.sglang.preflight import check_machine
from kvtier.errors import ConfigError, EngineError

_log = logging.getLogger(__name__)

NAME = "kvtier-hicache"
MODULE = "kvtier.connectors.sglang.hicache"
CLASS = "KVTierStorage"
_OFF = (None, False)
_ITSELF = f"--kv-connector {NAME} sets it itself"
_OTHER = "of several ranks, this path serves tensor-parallel ones"
_OWN = frozenset(
    {
        "enable_hierarchical_cache",
        "hicache_storage_backend",
        "disaggregation_mode",
        "tp_size",
        "pp_size",
        "dp_size",
        "attn_dp_size",
    }
)
"""Options of the linker's table that mean something else here."""

TAKEN = (
    Excluded("hicache_storage_backend", _OFF, _ITSELF),
    Excluded("hicache_storage_backend_extra_config", _OFF, "kvtier's own options go into --kv-connector-config"),
)


def excluded() -> tuple[Excluded, ...]:
    """What the staged path cannot be combined with."""
    return (
        *(e for e in options.EXCLUDED if e.option not in _OWN),
        Excluded("enable_unified_cache_external_linker", _OFF, "a linker replaces the hierarchical cache"),
        Excluded(
            "disaggregation_mode",
            (None, "null", "prefill"),
            "SGLang's decode instances bypass its staging: give it to the prefill instances",
        ),
        Excluded("disaggregation_decode_enable_offload_kvcache", _OFF, "SGLang's decode instances bypass its staging"),
        Excluded("pp_size", (None, 0, 1), _OTHER),
        Excluded("dp_size", (None, 0, 1), _OTHER),
        Excluded("attn_dp_size", (None, 0, 1), _OTHER),
    )


def hicache_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's options for `given` ones, which hold ``kv_connector`` and ``kv_connector_config`` among SGLang's own.
    Raises ConfigError; starts nothing."""
    found = {k: v for k, v in given.items() if k not in (options.CONNECTOR_OPTION, options.CONFIG_OPTION)}
    asked = f"--kv-connector {NAME}"
    options.refuse_excluded(found, (*TAKEN, *excluded()), asked=asked)
    if found.get("disaggregation_mode") == "prefill":
        policy = found.get("disaggregation_decode_allocation_policy")
        if policy == "prefill_complete":
            raise ConfigError(
                f"--disaggregation-decode-allocation-policy = {policy!r} cannot be combined with {asked}: SGLang "
                "allows no storage behind its prefill instances then. Choose another policy, or leave kvtier out"
            )
    reference = options.reference_of(given.get(options.CONFIG_OPTION))
    config = options.resolve_config(reference)
    options.check_waiting(config)
    options.settle_page_size(found, config)
    check_machine(config, found)
    if found.get("hicache_storage_prefetch_policy") == "best_effort":
        _log.warning(
            "--hicache-storage-prefetch-policy best_effort: requests do not wait for pages that are on their way"
        )
    extra = {
        "backend_name": NAME,
        "module_path": MODULE,
        "class_name": CLASS,
        "interface_v1": 1,
        "prefetch_threshold": found["page_size"],
        # SGLang's own waiting ends when ours does; what is on its way by then was given up.
        "prefetch_timeout_base": config.promote_deadline,
        **reference,
    }
    return found | {
        "enable_hierarchical_cache": True,
        "hicache_host_memory_mode": "buffer_only",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }


def refuse_unsupported(args: Any, model_config: Any, storage_config: Any) -> None:
    """What only the running engine knows. ConfigError or EngineError with the option, or what the model has."""
    table = excluded()
    values = {e.option: getattr(args, e.option, None) for e in table}
    options.refuse_excluded(values, table, asked="kvtier as storage")
    if model_config.is_multimodal and not args.language_model_only:
        raise EngineError(
            "this model takes images or sound, which kvtier was not tested with. Give --language-model-only, or start "
            "without kvtier"
        )
    if storage_config.is_mla_model and storage_config.tp_size > 1:
        raise EngineError(
            f"--tp-size = {storage_config.tp_size}: of a model whose ranks all hold the same pages, SGLang's "
            "hierarchical cache stores those of rank 0 only, and asks every rank. Give --kv-connector kvtier"
        )
