"""LMCache's real StorageManager in this process: store chunks, forget L1, and get them back through an L2 adapter."""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager

PATIENCE_S = 60.0
"""Whatever a test waits for happens at once on an idle machine: this is for one that stalls."""
BF16, U8 = torch.bfloat16, torch.uint8


def layout(*groups: tuple[tuple[int, ...], torch.dtype]) -> MemoryLayoutDesc:
    return MemoryLayoutDesc([torch.Size(shape) for shape, _ in groups], [dtype for _, dtype in groups])


VLLM = layout(((2, 3, 64, 128), BF16))
SGLANG = layout(((1, 6, 64, 128), BF16))
MLA = layout(((1, 3, 64, 576), BF16))
MLA_FLAT = layout(((3, 64, 576), BF16))
HYBRID = layout(((2, 3, 64, 128), BF16), ((5, 1000), U8))
THREE = layout(((2, 2, 64, 128), BF16), ((2, 1, 64, 64), BF16), ((777,), U8))
ODD = layout(((2, 3, 64, 100), BF16))


def kvtier_adapter(**params: Any) -> dict[str, Any]:
    return {
        "type": "plugin",
        "module_path": "kvtier.connectors.lmcache",
        "class_name": "KvtierL2Adapter",
        "adapter_params": params,
    }


def keys(n: int, *, model: str = "m", group: int = 0, base: int = 0, salt: str = "") -> list[ObjectKey]:
    rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
    return [ObjectKey((base + i).to_bytes(16, "big"), model, rank, group, salt) for i in range(n)]


class Storage:
    """A storage manager behind which the adapters `specs` are."""

    def __init__(self, *specs: dict[str, Any], l1_bytes: int = 32 << 20) -> None:
        adapters = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(s) for s in specs]))
        self._closed = False
        memory = L1MemoryManagerConfig(size_in_bytes=l1_bytes, use_lazy=False, shm_name="")
        self.manager = StorageManager(
            StorageManagerConfig(
                l1_manager_config=L1ManagerConfig(memory_config=memory),
                eviction_config=EvictionConfig("LRU"),
                l2_adapter_config=adapters,
            )
        )
        self._written = _Written(self.manager)

    def put(self, asked: Sequence[ObjectKey], desc: MemoryLayoutDesc, seed: int = 0) -> list[list[torch.Tensor]]:
        """Write random chunks into L1; they are stored in the background. Returns what was written."""
        objects = self.manager.reserve_write(list(asked), desc)
        assert len(objects) == len(asked)
        draw = torch.Generator().manual_seed(seed)
        written = []
        for key in asked:
            chunk = []
            for n, (shape, dtype) in enumerate(zip(desc.shapes, desc.dtypes, strict=True)):
                if dtype is U8:
                    values = torch.randint(0, 256, shape, generator=draw, dtype=U8)
                else:
                    values = torch.randn(shape, generator=draw).to(dtype)
                objects[key].get_tensor(n).copy_(values)
                chunk.append(values)
            written.append(chunk)
        self.manager.finish_write(list(asked))
        self.stored()
        return written

    def stored(self) -> None:
        """Wait until the store controllers have taken everything that was written, and every store has ended."""

        def idle() -> bool:
            reports = [c.report_status() for c in self.manager._store_controllers.values()]
            return self._written.all_taken and all(r["in_flight_task_count"] == 0 for r in reports)

        until(idle)

    def forget(self) -> None:
        """Drop everything in L1."""
        self.manager.clear(force=True)

    def get(self, asked: Sequence[ObjectKey], desc: MemoryLayoutDesc) -> dict[int, list[torch.Tensor]]:
        """What a prefetch finds, by index in `asked`."""
        return self.get_rows([(asked, desc)])[0]

    def get_rows(
        self, rows: Sequence[tuple[Sequence[ObjectKey], MemoryLayoutDesc]]
    ) -> list[dict[int, list[torch.Tensor]]]:
        """What one prefetch of several object groups or ranks finds, by row and index."""
        groups = [
            GroupedObjectKeys(keys=list(asked), object_group_id=asked[0].object_group_id, layout_desc=desc)
            for asked, desc in rows
        ]
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec(key_groups=groups))
        assert self.manager.wait_prefetch_status(handle, 2 * PATIENCE_S), "the prefetch did not end"
        result = self.manager.query_prefetch_status(handle)
        answer = []
        for (asked, desc), cells in zip(rows, result.hit_cells, strict=True):
            hit = [i for i in range(len(asked)) if cells.test(i)]
            found: dict[int, list[torch.Tensor]] = {}
            if hit:
                with self.manager.read_prefetched_results([asked[i] for i in hit]) as objects:
                    for i, item in zip(hit, objects, strict=True):
                        found[i] = [item.get_tensor(n).clone() for n in range(len(desc.shapes))]
                self.manager.finish_read_prefetched([asked[i] for i in hit])
            answer.append(found)
        return answer

    @property
    def adapter(self) -> Any:
        """The first adapter."""
        return next(iter(self.manager._l2_adapters.values()))

    def close(self) -> None:
        """End with everything written that kvtier's lower tiers are to have, for whoever opens them next."""
        if not self._closed:
            self._closed = True
            stores = [a._chunks.store for a in self.manager._l2_adapters.values() if hasattr(a, "_chunks")]
            written = [store.flush(PATIENCE_S) and store._promotions.drain(PATIENCE_S) for store in stores]
            self.manager.close()
            assert all(written), "a lower tier did not take its pages"
            until(lambda: not any(t.name.startswith("kvtier-close") for t in threading.enumerate()))


class _Written:
    """Counts keys from when they are in L1 until their stores have begun: between the two, a controller has some that
    are in none of its own counts."""

    def __init__(self, manager: StorageManager) -> None:
        self._lock = threading.Lock()
        self._left = 0
        for controller in manager._store_controllers.values():
            listener = controller._listener
            listener.on_l1_keys_write_finished = self._counted(listener.on_l1_keys_write_finished, 1)
            controller._process_new_keys = self._counted(controller._process_new_keys, -1)

    def _counted(self, real: Callable[[list[ObjectKey]], None], change: int) -> Callable[[list[ObjectKey]], None]:
        def counted(keys: list[ObjectKey]) -> None:
            if change > 0:
                self._add(len(keys))
            try:
                real(keys)
            finally:
                if change < 0:
                    self._add(-len(keys))

        return counted

    def _add(self, keys: int) -> None:
        with self._lock:
            self._left += keys

    @property
    def all_taken(self) -> bool:
        with self._lock:
            return self._left == 0


def until(condition: Callable[[], bool], limit_s: float = PATIENCE_S) -> None:
    """Poll until `condition()`; fails after `limit_s`."""
    give_up = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up, "did not happen in time"
        time.sleep(0.005)
