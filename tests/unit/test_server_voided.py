"""The log of overwritten values: what it knows after a crash, torn ends, full disks, and how it stays short."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.server import voided
from kvtier.server.voided import Voided


def page(name: int, number: int) -> bytes:
    return bytes([name]) * 24 + number.to_bytes(8, "big")


def again(path: Path) -> Voided:
    """As after a kill: a second look at the file, while the first one was not closed."""
    return Voided([path])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "voided.log"


def test_what_was_voided_is_known_after_a_crash(path: Path) -> None:
    log = Voided([path])
    log.add([page(1, 5), page(2, 7)])
    log.add([page(1, 3)])
    found = again(path)
    covered = {(n, i) for n in (1, 2, 3) for i in range(10) if found.covers(page(n, i))}
    assert covered == {(1, i) for i in range(6)} | {(2, i) for i in range(8)}
    found.opened()
    assert not found.covers(page(1, 1))
    log.close()
    found.close()


def test_it_is_for_its_owner_alone(path: Path) -> None:
    before = os.umask(0o022)
    try:
        log = Voided([path])
        assert path.stat().st_mode & 0o777 == 0o600
        log.close()
        path.chmod(0o644)  # as earlier releases left it
        again(path).close()
        assert path.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize("damage", ["torn", "flipped", "foreign"])
def test_a_damaged_end_is_cut_off_and_written_over(path: Path, damage: str) -> None:
    log = Voided([path])
    log.add([page(1, 5), page(2, 5)])
    log.close()
    raw = bytearray(path.read_bytes())
    if damage == "torn":
        del raw[-1]
    elif damage == "flipped":
        raw[-30] ^= 1
    else:
        raw = bytearray(b"not a log")
    path.write_bytes(raw)
    log = Voided([path])
    assert log.covers(page(1, 5)) == (damage != "foreign") and not log.covers(page(2, 5))
    log.add([page(3, 5)])
    found = again(path)
    assert found.covers(page(3, 5)) and found.covers(page(1, 5)) == (damage != "foreign")
    log.close()
    found.close()


def test_it_stays_short_and_keeps_what_is_pending(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voided, "_COMPACT_BYTES", 4000)
    log = Voided([path])
    log.add([page(1, n) for n in range(50)])
    log.compact(lambda pages: [False] * len(pages))
    assert path.stat().st_size == 2000, "not long enough to be worth it"
    log.add([page(n % 250, 100 + n) for n in range(60)])
    log.compact(lambda pages: [p == page(7, 107) for p in pages])
    assert path.stat().st_size == 40
    log.add([page(9, 1)])
    found = again(path)
    assert found.covers(page(7, 107)) and found.covers(page(9, 1)) and not found.covers(page(1, 1))
    log.close()
    found.close()


def test_a_full_disk_is_counted_and_leaves_a_whole_log(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Voided([path])
    log.add([page(1, 1)])
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[:50]))
        log.add([page(2, 1), page(3, 1)])
        patch.setattr(os, "write", no_space)
        log.add([page(4, 1)])
    assert log.errors == 3
    log.add([page(5, 1)])
    found = again(path)
    assert [n for n in range(1, 6) if found.covers(page(n, 1))] == [1, 2, 5]
    log.close()
    found.close()


def test_what_a_disk_did_not_take_is_written_when_it_takes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / name / "voided.log" for name in ("one", "two")]
    log = Voided(paths)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", no_space)
        log.add([page(1, 1)])
    assert [path.stat().st_size for path in paths] == [0, 0] and log.errors == 1
    log.compact(lambda pages: [True] * len(pages))
    log.add([page(2, 1)])
    assert [path.stat().st_size for path in paths] == [80, 80]
    log.close()
    for path in paths:
        found = again(path)
        assert found.covers(page(1, 1)) and found.covers(page(2, 1))
        found.close()


def test_it_forgets_nothing_that_a_tier_could_not_write_down(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deletion that waits for the index log is not on the disk: after a kill its page would be found."""
    monkeypatch.setattr(voided, "_COMPACT_BYTES", 4000)
    unlogged = {page(3, 3), page(5, 5)}
    log = Voided([path], lambda: unlogged)
    log.add([page(n, n) for n in range(110)])
    log.compact(lambda pages: [False] * len(pages))
    assert path.stat().st_size == 80
    found = again(path)
    assert found.covers(page(3, 3)) and found.covers(page(5, 5)) and not found.covers(page(4, 4))
    found.close()
    log.close()


def test_memory_is_bounded_where_no_disk_takes_notes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voided, "_COMPACT_BYTES", 4000)
    log = Voided([path])
    asked: list[int] = []

    def none_pending(pages: Sequence[bytes]) -> list[bool]:
        asked.append(len(pages))
        return [False] * len(pages)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", no_space)
        for n in range(30):
            log.add([page(n, m) for m in range(10)])
            log.compact(none_pending)
    assert asked == [100, 100, 100] and log.errors == 300
    log.close()


def no_space(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_a_path_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        Voided([tmp_path / "file" / "voided.log"])


def test_every_directory_has_it_and_any_one_of_them_is_enough(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, two = (tmp_path / name / "voided.log" for name in ("one", "two"))
    log = Voided([one, two])
    log.add([page(1, 5)])
    log.close()
    assert one.read_bytes() == two.read_bytes() and len(one.read_bytes()) == 40
    one.unlink()
    one.parent.rmdir()
    one.parent.write_text("a device that fails")
    log = Voided([one, two])
    assert log.covers(page(1, 5)) and "/one" in caplog.text
    log.add([page(2, 5)])
    log.close()
    one.parent.unlink()
    log = Voided([two, one])
    log.close()
    found = Voided([one])
    assert found.covers(page(1, 5)) and found.covers(page(2, 5)), "a copy that comes back learns what it missed"
    assert log.errors == 0
    found.close()


def test_a_note_counts_as_lost_only_where_no_directory_took_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Voided([tmp_path / "one" / "voided.log", tmp_path / "two" / "voided.log"])
    write, answers = os.write, [True, False]

    def every_other(file: int, data: bytes) -> int:
        answers.append(answers.pop(0))
        return write(file, data) if answers[-1] else no_space()

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", every_other)
        log.add([page(1, 1)])
        assert log.errors == 0
        patch.setattr(os, "write", no_space)
        log.add([page(2, 1), page(3, 1)])
    assert log.errors == 2
    log.close()
