"""Makes tests/golden/kvzip-kvpress.npz: scores and evicted positions of kvpress's KVzipPress on tiny random models.

    python tools/kvzip_fixtures.py [FILE]

kvpress needs an older transformers than kvtier, so the script runs itself in an environment of its own, which it makes
in a temporary folder (about 1 GB) and removes. The file holds everything the test needs: configurations, weights
(rounded to fp16, so that the file stays small), token ids and what was fed for each chunk.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

REQUIREMENTS = ("kvpress==0.5.5", "transformers<5.3", "torch==2.13.0")
TARGET = Path(__file__).parents[1] / "tests" / "golden" / "kvzip-kvpress.npz"

VOCABULARY = 260
"""More than the tokenizer's one token per byte."""

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.4,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}

CASES = {
    # name: architecture, chat template, context tokens, chunk tokens, ratio
    "llama_chat": ("llama", "<s>{{ messages[0]['content'] }}<e>", 100, 24, 0.5),
    "llama_system": ("llama", "<system>{{ messages[0]['content'] }}<end>", 90, 31, 0.25),
    "qwen3_plain": ("qwen3", None, 80, 33, 0.375),
    "qwen2_one_chunk": ("qwen2", None, 64, 2048, 0.25),
}


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    if importlib.util.find_spec("kvpress") is not None:
        make(target)
        return
    with tempfile.TemporaryDirectory(prefix="kvzip-fixtures-") as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
        subprocess.run([python, __file__, str(target)], check=True)


def make(target: Path) -> None:
    import numpy as np  # in the environment of kvpress

    arrays: dict[str, Any] = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            arrays.update({f"{name}/{key}": value for key, value in run(Path(folder), *case).items()})
    target.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(target, **arrays)
    print(f"{target}: {target.stat().st_size} bytes, {len(CASES)} cases")


def run(
    folder: Path, architecture: str, template: str | None, tokens: int, chunk_tokens: int, ratio: float
) -> dict[str, Any]:
    import numpy as np
    import torch
    import transformers
    from kvpress import KVzipPress  # type: ignore[import-not-found]
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = template
    fast.save_pretrained(folder)

    torch.manual_seed(7)
    model_class, config_class = {
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
        "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config),
        "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config),
    }[architecture]
    config = config_class(**SHAPE)
    model = model_class(config).eval()
    for parameter in model.parameters():  # not the rotary frequencies, which the file does not hold
        parameter.data = parameter.data.half().float()
    model.config.name_or_path = str(folder)

    class Recorder(KVzipPress):  # type: ignore[misc]
        """KVzipPress, and what it scored and fed."""

        def prepare(self, *args: Any, **kwargs: Any) -> Any:
            self.recorded_prefix = self.prefix_length
            self.recorded_pairs = super().prepare(*args, **kwargs)
            return self.recorded_pairs

        def compress_post(self, model: Any) -> None:
            self.recorded_scores = self.score_val.clone()
            super().compress_post(model)

    press = Recorder(compression_ratio=ratio, chunk_size=chunk_tokens)
    ids = torch.randint(VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(11))
    cache = transformers.DynamicCache()
    with torch.no_grad(), press(model):
        model.model(input_ids=ids, past_key_values=cache)
    evicted = np.zeros((config.num_hidden_layers, config.num_key_value_heads, tokens), np.bool_)
    for layer in model.model.layers:
        _, heads, positions = layer.self_attn.masked_key_indices
        evicted[layer.self_attn.layer_idx, heads.numpy(), positions.numpy()] = True
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    facts = {
        "architecture": architecture,
        "shape": SHAPE,
        "chunk_tokens": chunk_tokens,
        "ratio": ratio,
        "system_tokens": press.recorded_prefix,
        "template": template,
        "kvpress": REQUIREMENTS[0],
        "transformers": transformers.__version__,
    }
    return {
        "facts": np.frombuffer(json.dumps(facts, sort_keys=True).encode(), np.uint8),
        "token_ids": ids[0].numpy(),
        "scores": press.recorded_scores[:, 0].numpy(),
        "evicted": np.packbits(evicted, axis=-1),
        **{f"fed/{n}": fed[0].numpy() for n, (_, fed) in enumerate(press.recorded_pairs)},
        **{f"weights/{name}": tensor.half().numpy() for name, tensor in weights.items()},
    }


if __name__ == "__main__":
    main()
