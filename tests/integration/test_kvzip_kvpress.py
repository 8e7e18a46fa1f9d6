"""KVzip's scores and sets equal those of kvpress (tools/kvzip_fixtures.py made the file, in its own environment)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kvtier.compression.compaction import selection
from kvtier.compression.compaction.kvzip import FIRST_PROMPT, LATER_PROMPT, RepeatPrompts, plan
from kvtier.connectors.transformers.attention import family_of
from kvtier.connectors.transformers.compaction import prefill
from kvtier.connectors.transformers.kvzip import KVzipOptions, score_dense

GOLDEN = Path(__file__).parents[1] / "golden" / "kvzip-kvpress.npz"
CASES = ["llama_chat", "llama_system", "qwen3_plain", "qwen2_one_chunk"]
MODELS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
    "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config),
}


class Case:
    """One recorded run of kvpress."""

    def __init__(self, name: str) -> None:
        with np.load(GOLDEN, allow_pickle=False) as file:
            self.arrays = {key.removeprefix(f"{name}/"): file[key] for key in file if key.startswith(f"{name}/")}
        self.facts: dict[str, Any] = json.loads(self.arrays["facts"].tobytes())
        self.token_ids: list[int] = self.arrays["token_ids"].tolist()
        self.scores = torch.from_numpy(self.arrays["scores"])
        tokens = len(self.token_ids)
        self.evicted = torch.from_numpy(np.unpackbits(self.arrays["evicted"], axis=-1, count=tokens).astype(bool))
        self.fed = [tuple(self.arrays[key].tolist()) for key in sorted(k for k in self.arrays if k.startswith("fed/"))]
        self.system_tokens: int = self.facts["system_tokens"]

    def model(self) -> Any:
        model_class, config_class = MODELS[self.facts["architecture"]]
        model = model_class(config_class(**self.facts["shape"])).eval()
        weights = {
            key.removeprefix("weights/"): torch.from_numpy(value).float()
            for key, value in self.arrays.items()
            if key.startswith("weights/")
        }
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert set(missing) <= {"lm_head.weight"} and not unexpected
        model.tie_weights()
        return model

    def prompts(self) -> RepeatPrompts:
        """A tokenizer of one token per byte, in the order of the letters that stand for bytes."""
        letters = {letter: n for n, letter in enumerate(sorted(byte_letters().values()))}
        byte = byte_letters()

        def ids(text: str) -> tuple[int, ...]:
            return tuple(letters[byte[b]] for b in text.encode())

        template = self.facts["template"]
        suffix = "\n" if template is None else template.rpartition("}}")[2]
        return RepeatPrompts(ids(FIRST_PROMPT), ids(LATER_PROMPT), ids(suffix))

    def computed(self, prefix_tokens: int = 4) -> torch.Tensor:
        model = self.model()
        return score_dense(
            family_of(model),
            prefill(model, self.token_ids),
            self.token_ids,
            self.prompts(),
            system_tokens=self.system_tokens,
            options=KVzipOptions(chunk_tokens=self.facts["chunk_tokens"], prefix_tokens=prefix_tokens),
        )


def byte_letters() -> dict[int, str]:
    """The letter that stands for each byte in byte-level vocabularies: itself where it is printable, else one from
    256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + n) for n, byte in enumerate(rest)}}


@pytest.mark.parametrize("name", CASES)
def test_the_same_tokens_are_fed(name: str) -> None:
    case = Case(name)
    chunks = plan(case.token_ids, case.prompts(), start=case.system_tokens, chunk_tokens=case.facts["chunk_tokens"])
    assert [chunk.fed for chunk in chunks] == case.fed
    assert (chunks[0].start, chunks[-1].end) == (case.system_tokens, len(case.token_ids))


@pytest.mark.parametrize("name", CASES)
def test_the_same_scores_come_out(name: str) -> None:
    case = Case(name)
    scores = case.computed()
    torch.testing.assert_close(scores, case.scores, rtol=0, atol=2e-6)


def test_a_softmax_over_other_tokens_is_noticed() -> None:
    case = Case("llama_system")
    assert (case.computed(prefix_tokens=0) - case.scores).abs().max() > 1e-3
    assert (case.computed(prefix_tokens=8) - case.scores).abs().max() > 1e-3


@pytest.mark.parametrize("name", [name for name in CASES if "system" not in name and "chat" not in name])
def test_the_same_positions_are_evicted(name: str) -> None:
    """Without a system prompt, which kvpress does not protect beyond four tokens."""
    case = Case(name)
    kept = selection.pair(case.computed(), case.facts["ratio"], protected=4)
    stays = torch.ones_like(case.evicted)
    for layer, heads in enumerate(kept):
        for head, positions in enumerate(heads):
            stays[layer, head, positions] = False
    assert torch.equal(stays, case.evicted)
