"""The columns of a slot table: fixed-width records per row, no Python object per page.

A row is one page's entry. What is read together lies together, so that a look-up touches few cache lines: `fixed` is
written once per page, `hot` changes at every use. Single fields are read and written through memoryviews, which is
several times faster than indexing numpy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.abc.tier import CHECKSUM_BYTES, KEY_BYTES
from kvtier.storage_backends.slots.columns import PageColumns

FIXED = np.dtype(
    [
        ("offset", np.int64),
        ("nbytes", np.int64),
        ("valid_tokens", np.int32),
        ("form", np.int32),
        ("spec", np.int32),
        ("checksum", "V16"),
    ],
    align=True,
)
"""offset of the slot in the space; nbytes of the record; spec: index into the table's fingerprints."""

FREE, FILLING, STAGED, LIVE, DOOMED = range(5)
"""FILLING: reserved. STAGED: filled, described, not yet visible. DOOMED: removed, its slot still pinned."""

_FIRST_ROWS = 1024


class Rows:
    """`count` rows; grows by half. `extent` is where the slot's extent starts, `pin` counts holders, `state` is one of
    the above, `keep` has a bit set for every reason why the page may not make room. `stamp`, `lane`, `use` and `used`
    belong to the table's order (`kvtier.storage_backends.slots.order`)."""

    def __init__(self) -> None:
        self.count = 0
        self.vacant: list[int] = []  # to be had without `new`
        self.key_bytes = bytearray()  # KEY_BYTES per row
        self._resize(_FIRST_ROWS)

    fixed: npt.NDArray[np.void]
    extents: npt.NDArray[np.int64]
    stamps: npt.NDArray[np.int64]
    pins: npt.NDArray[np.int32]
    states: npt.NDArray[np.int8]
    keeps: npt.NDArray[np.uint8]
    lanes: npt.NDArray[np.int8]
    uses: npt.NDArray[np.uint8]
    useds: npt.NDArray[np.int64]

    def new(self) -> int:
        if self.vacant:
            return self.vacant.pop()
        if self.count == len(self.fixed):
            self._resize(self.count + self.count // 2)
        self.count += 1
        return self.count - 1

    def fill(self, pages: PageColumns, specs: Sequence[int]) -> int:
        """New rows in a run for `pages`, whose fingerprints are `specs`; the first one."""
        first, last = self.count, self.count + len(pages)
        if last > len(self.fixed):
            self._resize(last)
        self.count = last
        for name in ("offset", "nbytes", "valid_tokens", "form", "checksum"):
            self.fixed[name][first:last] = pages.pages[name]
        self.fixed["spec"][first:last] = specs
        self.key_bytes[first * KEY_BYTES : last * KEY_BYTES] = pages.pages["key"].tobytes()
        return first

    def keys(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
        return np.frombuffer(bytes(self.key_bytes), f"V{KEY_BYTES}")[rows]

    def vacate(self, row: int) -> None:
        self.state[row] = FREE
        self.pin[row] = 0
        self.vacant.append(row)

    def key(self, row: int) -> bytes:
        return bytes(self.key_bytes[row * KEY_BYTES : (row + 1) * KEY_BYTES])

    def checksum(self, row: int) -> bytes:
        at = row * FIXED.itemsize + CHECKSUM_AT
        return bytes(self.raw[at : at + CHECKSUM_BYTES])

    def _resize(self, size: int) -> None:
        fixed = np.zeros(size, FIXED)
        extents = np.zeros(size, np.int64)
        stamps, pins, states = np.zeros(size, np.int64), np.zeros(size, np.int32), np.zeros(size, np.int8)
        keeps, lanes = np.zeros(size, np.uint8), np.zeros(size, np.int8)
        uses, useds = np.zeros(size, np.uint8), np.zeros(size, np.int64)
        if self.count:
            keeps[: self.count] = self.keeps[: self.count]
            lanes[: self.count] = self.lanes[: self.count]
            uses[: self.count] = self.uses[: self.count]
            useds[: self.count] = self.useds[: self.count]
            fixed[: self.count] = self.fixed[: self.count]
            extents[: self.count] = self.extents[: self.count]
            stamps[: self.count] = self.stamps[: self.count]
            pins[: self.count] = self.pins[: self.count]
            states[: self.count] = self.states[: self.count]
        self.extents = extents
        self.fixed, self.stamps, self.pins, self.states = fixed, stamps, pins, states
        self.keeps, self.lanes, self.uses, self.useds = keeps, lanes, uses, useds
        self.keep, self.lane = memoryview(keeps), memoryview(lanes)
        self.use, self.used = memoryview(uses), memoryview(useds)
        self.key_bytes.extend(bytes(size * KEY_BYTES - len(self.key_bytes)))
        self.raw = memoryview(fixed.view(np.uint8))
        self.offset, self.nbytes = memoryview(fixed["offset"]), memoryview(fixed["nbytes"])
        self.valid_tokens, self.form = memoryview(fixed["valid_tokens"]), memoryview(fixed["form"])
        self.spec, self.extent = memoryview(fixed["spec"]), memoryview(extents)
        self.stamp, self.pin, self.state = memoryview(stamps), memoryview(pins), memoryview(states)


ROW_BYTES = FIXED.itemsize
CHECKSUM_AT = int(FIXED.fields["checksum"][1]) if FIXED.fields else 0
