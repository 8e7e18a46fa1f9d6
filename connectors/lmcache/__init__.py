"""kvtier behind LMCache 0.5.6. Importing this registers the serde ``kvtier_nvfp4``, so that LMCache's own adapters in
the same command can use it. Raises EngineError where the installed LMCache would call us otherwise."""

from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.serde import Deserializer, Serializer

from kvtier.connectors.lmcache.adapter import KvtierL2Adapter, KvtierL2AdapterConfig
from kvtier.connectors.lmcache.host import check_calls
from kvtier.connectors.lmcache.serde import ColdDeserializer, ColdSerializer, register

check_calls(KvtierL2Adapter, L2AdapterInterface)
check_calls(ColdSerializer, Serializer)
check_calls(ColdDeserializer, Deserializer)
register()

__all__ = ["KvtierL2Adapter", "KvtierL2AdapterConfig"]
