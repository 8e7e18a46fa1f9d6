"""A cache server that freezes, dies or starts again, and a disk that is full, behind an engine that serves: requests
are recomputed, the scheduler's thread is not held, and nothing is used that did not verify."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.processes import freeze, thaw

from .cache_server import PATIENCE_S, Server

pytestmark = pytest.mark.usefixtures("engine_hooks")

TOKENS = list(range(5, 133))
TIER_S = 120.0
"""How long the tier waits for its server where the request does not."""
ENGINE_THREAD_S = 20.0
"""No call on the scheduler's thread may take as long as the tier waits; far more than a busy machine needs."""


def block(server: Server, **more: Any) -> dict[str, Any]:
    from .harness import config

    given = config(**{"promote_deadline": "60s", **more})
    given["tiers"].append({"type": "redis", "url": f"unix://{server.socket}", "timeout": f"{TIER_S:.0f}s"})
    return given


def fresh(start: Any, model: Path, server: Server, **more: Any) -> tuple[Any, Any]:
    """An engine whose pages only the server has, and what they hold."""
    first = start(model, block(server))
    computed = first.compute(TOKENS)
    first.close()
    server.written(len(TOKENS) // 16)
    return start(model, block(server, **more)), computed


def longest_call(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each lookup and load takes, from now on. What is asked of a tier on their thread takes for ever."""
    took: list[float] = []
    for name in ("lookup", "load", "start_layer_wise_loading", "cancel_queued_load"):
        real = getattr(engine.linker, name)

        def timed(*args: Any, real: Any = real) -> Any:
            begin = time.monotonic()
            try:
                return real(*args)
            finally:
                took.append(time.monotonic() - begin)

        monkeypatch.setattr(engine.linker, name, timed)
    tier = engine.linker._store.lower[0]
    for name in ("length_many", "get_many_into", "put_many"):
        real = getattr(tier, name)

        def asked(*args: Any, real: Any = real, **named: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                took.append(float("inf"))
            return real(*args, **named)

        monkeypatch.setattr(tier, name, asked)
    return took


def restored(engine: Any, rid: str, computed: Any, struck: threading.Event | None = None) -> int:
    """Serve the request; the tokens that were restored, which must be what was computed. struck: set by a fault that
    is to meet this request, however busy the machine is."""
    from .harness import same, until

    req = engine.request(rid, TOKENS)
    assert struck is None or struck.wait(PATIENCE_S), "nothing was asked of the tier"
    until(lambda: not engine.linker.waits(rid), PATIENCE_S)
    got = engine.admit(req)
    rows = got.forward()
    assert got.finish()
    assert not got.loaded or same(rows, computed, got.loaded)
    loaded: int = got.loaded
    return loaded


def test_a_cache_server_that_freezes_while_pages_come_from_it(
    start: Any, tiny: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, computed = fresh(start, tiny, server, promote_deadline="1s")
    took = longest_call(engine, monkeypatch)
    tier = engine.linker._store.lower[0]
    real, frozen = tier.get_many_into, threading.Event()

    def freezing(*args: Any, **named: Any) -> Any:
        freeze(server.pid)
        frozen.set()
        return real(*args, **named)

    monkeypatch.setattr(tier, "get_many_into", freezing)
    assert restored(engine, "frozen", computed, frozen) == 0
    assert max(took) < ENGINE_THREAD_S
    misses = {reason: n for reason, n in engine.counts.misses.items() if n}
    assert sum(misses.values()) == 8 and misses.keys() <= {"deadline", "tier_down"}, misses
    engine.compute(list(range(300, 364)))  # serves on, and its own pages stay in host memory
    thaw(server.pid)
    monkeypatch.setattr(tier, "get_many_into", real)
    give_up = time.monotonic() + PATIENCE_S
    n = 0
    while restored(engine, f"again{n}", computed) < len(TOKENS):  # the tier comes back by itself
        assert time.monotonic() < give_up, "the server answers again, and nothing comes from it"
        n += 1
        time.sleep(0.1)
    engine.assert_nothing_held()


def test_a_cache_server_that_dies_and_starts_again(
    start: Any, tiny: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, computed = fresh(start, tiny, server, promote_deadline="3s")
    took = longest_call(engine, monkeypatch)
    tier = engine.linker._store.lower[0]
    real, killed = tier.get_many_into, threading.Event()

    def killing(*args: Any, **named: Any) -> Any:
        server.kill()
        killed.set()
        return real(*args, **named)

    monkeypatch.setattr(tier, "get_many_into", killing)
    assert restored(engine, "killed", computed, killed) == 0
    assert restored(engine, "gone", computed) == 0
    assert max(took) < ENGINE_THREAD_S
    monkeypatch.setattr(tier, "get_many_into", real)
    server.start()  # over what it had on disk
    give_up = time.monotonic() + PATIENCE_S
    n = 0
    while restored(engine, f"again{n}", computed) < len(TOKENS):
        assert time.monotonic() < give_up, "the server is back, and nothing comes from it"
        n += 1
        time.sleep(0.1)
    engine.assert_nothing_held()


def test_a_disk_that_is_full(start: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it holds is served; new pages stay in host memory as long as there is room, and requests go on."""
    import errno

    from kvtier.storage_backends.nvme import striped
    from kvtier.testing.faulty_device import Fault, FaultyDevice

    from .harness import config, same

    first = start(tiny, config(tmp_path))
    computed = first.compute(TOKENS)
    first.close()

    device = FaultyDevice()
    monkeypatch.setattr(striped, "open_nvme", partial(striped.open_nvme, device=device))
    engine = start(tiny, config(tmp_path, host="1MiB"))
    device.set(Fault(("write",), code=errno.ENOSPC))
    for n in range(12):
        engine.compute([1000 * n + i for i in range(512)], seed=n)
        engine.flush()
    old = engine.admit(engine.request("old", TOKENS))
    assert old.loaded == len(TOKENS) and same(old.forward(), computed, len(TOKENS)) and old.finish()
    recent = engine.admit(engine.request("recent", [1000 * 11 + i for i in range(512)]))
    recent.forward()
    assert recent.finish()
    device.set()
    engine.flush()
    engine.assert_nothing_held()
