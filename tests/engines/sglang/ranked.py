"""Real ranks of one engine, as processes over gloo: each has its own radix cache, pool, linker and tiers, and all
follow one script, as the schedulers of an engine do. They are forked from a server that has imported SGLang already."""

from __future__ import annotations

import multiprocessing
import random
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LIMIT_S = 400.0
"""Ranks that have not ended by then have met in different places."""
PAGE = 16

Script = Callable[["Rank"], Any]


def run_ranks(script: Script, folder: Path, model: Path, *, tp: int = 1, pp: int = 1) -> list[Any]:
    """What `script` returned on each rank. Fails if one of them raised, or did not end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.engines.sglang.harness", "sglang.srt.managers.scheduler"])
    children: list[tuple[Any, Connection]] = []
    for rank in range(tp * pp):
        here, there = context.Pipe()
        child = context.Process(target=_main, args=(script, folder, model, rank, tp, pp, there), daemon=True)
        child.start()
        there.close()
        children.append((child, here))
    answers: dict[int, Any] = {}
    try:
        give_up = time.monotonic() + LIMIT_S
        while waiting := {pipe: rank for rank, (_, pipe) in enumerate(children) if rank not in answers}:
            told = wait(list(waiting), max(0.0, give_up - time.monotonic()))
            assert told, f"ranks {sorted(waiting.values())} hang"
            for pipe, rank in waiting.items():
                if pipe in told:  # the first to fail: the others may be waiting for it
                    error, answers[rank] = pipe.recv()
                    assert error is None, f"rank {rank}: {error}"
    finally:
        for child, pipe in children:
            child.join(0.0 if child.exitcode is not None or len(answers) < len(children) else 60.0)
            child.kill()
            child.join()
            pipe.close()
    return [answers[rank] for rank in range(len(children))]


def _main(script: Script, folder: Path, model: Path, rank: int, tp: int, pp: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        meeting = f"file://{folder / 'rendezvous'}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=tp * pp)
        from sglang.srt.plugins import load_plugins

        load_plugins()
        pipe.send((None, script(Rank(folder, model, rank, tp, pp))))
        dist.barrier()
    except BaseException:  # noqa: BLE001 - the parent fails the test with it
        pipe.send((traceback.format_exc(), None))


class Rank:
    """This process's place, and what it has seen: decisions that all ranks must have made alike."""

    def __init__(self, folder: Path, model: Path, rank: int, tp: int, pp: int) -> None:
        import torch.distributed as dist

        self.folder, self.model, self.rank, self.tp, self.pp = folder, model, rank, tp, pp
        self.decisions: list[Any] = []
        stages = [dist.new_group([stage * tp + r for r in range(tp)]) for stage in range(pp)]
        columns = [dist.new_group([stage * tp + r for stage in range(pp)]) for r in range(tp)]
        self.groups: dict[str, Any] = {
            "tp_cache_group": stages[rank // tp],
            "attn_tp_cache_group": stages[rank // tp],
            "pp_cache_group": columns[rank % tp],
            "pp_rank": rank // tp,
            "pp_size": pp,
        }

    def engine(self, block: dict[str, Any], **options: Any) -> Any:
        from .harness import Engine

        sizes: dict[str, Any] = {"tp_size": self.tp, "pp_size": self.pp}
        engine = Engine(self.model, block, page=PAGE, rank=self.rank, groups=self.groups, **sizes, **options)
        return engine

    def scheduler(self, engine: Any) -> Scheduler:
        return Scheduler(engine, self)

    def meet(self) -> None:
        """Wait for the other ranks."""
        import torch.distributed as dist

        dist.barrier()


class Scheduler:
    """Admits requests as SGLang's scheduler does: the hooks of the connector around a loop that matches, adds and loads
    what is not held. A batch is everything that can be admitted; its forward reads what was loaded."""

    def __init__(self, engine: Any, rank: Rank) -> None:
        self.engine, self.rank = engine, rank
        self.tree_cache = engine.cache
        self.waiting_queue: list[Any] = []
        self.chunked_req: Any = None
        self.results: dict[str, tuple[int, int]] = {}  # device and restored tokens
        self.failed: list[str] = []
        self.rows: dict[str, Any] = {}
        self._idle = SimpleNamespace(is_empty=lambda: True)

    def add(self, rid: str, tokens: list[int], **more: Any) -> Any:
        from kvtier.connectors.sglang import hold

        req = self.engine.new_request(rid, tokens, **more)
        hold.request_queued(None, self, req)
        self.waiting_queue.append(req)
        return req

    def abort(self, rid: str) -> None:
        for req in [req for req in self.waiting_queue if req.rid == rid]:
            self.waiting_queue.remove(req)
            self.engine.abort(req)

    def step(self) -> None:
        """One scheduling step: results of offloads, a batch, its forward."""
        from kvtier.connectors.sglang import hold

        hold.next_batch(self, None, None)
        self.engine.cache.check_hicache_events()
        batch, _ = hold.build_batch(self._admit, self, None, self._idle)
        if batch is not None:
            self._forward(batch)

    def run(self, limit_s: float = 120.0) -> None:
        give_up = time.monotonic() + limit_s
        while self.waiting_queue:
            assert time.monotonic() < give_up, f"{len(self.waiting_queue)} requests still wait"
            self.step()
        self.settle()

    def settle(self) -> None:
        """Steps until every offload has been taken; with a pipeline, until verdicts were exchanged."""
        self.step()
        give_up = time.monotonic() + 120.0
        while self.engine.cache.linker.pending_offloads:
            assert time.monotonic() < give_up, "offloads were not taken"
            self.step()

    def _admit(self, scheduler: Any, delayer: Any, running: Any) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        from kvtier.connectors.sglang import hold

        cache = self.engine.cache
        batch: list[Any] = []

        def add(adder: Any, req: Any, *_: Any) -> None:
            device, loaded = req.prefix_len, 0
            if req.needs_host_load_back():
                loaded, req.last_node = cache.init_load_back(
                    InitLoadBackParams(
                        best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req
                    )
                )
                req.prefix_len += loaded
            self.results[req.rid] = (device, loaded)
            self.rank.decisions.append((req.rid, device, loaded))
            batch.append(req)

        adder = SimpleNamespace(tree_cache=cache, budget_state=lambda: None)
        for req in self.waiting_queue:
            req.init_next_round_input(cache)
            hold.admit(add, adder, req, False, None)
        self.waiting_queue = [req for req in self.waiting_queue if req not in batch]
        if not batch:
            return None, running
        self.index = cache.ready_to_load_host_cache()
        return SimpleNamespace(reqs=batch), running

    def _forward(self, batch: Any) -> None:
        from kvtier.connectors.sglang import hold

        linker = self.engine.cache.linker
        slots = {req.rid: linker.private_load_indices.get(req.rid) for req in batch.reqs}
        linker.layer_done_counter.set_consumer(self.index)
        for rid, where in slots.items():
            if where is not None:
                self.rows[rid] = self.engine.read(where, waiting=True)
        linker.layer_done_counter.set_consumer(-1)
        self.engine.cache.finish_external_linker_loads(batch.reqs)
        hold.settle_loads(self, batch, None)
        self._end_failed(batch)
        for where in slots.values():
            if where is not None:
                self.engine.allocator.free(where)

    def _end_failed(self, batch: Any) -> None:
        """The results of a batch: its requests whose loads failed end with 503."""
        for req in batch.reqs:
            if req.discard_output_reason is not None:
                assert req.discard_output_reason.status_code == 503 and req.skip_radix_cache_insert
                self.failed.append(req.rid)
                self.rank.decisions.append((req.rid, "failed"))


def prompt(n: int, tokens: int = 8 * PAGE) -> list[int]:
    draw = random.Random(n)
    return [draw.randrange(5, 500) for _ in range(tokens)]
