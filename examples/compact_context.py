"""Make a context small once, keep it in tiers, and answer from it: half of a context's tokens removed by KVzip.

A tiny random Llama and a tokenizer of single bytes stand in; `kvtier compact` does the first part for a real model.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier.compression.compaction.recipe import Recipe
from kvtier.compression.compaction.storage import CompactStore
from kvtier.config import parse_config
from kvtier.connectors.transformers.compact_methods import Context, compact, complete
from kvtier.connectors.transformers.compact_serving import CompactServing
from kvtier.connectors.transformers.compaction import compacted, identity_of

TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


class Bytes:
    """What KVzip asks of a tokenizer: its own prompts as token ids."""

    def encode(self, text: str, **_: object) -> list[int]:
        return list(text.encode())


def main() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY, num_key_value_heads=2, vocab_size=256)).eval()
    tokens = list(b"The page is encoded once, checked twice and never wrong. " * 8)

    context = Context.read(model, Bytes(), tokens)
    recipe = complete(Recipe("kvzip", 0.5), context.family)
    identity = identity_of(model, "tiny")
    prefix = compacted(identity, tokens, context.cache, compact(context, recipe))

    with CompactStore.open(parse_config({"tiers": [{"type": "host", "capacity": "32MiB"}]})) as store:
        store.put(prefix)
        found = store.get(identity, tokens, recipe)  # by the tokens, the model and the recipe
    if found is None:
        raise SystemExit("the prefix is not there")
    rows = sum(layer.rows for layer in found.manifest.layers)
    print(f"{found.tokens} tokens: {rows} of {2 * 2 * found.tokens} rows kept")
    with CompactServing(model, found, model_name="tiny") as serving:
        answer = serving.generate([list(b"Is it?")], max_new_tokens=8, do_sample=False)
    print("went on with", answer[0, len(b"Is it?") :].tolist())


if __name__ == "__main__":
    main()
