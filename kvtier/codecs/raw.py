"""Raw: every buffer copied byte for byte, in [head, token, dim] order whatever the hot layout is."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvtier.abc.codec import Codec, EncodeResult, Form
from kvtier.codecs import native
from kvtier.hot import HotPool
from kvtier.spec import ColdLayout, PageSpec


class RawCodec(Codec):
    """Never refuses a page: NaN and infinity are bytes like any other."""

    id: ClassVar[str] = "raw"
    version: ClassVar[int] = 1

    @property
    def form(self) -> Form:
        return Form.RAW

    @property
    def config(self) -> dict[str, str | int | float | bool]:
        return {}

    def layout(self, spec: PageSpec) -> ColdLayout:
        return ColdLayout.of(spec, quantize=False)

    def encode(
        self,
        layout: ColdLayout,
        pool: HotPool,
        page_ids: npt.NDArray[np.int64],
        valid_tokens: npt.NDArray[np.int32],
        arena: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.int64],
        seeds: npt.NDArray[np.uint64],
    ) -> EncodeResult:
        return native.encode(layout, pool, native.Pages(page_ids, valid_tokens, arena, offsets), seeds)

    def decode(
        self,
        layout: ColdLayout,
        pool: HotPool,
        page_ids: npt.NDArray[np.int64],
        valid_tokens: npt.NDArray[np.int32],
        arena: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.int64],
        buffers: range | None = None,
    ) -> None:
        native.decode(layout, pool, native.Pages(page_ids, valid_tokens, arena, offsets), buffers)
