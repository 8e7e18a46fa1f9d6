"""The namespace of an engine's pages: what must be equal for another engine to restore them.

SGLang's own page hashes chain tokens, the request's extra key (to which the LoRA adapter's id is appended) and its
cache salt. Model, weights, dtype, page size, shard and the content of adapters are not in them: they are added here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.checkpoint import fingerprint_checkpoint, tensor_heads
from kvtier.codecs.checkpoint_scales import read_scales
from kvtier.errors import ConfigError
from kvtier.keys import fingerprint_weights
from kvtier.model_config import rotary_dim_of
from kvtier.spec import Role

_log = logging.getLogger(__name__)

_READABLE = ("auto", "safetensors")
_WEIGHTS_OPTIONS = (
    "quantization",
    "model_impl",
    "model_loader_extra_config",
    "modelopt_quant",
    "modelopt_checkpoint_restore_path",
    "rl_quant_profile",
    "custom_weight_loader",
    "uno_lora_path",
)


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """model: served name, or the architecture where the name is a local path. weights, lora: hex fingerprints."""

    model: str
    weights: str
    lora: str


def identify(model_config: Any, args: Any) -> EngineIdentity:
    """`model_config`: SGLang's ModelConfig. `args`: a view of its resolved server arguments."""
    folder = _model_folder(model_config.model_path, args)
    return EngineIdentity(
        model=_model_name(args.served_model_name, model_config),
        weights=weights_fingerprint(folder, args.load_format, _overrides(args)),
        lora=lora_fingerprint(args.lora_paths) if args.enable_lora or args.lora_paths else "",
    )


def cache_values(model_config: Any, args: Any, pool: Any) -> dict[str, Any]:
    """What the model's configuration and checkpoint say about the numbers in `pool`: `DevicePool.of`'s options."""
    told: dict[str, Any] = {"rotary_dim": rotary_dim_of(model_config.hf_text_config, model_config.head_dim)}
    if str(pool.dtype).endswith("float8_e4m3fn"):  # the option may say auto
        folder = _model_folder(model_config.model_path, args)
        shards = folder is not None and args.load_format in _READABLE and any(folder.glob("*.safetensors"))
        told["fp8_scales"] = _fp8_scales(folder) if folder is not None and shards else {}
    return told


def _fp8_scales(folder: Path) -> Mapping[Role, Mapping[int, float]]:
    """None where the checkpoint's are not to be used, as the engine does: values are then as exact, in other units."""
    try:
        return read_scales(folder)
    except ConfigError as error:
        _log.warning("scales of the FP8 cache are taken as 1, since those of the checkpoint cannot be used: %s", error)
        return {}


def weights_fingerprint(folder: Path | None, load_format: str, overrides: Mapping[str, Any]) -> str:
    """Hex fingerprint of a checkpoint in safetensors files. Where there is none to read (dummy weights, other
    formats), a random one: pages are then found again by this engine only, until it restarts."""
    if load_format == "dummy":
        return secrets.token_hex(32)
    found = fingerprint_checkpoint(folder, overrides) if folder is not None and load_format in _READABLE else None
    if found is None:
        _log.warning(
            "no safetensors weights to identify this model by (load format %r): its pages are not shared with other "
            "engines and not found after a restart",
            load_format,
        )
        return secrets.token_hex(32)
    return found


def plain_checkpoint(model_config: Any, args: Any) -> str | None:
    """Fingerprint of the files alone, where the engine has loaded them as they are; else None."""
    folder = _model_folder(model_config.model_path, args)
    options = [*(o for o in _WEIGHTS_OPTIONS if o != "model_impl"), "json_model_override_args"]
    changed = any((value := getattr(args, o)) and value != "{}" for o in options)
    if folder is None or args.load_format not in _READABLE or changed:
        return None
    return fingerprint_checkpoint(folder)


def lora_fingerprint(adapters: Any) -> str:
    """Hex digest of the adapters an engine was started with: name, path and content. Adapters that are loaded later
    have random ids in the engine's own hashes, so they need no place here."""
    h = hashlib.sha256()
    for adapter in sorted(adapters or (), key=lambda a: (a.lora_name or "", a.lora_path or "")):
        described = json.dumps([adapter.lora_id, adapter.lora_name]).encode()
        folder = Path(adapter.lora_path)
        shards = sorted(folder.glob("*.safetensors"))
        content = (
            fingerprint_weights(_adapter_config(folder), (t for shard in shards for t in tensor_heads(shard)))
            if shards
            else secrets.token_hex(32)
        )
        h.update(len(described).to_bytes(4, "little") + described + bytes.fromhex(content))
    return h.hexdigest()


def _adapter_config(folder: Path) -> dict[str, Any]:
    path = folder / "adapter_config.json"
    config: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return {k: v for k, v in config.items() if k != "base_model_name_or_path"}


def _overrides(args: Any) -> dict[str, Any]:
    """Options that change what the same files compute."""
    return {
        "overrides": args.json_model_override_args,
        "compute_dtype": str(args.dtype),
        **{option: getattr(args, option) for option in _WEIGHTS_OPTIONS},
    }


def _model_name(served: str | None, model_config: Any) -> str:
    if served and not served.startswith(("/", ".", "~")) and not Path(served).exists():
        return served
    return ",".join(model_config.hf_config.architectures or ["unknown"])


def _model_folder(path: str, args: Any) -> Path | None:
    """The directory that the engine loaded from; a hub id is resolved in the local cache, never over the network."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, revision=args.revision, cache_dir=args.download_dir, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError) as error:
        _log.warning("model %r was not found in the local cache: %s", path, error)
        return None
