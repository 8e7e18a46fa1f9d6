"""The second-level scales that a ModelOpt NVFP4-KV checkpoint was calibrated with: one per layer for K and for V.

They are scalars of the checkpoint's safetensors files, ``model.layers.N.self_attn.k_proj.k_scale`` and
``...v_proj.v_scale``, also under ``model.language_model`` and without the projection's name. A scale s is the value of
code 1 at e4m3 scale 1, so that NVFP4's global scale is 1 / s. Checkpoints with an FP8 cache name its scales alike."""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.errors import ConfigError
from kvtier.spec import DType, PageSpec, Role

_NAME = re.compile(r"(?:.*\.)?layers\.(\d+)\.self_attn\.(?:([kv])_proj\.|attn\.)?([kv])_scale")
_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}
_HEADER_MAX_BYTES = 100_000_000
_LIMIT = 2.0**100
_FP16_LEAST = 2.0**-4
"""Global scales below would decode past the end of FP16."""
_ROLES = {"k": Role.K, "v": Role.V}


@dataclass(frozen=True, slots=True)
class CheckpointScales:
    """Global scales (float32, 1 / the checkpoint's number) by layer, K and V."""

    key: Mapping[int, float]
    value: Mapping[int, float]

    @staticmethod
    def load(path: str | Path) -> CheckpointScales:
        """From a safetensors file, or every one in a folder. Raises ConfigError where there is none, one cannot be
        read, no layer has scales, or a scale is not a positive number."""
        found = read_scales(path)
        if not found[Role.K] and not found[Role.V]:
            raise ConfigError(
                f"scale_checkpoint_path = {str(path)!r} holds no scales (model.layers.N.self_attn.k_proj.k_scale, "
                "v_proj.v_scale): give a checkpoint that ModelOpt calibrated with an NVFP4 KV cache, or use "
                "global_scale: page"
            )
        inverse = {r: {n: float(np.float32(1) / np.float32(s)) for n, s in by.items()} for r, by in found.items()}
        return CheckpointScales(inverse[Role.K], inverse[Role.V])

    @property
    def digest(self) -> str:
        """Hex, equal for equal scales only: pages made with others are not interchangeable."""
        h = hashlib.blake2b(digest_size=16, person=b"kvtier.kvscales")
        for role, scales in ((b"k", self.key), (b"v", self.value)):
            for layer in sorted(scales):
                h.update(struct.pack("<1sqf", role, layer, scales[layer]))
        return h.hexdigest()

    def of(self, spec: PageSpec) -> dict[int, float]:
        """Global scale by index of each compressed buffer of `spec`. Raises ConfigError for a layer without one."""
        scales = {Role.K: self.key, Role.V: self.value}
        out: dict[int, float] = {}
        for i, b in enumerate(spec.buffers):
            if not b.compressible:
                continue
            known = scales.get(b.role, {})
            if b.layer not in known:
                name = "K or V" if b.role is Role.LATENT else b.role.value.upper()
                raise ConfigError(
                    f"global_scale = 'checkpoint': the checkpoint has no scale for {name} of layer {b.layer} "
                    f"({b.role.value} buffer; it has {len(self.key)} of K and {len(self.value)} of V). Give the "
                    "checkpoint that this model was loaded from, or use global_scale: page"
                )
            out[i] = known[b.layer]
            if b.dtype in (DType.FP16, DType.FP8_E4M3) and out[i] < _FP16_LEAST:
                raise ConfigError(
                    f"global_scale = 'checkpoint': the scale of {b.role.value} of layer {b.layer} is {1 / out[i]:.4g}, "
                    f"above {1 / _FP16_LEAST:.0f}: a {b.dtype.value} cache could not hold what decodes; use a bf16 "
                    "cache or global_scale: page"
                )
        return out


def read_scales(path: str | Path) -> dict[Role, dict[int, float]]:
    """The scales as the checkpoint has them, by role and layer; empty where it has none. Raises ConfigError as
    `CheckpointScales.load` does for everything else."""
    found: dict[Role, dict[int, float]] = {Role.K: {}, Role.V: {}}
    for file in _files(Path(path).expanduser()):
        for name, layer, role, scale in _scales(file):
            if not (math.isfinite(scale) and 1 / _LIMIT <= scale <= _LIMIT):
                raise ConfigError(
                    f"scale_checkpoint_path = {str(path)!r}: {name} is {scale}; a scale must be a positive number "
                    "between 2**-100 and 2**100: export the checkpoint again, or use global_scale: page"
                )
            if found[role].setdefault(layer, scale) != scale:
                raise ConfigError(
                    f"scale_checkpoint_path = {str(path)!r}: {name} is there twice, with different values; "
                    "give the folder of one checkpoint"
                )
    return found


def _files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ConfigError(
            f"scale_checkpoint_path = {str(path)!r}: there is no safetensors file; give the checkpoint's folder, or "
            "the file with its scales"
        )
    return files


def _scales(file: Path) -> Iterator[tuple[str, int, Role, float]]:
    """Name, layer, role and value of every scale in `file`; nothing else of it is read."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if not 0 < size <= _HEADER_MAX_BYTES:
                raise ConfigError(f"{file} is not a safetensors file: its header claims {size} bytes")
            header: dict[str, Any] = json.loads(stream.read(size))
            for name, tensor in header.items():
                match = _NAME.fullmatch(name)
                if match is None or match[2] not in (None, match[3]):
                    continue
                begin, end = tensor["data_offsets"]
                stream.seek(8 + size + begin)
                yield name, int(match[1]), _ROLES[match[3]], _number(file, name, tensor, stream.read(end - begin))
    except OSError as error:
        raise ConfigError(f"scale_checkpoint_path: {file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file} is not a safetensors file: {error}") from None


def _number(file: Path, name: str, tensor: Mapping[str, Any], raw: bytes) -> float:
    kind, shape = tensor["dtype"], list(tensor["shape"])
    if kind not in _BYTES or shape not in ([], [1]) or len(raw) != _BYTES[kind]:
        raise ConfigError(f"{file}: {name} is {kind} of shape {shape}; a scale is one number, in F32, F16 or BF16")
    if kind == "BF16":
        raw, kind = b"\0\0" + raw, "F32"
    value: float = struct.unpack({"F32": "<f", "F16": "<e", "F64": "<d"}[kind], raw)[0]
    return value
