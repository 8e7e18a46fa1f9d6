"""Tests against the real SGLang, in its own environment (make test-sglang); elsewhere they are not even collected."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch and SGLang are imported by any test or child.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 4 layers, 4 query and 2 KV heads of 16, BF16, as a safetensors directory."""
    from .tiny_model import write_model

    return write_model(tmp_path_factory.mktemp("model") / "tiny", seed=1)


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    from .tiny_model import write_model

    return write_model(tmp_path_factory.mktemp("model") / "other", seed=2)


@pytest.fixture(scope="module")
def engine_hooks() -> Iterator[None]:
    """SGLang's plugins loaded into this process, as its scheduler does, after the scheduler was imported."""
    import sglang.srt.managers.scheduler  # noqa: F401
    from sglang.srt.plugins import load_plugins

    load_plugins()
    yield


@pytest.fixture
def start() -> Iterator[Any]:
    """Builds engines' caches without a model, and ends them."""
    from .harness import Engine

    yield from _engines(Engine)


@pytest.fixture
def start_pools() -> Iterator[Any]:
    """Builds engines with pools of every kind, and ends them."""
    from .pool_engines import PoolEngine

    yield from _engines(PoolEngine)


def _engines(kind: Any) -> Iterator[Any]:
    engines: list[Any] = []

    def build(*args: Any, **options: Any) -> Any:
        engines.append(kind(*args, **options))
        return engines[-1]

    yield build
    for engine in engines:
        engine.end()


@pytest.fixture
def lab() -> Any:
    """SGLang's host pools and storage; imported late, since importing the engine warns."""
    from . import staging

    return staging


@pytest.fixture
def opened(tiny: Path, lab: Any) -> Iterator[Any]:
    """Opens storages of the staged path, and closes them."""
    running: list[Any] = []

    def build(pool: Any = None, block: dict[str, Any] | None = None, **options: Any) -> Any:
        pool = lab.mha_pool("page_first", pages=24) if pool is None else pool
        running.append(lab.open_storage(tiny, block or lab.config(), pool, **options))
        return running[-1]

    yield build
    for storage in running:
        storage.close()


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cache server."""
    pytest.importorskip("redis", reason="redis is not installed: pip install 'kvtier[redis]'")
    from .cache_server import Server

    running = Server(tmp_path_factory.mktemp("s"))
    yield running
    running.kill()
