"""Who a model is, for the namespace of its pages: a name that is no path, and a fingerprint of its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kvtier.errors import ConfigError
from kvtier.keys import fingerprint_weights

_HEAD_BYTES = 4096
_NOT_IDENTITY = (
    "_name_or_path",
    "transformers_version",
    "_attn_implementation",
    "_attn_implementation_internal",
    "architectures",
    "dtype",
    "torch_dtype",
)
"""Entries of a config that differ with machine, version or way of loading while the model is the same. The class and
the tensors' own dtypes take part by themselves."""


def check_model_name(name: str) -> str:
    """`name`, if it can identify a model everywhere. Raises ConfigError for an empty name or a local path."""
    if not name.strip():
        raise ConfigError(
            "model_name is empty: give the name that the model is known by, such as SmolLM2-135M-Instruct"
        )
    # A bare name is one, whatever happens to lie in the folder where one stands.
    if name.startswith(("/", "./", "../", "~", "\\")) or name in (".", "..") or ("/" in name and Path(name).exists()):
        raise ConfigError(
            f"model_name {name!r} is a local path, which differs between machines: give the name that the model is "
            "known by, such as SmolLM2-135M-Instruct"
        )
    return name


def weights_fingerprint_of(model: Any) -> str:
    """Hex fingerprint of `model` (a PreTrainedModel): its config and the first 4 KiB of every tensor. Reads weights
    from whatever device they are on. Raises ConfigError where weights are not loaded."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in _NOT_IDENTITY}
    config["class"] = type(model).__name__
    return fingerprint_weights(config, _tensors(model))


def _tensors(model: Any) -> Iterator[tuple[str, Sequence[int], str, bytes]]:
    for name, tensor in model.state_dict().items():
        if tensor.device.type == "meta":
            raise ConfigError(f"weight {name!r} is not loaded (it is on the meta device): load the model first")
        head = tensor.detach().reshape(-1)[: _HEAD_BYTES // tensor.element_size()]
        yield name, tuple(tensor.shape), str(tensor.dtype), head.cpu().contiguous().view(torch.uint8).numpy().tobytes()
