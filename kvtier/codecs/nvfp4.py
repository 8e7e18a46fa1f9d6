"""NVFP4: attention K and V as 4-bit values with one scale per 16, everything else copied (`docs/formats.md`)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvtier.abc.codec import Codec, EncodeResult, Form
from kvtier.codecs import native
from kvtier.errors import ConfigError
from kvtier.hot import HotPool
from kvtier.spec import ColdLayout, GlobalScale, PageSpec


class Nvfp4Codec(Codec):
    """FP32 buffers are rounded to BF16 first. A page is refused if a valid row of a compressed buffer holds NaN or
    infinity, or a value that would clip even at the largest global scale (FP16 above 44 544)."""

    id: ClassVar[str] = "nvfp4"
    version: ClassVar[int] = 1

    def __init__(self, global_scale: GlobalScale | str = GlobalScale.PAGE) -> None:
        try:
            self._global_scale = GlobalScale(global_scale)
        except ValueError:
            names = ", ".join(s.value for s in GlobalScale)
            raise ConfigError(f"global_scale = {global_scale!r}: use one of {names}") from None

    @property
    def form(self) -> Form:
        return Form.NVFP4 if self._global_scale is GlobalScale.PAGE else Form.NVFP4_IDENTITY

    @property
    def config(self) -> dict[str, str | int | float | bool]:
        return {"global_scale": self._global_scale.value}

    def layout(self, spec: PageSpec) -> ColdLayout:
        return ColdLayout.of(spec, quantize=True, global_scale=self._global_scale)

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
