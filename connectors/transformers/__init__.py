"""kvtier under Hugging Face transformers: prefixes of a DynamicCache stored as cold pages, and brought back.

from kvtier.connectors.transformers import PrefixCache
with PrefixCache.open(model, config, model_name="SmolLM2-135M-Instruct") as prefixes:
    restored = prefixes.restore("request-1", token_ids)
    logits = model(torch.tensor([token_ids[restored.tokens :]]), cache=restored.cache).logits
    prefixes.offload(token_ids, restored.cache)
"""

from __future__ import annotations

from kvtier.errors import missing_extra

try:
    import torch
    import transformers
except ImportError as e:
    raise missing_extra(str(e.name), "transformers") from e

from kvtier.connectors.transformers.compat import cache_argument
from kvtier.connectors.transformers.geometry import page_spec_of
from kvtier.connectors.transformers.identity import check_model_name, weights_fingerprint_of
from kvtier.connectors.transformers.prefix_cache import PrefixCache, Restored

del torch, transformers

__all__ = ["PrefixCache", "Restored", "cache_argument", "check_model_name", "page_spec_of", "weights_fingerprint_of"]
