"""The contract of a page codec: translates pages between a hot pool and cold slots, many in one call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import CodecError
from kvtier.spec import ColdLayout, PageSpec

if TYPE_CHECKING:
    from kvtier.hot import HotPool


class Form(IntEnum):
    """How a stored page's bytes are encoded: the `form` of its record. Numbers are part of the format."""

    RAW = 1
    NVFP4 = 2
    """NVFP4 with one power of two per buffer in the page."""
    NVFP4_IDENTITY = 3
    """NVFP4 with global scale 1, nothing stored."""
    LOSSLESS = 4
    """Byte planes, each compressed. Its pages vary in size."""
    NVFP4_OFFSET = 5
    """K as NVFP4 of the distance from the page's mean, group by group; all else as in NVFP4."""
    NVFP4_TOKEN = 6
    """K as NVFP4 along tokens, of the distance from the middle of 16; all else as in NVFP4."""
    K8V4 = 7
    """K as FP8 of the distance from the page's mean, row by row; all else as in NVFP4."""
    K_2FP4 = 8
    """K as two NVFP4 components; all else as in NVFP4."""
    NVFP4_ROPE_2FP4 = 16
    """NVFP4 with the rotary columns as two NVFP4 components."""
    NVFP4_ROPE_FP8 = 17
    """NVFP4 with the rotary columns as FP8."""
    NVFP4_ROPE_KEPT = 18
    """NVFP4 with the rotary columns as they are."""
    IDENTITY_ROPE_2FP4 = 19
    IDENTITY_ROPE_FP8 = 20
    IDENTITY_ROPE_KEPT = 21
    NVFP4_CHECKPOINT = 9
    """NVFP4 with the global scales of a checkpoint, in the page."""
    CHECKPOINT_ROPE_2FP4 = 22
    CHECKPOINT_ROPE_FP8 = 23
    CHECKPOINT_ROPE_KEPT = 24


FINER = 0x100
"""Added to the form of a page some of whose buffers are stored finer than the form says. The page ends with their
levels (`kvtier.spec.Codings`)."""


class EncodeResult(NamedTuple):
    """checksums: uint8 ``[pages, 16]``, of each cold page under its key's seed. refused: bool ``[pages]``, pages
    that this codec cannot represent (NaN or infinity in a valid row), whose slots hold garbage, and pages over the
    error budget. relative_error: ``[pages]``, NaN where there is none, if the codec has an error budget. nbytes:
    ``[pages]``, how much of each slot is used, if the form's pages vary in size."""

    checksums: npt.NDArray[np.uint8]
    refused: npt.NDArray[np.bool_]
    relative_error: npt.NDArray[np.float64] | None = None
    nbytes: npt.NDArray[np.int64] | None = None


class Codec(ABC):
    """`id`, `version` and `config` are the on-disk contract: two codecs share them only if each decodes the
    other's bytes. Stateless and thread-safe; the GIL is released while bytes move."""

    id: ClassVar[str]
    version: ClassVar[int]
    varies: ClassVar[bool] = False
    """Whether pages vary in size: `cold_page_bytes` is then the most, and `EncodeResult.nbytes` what it was."""
    quality_sample: float = 0.0
    """Share of the pages whose error is to be measured, for the metrics."""
    quality_budget: float | None = None
    """The measured error from which on a buffer is to be stored finer, if any."""

    @property
    @abstractmethod
    def form(self) -> Form: ...

    @property
    @abstractmethod
    def config(self) -> dict[str, str | int | float | bool]:
        """Options that change bytes, for the namespace."""

    @abstractmethod
    def layout(self, spec: PageSpec) -> ColdLayout: ...

    def finer_layout(self, spec: PageSpec, levels: tuple[int, ...]) -> ColdLayout:
        """As `layout`, with some buffers stored finer (`kvtier.spec.Codings`). Such pages have the form ``form |
        FINER``. Raises CodecError for a codec that has nothing finer."""
        raise CodecError(f"pages of codec {self.id!r} are not stored finer by buffer")

    @abstractmethod
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
        """Write cold pages of pool pages `page_ids` to ``arena[offsets[i] : offsets[i] + cold_page_bytes]``.

        Rows past ``valid_tokens[i]`` are stored as zeros whatever they hold. The source must not change until this
        returns. Raises CodecError for ids or offsets out of range, before anything is written."""

    @abstractmethod
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
        """Write cold pages back into the pool: all buffers, or those with index in `buffers` (one layer, say).
        Rows past ``valid_tokens[i]`` become zeros."""

    def errors(
        self,
        layout: ColdLayout,
        pool: HotPool,
        page_ids: npt.NDArray[np.int64],
        valid_tokens: npt.NDArray[np.int32],
        arena: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.float64]:
        """``[pages, buffers, 2]`` of pages just encoded: the sum of squared errors of each buffer and its sum of
        squares, 0 for buffers that are stored losslessly."""
        return np.zeros((len(page_ids), len(layout.spec.buffers), 2))
