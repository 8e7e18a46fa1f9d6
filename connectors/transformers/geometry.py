"""The page geometry of a transformers decoder, or the reason why its cache cannot be cut into pages."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvtier.errors import SpecError
from kvtier.model_config import rotary_dim_of
from kvtier.spec import DType, PageSpec

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Their rotation depends on the length of the whole sequence, so the keys of a prefix are not a function of it."""


def page_spec_of(config: Any, *, page_tokens: int, dtype: DType) -> PageSpec:
    """PageSpec of `config` (a PreTrainedConfig) with a cache of `dtype`: MHA, MQA and GQA, full attention everywhere.

    Raises SpecError, naming what is not supported, for everything else.
    """
    text = config.get_text_config(decoder=True)
    name = str(getattr(text, "model_type", type(text).__name__))
    if getattr(config, "is_encoder_decoder", False):
        raise SpecError(f"{name}: encoder-decoder models are not supported by the transformers connector")
    if getattr(text, "kv_lora_rank", None) is not None:
        raise SpecError(
            f"{name}: MLA (kv_lora_rank = {text.kv_lora_rank}) is not supported by the transformers connector"
        )
    rope = rope_types(text) & set(_LENGTH_DEPENDENT_ROPE)
    if rope:
        raise SpecError(f"{name}: rope_type {sorted(rope)} makes the keys of a prefix depend on what follows it")
    layers = DynamicCache(config=text).layers
    other = {type(layer).__name__: n for n, layer in enumerate(layers) if type(layer) is not DynamicLayer}
    if other:
        kind, layer = next(iter(other.items()))
        raise SpecError(
            f"{name}: layer {layer} keeps its state in a {kind}; the transformers connector serves models whose "
            "layers all keep every token's key and value"
        )
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return PageSpec.mha(
        layers=len(layers) or int(text.num_hidden_layers),
        kv_heads=int(heads),
        head_dim=int(head_dim),
        page_tokens=page_tokens,
        dtype=dtype,
        rotary_dim=rotary_dim_of(text, int(head_dim)),
    )


def rope_types(config: Any) -> set[str]:
    """Every rope_type that `config` names, for the whole model or per layer type."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [parameters, *(p for p in parameters.values() if isinstance(p, dict))]
    return {str(p["rope_type"]) for p in nested if p.get("rope_type")}
