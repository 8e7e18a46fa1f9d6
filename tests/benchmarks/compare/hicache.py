"""SGLang's hierarchical cache with its own ``file`` storage, and with kvtier: pages of a host pool stored and loaded
through the calls that SGLang's controller makes of each.

    python -m tests.benchmarks.compare.hicache KV ROUNDS FOLDER

prints rows as JSON. The pool is SGLang's own for this K and V, with pages of 64 tokens; ``file`` gets every page as a
copy, kvtier reads and writes the pool in place. ``store`` is until everything is in files: of ``file`` they are
written back to the disk after it (fsync), of kvtier it waits for its NVMe tier. ``load`` and ``load one`` are cold: the
storage is opened anew, and files are dropped from the page cache. ``restart`` is opening it and loading everything."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtier.cli.demo_model import ensure_model
from tests.benchmarks.compare.codecs import relative_error
from tests.benchmarks.compare.kv import KV
from tests.benchmarks.compare.samples import Row, Samples

PAGE_TOKENS = 64
FILE = "hicache file"
AGAIN = ", again"
_FORMS = {"raw": "none", "nvfp4": "nvfp4", "k8v4": "k8v4", "lossless": "lossless"}
_FLUSH_S = 120.0
_STAT_BLOCK_BYTES = 512


class Pool:
    """SGLang's host pool, its first half filled with `kv`, whose second half is loaded into."""

    def __init__(self, kv: KV) -> None:
        from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _mha_host_inputs
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        _, layers, tokens, heads, dim = kv.shape
        self.kv, self.tokens, self.pages = kv, tokens, tokens // PAGE_TOKENS
        device = MHATokenToKVPool(
            size=tokens, page_size=PAGE_TOKENS, dtype=torch.bfloat16, head_num=heads, head_dim=dim, layer_num=layers,
            device="cpu", enable_memory_saver=False,
        )  # fmt: skip
        host, info, more = _mha_host_inputs(device)
        self.host = host(info, 3.0, 0, PAGE_TOKENS, "page_first_direct", pin_memory=False, **more)
        self._sides = [self.host.kv_buffer[side] for side in (0, 1)]  # [pages, layers, tokens of a page, heads, dim]
        for side, values in zip(self._sides, self._paged(kv), strict=True):
            side.zero_()
            side[: self.pages] = torch.from_numpy(values).view(torch.bfloat16)

    def _paged(self, kv: KV) -> Any:
        two, layers, _, heads, dim = kv.shape
        return np.ascontiguousarray(
            kv.reshape(two, layers, self.pages, PAGE_TOKENS, heads, dim).transpose(0, 2, 1, 3, 4, 5)
        ).view(np.int16)

    def indices(self, page: int, count: int, *, loaded: bool) -> torch.Tensor:
        first = page + (self.pages if loaded else 0)
        return torch.arange(first * PAGE_TOKENS, (first + count) * PAGE_TOKENS)

    def clear(self) -> None:
        """Of what was loaded."""
        for side in self._sides:
            side[self.pages : 2 * self.pages].zero_()

    def error(self) -> float:
        """Of what was loaded, relative."""
        got = torch.stack([side[self.pages : 2 * self.pages] for side in self._sides]).view(torch.int16)
        return relative_error(got.numpy().view(np.uint16), self._paged(self.kv).view(np.uint16))


class FileStorage:
    """As SGLang's controller uses it."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile

        self._pool, self._folder = pool, folder
        self._storage = HiCacheFile(_storage_config({"file_storage_path": str(folder)}))

    def store(self, keys: list[str], indices: torch.Tensor) -> None:
        host = self._pool.host
        pages = [host.get_data_page(indices[n * PAGE_TOKENS]) for n in range(len(keys))]
        if not self._storage.batch_set(keys, pages):
            raise RuntimeError("pages were not stored")

    def flush(self) -> None:
        for path in self._folder.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def load(self, keys: list[str], indices: torch.Tensor) -> None:
        host = self._pool.host
        if self._storage.batch_exists(keys) != len(keys):
            raise RuntimeError("pages were not found")
        pages = self._storage.batch_get(keys, [host.get_dummy_flat_data_page() for _ in keys])
        for n, page in enumerate(pages):
            if page is None:
                raise RuntimeError("pages were not loaded")
            host.set_from_flat_data_page(indices[n * PAGE_TOKENS], page)

    def bytes_at_rest(self) -> int:
        return sum(path.stat().st_blocks for path in self._folder.iterdir()) * _STAT_BLOCK_BYTES

    def clear(self) -> None:
        self._storage.clear()

    def close(self) -> None:
        self.flush()


class OurStorage:
    """As SGLang's controller uses it. extra: of `configured`."""

    def __init__(self, pool: Pool, extra: dict[str, Any]) -> None:
        from sglang.srt.mem_cache.hicache_storage import PoolName
        from sglang.srt.mem_cache.storage import StorageBackendFactory

        self._storage = StorageBackendFactory.create_backend("dynamic", _storage_config(extra), pool.host)
        self._storage.register_mem_pool_host(pool.host)
        self._storage.register_mem_host_pool_v2(pool.host, PoolName.KV)
        self._storage.on_host_pools_registered()

    def store(self, keys: list[str], indices: torch.Tensor) -> None:
        if not all(self._storage.batch_set_v1(keys, indices)):
            raise RuntimeError("pages were not stored")

    def flush(self) -> None:
        if not self._storage._store.flush(_FLUSH_S):
            raise RuntimeError(f"pages were not written within {_FLUSH_S:.0f} s")

    def load(self, keys: list[str], indices: torch.Tensor) -> None:
        if not all(self._storage.batch_get_v1(keys, indices)):
            raise RuntimeError("pages were not loaded")

    def bytes_at_rest(self) -> int:
        return int(self._storage._store.lower[0].usage().used_bytes)

    def clear(self) -> None:
        self._storage.clear()

    def close(self) -> None:
        self._storage.close()


def configured(folder: Path, quant: str) -> dict[str, Any]:
    """The storage's extra configuration, as SGLang makes it of kvtier's; the engine's arguments are then those of this
    process."""
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    from kvtier.connectors.sglang.arguments import translate

    block = {
        "kv_cache_compression_config": [{"algorithm": "quantization_for_cold_page", "quant": quant}],
        "tiers": [
            {"type": "host", "capacity": "256MiB"},
            {"type": "nvme", "path": str(folder), "capacity": "1GiB"},
        ],
        "promote_deadline": "60s",
        "break_even": False,
    }
    options = translate(
        {
            "model_path": str(ensure_model()),
            "device": "cpu",
            "attention_backend": "torch_native",
            "page_size": PAGE_TOKENS,
            "skip_tokenizer_init": True,
            "kv_connector": "kvtier-hicache",
            "kv_connector_config": block,
        }
    )
    arguments = ServerArgs(**options)
    arguments.resolve_once()
    arguments.check_server_args()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    extra: dict[str, Any] = json.loads(options["hicache_storage_backend_extra_config"])
    return extra


def _storage_config(extra: dict[str, Any]) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    return HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=True, model_name="compare", extra_config=extra,
    )  # fmt: skip


class _Turn:
    """One system's turn in round `n`."""

    def __init__(self, name: str, pool: Pool, folder: Path, n: int) -> None:
        self._name, self._pool, self._folder = name, pool, folder
        name = self._name.removesuffix(AGAIN)
        self._extra = None if name == FILE else configured(folder, _FORMS[name.removeprefix("kvtier ")])
        self._keys = [f"{n:08x}{page:056x}" for page in range(pool.pages)]
        self.samples: dict[str, Samples] = {}
        self.at_rest = self.error = 0.0

    def run(self) -> _Turn:
        pool, keys = self._pool, self._keys
        nbytes, everything = pool.kv.nbytes, pool.indices(0, pool.pages, loaded=False)
        target = pool.indices(0, pool.pages, loaded=True)
        with self._open() as storage:
            with self._one("store", nbytes):
                storage.store(keys, everything)
                storage.flush()
            self.at_rest = storage.bytes_at_rest() / nbytes
        pool.clear()
        restart = self._take("restart", nbytes)
        with restart.one():
            context = self._open()
            storage = context.__enter__()
            storage.load(keys, target)
        self.error = pool.error()
        context.__exit__(None, None, None)
        with self._open() as storage, self._one("load", nbytes):
            storage.load(keys, target)
        with self._open() as storage:
            for page, key in enumerate(keys):
                with self._one("load one", nbytes // pool.pages):
                    storage.load([key], pool.indices(page, 1, loaded=True))
            storage.clear()
        with self._open() as storage:
            for page, key in enumerate(keys):
                with self._one("store one", nbytes // pool.pages):
                    storage.store([key], pool.indices(page, 1, loaded=False))
                    storage.flush()
            storage.clear()
        return self

    @contextmanager
    def _open(self) -> Iterator[Any]:
        self._folder.mkdir(parents=True, exist_ok=True)
        storage = FileStorage(self._pool, self._folder) if self._extra is None else OurStorage(self._pool, self._extra)
        try:
            yield storage
        finally:
            storage.close()
            for path in self._folder.rglob("*"):
                if path.is_file():
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _one(self, op: str, hot_bytes: int) -> Any:
        return self._take(op, hot_bytes).one()

    def _take(self, op: str, hot_bytes: int) -> Samples:
        return self.samples.setdefault(op, Samples(hot_bytes))


def run(kv: KV, rounds: int, folder: Path) -> list[Row]:
    """``{"system", "op", ..., "at_rest", "relative_error"}``"""
    load_engine()
    pool = Pool(np.ascontiguousarray(kv[:, :, : kv.shape[2] // PAGE_TOKENS * PAGE_TOKENS]))
    names = [*(f"kvtier {form}" for form in _FORMS), FILE, f"kvtier nvfp4{AGAIN}", f"{FILE}{AGAIN}"]
    rows: dict[tuple[str, str], Row] = {}
    samples: dict[tuple[str, str], Samples] = {}
    for n in range(rounds + 1):
        for name in names:
            turn = _Turn(name, pool, folder / name.replace(", ", "-").replace(" ", "-"), n).run()
            for op, taken in turn.samples.items() if n else ():
                into = samples.setdefault((name, op), Samples(taken.hot_bytes))
                into.seconds += taken.seconds
                into.cpu_s += taken.cpu_s
                quality = {"at_rest": round(turn.at_rest, 4), "relative_error": round(turn.error, 5)}
                rows[name, op] = {"system": name, "op": op, **into.figures(), **quality}
    return list(rows.values())


def load_engine() -> None:
    """SGLang's scheduler and its plugins, into this process."""
    import sglang.srt.managers.scheduler  # noqa: F401
    from sglang.srt.plugins import load_plugins

    from kvtier.cli import sglang_on_cpu

    load_plugins()
    sglang_on_cpu.allow_host_pools()


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints goes to standard error
    rows = run(np.load(Path(sys.argv[1])), int(sys.argv[2]), Path(sys.argv[3]))
    out.write(json.dumps(rows) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
