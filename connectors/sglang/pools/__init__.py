"""SGLang's device pools described as hot pages: which buffers a page has, and which page a token's slot lies in.

A pool is one of: rows per token (`mha`, `mla`), or one state per node of the radix cache (`state`). Several make up the
cache of a hybrid model (`engine`): KV pages, and beside them a sliding window's pages, or recurrent states.
"""

from __future__ import annotations

from kvtier.connectors.sglang.pools.device_pool import KV, DevicePool, page_hashes
from kvtier.connectors.sglang.pools.mha import DTYPES, POOL_CLASS

__all__ = ["DTYPES", "KV", "POOL_CLASS", "DevicePool", "page_hashes"]
