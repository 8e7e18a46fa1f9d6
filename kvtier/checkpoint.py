"""Who a checkpoint is: its configuration and the beginning of every tensor, read from its safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtier.errors import EngineError
from kvtier.keys import fingerprint_weights

_HEAD_BYTES = 4096
_HEADER_MAX_BYTES = 100_000_000
_NOT_IDENTITY = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Keys of config.json that may differ between two copies of one model. The cache's dtype is in the namespace."""


def fingerprint_checkpoint(folder: Path, options: Mapping[str, Any] | None = None) -> str | None:
    """Hex fingerprint of a model's folder; None where it has no safetensors files to read. options: what else changes
    the numbers that the same files give. Raises EngineError for a file that is none."""
    shards = sorted(folder.glob("*.safetensors"))
    if not shards or not (folder / "config.json").is_file():
        return None
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config = {k: v for k, v in config.items() if k not in _NOT_IDENTITY}
    return fingerprint_weights({"config": config, **(options or {})}, (t for s in shards for t in tensor_heads(s)))


def tensor_heads(path: Path) -> Iterator[tuple[str, list[int], str, bytes]]:
    """Name, shape, dtype and first bytes of every tensor of a safetensors file, reading no more than that."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size <= _HEADER_MAX_BYTES:
            raise EngineError(f"{path} is not a safetensors file: its header claims {size} bytes")
        header = json.loads(file.read(size))
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            start, end = tensor["data_offsets"]
            file.seek(8 + size + start)
            yield name, tensor["shape"], tensor["dtype"], file.read(min(_HEAD_BYTES, end - start))
