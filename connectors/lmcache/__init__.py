"""kvtier behind LMCache 0.5.6. Importing this registers the serde ``kvtier_nvfp4``, so that LMCache's own adapters in
the same command can use it."""

from kvtier.connectors.lmcache.adapter import KvtierL2Adapter, KvtierL2AdapterConfig
from kvtier.connectors.lmcache.serde import register

register()

__all__ = ["KvtierL2Adapter", "KvtierL2AdapterConfig"]
