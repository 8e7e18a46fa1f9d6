"""What ``kvtier bench lmcache`` compares: L2 adapters, built as LMCache builds them from its own options."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOST_CAPACITY = "256MiB"
DISK_CAPACITY = "1GiB"
RESP_WORKERS = 8


@dataclass(frozen=True, slots=True)
class System:
    """options: of ``--l2-adapter``. keeps: chunks come up from memory of the adapter's own until it is opened anew.
    error: the largest relative error of what is loaded; 0 where it is the same bytes."""

    name: str
    options: Mapping[str, Any]
    keeps: bool
    error: float


def systems(folder: Path, redis: tuple[str, int]) -> list[System]:
    """On one disk, each in a folder of its own below `folder`, and on one Redis."""
    host, port = redis
    disk = {"type": "nvme", "path": str(folder / "kvtier"), "capacity": DISK_CAPACITY}
    server = {"type": "redis", "url": f"redis://{host}:{port}/1"}
    fs_native = {"type": "fs_native", "use_odirect": True}
    resp = {"type": "resp", "host": host, "port": port, "num_workers": RESP_WORKERS}
    fp8, ours = {"type": "fp8"}, {"type": "kvtier_nvfp4", "attention": "vllm", **_codec("nvfp4")}
    return [
        _kvtier("kvtier raw, nvme", disk, "none"),
        _kvtier("kvtier nvfp4, nvme", disk, "nvfp4"),
        System("fs_native", {**fs_native, "base_path": str(folder / "fs")}, False, 0.0),
        System("fs_native, fp8", {**fs_native, "base_path": str(folder / "fs8"), "serde": fp8}, False, 0.05),
        _kvtier("kvtier raw, redis", server, "none"),
        _kvtier("kvtier nvfp4, redis", server, "nvfp4"),
        System("resp", resp, False, 0.0),
        System("resp, fp8", {**resp, "serde": fp8}, False, 0.05),
        System("resp, kvtier_nvfp4", {**resp, "serde": ours}, False, 0.15),
    ]


def _kvtier(name: str, lower: Mapping[str, Any], quant: str) -> System:
    folder = {"path": f"{lower['path']}-{quant}"} if "path" in lower else {}
    params = {
        "attention": "vllm",
        "tiers": [{"type": "host", "capacity": HOST_CAPACITY}, {**lower, **folder}],
        "promote_deadline": "60s",
        **_codec(quant),
    }
    plugin = {"type": "plugin", "module_path": "kvtier.connectors.lmcache", "class_name": "KvtierL2Adapter"}
    return System(name, {**plugin, "adapter_params": params}, True, 0.0 if quant == "none" else 0.15)


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
