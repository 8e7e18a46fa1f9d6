"""Generation with eviction, against a model that keeps every row and hides the evicted ones behind a mask.

The reference shares no code with the product beyond the model: it selects with the fp64 oracle on a cache that is never
packed, and masks in an attention function of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvtier.abc.compression import LiveRequest
from kvtier.cli.demo_model import ensure_model
from kvtier.compression import CompressionPipeline
from kvtier.compression.triattention import Calibration, TriAttention
from kvtier.config import TriAttentionConfig, parse_compression, parse_config
from kvtier.connectors.transformers import PrefixCache
from kvtier.connectors.transformers.calibration import calibrate
from kvtier.connectors.transformers.eviction import EvictingGeneration, cache_argument, platform_of, rotary_reader
from kvtier.errors import ConfigError, SpecError
from kvtier.kernels.triattention import reference

MODES = ["union", "per_head", "per_layer_perhead"]
SESSIONS = Path(__file__).parents[2] / "kvtier" / "data" / "agent_sessions"


@pytest.fixture(scope="module")
def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, rope_theta=10000.0, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def statistics(llama: Any) -> Calibration:
    return calibrate(llama, torch.randint(128, (256,), generator=torch.Generator().manual_seed(1)))


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    folder = ensure_model()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer


def method_of(model: Any, statistics: Calibration, **options: Any) -> TriAttention:
    read = rotary_reader(model.config)
    return TriAttention(statistics, lambda layer: read(layer, statistics.rope_style), **options)


def generation_of(model: Any, statistics: Calibration, **options: Any) -> tuple[EvictingGeneration, TriAttention]:
    method = method_of(model, statistics, **options)
    return EvictingGeneration(model, CompressionPipeline([method], platform_of(model))), method


def greedy(generation: EvictingGeneration, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
    """``[batch, tokens]``, with the cache left open."""
    logits = generation.prefill(prompt)
    out = []
    for _ in range(tokens):
        out.append(logits[:, -1].argmax(-1))
        logits = generation.step(out[-1][:, None])
    return torch.stack(out, dim=1)


@dataclass
class MaskedReference:
    """Decodes greedily with all rows in the cache; `hidden` bool ``[layers, kv_heads, rows]`` says which are
    evicted."""

    model: Any
    statistics: Calibration
    mode: str
    budget: int
    beta: int
    normalized: bool = True
    hidden: torch.Tensor | None = None
    evicted: int = field(default=0)

    def generate(self, prompt: torch.Tensor, tokens: int) -> list[int]:
        config = self.model.config
        layers, heads = config.num_hidden_layers, config.num_key_value_heads
        self.hidden = torch.zeros(layers, heads, prompt.shape[1] + tokens + 1, dtype=torch.bool)
        cache = DynamicCache(config=config)
        out: list[int] = []
        ids = prompt
        with torch.no_grad(), self.attention():
            while len(out) < tokens:
                logits = self.model(ids, **{cache_argument(self.model): cache}).logits
                generated = cache.get_seq_length() - prompt.shape[1]
                if ids is not prompt and generated % self.beta == 0:
                    self.evict(cache, prompt.shape[1])
                out.append(int(logits[0, -1].argmax()))
                ids = torch.tensor([[out[-1]]])
        return out

    def evict(self, cache: Any, prompt_tokens: int) -> None:
        assert self.hidden is not None
        rows = cache.get_seq_length()
        visible = [[(~h[prompt_tokens:rows]).nonzero()[:, 0].numpy() for h in layer] for layer in self.hidden]
        if len(visible[0][0]) <= self.budget:
            return
        read = rotary_reader(self.model.config)
        group = self.model.config.num_attention_heads // self.model.config.num_key_value_heads
        scores = []
        for layer, per_head in enumerate(visible):
            turn = read(layer, "half")
            keys = cache.layers[layer].keys[0].numpy()[:, prompt_tokens:rows]
            scores.append([
                reference.score(
                    keys[q // group][per_head[q // group]], turn.real, turn.imag, self.statistics.q_mean[layer, q],
                    self.statistics.q_abs[layer, q], turn.omega, turn.gain, rows,
                )
                for q in range(len(per_head) * group)
            ])  # fmt: skip
        reduced = reference.reduce(np.array(scores), len(visible[0]), self.mode, normalized=self.normalized)
        kept = np.broadcast_to(reference.select(reduced, self.budget), (len(visible), len(visible[0]), self.budget))
        self.evicted += len(visible[0][0]) - self.budget
        for layer, per_head in enumerate(visible):
            for head, ordinals in enumerate(per_head):
                self.hidden[layer, head, prompt_tokens:rows] = True
                self.hidden[layer, head, prompt_tokens + ordinals[kept[layer, head]]] = False

    def attention(self) -> Any:
        """Swaps the model's attention for a plain fp32 one that hides the evicted rows."""
        import contextlib

        def masked(
            module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, None]:
            assert self.hidden is not None
            group, rows, new = module.num_key_value_groups, key.shape[2], query.shape[2]
            key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
            products = query @ key.transpose(2, 3) * kwargs["scaling"]
            future = torch.ones(new, rows, dtype=torch.bool).triu(rows - new + 1)
            hidden = self.hidden[module.layer_idx, :, None, :rows].repeat_interleave(group, dim=0)
            products = products.masked_fill(future | hidden, -torch.inf)
            return (products.softmax(-1) @ value).transpose(1, 2).contiguous(), None

        @contextlib.contextmanager
        def swapped() -> Iterator[None]:
            before = self.model.config._attn_implementation
            ALL_ATTENTION_FUNCTIONS.register("masked_reference", masked)
            self.model.config._attn_implementation = "masked_reference"
            try:
                yield
            finally:
                self.model.config._attn_implementation = before

        return swapped()


def prompts(count: int, tokens: int, seed: int = 7) -> torch.Tensor:
    return torch.randint(128, (count, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("normalized", [True, False])
def test_sixty_of_sixty_tokens_as_a_masked_model(
    llama: Any, statistics: Calibration, mode: str, normalized: bool
) -> None:
    batch = prompts(3, 11)
    generation, method = generation_of(
        llama, statistics, budget=12, beta=8, eviction_mode=mode, normalize_scores=normalized
    )
    with generation:
        found = greedy(generation, batch, 60)
    evicted = 0
    for n, prompt in enumerate(batch):
        masked = MaskedReference(llama, statistics, mode, 12, 8, normalized or mode == "union")
        assert masked.generate(prompt[None], 60) == found[n].tolist()
        evicted += masked.evicted
    assert method.metrics.evicted_tokens("triattention") == evicted == 3 * 44
    with torch.no_grad():
        plain = llama.generate(
            batch, attention_mask=torch.ones_like(batch), max_new_tokens=60, do_sample=False, pad_token_id=0
        )
    assert plain[:, 11:].tolist() != found.tolist()  # eviction changes what a model says, so equality means something


@pytest.mark.parametrize("mode", MODES)
def test_budget_64_beta_64_and_256_generated_rows_evict_192(llama: Any, statistics: Calibration, mode: str) -> None:
    generation, method = generation_of(llama, statistics, budget=64, beta=64, eviction_mode=mode)
    with generation:
        generation.prefill(prompts(1, 9))
        lengths = []
        for n in range(256):
            generation.step(torch.tensor([[n % 128]]))
            lengths.append(generation.requests[0].length)
        request = generation.requests[0]
        assert (request.evicted_tokens, request.length, request.logical_tokens) == (192, 9 + 64, 9 + 256)
        assert [layer.get_seq_length() for layer in generation.cache.layers] == [73] * 3  # type: ignore[union-attr]
        assert generation.compression.publishable_tokens(request) == 9
    # First at decode length (floor(budget / beta) + 1) * beta.
    assert lengths[126] == 9 + 127 and lengths[127] == 9 + 64
    assert method.metrics.evicted_tokens("triattention") == 192 and method.metrics.rounds("triattention") == 3
    assert len(method._schedule) == 0


def test_a_budget_that_is_never_exceeded_changes_no_bit(llama: Any, statistics: Calibration) -> None:
    batch = prompts(2, 20)
    with EvictingGeneration(llama, CompressionPipeline([], platform_of(llama))) as plain:
        expected = [plain.prefill(batch), *(plain.step(batch[:, n : n + 1]) for n in range(20))]
        rows = [layer.keys.clone() for layer in plain.cache.layers]  # type: ignore[union-attr]
    generation, method = generation_of(llama, statistics, budget=64, beta=4)
    with generation:
        found = [generation.prefill(batch), *(generation.step(batch[:, n : n + 1]) for n in range(20))]
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a, b)
        for before, layer in zip(rows, generation.cache.layers, strict=True):  # type: ignore[union-attr]
            assert torch.equal(before, layer.keys)
        assert generation.compression.publishable_tokens(generation.requests[0]) == 40
    assert method.metrics.rounds("triattention") == 0


def test_kept_rows_are_the_same_bytes_and_the_prompt_is_untouched(llama: Any, statistics: Calibration) -> None:
    generation, method = generation_of(llama, statistics, budget=6, beta=10)
    with generation:
        generation.prefill(prompts(1, 8))
        for n in range(9):
            generation.step(torch.tensor([[n]]))
        cache, request = generation.cache, generation.requests[0]
        assert cache is not None
        kept: list[Any] = []
        original = method.keep_set

        def remember(request: LiveRequest, cache: Any) -> Any:
            kept.append((original(request, cache), [(l.keys.clone(), l.values.clone()) for l in cache.layers]))  # noqa: E741
            return kept[0][0]

        method.keep_set = remember  # type: ignore[method-assign]
        generation.step(torch.tensor([[99]]))
        keep, before = kept[0]
        rows = [*range(8), *(8 + keep.ordinals[0, 0]).tolist()]
        assert len(rows) == 14 == request.length
        for layer, (keys, values) in zip(cache.layers, before, strict=True):
            assert torch.equal(layer.keys, keys[:, :, rows]) and torch.equal(layer.values, values[:, :, rows])


def test_a_step_that_confirms_several_tokens_makes_at_most_one_round(llama: Any, statistics: Calibration) -> None:
    generation, method = generation_of(llama, statistics, budget=10, beta=4)
    with generation:
        generation.prefill(prompts(1, 5))
        generation.step(prompts(1, 21, seed=2))
        assert method.metrics.rounds("triattention") == 1
        assert generation.requests[0].length == 15
        generation.step(prompts(1, 2, seed=3))  # 23: no multiple of 4 crossed
        assert method.metrics.rounds("triattention") == 1
        generation.step(prompts(1, 1, seed=3))
        assert method.metrics.rounds("triattention") == 2


@pytest.mark.parametrize("mode", MODES)
def test_tokens_fed_together_are_tokens_fed_one_by_one(llama: Any, statistics: Calibration, mode: str) -> None:
    """Between two rounds the cache only grows, so a whole stretch may be fed at once: how evaluation feeds text."""
    text = prompts(2, 61, seed=9)
    one, _ = generation_of(llama, statistics, budget=12, beta=10, eviction_mode=mode)
    many, _ = generation_of(llama, statistics, budget=12, beta=10, eviction_mode=mode)
    with one, many:
        one.prefill(text[:, :11])
        many.prefill(text[:, :11])
        for start in range(11, 61, 10):
            singles = [one.step(text[:, n : n + 1]) for n in range(start, start + 10)]
            torch.testing.assert_close(many.step(text[:, start : start + 10]), torch.cat(singles, 1), atol=1e-4, rtol=0)
        assert one.requests[0].evicted_tokens == many.requests[0].evicted_tokens == 38


@pytest.mark.parametrize("mode", MODES)
def test_draft_rows_move_with_the_kept_set(llama: Any, statistics: Calibration, mode: str) -> None:
    generation, method = generation_of(llama, statistics, budget=4, beta=8, eviction_mode=mode)
    with generation:
        generation.prefill(prompts(2, 6))
        generation.step(prompts(2, 7, seed=4))
        cache = generation.cache
        assert cache is not None
        # 8 confirmed rows and 3 of a draft behind them.
        for request in cache.requests:
            request.draft_tokens = 3
        arguments = {cache_argument(llama): cache.dynamic}
        with torch.no_grad():
            llama(prompts(2, 4, seed=5), position_ids=torch.arange(13, 17)[None].expand(2, -1), **arguments)
        before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        for request in cache.requests:
            request.length += 1
            request.generated_tokens += 1
        generation.compression.call("on_generation_step_end", cache.requests, cache)
        assert method.metrics.evicted_tokens("triattention") == 2 * 4
        for layer, (keys, values) in zip(cache.layers, before, strict=True):
            assert layer.get_seq_length() == 6 + 4 + 3
            assert torch.equal(layer.keys[:, :, -3:], keys[:, :, -3:])
            assert torch.equal(layer.values[:, :, -3:], values[:, :, -3:])


def test_generate_is_transformers_own(llama: Any, statistics: Calibration) -> None:
    batch = prompts(2, 11)
    generation, _ = generation_of(llama, statistics, budget=12, beta=8)
    with generation:
        expected = greedy(generation, batch, 40)
        found = generation.generate(batch, max_new_tokens=40, do_sample=False, pad_token_id=0)
        assert found[:, :11].tolist() == batch.tolist()
        assert found[:, 11:].tolist() == expected.tolist()
        # The last token was sampled and not fed.
        assert generation.requests[0].generated_tokens == 39
        chunked = generation.generate(batch, max_new_tokens=40, do_sample=False, pad_token_id=0, prefill_chunk_size=4)
        assert chunked.tolist() == found.tolist()
        sampled = generation.generate(
            batch[:1], max_new_tokens=20, do_sample=True, num_return_sequences=3, pad_token_id=0
        )
        assert sampled.shape == (3, 31)
    assert not llama._forward_hooks and not llama._forward_pre_hooks


def test_generate_refuses_what_eviction_cannot_do(llama: Any, statistics: Calibration) -> None:
    generation, _ = generation_of(llama, statistics)
    batch = prompts(2, 5)
    for options, words in (
        ({"num_beams": 4}, "num_beams = 4"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"inputs_embeds": torch.zeros(2, 5, 64)}, "inputs_embeds"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1] * 5])}, "one length"),
    ):
        with pytest.raises(ConfigError, match=words):
            generation.generate(batch, **options)
    with pytest.raises(SpecError, match="call prefill"):
        generation.step(batch)


def test_hooks_of_generate_are_removed_when_it_fails(llama: Any, statistics: Calibration) -> None:
    generation, method = generation_of(llama, statistics, budget=4, beta=4)

    def broken(*_: Any) -> Any:
        raise RuntimeError("no score today")

    method.keep_set = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="no score today"):
        generation.generate(prompts(1, 5), max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert not llama._forward_hooks and not llama._forward_pre_hooks


def test_the_configuration_block_turns_it_on(llama: Any, statistics: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "llama.safetensors"
    statistics.save(path)
    block = {
        "kv_cache_compression_config": [
            {"algorithm": "quantization_for_cold_page"},
            {"algorithm": "triattention", "budget": 8, "beta": 4, "calibration_path": str(path)},
        ]
    }
    with EvictingGeneration(llama, parse_compression(json.loads(json.dumps(block)))) as generation:
        generation.generate(prompts(1, 5), max_new_tokens=33, do_sample=False, pad_token_id=0)
        assert [m.algorithm for m in generation.compression.managers] == ["quantization_for_cold_page", "triattention"]
        assert generation.requests[0].evicted_tokens == 24
    other = TriAttentionConfig(algorithm="triattention", calibration_path=tmp_path / "absent.safetensors")
    with pytest.raises(ConfigError, match=r"calibration_path.*absent\.safetensors.*cannot be read"):
        EvictingGeneration(llama, [other])


def test_cold_pages_and_eviction_at_once(llama: Any, statistics: Calibration, tmp_path: Path) -> None:
    """One block turns both on; what is offloaded is the plain KV of the prompt, and comes back bit for bit."""
    path = tmp_path / "llama.safetensors"
    statistics.save(path)
    config = parse_config({
        "kv_cache_compression_config": [
            {"algorithm": "quantization_for_cold_page", "quant": "none"},
            {"algorithm": "triattention", "budget": 8, "beta": 4, "calibration_path": str(path)},
        ],
        "tiers": [{"type": "host", "capacity": "16MiB"}],
    })  # fmt: skip
    prompt = prompts(2, 40)
    with (
        PrefixCache.open(llama, config, model_name="tiny", page_tokens=8) as prefixes,
        EvictingGeneration(llama, config.kv_cache_compression_config, registry=prefixes.ledger.registry) as generation,
    ):
        generation.prefill(prompt)
        plain = [(layer.keys.clone(), layer.values.clone()) for layer in generation.cache.layers]  # type: ignore[union-attr]
        assert generation.publishable().get_seq_length() == 40
        for n in range(30):
            generation.step(prompts(2, 1, seed=n))
        for row in range(2):
            copy = generation.publishable(row)
            assert copy.get_seq_length() == 40
            prefixes.offload(prompt[row].tolist(), copy).result()
            restored = prefixes.restore(f"again-{row}", [*prompt[row].tolist(), 1])
            assert restored.tokens == 40
            for layer, (keys, values) in zip(restored.cache.layers, plain, strict=True):
                assert torch.equal(layer.keys[0], keys[row]) and torch.equal(layer.values[0], values[row])
        value = prefixes.ledger.registry.get_sample_value("kvtier_evicted_tokens_total", {"method": "triattention"})
        assert value == 2 * 20


@pytest.mark.model
@pytest.mark.timeout(600)
def test_smollm2_generates_as_a_masked_model(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    line = json.loads(sorted(SESSIONS.glob("*.jsonl"))[0].read_text().splitlines()[0])
    text = tokenizer(line["input"], return_tensors="pt").input_ids
    statistics = calibrate(model, text[0, :512])
    prompt = text[:, :48]
    generation, method = generation_of(model, statistics, budget=16, beta=16)
    with generation:
        found = greedy(generation, prompt, 60)
    masked = MaskedReference(model, statistics, "union", 16, 16)
    assert masked.generate(prompt, 60) == found[0].tolist()
    assert method.metrics.evicted_tokens("triattention") == masked.evicted == 32
