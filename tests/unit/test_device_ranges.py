"""NVTX ranges: names and nesting by a fake recorder, none for host memory, and that the device codec opens them."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.codecs import device, native, ranges
from kvtier.codecs.pinned import Mapped


class Recorder:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def range_push(self, name: str) -> None:
        self.seen.append(f"+{name}")

    def range_pop(self) -> None:
        self.seen.append("-")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(ranges, "_nvtx", lambda: recorder)
    return recorder


def test_ranges_nest_and_end_with_an_error(recorder: Recorder) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        ranges.device_range(True, "encode", 3),
        ranges.device_range(True, "decode", 1),
    ):
        raise ZeroDivisionError
    assert recorder.seen == ["+kvtier encode, 3 pages", "+kvtier decode, 1 pages", "-", "-"]


def test_host_memory_has_no_ranges(recorder: Recorder) -> None:
    with ranges.device_range(False, "encode", 3):
        pass
    assert recorder.seen == []
    assert ranges.device_range(False, "encode", 3) is ranges.device_range(False, "decode", 4), "nothing is made"


def test_without_cuda_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvtier[torch]'")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ranges._nvtx.cache_clear()
    try:
        with ranges.device_range(True, "encode", 3):  # torch of a CPU would raise
            pass
    finally:
        ranges._nvtx.cache_clear()


def test_waiting_for_a_device_is_a_range(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def synchronize(self) -> None:
            recorder.seen.append("waited")

    slots = Mapped(0, np.zeros(2, np.int64))
    device.Decoding(slots, Event()).finish()
    device.Decoding(slots, None).finish()
    assert recorder.seen == ["+kvtier decode, waiting, 2 pages", "waited", "-"]


def test_queueing_is_a_range(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, str, int]] = []

    def listening(on_device: bool, what: str, pages: int) -> None:
        asked.append((on_device, what, pages))
        raise InterruptedError  # what follows needs a device

    monkeypatch.setattr(device, "device_range", listening)
    monkeypatch.setattr(native, "decode_parts", lambda *_: None)
    monkeypatch.setattr(native, "plan_of", lambda *_: None)
    monkeypatch.setattr(native, "parts_of", lambda *_: range(1))
    monkeypatch.setattr(device, "_prepare", lambda *_: (None, None))
    monkeypatch.setattr(device, "_map", lambda *_, **__: Mapped(0, np.zeros(2, np.int64)))
    monkeypatch.setattr(device, "replace", lambda layout, **_: layout)

    class Thing:
        ids = np.zeros(2, np.int64)
        arena = np.zeros(1, np.uint8)
        cold_page_bytes = 1
        device = "cuda:0"

    for enqueue in (device.enqueue_encode, device.enqueue_decode):
        with pytest.raises(InterruptedError):
            enqueue(Thing(), Thing(), Thing())  # type: ignore[arg-type]
    assert asked == [(True, "encode", 2), (True, "decode", 2)]
