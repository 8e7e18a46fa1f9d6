"""Give a transformers model a prefix cache: the second request computes only what is new to it.

A tiny random Llama stands in for a model; with one of yours nothing else changes.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier.config import parse_config
from kvtier.connectors.transformers import PrefixCache, cache_argument

TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def main() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY, num_key_value_heads=2, vocab_size=256)).eval()
    document = torch.randint(0, 256, (300,)).tolist()
    config = parse_config({"tiers": [{"type": "host", "capacity": "16MiB"}]})

    with PrefixCache.open(model, config, model_name="tiny", page_tokens=32) as prefixes:
        for number, question in enumerate(([1, 2, 3], [4, 5, 6])):
            prompt = document + question
            restored = prefixes.restore(f"request-{number}", prompt)
            rest = torch.tensor([prompt[restored.tokens :]])  # at least one token is always left
            with torch.inference_mode():
                logits = model(rest, use_cache=True, **{cache_argument(model): restored.cache}).logits
            print(f"restored {restored.tokens}, computed {rest.shape[1]} tokens; next: {int(logits[0, -1].argmax())}")
            prefixes.offload(prompt, restored.cache).result(60)  # a server would go on at once


if __name__ == "__main__":
    main()
