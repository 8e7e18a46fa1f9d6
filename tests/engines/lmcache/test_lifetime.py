"""LMCache takes its memory back once a task's result is posted, or the adapter is closed: nobody of ours may be in it
then, and every task has exactly one result, whatever goes wrong."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 60.0


def finished(pop: Any, task: int) -> Any:
    """The result of a task that `pop` gives out."""
    give_up = time.monotonic() + LIMIT_S
    while (result := pop(task)) is None:
        assert time.monotonic() < give_up, "the task has no result"
        time.sleep(0.005)
    assert pop(task) is None, "a result is given out once"
    return result


class Slow:
    """Holds up jobs that are in LMCache's memory, and tells whether one is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        from kvtier.mover import PageMover
        from kvtier.reader import PageReader

        owner = PageReader if method == "decode" else PageMover
        self.inside, self.begun = 0, threading.Event()
        self.go, self.lock, real = threading.Event(), threading.Lock(), getattr(owner, method)

        def held_up(*args: Any, **kwargs: Any) -> Any:
            with self.lock:
                self.inside += 1
            self.begun.set()
            try:
                assert self.go.wait(LIMIT_S)
                return real(*args, **kwargs)
            finally:
                with self.lock:
                    self.inside -= 1

        monkeypatch.setattr(owner, method, held_up)


@pytest.mark.parametrize(("method", "kind"), [("_fill", "store"), ("decode", "load")])
def test_close_waits_for_what_has_begun_and_drops_what_has_not(
    drive: Any, monkeypatch: pytest.MonkeyPatch, method: str, kind: str
) -> None:
    from .storage import keys, until

    driver = drive()
    adapter = driver.adapter
    driver.store(keys(40), driver.objects(40, fill=1))
    slow = Slow(monkeypatch, method)
    if kind == "store":
        tasks = [adapter.submit_store_task(keys(1, base=100 + i), driver.objects(1, fill=1)) for i in range(40)]
    else:
        for i in range(40):
            driver.lookup(keys(1, base=i))
        tasks = [adapter.submit_load_task(keys(1, base=i), driver.objects(1)) for i in range(40)]
    assert slow.begun.wait(LIMIT_S)
    closing = threading.Thread(target=adapter.close)
    closing.start()
    until(lambda: adapter._chunks._gate._shut)
    closing.join(0.1)
    assert closing.is_alive(), "a job is in LMCache's memory"
    slow.go.set()
    closing.join(LIMIT_S)
    assert not closing.is_alive() and slow.inside == 0
    results = adapter.pop_completed_store_tasks() if kind == "store" else None
    if results is not None:
        assert sorted(results) == tasks
        done = sum(r.is_successful() for r in results.values())
    else:
        done = sum(adapter.query_load_result(task).test(0) for task in tasks)
        assert all(adapter.query_load_result(task) is None for task in tasks)
    assert 1 <= done < 40, "what was queued behind was not begun"
    # Afterwards a call is answered too.
    late = adapter.submit_load_task(keys(1), driver.objects(1))
    assert not finished(adapter.query_load_result, late).test(0)
    late = adapter.submit_lookup_and_lock_task(keys(1), {0: driver.desc})
    assert not finished(adapter.query_lookup_and_lock_result, late).test(0)
    late = adapter.submit_store_task(keys(1), driver.objects(1))
    assert not adapter.pop_completed_store_tasks()[late].is_successful()
    adapter.submit_unlock(keys(1))
    adapter.delete(keys(1))
    assert adapter.report_status()["is_healthy"] is False and adapter.get_usage() is not None


def test_close_ends_a_wait_for_room_and_every_open_lookup(drive: Any, tmp_path: Path) -> None:
    from .storage import keys

    driver = drive(tiers=[{"type": "host", "capacity": "1MiB"}], offload_wait="60s", promote_deadline="60s")
    adapter = driver.adapter
    driver.store(keys(10), driver.objects(10, fill=1))
    assert len(driver.lookup(keys(10))) == 10  # all is pinned
    stores = [adapter.submit_store_task(keys(1, base=100 + i), driver.objects(1, fill=1)) for i in range(5)]
    begin = time.monotonic()
    adapter.close()
    assert time.monotonic() - begin < 30.0  # at once, but for a busy machine; room is waited for twice as long
    results = adapter.pop_completed_store_tasks()
    assert sorted(results) == stores and not any(r.is_successful() for r in results.values())


def test_a_part_that_cannot_start_leaves_the_others_to_end_first(drive: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result is posted when the last part has left LMCache's memory, not when the first one failed."""
    from kvtier.mover import PageMover

    from .storage import keys

    driver = drive()
    adapter = driver.adapter
    written = driver.objects(2, fill=3)
    driver.store(keys(2), written)
    driver.lookup(keys(1))
    driver.lookup(keys(1, base=1))  # another lookup: the load has two parts
    slow = Slow(monkeypatch, "decode")
    real, calls = PageMover.onboard, iter(range(100))

    def second_fails(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError("broken")
        return real(*args, **kwargs)

    monkeypatch.setattr(PageMover, "onboard", second_fails)
    out = driver.objects(2)
    task = adapter.submit_load_task(keys(2), out)
    assert slow.begun.wait(LIMIT_S) and adapter.query_load_result(task) is None
    slow.go.set()
    bitmap = finished(adapter.query_load_result, task)
    assert bitmap.test(0) and not bitmap.test(1)
    assert (out[0].raw_data == written[0].raw_data).all() and not out[1].raw_data.any()
    assert adapter.report_status()["open_lookups"] == 0 and len(adapter._leases) == 0


@pytest.mark.parametrize("broken", ["_enter", "keys_of", "release"])
def test_errors_after_the_copying_cost_no_result(drive: Any, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    from .storage import keys

    driver = drive()
    driver.store(keys(3), driver.objects(3, fill=1))

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(driver.adapter._chunks, broken, fails)
    if broken == "release":
        monkeypatch.setattr(driver.adapter._leases, "_release", fails)
    driver.store(keys(3, base=10), driver.objects(3, fill=1))
    driver.lookup(keys(3))
    driver.load(keys(3), driver.objects(3))
    driver.load(keys(3), driver.objects(3))
    assert sum(driver.adapter.report_status()["errors"].values()) > 0


def test_the_same_key_twice_in_one_task(drive: Any) -> None:
    from .storage import keys

    driver = drive()
    key, other = keys(2)
    written = driver.objects(1, fill=4) * 2 + driver.objects(1, fill=9)
    assert driver.store([key, key, other], written).is_successful()
    assert driver.lookup([key, other, key]) == [0, 1, 2]
    out = driver.objects(3)
    assert driver.load([key, key, other], out) == [0, 1, 2]
    assert (out[0].raw_data == out[1].raw_data).all() and (out[2].raw_data == written[2].raw_data).all()
    assert (out[0].raw_data == written[0].raw_data).all()
    assert driver.load([other, other], driver.objects(2)) == [0, 1], "without a lookup before"
    status = driver.adapter.report_status()
    assert status["open_lookups"] == 0 and status["hits"] == {"host": 3}


def test_a_group_that_nobody_describes_and_memory_of_another_layout(drive: Any) -> None:
    from . import storage

    driver = drive()
    driver.store(storage.keys(3), driver.objects(3, fill=1))
    task = driver.adapter.submit_lookup_and_lock_task(storage.keys(3), {7: driver.desc})
    assert finished(driver.adapter.query_lookup_and_lock_result, task).popcount() == 0
    assert driver.lookup(storage.keys(3)) == [0, 1, 2]
    right, driver.desc = driver.desc, storage.layout(((2, 3, 32, 128), storage.BF16))
    wrong = driver.objects(1)
    driver.desc = right
    memory = [driver.objects(1)[0], wrong[0], driver.objects(1)[0]]
    assert driver.load(storage.keys(3), memory) == [0, 2], "the chunk that does not fit is a miss"
    assert not wrong[0].raw_data.any()
    assert driver.lookup(storage.keys(3)) == [0, 1, 2], "it is still there"
    driver.adapter.submit_unlock(storage.keys(3))
    assert driver.adapter.report_status()["misses"]["corrupt"] == 0


def test_an_object_of_no_tokens_fails_alone(drive: Any) -> None:
    from . import storage

    driver = drive()
    right, driver.desc = driver.desc, storage.layout(((2, 3, 0, 128), storage.BF16))
    empty = driver.objects(1)
    driver.desc = right
    memory = [driver.objects(1, fill=1)[0], empty[0], driver.objects(1, fill=2)[0]]
    assert not driver.store(storage.keys(3), memory).is_successful()
    assert driver.lookup(storage.keys(3)) == [0, 2]
    assert driver.load(storage.keys(3), memory) == [0, 2]
    assert sum(driver.adapter.report_status()["errors"].values()) == 0


def test_lookups_that_are_never_unlocked_end_with_their_lease(drive: Any) -> None:
    from .storage import keys, until

    driver = drive(tiers=[{"type": "host", "capacity": "1MiB"}], lease="400ms", offload_wait="30s")
    driver.store(keys(10), driver.objects(10, fill=1))
    for _ in range(300):
        driver.adapter.submit_lookup_and_lock_task(keys(10), {0: driver.desc})
    assert driver.load(keys(5), driver.objects(5)) == [0, 1, 2, 3, 4]  # one of them is loaded in part
    until(lambda: len(driver.adapter._leases) == 0 and driver.adapter.report_status()["open_lookups"] == 0)
    assert not driver.adapter._leases._by_key
    assert driver.load(keys(2), driver.objects(2)) == [0, 1]
    assert driver.store(keys(8, base=50), driver.objects(8, fill=1)).is_successful(), "nothing is pinned"


def test_an_error_about_one_lookup_keeps_no_other_one_pinned(drive: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from .storage import keys

    driver = drive()
    driver.store(keys(6), driver.objects(6, fill=1))
    for i in range(6):
        assert driver.lookup(keys(1, base=i)) == [0]

    def fails(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(driver.adapter._chunks, "_enter_arrived", fails)
    driver.adapter.submit_unlock(keys(6))
    status = driver.adapter.report_status()
    assert len(driver.adapter._leases) == 0 and status["open_lookups"] == 0 and status["errors"]["engine"] == 6


def test_a_board_gives_every_task_one_result() -> None:
    from kvtier.connectors.lmcache.tasks import TaskBoard

    board: TaskBoard[str] = TaskBoard()
    for task in range(4):
        board.begin(task, "nothing")
    board.finish(0, "a")
    board.finish(0, "again")
    board.fail(0)
    board.finish(1, "b")
    assert board.pop(0) == "a" and board.pop(0) is None
    board.close()
    board.finish(2, "too late")
    board.close()
    assert board.pop_all() == {1: "b", 2: "nothing", 3: "nothing"} and board.pop_all() == {}
