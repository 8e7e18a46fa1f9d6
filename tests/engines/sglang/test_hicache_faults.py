"""The staged path over a cache server that freezes, dies or starts again, and over a disk that is full: SGLang's
threads get what they expect, in time, and nothing that did not verify."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.testing.processes import freeze, thaw

from .cache_server import PATIENCE_S, Server
from .test_fault_tiers import TIER_S, block

pytestmark = pytest.mark.usefixtures("engine_hooks")

PAGES = 6


def below(lab: Any, opened: Callable[..., Any], given: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
    """A host pool, and its first pages, which an engine that has ended left in the lower tier of `given`."""
    pool = lab.mha_pool("page_first", pages=24)
    storage = opened(pool, given)
    want = [lab.page_of(pool, n) for n in range(PAGES)]
    assert storage.batch_set_v1(lab.names(PAGES), lab.slots(range(PAGES))) == [True] * PAGES
    lab.end(storage)
    return pool, want


def restored(
    lab: Any,
    storage: Any,
    pool: Any,
    want: list[torch.Tensor],
    rid: str,
    between: Callable[[], object] = lambda: None,
) -> int:
    """Ask and load as SGLang's threads do; how many pages came, which must be what was stored. between: called when it
    is known what there is."""
    for buffer in lab.buffers_of(pool):
        buffer.fill_(-7.0)
    keys = lab.names(PAGES)
    with storage.reads.serving(rid):
        found = storage.batch_exists(keys)
        assert type(found) is int
        between()
        answer = storage.batch_get_v1(keys[:found], lab.slots(range(found)))
    storage.batch_built([rid], lambda: set())
    came: int = sum(answer)
    assert answer == [True] * came + [False] * (found - came)
    for n in range(PAGES):
        page = lab.page_of(pool, n)
        assert torch.equal(page, want[n] if n < came else torch.full_like(page, -7.0)), (n, came)
    return came


def comes_back(lab: Any, storage: Any, pool: Any, want: list[torch.Tensor]) -> None:
    """The tier comes back by itself."""
    give_up = time.monotonic() + PATIENCE_S
    n = 0
    while restored(lab, storage, pool, want, f"again{n}") < PAGES:
        assert time.monotonic() < give_up, "the server answers again, and nothing comes from it"
        n += 1
        time.sleep(0.1)


def add_up(lab: Any, storage: Any) -> Any:
    counts = lab.add_up(storage)
    assert counts.errors["engine"] == 0
    return counts


def test_a_cache_server_that_freezes_while_pages_come_from_it(
    lab: Any, opened: Callable[..., Any], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, want = below(lab, opened, block(server))
    server.written(PAGES)
    storage = opened(pool, block(server, promote_deadline="2s"))
    tier = storage._store.lower[0]
    real, known, frozen = tier.get_many_into, threading.Event(), threading.Event()

    def freezing(*args: Any, **named: Any) -> Any:
        assert known.wait(PATIENCE_S)
        freeze(server.pid)
        frozen.set()
        return real(*args, **named)

    def strike() -> None:
        known.set()
        assert frozen.wait(PATIENCE_S), "nothing was asked of the tier"

    monkeypatch.setattr(tier, "get_many_into", freezing)
    begin = time.monotonic()
    assert restored(lab, storage, pool, want, "frozen", strike) == 0
    storage.cache_reset()
    assert storage.batch_set_v1(lab.names(2, 50), lab.slots([10, 11])) == [True, True]  # into host memory
    assert time.monotonic() - begin < TIER_S / 2  # the tier itself waits much longer
    counts = add_up(lab, storage)
    missed = {reason: n for reason, n in counts.misses.items() if n}
    assert sum(missed.values()) == PAGES and missed.keys() <= {"deadline", "tier_down"}, missed
    thaw(server.pid)
    monkeypatch.setattr(tier, "get_many_into", real)
    comes_back(lab, storage, pool, want)
    add_up(lab, storage)


def test_a_cache_server_that_dies_and_starts_again(
    lab: Any, opened: Callable[..., Any], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, want = below(lab, opened, block(server))
    server.written(PAGES)
    storage = opened(pool, block(server, promote_deadline="3s"))
    tier = storage._store.lower[0]
    real, known, killed = tier.get_many_into, threading.Event(), threading.Event()

    def killing(*args: Any, **named: Any) -> Any:
        assert known.wait(PATIENCE_S)
        server.kill()
        killed.set()
        return real(*args, **named)

    def strike() -> None:
        known.set()
        assert killed.wait(PATIENCE_S), "nothing was asked of the tier"

    monkeypatch.setattr(tier, "get_many_into", killing)
    assert restored(lab, storage, pool, want, "killed", strike) == 0
    monkeypatch.setattr(tier, "get_many_into", real)
    assert restored(lab, storage, pool, want, "gone") == 0
    server.start()  # over what it had on disk
    comes_back(lab, storage, pool, want)
    add_up(lab, storage)


def test_a_disk_that_is_full(
    lab: Any, opened: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it holds is served; new pages find room in host memory as long as there is some, and are told one by one."""
    from kvtier.storage_backends.nvme import striped
    from kvtier.testing.faulty_device import Fault, FaultyDevice

    pool, want = below(lab, opened, lab.config(tmp_path))
    device = FaultyDevice()
    monkeypatch.setattr(striped, "open_nvme", partial(striped.open_nvme, device=device))
    storage = opened(pool, lab.config(tmp_path, host="256KiB", offload_wait="50ms"))
    device.set(Fault(("write",), code=errno.ENOSPC))
    for n in range(6):
        answer = storage.batch_set_v1(lab.names(10, 100 + 10 * n), lab.slots(range(10)))
        assert len(answer) == 10 and all(type(stored) is bool for stored in answer)
    assert restored(lab, storage, pool, want, "old") == PAGES
    add_up(lab, storage)
    device.set()
