"""Anonymous memory for the host tier, touched ahead of use: a first touch costs microseconds per 4 KiB."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import threading

import numpy as np
import numpy.typing as npt

from kvtier.errors import CapacityError

_log = logging.getLogger(__name__)

_MAP_HUGETLB = 0x40000
_HUGE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14: prefault for writing, contents unchanged
_STEP_BYTES = 64 << 20
_IN_CONSTRUCTOR_BYTES = 256 << 20
"""Arenas up to this size are touched before the constructor returns, larger ones by a thread."""

_libc = ctypes.CDLL(None, use_errno=True)  # releases the GIL, which mmap.madvise does not
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Arena:
    """`bytes_` holds `size_bytes` of page-aligned, zeroed memory. It is freed with the last array that uses it.

    reserved: out of the system's reserved huge pages of 2 MiB; CapacityError where they are too few."""

    def __init__(self, size_bytes: int, *, pretouch: bool, reserved: bool = False) -> None:
        memory = _map_reserved(size_bytes) if reserved else _map(size_bytes, 0, "set a lower capacity")
        if hasattr(mmap, "MADV_HUGEPAGE") and not reserved:
            try:
                memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError as error:
                _log.debug("no huge pages for the host tier: %s", error)
        self.bytes_: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)[:size_bytes]
        self._stop = threading.Event()
        self._toucher: threading.Thread | None = None
        if not pretouch:
            return
        first = min(size_bytes, _STEP_BYTES)
        if not self._populate(0, first):
            # Writing is the only other way, and only safe before anybody else writes.
            self.bytes_.fill(0)
        elif size_bytes <= _IN_CONSTRUCTOR_BYTES:
            self._populate_rest(first)
        else:
            self._toucher = threading.Thread(
                target=self._populate_rest, args=(first,), name="kvtier-host-pretouch", daemon=True
            )
            self._toucher.start()

    def close(self) -> None:
        """Stop touching and let the memory go; arrays that others still hold stay valid."""
        self._stop.set()
        if self._toucher is not None:
            self._toucher.join()
        self.bytes_ = np.empty(0, np.uint8)

    def _populate_rest(self, start: int) -> None:
        for at in range(start, len(self.bytes_), _STEP_BYTES):
            if self._stop.is_set():
                return
            if not self._populate(at, min(_STEP_BYTES, len(self.bytes_) - at)):
                return

    def _populate(self, start: int, length: int) -> bool:
        address = self.bytes_.ctypes.data + start
        if _libc.madvise(address, length, _MADV_POPULATE_WRITE) == 0:
            return True
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            name = errno.errorcode.get(code, str(code))
            _log.warning("the host tier's memory could not be touched ahead of use: %s", name)
            return True
        return False


def _map(size_bytes: int, flags: int, remedy: str) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    except (OSError, OverflowError, ValueError) as error:
        raise CapacityError(
            f"capacity = {size_bytes}: the host tier cannot have that much memory ({error}); {remedy}"
        ) from error


def _map_reserved(size_bytes: int) -> mmap.mmap:
    """Whole huge pages: the kernel would round the length up, and then not unmap what is not a multiple."""
    pages = -(-size_bytes // _HUGE_BYTES)
    remedy = (
        f"huge_pages = 'reserved' takes {pages} of 2 MiB: reserve them with sysctl vm.nr_hugepages, in Kubernetes as "
        "hugepages-2Mi, or leave huge_pages out"
    )
    return _map(pages * _HUGE_BYTES, _MAP_HUGETLB, remedy)
