"""What ``kvtier bench lmcache`` compares: L2 adapters, built as LMCache builds them from its own options."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOST_CAPACITY = "256MiB"
DISK_CAPACITY = "1GiB"
RESP_WORKERS = 8
AGAIN = ", again"
"""Behind the name of a system that was measured under its own name as well."""

_STAT_BLOCK_BYTES = 512
_ERRORS = {"none": 0.0, "nvfp4": 0.15, "k8v4": 0.15, "lossless": 0.0}
"""By codec: the largest relative error of a chunk."""


@dataclass(frozen=True, slots=True)
class System:
    """options: of ``--l2-adapter``. keeps: chunks come up from memory of the adapter's own until it is opened anew.
    error: the largest relative error of what is loaded; 0 where it is the same bytes. folder: that it writes into,
    None where it uses `redis`, a host and a port."""

    name: str
    options: Mapping[str, Any]
    keeps: bool
    error: float
    folder: Path | None
    redis: tuple[str, int]

    def drop_page_cache(self) -> None:
        """Have the system forget what it read and wrote of the files."""
        for path in self._files():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def bytes_at_rest(self, adapter: Any) -> int:
        """Of all that is stored. Of kvtier's own disk, whose files are as long as its capacity from the start, what its
        chunks take up in them; of other files their blocks; of Redis what it says that its keys take."""
        if self.folder is None:
            return _bytes_in_redis(*self.redis)
        if self.keeps:
            return int(adapter.report_status()["tiers"]["nvme"]["used_bytes"])
        return sum(path.stat().st_blocks for path in self._files()) * _STAT_BLOCK_BYTES

    def _files(self) -> list[Path]:
        return [] if self.folder is None else [path for path in self.folder.rglob("*") if path.is_file()]


def _bytes_in_redis(host: str, port: int) -> int:
    """In all databases."""
    import redis

    total = 0
    for database in (0, 1):
        with redis.Redis(host=host, port=port, db=database) as client:
            total += sum(client.memory_usage(key, samples=0) or 0 for key in client.scan_iter(count=1000))
    return total


def systems(folder: Path, redis: tuple[str, int]) -> list[System]:
    """On one disk, each in a folder of its own below `folder`, and on one Redis."""
    fp8, ours = {"type": "fp8"}, {"type": "kvtier_nvfp4", "attention": "vllm", **_codec("nvfp4")}

    def kvtier(where: str, codec: str, name: str = "") -> System:
        at = folder / f"kvtier-{codec}{'-again' if name else ''}"
        lower: dict[str, Any] = {"type": "nvme", "path": str(at), "capacity": DISK_CAPACITY}
        if where == "redis":
            lower = {"type": "redis", "url": f"redis://{redis[0]}:{redis[1]}/1"}
        form = "raw" if codec == "none" else codec
        return System(
            f"kvtier {form}, {where}{name}", _plugin(lower, codec), True, _ERRORS[codec],
            at if where == "nvme" else None, redis,
        )  # fmt: skip

    def files(kind: str, serde: Mapping[str, Any] | None = None, name: str = "") -> System:
        label = f"{kind}{'' if serde is None else ', ' + serde['type']}{name}"
        at = folder / label.replace(", ", "-").replace(" ", "-")
        options = {"type": kind, "use_odirect": True, "base_path": str(at)} | (
            {} if serde is None else {"serde": serde}
        )
        return System(label, options, False, 0.05 if serde else 0.0, at, redis)

    def resp(serde: Mapping[str, Any] | None = None, name: str = "") -> System:
        options = {"type": "resp", "host": redis[0], "port": redis[1], "num_workers": RESP_WORKERS}
        if serde is None:
            return System(f"resp{name}", options, False, 0.0, None, redis)
        error = 0.05 if serde is fp8 else _ERRORS["nvfp4"]
        return System(f"resp, {serde['type']}", options | {"serde": serde}, False, error, None, redis)

    return [
        *(kvtier("nvme", codec) for codec in _ERRORS),
        files("fs_native"),
        files("fs_native", fp8),
        files("fs"),
        *(kvtier("redis", codec) for codec in _ERRORS),
        resp(),
        resp(fp8),
        resp(ours),
        kvtier("nvme", "nvfp4", AGAIN),
        files("fs_native", None, AGAIN),
        resp(None, AGAIN),
    ]


def _plugin(lower: Mapping[str, Any], codec: str) -> dict[str, Any]:
    """kvtier behind LMCache, with a host tier above `lower`."""
    params = {
        "attention": "vllm",
        "tiers": [{"type": "host", "capacity": HOST_CAPACITY}, dict(lower)],
        "promote_deadline": "60s",
        **_codec(codec),
    }
    plugin = {"type": "plugin", "module_path": "kvtier.connectors.lmcache", "class_name": "KvtierL2Adapter"}
    return {**plugin, "adapter_params": params}


def _codec(quant: str) -> dict[str, Any]:
    return {"kv_cache_compression_config": [{"algorithm": "quantization_for_cold_page", "quant": quant}]}


def open_adapter(system: System, l1: Any) -> Any:
    """The adapter, with its serde around it where it has one. `l1`: LMCache's L1Manager, from which a serde takes its
    buffers."""
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
    from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper
    from lmcache.v1.distributed.serde import create_serde_processor

    import kvtier.connectors.lmcache  # noqa: F401 - registers the serde

    arguments = argparse.Namespace(l2_adapter=[json.dumps(system.options)])
    (config,) = parse_args_to_l2_adapters_config(arguments).adapters
    adapter = create_l2_adapter(config, l1.get_l1_memory_desc())
    if config.serde_config is None:
        return adapter
    return SerdeL2AdapterWrapper(inner=adapter, serde=create_serde_processor(config.serde_config), l1_manager=l1)
