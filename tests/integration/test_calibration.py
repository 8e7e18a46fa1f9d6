"""Calibration of real attention modules, the files it makes, and the files that others made."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from transformers.models.llama import modeling_llama

from kvtier.abc.compression import CacheGeometry
from kvtier.cli import main
from kvtier.compression import CompressionPipeline
from kvtier.compression.triattention import Calibration, TriAttention, load_calibration
from kvtier.connectors.transformers.calibration import calibrate
from kvtier.connectors.transformers.eviction import EvictingGeneration, platform_of, rotary_reader
from kvtier.errors import ConfigError, SpecError

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TEXT = torch.randint(128, (200,), generator=torch.Generator().manual_seed(3))
ROPE: dict[str, Any] = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
YARN = {**ROPE, "rope_type": "yarn", "attention_factor": 1.2}
LLAMA3 = {**ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {**ROPE, "rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [4.0] * 8}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "linear": lambda: transformers.LlamaConfig(**SIZES, rope_parameters={**ROPE, "rope_type": "linear"}),
    "dynamic": lambda: transformers.LlamaConfig(**SIZES, rope_parameters={**ROPE, "rope_type": "dynamic"}),
    "yarn": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama3": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "longrope": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LONG),
    "qwen3: norm of each head": lambda: transformers.Qwen3Config(**SIZES),
    "olmo2: norm of all heads": lambda: transformers.Olmo2Config(**SIZES),
    "phi3: one projection": lambda: transformers.Phi3Config(**SIZES),
    "cohere: pairs side by side": lambda: transformers.CohereConfig(**SIZES),
    "glm: half of the dimensions": lambda: transformers.GlmConfig(**SIZES, partial_rotary_factor=0.5),
    "smollm3: some layers without": lambda: transformers.SmolLM3Config(**SIZES, no_rope_layer_interval=3),
    "gemma3: two embeddings and windows": lambda: transformers.Gemma3TextConfig(
        **SIZES, sliding_window=16, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
}


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", MODELS)
def test_statistics_are_those_of_the_queries_that_attention_sees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's rotated queries, turned back, have the captured mean and mean absolute value."""
    model = model_of(MODELS[name]())
    found = calibrate(model, TEXT, chunk_tokens=70)
    rotated: dict[int, list[torch.Tensor]] = {}

    def watch(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kw: Any) -> Any:
        rotated.setdefault(module.layer_idx, []).append(query[0].double())
        return modeling_llama.eager_attention_forward(module, query, key, value, *args, **kw)

    transformers.AttentionInterface.register("watching", watch)
    transformers.AttentionMaskInterface.register("watching", transformers.masking_utils.eager_mask)
    model.config._attn_implementation = "watching"
    with torch.no_grad():
        model(TEXT[None])
    read = rotary_reader(model.config)
    for layer in range(3):
        turn = read(layer, found.rope_style)
        back = dataclasses.replace(turn, omega=-turn.omega)
        (queries,) = rotated[layer]
        for head in range(4):
            x = back.rotate(queries[head].numpy(), np.arange(len(TEXT)))
            # The model has scaled once, rotate() once more.
            z = (x[:, turn.real] + 1j * x[:, turn.imag]) / np.where(turn.omega != 0, turn.gain, 1.0)
            np.testing.assert_allclose(found.q_mean[layer, head], z.mean(0), atol=2e-4)
            np.testing.assert_allclose(found.q_abs[layer, head], np.abs(z).mean(0), atol=2e-4)
    assert found.sampled.all() and found.head_dim == 16


def test_a_rotation_that_the_configuration_does_not_say_is_refused() -> None:
    model = model_of(MODELS["llama"]())
    model.model.rotary_emb.inv_freq *= 1.5
    with pytest.raises(ConfigError, match=r"layer \d: the model rotates its keys in another way"):
        calibrate(model, TEXT)
    with pytest.raises(ConfigError, match="at least 64"):
        calibrate(model, TEXT[:10])
    assert not any(m._forward_hooks for m in model.modules())


def test_attention_that_is_built_in_another_way_is_refused() -> None:
    with pytest.raises(SpecError, match="cannot be calibrated"):
        calibrate(model_of(transformers.GPTNeoXConfig(**SIZES)), TEXT)


@pytest.fixture(scope="module")
def statistics() -> Calibration:
    return calibrate(model_of(MODELS["llama"]()), TEXT, model_name="tiny")


def same(a: Calibration, b: Calibration) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("q_mean", "q_abs", "sampled"))


FIELDS = ("q_mean_real", "q_mean_imag", "q_abs_mean")


def published(statistics: Calibration) -> dict[str, Any]:
    stats = {
        f"layer{layer:02d}_head{head:02d}": {
            "q_mean_real": torch.from_numpy(statistics.q_mean[layer, head].real.copy()),
            "q_mean_imag": torch.from_numpy(statistics.q_mean[layer, head].imag.copy()),
            "q_abs_mean": torch.from_numpy(statistics.q_abs[layer, head].copy()),
        }
        for layer in range(3)
        for head in range(4)
    }
    metadata = {"head_dim": 16, "rope_style": "half", "model_name": "tiny", "sampled_heads": [[0, 0]]}
    return {"metadata": metadata, "stats": stats}


def flat(statistics: Calibration) -> dict[str, torch.Tensor]:
    turn = rotary_reader(MODELS["llama"]())(0, "half")
    return {
        "E_q": torch.from_numpy(statistics.q_mean),
        "E_q_norm": torch.from_numpy(statistics.q_abs),
        "omega": torch.from_numpy(turn.omega).float(),
        "freq_scale_sq": torch.from_numpy(turn.gain).float(),
    }


def test_every_form_of_file_is_read_and_ours_round_trips(statistics: Calibration, tmp_path: Path) -> None:
    statistics.save(tmp_path / "a.safetensors")
    torch.save(published(statistics), tmp_path / "b.pt")
    torch.save(flat(statistics), tmp_path / "c.pt")
    safetensors.torch.save_file(flat(statistics), tmp_path / "d.safetensors")
    for path in sorted(tmp_path.iterdir()):
        assert same(load_calibration(path), statistics), path.name
    assert load_calibration(tmp_path / "a.safetensors").model_name == "tiny"
    assert load_calibration(tmp_path / "c.pt").omega is not None


def test_code_in_a_pt_file_does_not_run(tmp_path: Path) -> None:
    import pickle

    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "exploded",)

    (tmp_path / "bomb.pt").write_bytes(pickle.dumps({"stats": Bomb()}))
    torch.save({"stats": Bomb()}, tmp_path / "zip.pt")
    for name in ("bomb.pt", "zip.pt"):
        with pytest.raises(ConfigError, match=f"calibration_path.*{name}.*cannot be read"):
            load_calibration(tmp_path / name)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["stats"].clear(), "holds no head"),
        (lambda c: c["stats"]["layer00_head00"].pop("q_abs_mean"), "'layer00_head00' lacks q_abs_mean"),
        (lambda c: c["stats"].update(lay0=c["stats"]["layer00_head00"]), "'lay0' is not of the form"),
        (lambda c: c["stats"]["layer01_head01"].update(dict.fromkeys(FIELDS, torch.ones(5))), "frequencies"),
        (lambda c: c["metadata"].update(head_dim=128), "head_dim = 128"),
        (lambda c: c["metadata"].update(rope_style="spiral"), "rope_style = 'spiral'"),
        (lambda c: c["stats"]["layer00_head00"]["q_mean_real"].fill_(float("nan")), "NaN"),
        (lambda c: c.pop("stats"), "holds neither"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused(statistics: Calibration, tmp_path: Path, change: Any, words: str) -> None:
    content = published(statistics)
    change(content)
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=words):
        load_calibration(tmp_path / "x.pt")


def test_files_that_are_none(tmp_path: Path, statistics: Calibration) -> None:
    for name in ("noise.pt", "noise.safetensors"):
        (tmp_path / name).write_bytes(b"no such thing")
        with pytest.raises(ConfigError, match="cannot be read"):
            load_calibration(tmp_path / name)
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ConfigError, match="holds a list"):
        load_calibration(tmp_path / "list.pt")
    with pytest.raises(ConfigError, match=r"--output.*\.safetensors"):
        statistics.save(tmp_path / "x.pt")
    with pytest.raises(ConfigError, match="cannot be written"):
        statistics.save(tmp_path / "no" / "folder.safetensors")


@pytest.mark.parametrize(
    ("geometry", "words"),
    [
        (CacheGeometry(4, 4, 2, 16), "has 3 layers, the model 4"),
        (CacheGeometry(3, 8, 2, 16), "has 4 query heads, the model 8"),
        (CacheGeometry(3, 4, 2, 32), "has 16 head_dim, the model 32"),
    ],
)
def test_another_models_calibration_is_refused(statistics: Calibration, geometry: CacheGeometry, words: str) -> None:
    with pytest.raises(ConfigError, match=f"calibration_path.*{words}.*kvtier calibrate"):
        statistics.check(geometry)


def test_another_models_frequencies_are_refused(statistics: Calibration, tmp_path: Path) -> None:
    torch.save({**flat(statistics), "omega": torch.ones(8)}, tmp_path / "x.pt")
    read = rotary_reader(MODELS["llama"]())
    method = TriAttention(load_calibration(tmp_path / "x.pt"), lambda layer: read(layer, "half"))
    with pytest.raises(ConfigError, match="omega of the file is not that of the model in layer 0"):
        method.check(platform_of(model_of(MODELS["llama"]())))


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_frequencies_that_change_with_length_limit_the_context(name: str) -> None:
    model = model_of(MODELS[name]())
    statistics, read = calibrate(model, TEXT), rotary_reader(model.config)
    method = TriAttention(statistics, lambda layer: read(layer, statistics.rope_style))
    limit = read(0, "half").valid_tokens
    assert limit is not None
    with pytest.raises(ConfigError, match=f"beyond {limit} tokens.*limit the context length"):
        method.check(dataclasses.replace(platform_of(model), context_tokens=limit + 1))
    method.check(platform_of(model, context_tokens=limit))


def test_heads_without_statistics_do_not_decide(statistics: Calibration) -> None:
    """Whatever stands in the place of a head that was not sampled, the kept rows are the same."""
    model = model_of(MODELS["llama"]())
    sampled = np.ones((3, 4), np.bool_)
    sampled[1] = [True, False, False, True]
    read = rotary_reader(model.config)
    kept = []
    for mode in ("union", "per_head", "per_layer_perhead"):
        for noise in (0.0, 50.0):
            mean = statistics.q_mean.copy()
            mean[~sampled] += noise
            method = TriAttention(
                dataclasses.replace(statistics, q_mean=mean, sampled=sampled),
                lambda layer: read(layer, "half"),
                budget=10,
                beta=10,
                eviction_mode=mode,
            )
            with EvictingGeneration(model, CompressionPipeline([method], platform_of(model))) as generation:
                generation.prefill(TEXT[None, :5])
                generation.step(TEXT[None, 5:35])
                assert generation.cache is not None and generation.requests[0].length == 15
                kept.append([layer.keys.clone() for layer in generation.cache.layers])
        assert all(torch.equal(a, b) for a, b in zip(*kept[-2:], strict=True))
    sampled[1, :2] = False
    for mode in ("per_head", "per_layer_perhead"):
        method = TriAttention(
            dataclasses.replace(statistics, sampled=sampled), lambda layer: read(layer, "half"), eviction_mode=mode
        )
        with pytest.raises(ConfigError, match="layer 1 has a KV head without statistics"):
            method.check(platform_of(model))


def test_windows_keep_their_latest_rows() -> None:
    """Layers with a sliding window keep the newest `budget` rows, so the window is whole; the model cannot tell."""
    model = model_of(MODELS["gemma3: two embeddings and windows"]())
    statistics, read = calibrate(model, TEXT), rotary_reader(model.config)

    def method_of(budget: int) -> TriAttention:
        return TriAttention(statistics, lambda layer: read(layer, statistics.rope_style), budget=budget, beta=8)

    with pytest.raises(ConfigError, match="'budget' = 15: the model has a sliding window of 16"):
        method_of(15).check(platform_of(model))
    with EvictingGeneration(model, CompressionPipeline([], platform_of(model))) as plain:
        plain.prefill(TEXT[None, :10])
        plain.step(TEXT[None, 10:50])
        assert plain.cache is not None
        keys = [layer.keys.clone() for layer in plain.cache.layers]
    with EvictingGeneration(model, CompressionPipeline([method_of(20)], platform_of(model))) as generation:
        generation.prefill(TEXT[None, :10])
        generation.step(TEXT[None, 10:50])
        assert generation.cache is not None and generation.requests[0].length == 30
        for layer in (0, 2):
            expected = torch.cat([keys[layer][:, :, :10], keys[layer][:, :, -20:]], dim=2)
            assert torch.equal(generation.cache.layers[layer].keys, expected)
        kept = generation.cache.layers[1].keys
        assert not torch.equal(kept, torch.cat([keys[1][:, :, :10], keys[1][:, :, -20:]], dim=2))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of(MODELS["llama"]())
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    words = {f"w{n}": n for n in range(128)}
    (folder / "tokenizer.json").write_text(
        json.dumps({
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
            "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
        })
    )  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{n}" for n in TEXT.tolist()))
    output = tmp_path / "stats.safetensors"
    with pytest.raises(SystemExit) as done:
        main(["calibrate", str(folder), "--text", str(text), "--output", str(output), "--chunk-tokens", "64"])
    assert done.value.code == 0
    assert "200 tokens" in capsys.readouterr().out
    expected = calibrate(model, TEXT, chunk_tokens=64)
    found = load_calibration(output)
    np.testing.assert_allclose(found.q_mean, expected.q_mean, atol=1e-5)
    with pytest.raises(SystemExit) as done:
        main(["calibrate", str(folder), "--text", str(tmp_path / "absent"), "--output", str(output)])
    assert done.value.code == 2 and "--text" in capsys.readouterr().err
