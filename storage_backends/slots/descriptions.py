"""What rows say of their pages: geometry, form, checksum and origin, as `PageMeta` has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.abc.tier import CHECKSUM_BYTES, FINGERPRINT_BYTES, PRIORITY_MAX, PRIORITY_MIN, PageMeta, Slot
from kvtier.errors import SpecError
from kvtier.storage_backends.slots.columns import PAGE, PageColumns
from kvtier.storage_backends.slots.order import Order
from kvtier.storage_backends.slots.rows import CHECKSUM_AT, ROW_BYTES, Rows

ORIGIN_MAX_BYTES = 255
_FEW = 4  # rows from which whole columns are faster than one row after the other


class Descriptions:
    """Of the pages in `rows`. spec_ids: fingerprints by what rows call them; origins: by row, of those that have one.
    Not thread-safe: every call is made under the tier's lock."""

    def __init__(self, rows: Rows, order: Order) -> None:
        self._rows = rows
        self._order = order
        self.origins: dict[int, bytes] = {}
        self._specs: list[bytes] = []
        self.spec_ids: dict[bytes, int] = {}

    def set(self, row: int, meta: PageMeta) -> None:
        """All of `meta` but its priority, which is the order's."""
        rows = self._rows
        rows.nbytes[row], rows.form[row], rows.valid_tokens[row], checksum, spec, origin, _ = meta
        at = row * ROW_BYTES + CHECKSUM_AT
        rows.raw[at : at + CHECKSUM_BYTES] = checksum
        rows.spec[row] = self.spec_id(spec)
        if origin:
            self.origins[row] = origin

    def recover(self, pages: PageColumns) -> int:
        """New rows in a run for `pages`, in an empty table; the first one."""
        specs = pages.pages["spec"].tolist()
        ids = {spec: self.spec_id(spec) for spec in dict.fromkeys(specs)}
        first = self._rows.fill(pages, [ids[spec] for spec in specs])
        self.origins = {first + i: origin for i, origin in pages.origins.items()}
        return first

    def spec_id(self, spec: bytes) -> int:
        known = self.spec_ids.get(spec)
        if known is None:
            known = self.spec_ids[spec] = len(self._specs)
            self._specs.append(spec)
        return known

    def of(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> list[tuple[Slot, PageMeta]]:
        """What lies in pinned rows, and where."""
        if len(rows) < _FEW:
            r = self._rows
            return [(Slot(row, r.offset[row], r.nbytes[row]), self._meta(row)) for row in map(int, rows)]
        wanted = np.asarray(rows, np.int64)
        # Straight from tuples: named construction would take most of the time.
        specs, origin, new = self._specs, self.origins.get, tuple.__new__
        priorities = self._order.priorities(wanted)
        return [
            (
                new(Slot, (row, at, nbytes)),
                new(PageMeta, (nbytes, form, valid, check, specs[spec], origin(row, b""), priority)),
            )
            for row, priority, (at, nbytes, valid, form, spec, check) in zip(
                wanted.tolist(), priorities, self._rows.fixed[wanted].tolist(), strict=True
            )
        ]

    def _meta(self, row: int) -> PageMeta:
        r, spec = self._rows, self._specs[self._rows.spec[row]]
        origin, priority = self.origins.get(row, b""), self._order.priority(row)
        return PageMeta(r.nbytes[row], r.form[row], r.valid_tokens[row], r.checksum(row), spec, origin, priority)

    def columns(self, rows: npt.NDArray[np.int64]) -> PageColumns:
        """A snapshot of these rows, in their order."""
        pages, fixed = np.empty(len(rows), PAGE), self._rows.fixed[rows]
        for name in ("offset", "nbytes", "valid_tokens", "form", "checksum"):
            pages[name] = fixed[name]
        pages["key"] = self._rows.keys(rows)
        pages["spec"] = np.array(self._specs, f"V{FINGERPRINT_BYTES}")[fixed["spec"]] if len(rows) else b""
        origin = self.origins.get
        origins = (
            {i: o for i, row in enumerate(rows.tolist()) if (o := origin(row)) is not None} if self.origins else {}
        )
        return PageColumns(pages, origins)


def check_meta(meta: PageMeta) -> None:
    """Raise SpecError for a description that no tier can keep."""
    nbytes, form, valid_tokens, checksum, spec, origin, priority = meta
    if (
        len(checksum) == CHECKSUM_BYTES
        and len(spec) == FINGERPRINT_BYTES
        and len(origin) <= ORIGIN_MAX_BYTES
        and PRIORITY_MIN <= priority <= PRIORITY_MAX
        and nbytes >= 0
        and 0 <= form < 1 << 16
        and 0 <= valid_tokens < 1 << 31
    ):
        return
    if len(checksum) != CHECKSUM_BYTES or len(spec) != FINGERPRINT_BYTES:
        raise SpecError(
            f"checksum and spec have {CHECKSUM_BYTES} and {FINGERPRINT_BYTES} bytes, "
            f"got {len(checksum)} and {len(spec)}"
        )
    if len(origin) > ORIGIN_MAX_BYTES:
        raise SpecError(f"origin has {len(origin)} bytes, at most {ORIGIN_MAX_BYTES} can be kept")
    if not PRIORITY_MIN <= priority <= PRIORITY_MAX:
        raise SpecError(f"priority = {priority}: must be from {PRIORITY_MIN} to {PRIORITY_MAX}")
    raise SpecError(f"nbytes, form or valid_tokens out of range: {meta}")
