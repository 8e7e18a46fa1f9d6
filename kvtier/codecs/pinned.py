"""Host memory that a GPU reads and writes in place: arenas registered once, other arrays by way of a pinned copy."""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import CodecError

_log = logging.getLogger(__name__)

_PAGE_BYTES = 4096
_REGISTER_PORTABLE_MAPPED = 1 | 2
_lock = threading.Lock()
_registered: dict[int, tuple[int, int]] = {}
"""Address in the process -> its length, and where the device sees it."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """Slots as a device addresses them: ``address + offsets[i]``. `copy` stands in for `arena` where that is not
    mapped; its slots lie one behind the other."""

    address: int
    offsets: npt.NDArray[np.int64]
    arena: npt.NDArray[np.uint8] | None = None
    copy: Any = None

    def bring_back(self, offsets: npt.NDArray[np.int64], cold_bytes: int) -> None:
        """Slots that the device wrote, from the copy to their places in the arena."""
        if self.copy is None or self.arena is None:
            return
        written = self.copy.numpy()
        for at, offset in zip(self.offsets.tolist(), offsets.tolist(), strict=True):
            self.arena[offset : offset + cold_bytes] = written[at : at + cold_bytes]


def mapped(arena: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], cold_bytes: int, *, filled: bool) -> Mapped:
    """The slots of `arena`, registering it at first sight where it is memory of whole pages, as a tier's is; that takes
    a second for some GiB. filled: slots hold pages already, which a copy must hold too."""
    import torch

    address = arena.ctypes.data
    if address % _PAGE_BYTES == 0 and arena.size % _PAGE_BYTES == 0 and arena.size:
        return Mapped(register(arena), offsets)
    copy = torch.empty(len(offsets) * cold_bytes, dtype=torch.uint8, pin_memory=True)
    places = np.arange(len(offsets), dtype=np.int64) * cold_bytes
    if filled:
        inside = copy.numpy()
        for at, offset in zip(places.tolist(), offsets.tolist(), strict=True):
            inside[at : at + cold_bytes] = arena[offset : offset + cold_bytes]
    return Mapped(copy.data_ptr(), places, arena, copy)


def register(arena: npt.NDArray[np.uint8]) -> int:
    """Pin `arena` and map it for every device, until it is garbage. Returns where devices see it. Raises CodecError."""
    address = arena.ctypes.data
    with _lock:
        known = _registered.get(address)
        if known is not None and known[0] == arena.size:
            return known[1]
        if known is not None:
            raise CodecError(
                f"an arena of {arena.size} bytes lies where one of {known[0]} is mapped for the device already"
            )
        _runtime(f"map {arena.size} bytes of host memory for the device", "cudaHostRegister", address, arena.size,
                 _REGISTER_PORTABLE_MAPPED)  # fmt: skip
        seen = ctypes.c_void_p()
        code = ctypes.CDLL("libcuda.so.1").cuMemHostGetDevicePointer_v2(
            ctypes.byref(seen), ctypes.c_void_p(address), ctypes.c_uint(0)
        )
        if code or not seen.value:
            raise CodecError(f"the device does not see registered host memory (error {code})")
        _registered[address] = (arena.size, seen.value)
        weakref.finalize(arena, _unregister, address)
        return seen.value


def _unregister(address: int) -> None:
    with _lock:
        if _registered.pop(address, None) is None:
            return
    try:
        _runtime("unmap host memory", "cudaHostUnregister", address)
    except CodecError as e:
        _log.warning("%s", e)


def _runtime(what: str, name: str, *arguments: int) -> None:
    import torch

    code = int(getattr(torch.cuda.cudart(), name)(*arguments))
    if code:
        raise CodecError(f"cannot {what}: {name} says {code}; is there enough memory that may be locked (ulimit -l)?")
