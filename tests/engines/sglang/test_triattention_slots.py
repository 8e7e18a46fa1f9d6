"""Rows of live requests in the engine's real pools, allocators and prefix cache, without a model."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.abc.compression import KeepSet, LiveRequest
from kvtier.connectors.sglang.compression_cache import SlotCache
from kvtier.errors import EngineError
from kvtier.kernels.rowpack import fast as rowpack

pytestmark = pytest.mark.usefixtures("engine_hooks")

PROMPT, ROWS, KEPT = 40, 131, 21


class Running:
    """Requests in the middle of their decoding, `ROWS` random rows each, the whole pages of their prompt shared with
    the prefix cache; pages of different requests lie between one another."""

    def __init__(self, model: Path, page: int, hnd: bool, requests: int = 3) -> None:
        from .harness import Engine, config

        self.engine = Engine(model, config(), page=page, hnd=hnd, pages=512 if page == 1 else 48)
        self.page = page
        self.tree = self.engine.cache
        self.table = self.tree.req_to_token_pool.req_to_token
        self.fences = 0
        self.cache = SlotCache(self.engine.pool, self.table, self.tree, self.fence)
        draw = torch.Generator().manual_seed(page)
        for buffer in (*self.engine.pool.k_buffer, *self.engine.pool.v_buffer):
            buffer.copy_(torch.randn(buffer.shape, generator=draw))
        pages = -(-ROWS // page)
        slots = self.engine.allocator.alloc(requests * pages * page)
        order = torch.randperm(requests * pages, generator=draw).view(requests, pages)
        self.reqs: list[Any] = []
        self.live: list[LiveRequest] = []
        for n in range(requests):
            own = (slots[::page][order[n]][:, None] + torch.arange(page)).flatten()
            self.add(n, own)

    def add(self, n: int, slots: torch.Tensor) -> None:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.sampling.sampling_params import SamplingParams

        from .harness import key_of

        prompt = [(n * 31 + i) % 400 + 9 for i in range(PROMPT)]
        req: Any = Req(
            rid=f"r{n}",
            origin_input_text="",
            origin_input_ids=array("q", prompt),
            sampling_params=SamplingParams(max_new_tokens=500),
            vocab_size=512,
        )
        req.kv.req_pool_idx = n
        self.table[n, :ROWS] = slots[:ROWS].to(self.table.dtype)
        shared = PROMPT // self.page * self.page
        self.tree.insert(InsertParams(key=key_of(prompt[:shared]), value=slots[:shared].clone()))
        req.kv.cache_protected_len = shared
        req.kv.kv_committed_len = req.kv.kv_allocated_len = ROWS
        live = LiveRequest(f"{n}", PROMPT, ROWS - PROMPT, ROWS)
        self.reqs.append(req)
        self.live.append(live)
        self.cache.add(live, req)

    def fence(self) -> None:
        self.fences += 1

    def rows(self, n: int, rows: int) -> list[torch.Tensor]:
        """``[rows, heads, dim]`` of every buffer, by the token table."""
        found = self.engine.read(self.table[n, :rows].long())
        return [x.clone() for pair in found for x in pair]


@pytest.fixture(params=[(1, False), (16, False), (64, False), (16, True)], ids=["1", "16", "64", "16-hnd"])
def running(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Running]:
    state = Running(tiny, *request.param)
    yield state
    state.engine.close()


def chosen(layers: int, heads: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    picks = [torch.randperm(ROWS - PROMPT, generator=draw)[:KEPT].sort().values for _ in range(layers * heads)]
    return torch.stack(picks).view(layers, heads, KEPT)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 2)], ids=["union", "per_head", "per_layer_perhead"])
def test_kept_rows_are_packed_and_whole_pages_are_freed(running: Running, shape: tuple[int, int]) -> None:
    before = [running.rows(n, ROWS) for n in range(3)]
    free = running.engine.allocator.available_size()
    moved = (0, 2)  # the second of the three decodes on
    keep = {n: chosen(*shape, seed=n) for n in moved}
    running.cache.begin_step()
    for n in moved:
        for layer in range(3):
            seen = running.cache.keys(running.live[n], layer, PROMPT)
            assert torch.equal(seen, before[n][2 * layer][PROMPT:].transpose(0, 1))
    running.cache.compact([running.live[n] for n in moved], [KeepSet(PROMPT, keep[n]) for n in moved])
    assert running.fences == 1
    length = PROMPT + KEPT
    for n in moved:
        ordinals = keep[n].expand(3, 2, KEPT)
        for buffer, (got, old) in enumerate(zip(running.rows(n, length), before[n], strict=True)):
            assert torch.equal(got[:PROMPT], old[:PROMPT])
            for head in range(2):
                assert torch.equal(got[PROMPT:, head], old[PROMPT:][ordinals[buffer // 2, head], head])
        kv, live = running.reqs[n].kv, running.live[n]
        assert kv.kv_committed_len == kv.kv_allocated_len == live.length == length
        assert live.evicted_tokens == ROWS - length
        assert running.reqs[n].skip_radix_cache_insert
        # What methods read afterwards is the packed state.
        assert torch.equal(running.cache.keys(live, 1), running.rows(n, length)[2].transpose(0, 1))
    assert running.cache.packed == {"0", "2"}
    assert all(torch.equal(a, b) for a, b in zip(running.rows(1, ROWS), before[1], strict=True))
    assert not running.reqs[1].skip_radix_cache_insert
    page = running.page
    pages_freed = -(-ROWS // page) - -(-length // page)
    assert running.engine.allocator.available_size() == free + 2 * pages_freed * page
    # And what was freed is nobody's: what the three still use is not among the free pages.
    used = torch.cat([running.table[n, : r.kv.kv_allocated_len].long() // page for n, r in enumerate(running.reqs)])
    assert not torch.isin(used, running.engine.allocator.get_all_free_pages()).any()


def test_rows_that_are_not_the_requests_own_do_not_move(running: Running) -> None:
    before = [running.rows(n, ROWS) for n in range(3)]
    free = running.engine.allocator.available_size()
    keep = chosen(1, 1, 0)
    with pytest.raises(EngineError, match="others share its first"):
        running.cache.compact(running.live[:1], [KeepSet(PROMPT - 1, keep)])
    running.reqs[0].kv.kv_allocated_len += 1
    with pytest.raises(EngineError, match="nothing was evicted"):
        running.cache.compact(running.live[:1], [KeepSet(PROMPT, keep)])
    assert all(torch.equal(a, b) for n in range(3) for a, b in zip(running.rows(n, ROWS), before[n], strict=True))
    assert running.engine.allocator.available_size() == free and running.reqs[0].to_finish is None


def test_a_request_whose_rows_moved_half_ends_with_an_error(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("injected by a test")

    monkeypatch.setattr(rowpack, "pack", fails)
    with pytest.raises(RuntimeError, match="injected"):
        running.cache.compact(running.live[:1], [KeepSet(PROMPT, chosen(1, 1, 0))])
    assert running.reqs[0].to_finish.status_code == 500 and running.reqs[0].skip_radix_cache_insert
    assert running.reqs[1].to_finish is None


class Recording:
    """Stands for a pipeline: remembers which hooks were called with which requests."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []

    def hooks(self, name: str) -> tuple[Any, ...]:
        return (None,)

    def call(self, name: str, requests: list[LiveRequest], cache: Any = None) -> None:
        if requests:
            self.calls.append((name, [f"{r.request_id} {r.generated_tokens} {r.length}" for r in requests]))


def test_hooks_are_called_in_batches_at_their_points() -> None:
    from kvtier.connectors.sglang import compression as module

    pipeline, errors = Recording(), []
    cache: Any = SimpleNamespace(begin_step=lambda: None, packed=set(), add=lambda *_: None, drop=lambda *_: None)
    state = module.SchedulerCompression(pipeline, cache, count_error=lambda: errors.append(1))  # type: ignore[arg-type]
    tree = SimpleNamespace()
    module.attach(tree, state)

    def req(rid: str, prompt: int) -> Any:
        return SimpleNamespace(rid=rid, origin_input_ids=[0] * prompt, kv=SimpleNamespace(cache_protected_len=0))

    def decode(*of: tuple[Any, int]) -> list[tuple[str, list[str]]]:
        pipeline.calls.clear()
        lengths = torch.tensor([rows for _, rows in of])
        module.before_decode(SimpleNamespace(tree_cache=tree, reqs=[r for r, _ in of], seq_lens_cpu=lengths))
        return list(pipeline.calls)

    a, b = req("a", 5), req("b", 7)
    # A prompt of 7 tokens in two chunks, and one of 5 in one.
    b.prefix_len, b.full_untruncated_fill_ids = 4, [0] * 7
    module.chunk_ended(None, SimpleNamespace(tree_cache=tree), b)
    assert pipeline.calls == [("on_request_init", ["0.b 0 4"]), ("on_prefill_chunk_end", ["0.b 0 4"])]
    assert decode((a, 5)) == [
        ("on_request_init", ["1.a 0 5"]),
        ("on_prefill_chunk_end", ["1.a 0 5"]),
        ("on_context_step_end", ["1.a 0 5"]),
        ("on_generation_step_begin", ["1.a 0 5"]),
    ]
    assert decode((a, 6), (b, 7)) == [
        ("on_prefill_chunk_end", ["0.b 0 7"]),
        ("on_context_step_end", ["0.b 0 7"]),
        ("on_generation_step_end", ["1.a 1 6"]),
        ("on_generation_step_begin", ["0.b 0 7", "1.a 1 6"]),
    ]
    assert decode((a, 7), (b, 8))[0] == ("on_generation_step_end", ["1.a 2 7", "0.b 1 8"])
    pipeline.calls.clear()
    # It ends with a row that no step has read any more.
    b.finished, b.kv.kv_committed_len = lambda: True, 9
    module.released(b, tree, checkpoint=True)
    module.released(b, tree, checkpoint=True)  # nothing is known of it any more
    assert pipeline.calls == [("on_generation_step_end", ["0.b 2 9"]), ("on_request_finish", ["0.b 2 9"])]
    # Retracted with 3 generated tokens, which are recomputed: it begins again with them.
    module.released(a, tree, checkpoint=False)
    assert decode((a, 8))[0][1] == ["2.a 3 8"]
    assert not errors


def test_a_failure_is_counted_and_with_several_ranks_not_hidden() -> None:
    from kvtier.connectors.sglang import compression as module

    errors: list[int] = []

    def fails() -> None:
        raise RuntimeError("injected by a test")

    for ranks in (1, 2):
        state = module.SchedulerCompression(Recording(), None, count_error=lambda: errors.append(1), ranks=ranks)  # type: ignore[arg-type]
        if ranks == 1:
            state.guard(fails)
        else:
            with pytest.raises(RuntimeError, match="injected"):
                state.guard(fails)
    assert errors == [1, 1]


def test_positions_are_logical_and_lengths_physical() -> None:
    from kvtier.connectors.sglang import compression as module

    def forward(decode: bool) -> Any:
        return SimpleNamespace(
            forward_mode=SimpleNamespace(is_decode=lambda: decode),
            positions=torch.tensor([9, 20], dtype=torch.int64),
            mrope_positions=torch.tensor([[9, 20]] * 3),
        )

    evicted = SimpleNamespace(kvtier_live=LiveRequest("a", 5, 30, 10))
    batch = SimpleNamespace(reqs=[evicted, SimpleNamespace()])
    for decode, positions in ((True, [34, 20]), (False, [9, 20])):
        ran = forward(decode)
        old = ran.positions
        module.positions(ran, None, batch, None)
        assert ran.mrope_positions.tolist() == [positions] * 3
        assert ran.positions.tolist() == positions and old.tolist() == [9, 20]


def test_a_running_request_is_expected_to_grow_to_its_budget_and_not_beyond() -> None:
    from kvtier.connectors.sglang import compression as module

    tree = SimpleNamespace()
    adder = SimpleNamespace(tree_cache=tree, page_size=16)

    def growth(estimate: float, generated_rows: int | None) -> float:
        req = SimpleNamespace()
        if generated_rows is not None:
            req.kvtier_live = LiveRequest("a", 20, generated_rows, 20 + generated_rows)
        return module.growth(lambda *_: estimate, adder, req)

    assert growth(4096, 3) == 4096  # an engine without methods
    module.attach(tree, module.SchedulerCompression(None, None, count_error=lambda: None, most_generated=100))  # type: ignore[arg-type]
    assert growth(4096, 3) == 128 - 32  # from 2 pages, with 23 rows, to 8 pages, with 120
    assert growth(4096, 100) == 0 and growth(4096, 900) == 0
    assert growth(10, 3) == 10 and growth(4096, None) == 4096
