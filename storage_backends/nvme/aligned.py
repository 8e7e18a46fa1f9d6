"""Memory that O_DIRECT can use: 4 KiB-aligned views of a caller's buffer, and pooled buffers where it is not."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from kvtier.abc.tier import SLOT_ALIGN

_KEPT_BUFFERS = 32
_KEPT_BYTES = 64 << 20


def address_of(buffer: memoryview) -> int:
    """Address of the first byte; 1, which is never aligned, for an empty buffer."""
    if not len(buffer):
        return 1
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def is_aligned(buffer: memoryview) -> bool:
    return address_of(buffer) % SLOT_ALIGN == 0


def extended(buffer: memoryview, nbytes: int) -> memoryview:
    """`nbytes` from the start of `buffer`, also past its end: the caller knows that they can be read, and keeps
    `buffer` alive."""
    return memoryview(_array_type(nbytes).from_address(address_of(buffer)))


@lru_cache(maxsize=64)
def _array_type(nbytes: int) -> Any:
    return ctypes.c_char * nbytes


class BouncePool:
    """Aligned buffers for records whose own buffer is not. Thread-safe: list operations are atomic."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    @contextmanager
    def buffer(self, nbytes: int) -> Iterator[memoryview]:
        """An aligned, writable view of `nbytes`; what it holds is left over from earlier uses."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = None
        if memory is None or len(memory) < nbytes:
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = memoryview(memory)[:nbytes]
        try:
            yield view
        finally:
            if len(memory) <= _KEPT_BYTES and len(self._free) < _KEPT_BUFFERS:
                self._free.append(memory)


def copy(to: memoryview, source: memoryview) -> None:
    """To the start of `to`."""
    if len(source):  # numpy lets the GIL go while it copies, memoryview does not
        np.frombuffer(to, np.uint8)[: len(source)] = np.frombuffer(source, np.uint8)


def zero(part: memoryview) -> None:
    if len(part):
        np.frombuffer(part, np.uint8)[:] = 0
