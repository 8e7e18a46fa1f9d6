"""What a log is told of long work."""

from __future__ import annotations

from kvtier.cli.compact_progress import LINES_EVERY_S, lines


def test_a_log_gets_a_line_now_and_then_with_the_time_left() -> None:
    now, told = [0.0], list[str]()
    show = lines(told.append, lambda: now[0])
    for done in range(1, 101):
        now[0] = 10.0 * done
        show(done, 100, "reading")
    assert told[:2] == ["reading: 3 of 100, 0:16:10 left\n", "reading: 6 of 100, 0:15:40 left\n"]
    assert len(told) == 1000 // LINES_EVERY_S
    now[0] += LINES_EVERY_S  # other work is counted by itself: nothing is known of it yet
    show(5, 10, "fitting")
    now[0] += 2 * LINES_EVERY_S
    show(6, 10, "fitting")
    assert told[-2:] == ["fitting: 5 of 10\n", "fitting: 6 of 10, 0:04:00 left\n"]


def test_short_work_leaves_a_log_alone() -> None:
    told = list[str]()
    show = lines(told.append, lambda: 1.0)
    for done in range(100):
        show(done, 100, "reading")
    assert told == []
