"""``--kv-connector kvtier`` translated into SGLang's own options, and the options that it excludes.

Runs in the process that parses the command line or builds `Engine`, before any worker starts, so that a mistake is
one message and not a worker's traceback.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.codecs.registry import codec
from kvtier.config import Config, load_config, parse_config
from kvtier.connectors.sglang.preflight import check_machine
from kvtier.errors import ConfigError, SpecError
from kvtier.spec import GROUP, DType, PageSpec

_log = logging.getLogger(__name__)

NAME = "kvtier"
CONNECTOR_OPTION = "kv_connector"
CONFIG_OPTION = "kv_connector_config"
DEFAULT_PAGE_TOKENS = 64
DEFAULT_CONFIG: Mapping[str, Any] = {"tiers": [{"type": "host", "capacity": "4GiB"}]}
_STATE_PER_TOKEN = "no_buffer"
_FORMS_OF_TOKENS = ("nvfp4_offset", "nvfp4_token", "k8v4")
LINKER_MODULE = "kvtier.connectors.sglang.linker"
LINKER_CLASS = "KVTierLinker"


@dataclass(frozen=True, slots=True)
class Excluded:
    """An option of SGLang that cannot be combined with the connector unless it has one of the `allowed` values."""

    option: str
    allowed: tuple[Any, ...]
    why: str

    @property
    def flag(self) -> str:
        return "--" + self.option.replace("_", "-")


_OFF = (None, False)
_ONE = (None, 0, 1)
_RADIX = "kvtier restores pages into SGLang's default radix cache"
_OTHER_CACHE = "it is another cache behind the radix cache"
_UNTESTED = "the two were never tested together"
_REPLICAS = "replicas would open the same directories: start engines of their own that share a cache server"
_CONTEXT = "the parts of a page that context-parallel ranks hold are not told apart"
EXCLUDED = (
    Excluded("disable_radix_cache", _OFF, _RADIX),
    Excluded("radix_cache_backend", _OFF, _RADIX),
    Excluded("prefill_only_disable_kv_cache", _OFF, _RADIX),
    Excluded("enable_hierarchical_cache", _OFF, _OTHER_CACHE + "; --kv-connector kvtier-hicache goes behind it"),
    Excluded("hicache_storage_backend", _OFF, _OTHER_CACHE + "; --kv-connector kvtier-hicache is such storage"),
    Excluded("enable_lmcache", _OFF, _OTHER_CACHE),
    Excluded("enable_flexkv", _OFF, _OTHER_CACHE),
    Excluded("enable_unified_memory", _OFF, "its pages move while they are copied"),
    Excluded("enable_page_major_kv_layout", _OFF, "this version reads one buffer per layer"),
    Excluded("enable_kv_cache_sharding", _OFF, "this version serves whole pages on one rank"),
    Excluded("enable_hisparse", _OFF, _UNTESTED),
    Excluded("enable_pdmux", _OFF, _UNTESTED),
    Excluded("enable_streaming_session", _OFF, _UNTESTED),
    Excluded("enable_session_radix_cache", _OFF, _UNTESTED),
    Excluded("encoder_only", _OFF, _UNTESTED),
    Excluded("dllm_algorithm", _OFF, _UNTESTED),
    Excluded("speculative_algorithm", _OFF, "pages in its draft model's KV pool are not stored"),
    Excluded("disaggregation_mode", (None, "null"), "requests do not pass the ordinary waiting queue"),
    Excluded("dp_size", _ONE, _REPLICAS),
    Excluded("attn_dp_size", _ONE, _REPLICAS),
    Excluded("dcp_size", _ONE, _CONTEXT),
    Excluded("attn_cp_size", _ONE, _CONTEXT),
    Excluded("kv_cache_dtype", (None, "auto", "bf16", "bfloat16", "fp8_e4m3"), "such device caches are not served"),
    Excluded("quantization_param_path", _OFF, "scales beside the checkpoint are no part of what tells its pages apart"),
)

TAKEN = (
    Excluded("enable_unified_cache_external_linker", _OFF, "kvtier sets it itself"),
    Excluded("unified_cache_external_linker_config", _OFF, "kvtier sets it itself"),
)


def linker_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's options for `given` ones, which hold ``kv_connector`` and ``kv_connector_config`` among SGLang's own.

    Without a connector that is all of `given` but these two. Raises ConfigError; starts nothing."""
    options = {k: v for k, v in given.items() if k not in (CONNECTOR_OPTION, CONFIG_OPTION)}
    name, config = given.get(CONNECTOR_OPTION), given.get(CONFIG_OPTION)
    if name is None:
        if config is not None:
            raise ConfigError("--kv-connector-config is given without --kv-connector: add --kv-connector kvtier")
        return options
    if name != NAME:
        raise ConfigError(f"--kv-connector = {name!r}: choose {NAME}, or kvtier-hicache behind SGLang's host memory")
    refuse_excluded(options, (*EXCLUDED, *TAKEN))
    reference = reference_of(config)
    config_read = resolve_config(reference)
    check_waiting(config_read)
    settle_page_size(options, config_read)
    check_machine(config_read, options)
    options["enable_unified_cache_external_linker"] = True
    options["unified_cache_external_linker_backend"] = "dynamic"
    options["unified_cache_external_linker_config"] = {
        "linker": LINKER_CLASS,
        "linker_module_path": LINKER_MODULE,
        "linker_extra_config": reference,
    }
    return options


def refuse_excluded(
    options: Mapping[str, Any], table: Sequence[Excluded], *, asked: str = f"--kv-connector {NAME}"
) -> None:
    """ConfigError for the first option of `table` that `asked` cannot be combined with."""
    for excluded in table:
        value = options.get(excluded.option)
        if not any(value is a or (value == a and type(value) is type(a)) for a in excluded.allowed):
            raise ConfigError(
                f"{excluded.flag} = {value!r} cannot be combined with {asked}: {excluded.why}. Remove one of the two"
            )


def resolve_config(reference: Mapping[str, Any]) -> Config:
    """The configuration that a linker's extra options refer to: a file, read again by each worker so that passwords in
    it do not travel in logged options, or a block given in Python."""
    if "config_file" in reference:
        return load_config(reference["config_file"])
    return parse_config(reference.get("config", DEFAULT_CONFIG))


def check_waiting(config: Config) -> None:
    """A request must not be held for its pages until the engine itself gives it up."""
    try:
        timeout_s = float(os.environ.get("SGLANG_REQ_WAITING_TIMEOUT", "-1"))
    except ValueError:
        return  # SGLang says so, and has no timeout then
    if 0 < timeout_s <= config.promote_deadline:
        raise ConfigError(
            f"promote_deadline = {config.promote_deadline} s must be shorter than SGLANG_REQ_WAITING_TIMEOUT = "
            f"{timeout_s} s: lower the first or raise the second"
        )


def settle_page_size(options: dict[str, Any], config: Config) -> None:
    """Set a page size where the user sets none, and refuse one that the form of pages cannot have."""
    if options.get("page_size") is None and options.get("mamba_radix_cache_strategy") == _STATE_PER_TOKEN:
        options["page_size"] = 1  # all that SGLang takes with it
    if options.get("page_size") is None:
        _log.info("kvtier sets --page-size %d; give --page-size to choose another", DEFAULT_PAGE_TOKENS)
        options["page_size"] = DEFAULT_PAGE_TOKENS
    check_page_tokens(config, options["page_size"])


def check_page_tokens(config: Config, page_tokens: int) -> None:
    """A form of K that was asked for by name must be able to hold pages of that size."""
    if config.cold_page is None or config.cold_page.quant not in _FORMS_OF_TOKENS:
        return
    page = PageSpec.mha(layers=1, kv_heads=1, head_dim=GROUP, page_tokens=page_tokens, dtype=DType.BF16)
    try:
        codec(config.cold_page.quant).layout(page)
    except SpecError as error:
        raise ConfigError(f"--page-size = {page_tokens}: {error}") from None


def reference_of(config: Any) -> dict[str, Any]:
    """What workers find the configuration by (`resolve_config`), for the path of a file or a block."""
    if config is None:
        _log.warning("kvtier runs without --kv-connector-config: %s", dict(DEFAULT_CONFIG))
        return {}
    if isinstance(config, Mapping):
        return {"config": dict(config)}
    return {"config_file": str(file_of(config, "--kv-connector-config"))}


def file_of(value: Any, flag: str) -> Path:
    """The absolute path of the file that `flag` names. ConfigError for what can be none."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        raise ConfigError(
            f"{flag} = {value[:40]!r}...: it takes the name of a file. Write the block into one, or give it as a "
            "mapping from Python"
        )
    try:
        return Path(value).expanduser().resolve()
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{flag} = {value!r} names no file ({error}): give a YAML or JSON file, or a mapping from Python"
        ) from None
