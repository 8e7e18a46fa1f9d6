"""Pages and their places by column: what a million of them are handed around as, with no Python object per page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.abc.tier import CHECKSUM_BYTES, FINGERPRINT_BYTES, KEY_BYTES, PageMeta

PAGE = np.dtype(
    [
        ("key", f"V{KEY_BYTES}"),
        ("checksum", f"V{CHECKSUM_BYTES}"),
        ("spec", f"V{FINGERPRINT_BYTES}"),
        ("offset", np.int64),
        ("nbytes", np.int64),
        ("valid_tokens", np.int32),
        ("form", np.int32),
    ]
)


class Entry(NamedTuple):
    """A page with its place: `offset` in bytes into the space."""

    key: bytes
    meta: PageMeta
    offset: int


@dataclass(frozen=True, slots=True)
class PageColumns:
    """pages: one record of dtype PAGE each. origins: by position, of the pages that have one."""

    pages: npt.NDArray[np.void]
    origins: Mapping[int, bytes]

    @staticmethod
    def of(entries: Iterable[Entry]) -> PageColumns:
        listed = list(entries)
        rows = [
            (e.key, m.checksum, m.spec, e.offset, m.nbytes, m.valid_tokens, m.form) for e in listed for m in [e.meta]
        ]
        return PageColumns(np.array(rows, PAGE), {i: e.meta.origin for i, e in enumerate(listed) if e.meta.origin})

    def __len__(self) -> int:
        return len(self.pages)

    def keys(self) -> list[bytes]:
        keys: list[bytes] = self.pages["key"].tolist()
        return keys

    def take(self, chosen: npt.NDArray[np.int64]) -> PageColumns:
        """The pages at these positions, in this order."""
        if not self.origins:
            return PageColumns(self.pages[chosen], {})
        get = self.origins.get
        origins = {to: origin for to, at in enumerate(chosen.tolist()) if (origin := get(at)) is not None}
        return PageColumns(self.pages[chosen], origins)

    def entries(self) -> list[Entry]:
        get = self.origins.get
        return [
            Entry(key, PageMeta(nbytes, form, valid, check, spec, get(i, b"")), offset)
            for i, (key, check, spec, offset, nbytes, valid, form) in enumerate(self.pages.tolist())
        ]
