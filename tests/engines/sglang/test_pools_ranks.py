"""Several ranks whose caches are more than KV pages, one of which has lost a page beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .ranked import Rank, run_ranks

PAGES = 6


def restore(rank: Rank, kind: str, page: int, lost: dict[str, int]) -> Any:
    """Store two turns, lose a page on the last rank, and restore what all ranks have in common: its length in pages,
    what the ledger counts, and whether the bytes are right."""
    from .harness import config
    from .pool_engines import PoolEngine
    from .test_pools import tokens_of
    from .test_pools_faults import keys_of

    block = config(rank.folder / "kv")
    engine = PoolEngine(
        rank.model, block, kind, page=page, rank=rank.rank, groups=rank.groups, tp_size=rank.tp, pp_size=rank.pp
    )
    try:
        turn = tokens_of(page, 2 * PAGES)
        engine.fill_prefix(turn[: PAGES * page])
        engine.fill_prefix(turn, seed=1, known=PAGES * page)
        everywhere = {"kv": engine.matched(turn)[0]}
        if engine.windowed:
            everywhere["swa"] = engine.allocator.full_to_swa_index_mapping[everywhere["kv"]]
        before = engine.contents_of(everywhere)
        engine.flush()
        if rank.rank == rank.tp - 1:
            for pool, at in lost.items():
                engine.linker._store.delete([keys_of(engine, pool, turn)[at]])
        rank.meet()
        req = engine.request("again", turn)
        while engine.linker.waits("again"):
            engine.linker.agree(["again"])
        restored = engine.admit(req, wait=False)
        engine.forward(restored)
        got = engine.contents_of({name: at for name, at in engine.places_of(restored).items() if name in before})
        end = restored.loaded
        right = all(
            (a == b[max(0, end - len(a)) : end]).all()
            for name in before
            for a, b in zip(got[name], before[name], strict=True)
        )
        ended = engine.finish(restored)
        engine.assert_nothing_held()
        counts = engine.counts
        return end // page, counts.hits["host"], sum(counts.misses.values()), right and ended
    finally:
        engine.close()


def window(rank: Rank) -> Any:
    return restore(rank, "swa", 16, {"swa": 2 * PAGES - 1})


def state(rank: Rank) -> Any:
    return restore(rank, "mamba", 1, {"mamba": 2 * PAGES - 1})


def latent(rank: Rank) -> Any:
    return restore(rank, "mla", 16, {"kv": 7})


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("script", "pages"), [(window, 2 * PAGES - 1), (state, PAGES), (latent, 7)], ids=["window", "state", "latent"]
)
def test_ranks_restore_what_all_of_them_have(tiny: Path, tmp_path: Path, script: Any, pages: int) -> None:
    answers = run_ranks(script, tmp_path, tiny, tp=2)
    assert answers == [(pages, pages, 2 * PAGES - pages, True)] * 2
