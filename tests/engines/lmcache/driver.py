"""Calls one adapter as LMCache's controllers do."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from typing import Any

GROUP = 0
LIMIT_S = 120.0
"""For the result of a task, which is there at once on an idle machine; longer than any deadline of a test's own."""


class Driver:
    """Calls one adapter as a controller does: submit, wait for the descriptor, take the result."""

    def __init__(self, adapter: Any) -> None:
        from .storage import VLLM

        self.adapter, self.desc = adapter, VLLM

    def objects(self, n: int, fill: int | None = None) -> list[Any]:
        import torch
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

        (shape,), (dtype,) = self.desc.shapes, self.desc.dtypes
        made = []
        for i in range(n):
            raw = torch.zeros(shape.numel() * dtype.itemsize, dtype=torch.uint8)
            if fill is not None:
                raw.view(dtype).fill_(float(fill + i))
            meta = MemoryObjMetadata(
                shape=shape,
                dtype=dtype,
                address=0,
                phy_size=len(raw),
                fmt=MemoryFormat.KV_2LTD,
                ref_count=1,
                shapes=[shape],
                dtypes=[dtype],
            )
            made.append(TensorMemoryObj(raw, meta, None))
        return made

    @staticmethod
    def _wait(fd: int, limit_s: float = LIMIT_S) -> None:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        assert poller.poll(limit_s * 1000), "no event in time"

    def store(self, keys: Sequence[Any], objects: list[Any]) -> Any:
        task = self.adapter.submit_store_task(list(keys), objects)
        results: dict[int, Any] = {}
        give_up = time.monotonic() + LIMIT_S
        while task not in results:
            assert time.monotonic() < give_up, "the task has no result"
            self._wait(self.adapter.get_store_event_fd())
            results |= self.adapter.pop_completed_store_tasks()
        return results[task]

    def _result(self, query: Any, task: int, fd: int) -> list[int]:
        self._wait(fd)
        give_up = time.monotonic() + LIMIT_S
        while (bitmap := query(task)) is None:
            assert time.monotonic() < give_up, "the task has no result"
            time.sleep(0.002)
        assert query(task) is None, "a result is given out once"
        return [i for i in range(bitmap.size()) if bitmap.test(i)]

    def lookup(self, keys: Sequence[Any]) -> list[int]:
        task = self.adapter.submit_lookup_and_lock_task(list(keys), {GROUP: self.desc})
        return self._result(
            self.adapter.query_lookup_and_lock_result, task, self.adapter.get_lookup_and_lock_event_fd()
        )

    def load(self, keys: Sequence[Any], objects: list[Any]) -> list[int]:
        task = self.adapter.submit_load_task(list(keys), objects)
        return self._result(self.adapter.query_load_result, task, self.adapter.get_load_event_fd())
