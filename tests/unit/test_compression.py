"""The framework: which hooks are called, when, in what order, and what is refused."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvtier.abc.compression import (
    HOOKS,
    AttentionKind,
    CacheGeometry,
    CompressionManager,
    KeepSet,
    LiveCache,
    LiveRequest,
    Platform,
    Speculation,
    Stage,
)
from kvtier.compression import CompressionPipeline, EvictionMetrics, RoundSchedule, build_compression
from kvtier.compression.triattention import Calibration, Rotary, TriAttention
from kvtier.config import parse_compression
from kvtier.connectors.transformers.eviction import EvictingGeneration, platform_of
from kvtier.errors import ConfigError, SpecError

DOCS = Path(__file__).parents[2] / "docs" / "writing-a-method.md"
GEOMETRY = CacheGeometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)
PLATFORM = Platform("the test", GEOMETRY)


@pytest.fixture(scope="module")
def model() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


class Recorder(CompressionManager):
    """Overrides every hook and writes down what it was given."""

    algorithm = "recorder"

    def __init__(self, name: str = "", log: list[tuple[Any, ...]] | None = None) -> None:
        self.name = name
        self.log = log if log is not None else []

    def note(self, hook: str, requests: Sequence[LiveRequest], cache: LiveCache | None) -> None:
        rows = None if cache is None else cache.keys(requests[0], 0).shape[1]
        self.log.append((self.name, hook, [(r.generated_tokens, r.length) for r in requests], rows))

    def on_request_init(self, requests: Sequence[LiveRequest], **kwargs: Any) -> None:
        self.note("init", requests, None)

    def on_prefill_chunk_end(self, requests: Sequence[LiveRequest], cache: LiveCache, **kwargs: Any) -> None:
        self.note("chunk", requests, cache)

    def on_context_step_end(self, requests: Sequence[LiveRequest], cache: LiveCache, **kwargs: Any) -> None:
        self.note("context", requests, cache)

    def on_generation_step_begin(self, requests: Sequence[LiveRequest], cache: LiveCache, **kwargs: Any) -> None:
        self.note("begin", requests, cache)

    def on_generation_step_end(self, requests: Sequence[LiveRequest], cache: LiveCache, **kwargs: Any) -> None:
        self.note("end", requests, cache)

    def on_tool_call_begin(self, requests: Sequence[LiveRequest], cache: LiveCache, **kwargs: Any) -> None:
        self.note("tool", requests, cache)

    def on_tool_call_end(self, requests: Sequence[LiveRequest], cache: LiveCache, **kwargs: Any) -> None:
        self.note("answer", requests, cache)

    def on_request_finish(self, requests: Sequence[LiveRequest], **kwargs: Any) -> None:
        self.note("finish", requests, None)


class Other(Recorder):
    algorithm = "other"


def test_hooks_run_batched_in_order_and_see_the_updated_cache(model: Any) -> None:
    log: list[tuple[Any, ...]] = []
    pipeline = CompressionPipeline([Recorder("a", log), Other("b", log)], PLATFORM)
    prompt = torch.arange(14).view(2, 7)
    with EvictingGeneration(model, pipeline) as generation:
        generation.prefill(prompt, chunk_tokens=4)
        generation.step(prompt[:, :1])
        generation.compression.call("on_tool_call_begin", generation.requests, generation.cache)
        generation.compression.call("on_tool_call_end", generation.requests, generation.cache)
        generation.step(prompt[:, :2])
    expected = [
        ("init", (0, 0), None),
        ("chunk", (0, 4), 4),
        ("chunk", (0, 7), 7),
        ("context", (0, 7), 7),
        ("begin", (0, 7), 7),
        ("end", (1, 8), 8),
        ("tool", (1, 8), 8),
        ("answer", (1, 8), 8),
        ("begin", (1, 8), 8),
        ("end", (3, 10), 10),
        ("finish", (3, 10), None),
    ]
    assert log == [(name, hook, [state] * 2, rows) for hook, state, rows in expected for name in ("a", "b")]


def test_every_stage_has_a_hook_and_every_hook_is_a_no_op() -> None:
    assert set(Stage) <= set(HOOKS.values())
    hooks = {name for name in vars(CompressionManager) if name.startswith("on_")}
    assert hooks == set(HOOKS)
    manager = CompressionManager()
    for name in hooks:
        arguments: list[Any] = [[], None] if name not in ("on_request_init", "on_request_finish") else [[]]
        assert getattr(manager, name)(*arguments, something_new=1) is None


class Idle(CompressionManager):
    algorithm = "idle"


def test_nothing_is_called_when_nothing_is_active(model: Any) -> None:
    """A method without hooks costs no call into the methods, their cache view or the row packing."""
    pipeline = CompressionPipeline([Idle()], PLATFORM)
    assert not pipeline.active and not any(pipeline.hooks(name) for name in HOOKS)
    active = CompressionPipeline([Recorder()], PLATFORM)
    assert active.active and all(active.hooks(name) for name in HOOKS)
    calls: list[str] = []

    def watch(frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and ("rowpack" in file or "triattention" in file or file.endswith("abc/compression.py")):
            calls.append(frame.f_code.co_name)
        if event == "call" and frame.f_code.co_name in ("keys", "compact") and file.endswith("eviction.py"):
            calls.append(frame.f_code.co_name)

    def run(pipeline: CompressionPipeline) -> list[str]:
        calls.clear()
        generation = EvictingGeneration(model, pipeline)
        sys.setprofile(watch)
        try:
            generation.prefill(torch.arange(6).view(1, 6))
            for n in range(5):
                generation.step(torch.tensor([[n]]))
            generation.finish()
        finally:
            sys.setprofile(None)
        # Positions are needed whether or not anything was evicted.
        return [name for name in calls if name not in ("evicted_tokens", "logical_tokens", "__init__")]

    assert run(pipeline) == []
    assert "keys" in run(active)  # the watch can see


def test_no_requests_no_call() -> None:
    recorder = Recorder()
    CompressionPipeline([recorder], PLATFORM).call("on_request_init", [])
    assert recorder.log == []


def test_a_method_is_given_once() -> None:
    with pytest.raises(ConfigError, match="idle may be given once"):
        CompressionPipeline([Idle(), Idle()], PLATFORM)


class Cautious(CompressionManager):
    algorithm = "cautious"

    def publishable_tokens(self, request: LiveRequest) -> int:
        return 3


def test_evicted_rows_are_never_published() -> None:
    plain, cautious = (CompressionPipeline(m, PLATFORM) for m in ([], [Cautious(), Idle()]))
    whole = LiveRequest("r", prompt_tokens=10, generated_tokens=5, length=15)
    evicted = LiveRequest("r", prompt_tokens=10, generated_tokens=5, length=13)
    assert (whole.evicted_tokens, evicted.evicted_tokens) == (0, 2)
    assert [plain.publishable_tokens(r) for r in (whole, evicted)] == [15, 10]
    assert [cautious.publishable_tokens(r) for r in (whole, evicted)] == [3, 3]


def test_the_worked_example_of_the_documentation(model: Any) -> None:
    code = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[0]
    assert len(code.strip().splitlines()) < 40
    # The prompt's last token must not be the model's end token, and none is.
    model.generation_config.eos_token_id = None
    names: dict[str, Any] = {"model": model, "prompt_ids": torch.arange(5)[None], "__name__": "example"}
    exec(compile(code, str(DOCS), "exec"), names)
    assert names["tokens"].shape == (1, 205)
    request = names["request"]
    assert (request.generated_tokens, request.evicted_tokens) == (199, 128)
    assert request.length == 5 + 64 + 199 % 16


@pytest.mark.parametrize(
    ("previous", "now", "length", "due"),
    [
        (7, 8, 10 + 5, True),
        (7, 8, 10 + 4, False),  # within the budget
        (6, 7, 10 + 7, False),  # no multiple of beta crossed
        (8, 9, 10 + 9, False),
        (0, 25, 10 + 25, True),  # several crossed: one round
    ],
)
def test_when_a_round_is_due(previous: int, now: int, length: int, due: bool) -> None:
    schedule = RoundSchedule(budget=4, beta=8)
    request = LiveRequest("r", 10, previous, 10 + previous)
    schedule.start([request])
    request.generated_tokens, request.length = now, length
    assert schedule.due([request]) == ([request] if due else [])
    assert schedule.due([request]) == []
    schedule.finish([request])
    assert len(schedule) == 0


@pytest.mark.parametrize(("budget", "beta"), [(1, 1), (64, 64), (100, 64), (63, 64), (128, 10)])
def test_first_eviction_is_at_the_multiple_of_beta_above_the_budget(budget: int, beta: int) -> None:
    schedule, request = RoundSchedule(budget, beta), LiveRequest("r", 3)
    schedule.start([request])
    steps = 0
    while True:
        steps += 1
        request.generated_tokens, request.length = steps, 3 + steps
        if schedule.due([request]):
            break
    assert steps == (budget // beta + 1) * beta


def test_a_retracted_request_starts_from_what_is_recomputed() -> None:
    schedule, request = RoundSchedule(4, 8), LiveRequest("r", 10, 30, 14)
    schedule.start([request])
    request.length = 40
    assert schedule.due([request]) == []
    request.generated_tokens, request.length = 32, 42
    assert schedule.due([request]) == [request]


@pytest.mark.parametrize(("budget", "beta", "word"), [(0, 1, "'budget' = 0"), (1, 0, "'beta' = 0")])
def test_rounds_need_numbers(budget: int, beta: int, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        RoundSchedule(budget, beta)


def test_metrics_exist_at_zero_and_count() -> None:
    metrics = EvictionMetrics(["triattention"])
    read = metrics.registry.get_sample_value
    assert read("kvtier_evicted_tokens_total", {"method": "triattention"}) == 0
    assert read("kvtier_eviction_kept_tokens_count", {"method": "triattention"}) == 0
    metrics.round("triattention", [3, 4], [64, 64], 0.5)
    assert (metrics.evicted_tokens("triattention"), metrics.rounds("triattention")) == (7, 2)
    assert read("kvtier_eviction_kept_tokens_sum", {"method": "triattention"}) == 128
    assert metrics.seconds("triattention") == 0.5


def calibration() -> Calibration:
    import numpy as np

    rng = np.random.default_rng(0)
    mean = (rng.normal(size=(2, 4, 4)) + 1j * rng.normal(size=(2, 4, 4))).astype(np.complex64)
    return Calibration(mean, np.abs(mean), np.ones((2, 4), np.bool_))


def rotary(layer: int, style: str = "half") -> Rotary:
    import numpy as np

    return Rotary(np.ones(4), np.ones(4), np.arange(4), np.arange(4, 8))


@pytest.mark.parametrize(
    ("change", "mode", "words"),
    [
        ({"attention": AttentionKind.MLA}, "union", "'mla' is not supported"),
        ({"recurrent": True}, "union", "recurrent layers"),
        ({"sliding_pools": True}, "union", "sliding-window pools"),
        ({"beam_width": 4}, "union", "beam width 4.*use beam width 1"),
        ({"disaggregated_decode": True}, "union", "disaggregated decode"),
        ({"prefix_reuse_limited": False}, "union", "prefix cache"),
        ({"speculation": Speculation.ON}, "per_head", "'eviction_mode' = 'per_head'.*needs 'union'"),
        ({"speculation": Speculation.ON}, "per_layer_perhead", "'eviction_mode'"),
        ({"geometry": dataclasses.replace(GEOMETRY, windows=(None, 99))}, "union", "'budget' = 64.*window of 99"),
        ({"geometry": dataclasses.replace(GEOMETRY, windows=(9, 9))}, "union", "every layer has a sliding window"),
        ({"geometry": dataclasses.replace(GEOMETRY, layers=3)}, "union", "'calibration_path'.*2 layers"),
    ],
)
def test_triattention_refuses_by_option(change: dict[str, Any], mode: str, words: str) -> None:
    method = TriAttention(calibration(), rotary, budget=64, eviction_mode=mode)
    CompressionPipeline([method], PLATFORM)
    with pytest.raises(ConfigError, match=words):
        CompressionPipeline([method], dataclasses.replace(PLATFORM, **change))


def test_speculation_is_fine_with_union() -> None:
    CompressionPipeline(
        [TriAttention(calibration(), rotary)], dataclasses.replace(PLATFORM, speculation=Speculation.ON)
    )


class FakeCache(LiveCache):
    """Random keys in memory, and the keep sets it was given."""

    def __init__(self, heads: range, rows: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layers = torch.randn(2, 2, rows, 8, generator=generator)[:, heads.start : heads.stop]
        self.kept: list[KeepSet] = []

    def keys(self, request: LiveRequest, layer: int, first_row: int = 0) -> torch.Tensor:
        return self.layers[layer][:, first_row : request.length]

    def compact(self, requests: Sequence[LiveRequest], keep: Sequence[KeepSet]) -> None:
        self.kept += keep
        for request, kept in zip(requests, keep, strict=True):
            request.length = kept.kept_rows


def kept_on(heads: range, reduce_max: Any, rows: int = 40) -> torch.Tensor:
    method = TriAttention(calibration(), rotary, budget=8, beta=5, reduce_max=reduce_max)
    geometry = CacheGeometry(2, 2 * len(heads), len(heads), 8, 2 * heads.start)
    pipeline = CompressionPipeline([method], dataclasses.replace(PLATFORM, geometry=geometry))
    request, cache = LiveRequest("r", 5), FakeCache(heads, rows)
    pipeline.call("on_request_init", [request])
    request.generated_tokens, request.length = rows - 5, rows
    pipeline.call("on_generation_step_end", [request], cache)
    assert request.length == 13
    return torch.as_tensor(cache.kept[0].ordinals)


def test_ranks_of_a_tensor_parallel_group_keep_the_same_rows_as_one() -> None:
    """Each rank scores its own heads; with the maximum over ranks all keep what one rank with all heads keeps."""
    alone = kept_on(range(2), None)
    local: list[torch.Tensor] = []

    def collect(scores: torch.Tensor) -> torch.Tensor:
        local.append(scores)
        return scores

    separate = [kept_on(range(n, n + 1), collect) for n in range(2)]
    assert not torch.equal(*separate)
    for rank in range(2):
        joined = kept_on(range(rank, rank + 1), lambda scores: torch.maximum(*local))
        assert torch.equal(joined, alone)


def test_the_factory_builds_both_methods_and_says_what_has_no_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "stats.safetensors"
    calibration().save(path)
    triattention = {"algorithm": "triattention", "calibration_path": str(path), "normalize_scores": False}
    block = {"kv_cache_compression_config": [triattention, {"algorithm": "quantization_for_cold_page"}]}
    pipeline = build_compression(parse_compression(block), PLATFORM, rotary=rotary)
    assert [m.algorithm for m in pipeline.managers] == ["triattention", "quantization_for_cold_page"]
    assert len(pipeline.hooks("on_generation_step_end")) == 1
    assert "'normalize_scores' = False has no effect" in caplog.text
    with pytest.raises(ConfigError, match="rotary frequencies"):
        build_compression(parse_compression(block), PLATFORM)
    assert not build_compression(parse_compression({"kv_cache_compression_config": []}), PLATFORM).active


def test_a_batch_is_packed_to_one_length(model: Any) -> None:
    class Uneven(CompressionManager):
        algorithm = "uneven"

        def on_generation_step_end(self, requests: Sequence[LiveRequest], cache: LiveCache, **kwargs: Any) -> None:
            cache.compact(requests, [KeepSet(2, torch.arange(n)[None, None]) for n, _ in enumerate(requests)])

    with EvictingGeneration(model, CompressionPipeline([Uneven()], platform_of(model))) as generation:
        generation.prefill(torch.arange(10).view(2, 5))
        with pytest.raises(SpecError, match="all must keep the same number"):
            generation.step(torch.tensor([[1], [2]]))
