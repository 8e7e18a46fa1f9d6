"""``--kv-cache-compression-config``: what the workers are told, and what is refused before they start."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier.connectors.sglang.compression_options import VARIABLE

from .masked_reference import statistics

pytestmark = pytest.mark.usefixtures("engine_hooks", "told")


@pytest.fixture
def told() -> Iterator[None]:
    """The variable that tells workers is this process's own again afterwards."""
    os.environ.pop(VARIABLE, None)
    yield
    os.environ.pop(VARIABLE, None)


@pytest.fixture(scope="module")
def stats(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("stats") / "stats.safetensors"
    statistics().save(path)
    return str(path)


def methods(stats: str, **options: Any) -> dict[str, Any]:
    return {"kv_cache_compression_config": [{"algorithm": "triattention", "calibration_path": stats, **options}]}


def file_of(folder: Path, block: dict[str, Any]) -> str:
    path = folder / "block.json"
    path.write_text(json.dumps(block))
    return str(path)


def parse(*arguments: str) -> Any:
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args(["--model-path", "some/model", "--device", "cpu", *arguments])


def test_workers_are_told_the_file_and_the_engine_nothing(tmp_path: Path, stats: str) -> None:
    path = file_of(tmp_path, methods(stats))
    args = parse("--kv-cache-compression-config", path)
    assert os.environ[VARIABLE] == path
    assert args.page_size is None and not args.enable_unified_cache_external_linker
    parse()
    assert VARIABLE not in os.environ  # another engine of this process, without methods


def test_the_block_may_stand_in_the_connectors_file(tmp_path: Path, stats: str) -> None:
    path = file_of(tmp_path, {"tiers": [{"type": "host", "capacity": "1GiB"}], **methods(stats)})
    args = parse("--kv-connector", "kvtier", "--kv-connector-config", path)
    assert args.enable_unified_cache_external_linker and os.environ[VARIABLE] == path


@pytest.mark.parametrize("first", ["connector", "compression"])
def test_the_order_of_the_two_plugins_does_not_matter(first: str, stats: str) -> None:
    from kvtier.connectors.sglang import arguments, compression_arguments
    from kvtier.connectors.sglang.compression_options import resolve

    block = {"tiers": [{"type": "host", "capacity": "1GiB"}], **methods(stats, budget=77)}
    given = {"model_path": "m", "kv_connector": "kvtier", "kv_connector_config": block}
    steps = [arguments.translate, compression_arguments.translate]
    for step in steps if first == "connector" else reversed(steps):
        given = step(given)
    assert given["enable_unified_cache_external_linker"]
    assert [m.budget for m in resolve(os.environ[VARIABLE]).live] == [77]


def test_keyword_arguments_of_the_engine(stats: str) -> None:
    from sglang.srt.entrypoints.engine import Engine

    from kvtier.connectors.sglang.compression_options import resolve

    block = methods(stats, budget=5)
    for value in (block, block["kv_cache_compression_config"]):
        args = Engine.server_args_class(model_path="m", device="cpu", kv_cache_compression_config=value)
        assert args.model_path == "m"
        assert [m.budget for m in resolve(os.environ[VARIABLE]).live] == [5]
    Engine.server_args_class(model_path="m", device="cpu")
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--speculative-algorithm", "EAGLE"), "--speculative-algorithm = 'EAGLE'"),
        (("--disaggregation-mode", "decode"), "--disaggregation-mode = 'decode'"),
        (("--enable-mixed-chunk",), "--enable-mixed-chunk = True"),
        (("--enable-streaming-session",), "--enable-streaming-session = True"),
        (("--enable-unified-memory",), "--enable-unified-memory = True"),
        (("--enable-hisparse",), "--enable-hisparse = True"),
        (("--pp-size", "2"), "--pp-size = 2"),
        (("--kv-cache-dtype", "fp8_e4m3"), "--kv-cache-dtype = 'fp8_e4m3'"),
    ],
)
def test_what_excludes_eviction_is_refused_by_name(
    arguments: tuple[str, ...], words: str, tmp_path: Path, stats: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--kv-cache-compression-config", file_of(tmp_path, methods(stats)), *arguments)
    message = str(caught.value)
    assert message.startswith(f"error: {words} cannot be combined with --kv-cache-compression-config"), message
    assert "\n" not in message and VARIABLE not in os.environ


def test_every_excluded_option_exists_in_the_engine() -> None:
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.server_args import ServerArgs

    from kvtier.connectors.sglang.compression_options import EXCLUDED

    assert {e.option for e in EXCLUDED} <= {field.name for field in record_fields(ServerArgs)}


def test_files_that_cannot_work_are_refused(tmp_path: Path, stats: str) -> None:
    cold = {"kv_cache_compression_config": [{"algorithm": "quantization_for_cold_page"}]}
    for block, words in (
        (methods(stats, budget=0), "budget"),
        (methods(stats, buget=9), "unknown option 'kv_cache_compression_config\\[0\\].buget'"),
        (methods(str(tmp_path / "none.safetensors")), "calibration_path"),
        (cold, "names no method that acts on a live cache"),
    ):
        with pytest.raises(SystemExit, match=f"error: .*{words}"):
            parse("--kv-cache-compression-config", file_of(tmp_path, block))
    both = file_of(tmp_path, {"tiers": [{"type": "host", "capacity": "1GiB"}], **methods(stats)})
    with pytest.raises(SystemExit, match="both name a method"):
        parse("--kv-cache-compression-config", both, "--kv-connector", "kvtier", "--kv-connector-config", both)


def test_the_engine_has_what_the_hooks_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from kvtier.connectors.sglang import compression_hooks
    from kvtier.errors import EngineError

    compression_hooks.check_engine()

    def other(self: Any, spare: int) -> None: ...

    monkeypatch.setattr(ScheduleBatch, "prepare_for_decode", other)
    with pytest.raises(EngineError, match="prepare_for_decode takes"):
        compression_hooks.check_engine()


def test_a_connector_whose_file_names_a_method_needs_the_second_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.connectors.sglang import compression_hooks
    from kvtier.errors import EngineError

    with pytest.raises(EngineError, match="add it to SGLANG_PLUGINS"):
        compression_hooks.verify_installed()
    monkeypatch.setenv(VARIABLE, "/some/file")
    with pytest.raises(EngineError, match="was not hooked"):  # this process loaded its plugins without the variable
        compression_hooks.verify_installed()


def scheduler(**changes: Any) -> Any:
    """As much of a scheduler of the tiny model as `platform_of` looks at."""
    config = {
        "hf_text_config": SimpleNamespace(num_hidden_layers=4),
        "num_attention_heads": 4,
        "head_dim": 16,
        "attention_arch": SimpleNamespace(name="MHA"),
        "sliding_window_size": None,
        "attention_chunk_size": None,
        "context_len": 2048,
    }
    pool = SimpleNamespace(head_num=2)
    of_scheduler = {"is_hybrid_swa": False, "is_hybrid_ssm": False}
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**config, **{k: v for k, v in changes.items() if k in config}}),
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        tree_cache=SimpleNamespace(components=()),
        **{**of_scheduler, **{k: v for k, v in changes.items() if k in of_scheduler}},
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attention_arch": SimpleNamespace(name="MLA")}, "attention 'mla' is not supported"),
        ({"is_hybrid_ssm": True}, "recurrent layers: not supported"),
        ({"is_hybrid_swa": True}, "sliding-window pools: not supported"),
        ({"sliding_window_size": 128}, "sliding-window pools: not supported"),
        ({"hf_text_config": SimpleNamespace(num_hidden_layers=5)}, "option 'calibration_path'.* 4 layers"),
        ({"num_attention_heads": 8}, "option 'calibration_path'.* 4 query heads"),
        ({"head_dim": 32}, "option 'calibration_path'.* 16 head_dim"),
    ],
)
def test_models_that_cannot_be_served_are_named(change: dict[str, Any], words: str, stats: str) -> None:
    from kvtier.compression import build_compression
    from kvtier.compression.triattention import Rotary
    from kvtier.config import parse_live
    from kvtier.connectors.sglang.compression_setup import platform_of
    from kvtier.errors import ConfigError

    def rotary(layer: int, style: str) -> Rotary:
        half = np.arange(8)
        return Rotary(1.0 / 10000.0 ** (half / 8), np.ones(8), half, half + 8)

    one_rank = SimpleNamespace(rank=0, size=1)
    live = parse_live(methods(stats)).live
    assert build_compression(live, platform_of(scheduler(), one_rank), rotary=rotary).active
    with pytest.raises(ConfigError, match=words):
        build_compression(live, platform_of(scheduler(**change), one_rank), rotary=rotary)


def test_a_rotary_embedding_that_is_not_the_models_is_refused() -> None:
    import torch

    from kvtier.compression.triattention import Rotary
    from kvtier.connectors.sglang.compression_rotary import check_rotary
    from kvtier.errors import EngineError

    half = np.arange(8)
    omega = 1.0 / 10000.0 ** (half / 8)
    phases = torch.arange(2000)[:, None] * torch.from_numpy(omega)
    module: Any = torch.nn.Module()
    module.cos_sin_cache = torch.cat([phases.cos(), phases.sin()], dim=1).bfloat16()
    module.is_neox_style = True
    fits = Rotary(omega, np.ones(8), half, half + 8)
    check_rotary(module, fits, 0, "half")
    for rotary, style in (
        (fits, "interleaved"),
        (Rotary(omega * 1.1, np.ones(8), half, half + 8), "half"),
        (Rotary(omega, np.full(8, 1.5), half, half + 8), "half"),
    ):
        with pytest.raises(EngineError, match="is not that of its configuration in layer 3"):
            check_rotary(module, rotary, 3, style)
