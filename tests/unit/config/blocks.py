"""Configuration blocks, as short as can be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
GIB = 1 << 30
Run = Callable[..., tuple[int, str, str]]
VARIABLES = ("KVTIER_SERVER_PASSWORD", "KVTIER_HTTP_TOKEN", "KVTIER_REDIS_PASSWORD", "KVTIER_REDIS_SENTINEL_PASSWORD")
HOST: dict[str, Any] = {"type": "host", "capacity": "4GiB"}
NVME: dict[str, Any] = {"type": "nvme", "path": "/var/lib/kvtier", "capacity": "8GiB"}
TWO: dict[str, Any] = {**NVME, "path": ["/b", "/a"]}
REDIS: dict[str, Any] = {"type": "redis", "url": "redis://127.0.0.1:6379"}
COLD: dict[str, Any] = {"algorithm": "quantization_for_cold_page"}
ADAPTER = {"type": "plugin", "module_path": "kvtier.connectors.lmcache", "class_name": "KvtierL2Adapter"}


def block(*tiers: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"tiers": [HOST, *tiers], **options}
