"""Query statistics of a model, and the files they come in.

Read: the published ``.pt`` (always with ``weights_only=True``: nothing in it runs), safetensors, and the flat form in
either. Written: safetensors only. See docs/triattention.md for the tensors' names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.abc.compression import CacheGeometry
from kvtier.compression.triattention.rotary import ROPE_STYLES, Rotary
from kvtier.errors import ConfigError, missing_extra

OPTION = "calibration_path"

_HEAD = re.compile(r"layer(\d+)_head(\d+)")
_FIELDS = ("q_mean_real", "q_mean_imag", "q_abs_mean")
_FLAT = ("E_q", "E_q_norm", "omega", "freq_scale_sq")
_FREQUENCY_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Calibration:
    """q_mean: complex64 ``[layers, query_heads, F]``, the mean query before rotation as complex numbers; F is half of
    head_dim. q_abs: fp32, the same shape, the mean of its absolute values. sampled: bool ``[layers, query_heads]``,
    heads that the file has. omega, gain: fp64 ``[F]`` where the file says them."""

    q_mean: npt.NDArray[np.complex64]
    q_abs: npt.NDArray[np.float32]
    sampled: npt.NDArray[np.bool_]
    rope_style: str = "half"
    model_name: str = ""
    omega: npt.NDArray[np.float64] | None = None
    gain: npt.NDArray[np.float64] | None = None

    @property
    def head_dim(self) -> int:
        return 2 * int(self.q_mean.shape[-1])

    def check(self, geometry: CacheGeometry) -> None:
        """Raise ConfigError where this is another model's calibration."""
        layers, heads, half = self.q_mean.shape
        last_head = geometry.first_query_head + geometry.query_heads
        for name, mine, theirs, fits in (
            ("layers", layers, geometry.layers, layers == geometry.layers),
            ("query heads", heads, last_head, heads >= last_head),
            ("head_dim", 2 * half, geometry.head_dim, 2 * half == geometry.head_dim),
        ):
            if not fits:
                raise ConfigError(
                    f"option {OPTION!r}: the calibration has {mine} {name}, the model {theirs}; "
                    "run `kvtier calibrate` on this model"
                )

    def check_rotary(self, rotary: Rotary, layer: int) -> None:
        """Raise ConfigError where the file's frequencies are not those of the model's configuration."""
        for name, mine, theirs in (("omega", self.omega, rotary.omega), ("freq_scale_sq", self.gain, rotary.gain)):
            if mine is not None and not np.allclose(mine, theirs, rtol=_FREQUENCY_TOLERANCE, atol=0.0):
                raise ConfigError(
                    f"option {OPTION!r}: {name} of the file is not that of the model in layer {layer}: "
                    "run `kvtier calibrate` on this model"
                )

    def save(self, path: Path) -> None:
        """Write safetensors. Raises ConfigError for another suffix or where the file cannot be written."""
        if path.suffix != ".safetensors":
            raise ConfigError(f"--output {str(path)!r}: give a name that ends in .safetensors")
        save_file = _safetensors().numpy.save_file
        tensors = {}
        for layer, head in np.argwhere(self.sampled).tolist():
            values = (self.q_mean[layer, head].real, self.q_mean[layer, head].imag, self.q_abs[layer, head])
            for field, value in zip(_FIELDS, values, strict=True):
                tensors[f"layer{layer:02d}_head{head:02d}.{field}"] = np.ascontiguousarray(value, dtype=np.float32)
        metadata = {
            "head_dim": self.head_dim,
            "rope_style": self.rope_style,
            "model_name": self.model_name,
            "sampled_heads": np.argwhere(self.sampled).tolist(),
        }
        try:
            save_file(tensors, path, metadata={"metadata": json.dumps(metadata)})
        except (OSError, _safetensors().SafetensorError) as e:
            raise ConfigError(f"--output {str(path)!r} cannot be written: {e}; give a writable path") from e


def load_calibration(path: Path) -> Calibration:
    """Read a file of any of the forms. Raises ConfigError, naming the option, for everything that is not one."""
    try:
        content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pt(path)
        if all(name in content for name in _FLAT):
            return _of_flat(content)
        if isinstance(content.get("stats"), dict):
            return _of_heads(content["stats"], content.get("metadata") or {})
    except ConfigError:
        raise
    except Exception as e:
        # The readers raise whatever a damaged file makes them raise.
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise ConfigError(
            f"option {OPTION!r} = {str(path)!r} cannot be read ({reason}); give a file made by `kvtier calibrate`, "
            "or a published .pt"
        ) from e
    raise ConfigError(
        f"option {OPTION!r} = {str(path)!r} holds neither 'metadata' and 'stats' nor {', '.join(_FLAT)}; "
        "make one with `kvtier calibrate`"
    )


def _read_pt(path: Path) -> dict[str, Any]:
    try:
        import torch
    except ImportError as e:
        raise missing_extra("torch", "torch") from e
    content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict):
        raise ConfigError(f"option {OPTION!r} = {str(path)!r} holds a {type(content).__name__}, expected a dictionary")
    return content


def _read_safetensors(path: Path) -> dict[str, Any]:
    with _safetensors().safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dictionary
        header = file.metadata() or {}
    if all(name in tensors for name in _FLAT):
        return tensors
    stats: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        head, _, field = name.removeprefix("stats.").partition(".")
        stats.setdefault(head, {})[field] = tensor
    return {"stats": stats, "metadata": json.loads(header.get("metadata", "{}"))}


def _of_heads(stats: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, Any]) -> Calibration:
    found: dict[tuple[int, int], list[npt.NDArray[np.float32]]] = {}
    for name, head in stats.items():
        match = _HEAD.fullmatch(name)
        missing = [field for field in _FIELDS if field not in head]
        if match is None or missing:
            what = f"lacks {missing[0]}" if match else "is not of the form layer00_head00"
            raise ConfigError(f"option {OPTION!r}: the entry {name!r} {what}")
        found[int(match[1]), int(match[2])] = [_float(head[field]) for field in _FIELDS]
    if not found:
        raise ConfigError(f"option {OPTION!r}: the file holds no head; make one with `kvtier calibrate`")
    half = {len(field) for fields in found.values() for field in fields}
    if len(half) != 1 or int(metadata.get("head_dim", 2 * min(half))) != 2 * min(half):
        raise ConfigError(
            f"option {OPTION!r}: heads have {sorted(half)} frequencies for head_dim = {metadata.get('head_dim')}"
        )
    shape = (1 + max(layer for layer, _ in found), 1 + max(head for _, head in found), half.pop())
    q_mean, q_abs = np.zeros(shape, np.complex64), np.zeros(shape, np.float32)
    sampled = np.zeros(shape[:2], np.bool_)
    for place, (real, imag, absolute) in found.items():
        q_mean[place], q_abs[place], sampled[place] = real + 1j * imag, absolute, True
    style = str(metadata.get("rope_style", "half"))
    if style not in ROPE_STYLES:
        raise ConfigError(f"option {OPTION!r}: rope_style = {style!r} is not one of {', '.join(ROPE_STYLES)}")
    return Calibration(q_mean, q_abs, sampled, style, str(metadata.get("model_name", "")))


def _of_flat(content: Mapping[str, Any]) -> Calibration:
    q_mean = content["E_q"].cpu().numpy().astype(np.complex64)
    q_abs, omega, gain = (_float(content[name]) for name in _FLAT[1:])
    if q_mean.ndim != 3 or q_abs.shape != q_mean.shape or {omega.shape, gain.shape} != {q_mean.shape[2:]}:
        raise ConfigError(
            f"option {OPTION!r}: E_q {q_mean.shape}, E_q_norm {q_abs.shape}, omega {omega.shape} and freq_scale_sq "
            f"{gain.shape} do not fit together"
        )
    sampled = np.ones(q_mean.shape[:2], np.bool_)
    return Calibration(q_mean, q_abs, sampled, omega=omega.astype(np.float64), gain=gain.astype(np.float64))


def _float(tensor: Any) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = tensor.detach().cpu().float().numpy()
    if not np.isfinite(values).all():
        raise ConfigError(f"option {OPTION!r}: the file holds NaN or infinity")
    return values


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as e:
        raise missing_extra("safetensors", "transformers") from e
    return safetensors
