"""NVFP4: attention K and V as 4-bit values with one scale per 16, everything else copied (`docs/formats.md`).

Plain, with the rotary columns stored apart, and with other forms for K."""

from __future__ import annotations

from enum import Enum
from typing import ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.abc.codec import EncodeResult, Form
from kvtier.codecs.checkpoint_scales import CheckpointScales
from kvtier.codecs.native import NativeCodec
from kvtier.errors import CodecError, ConfigError
from kvtier.hot import HotPool
from kvtier.spec import Coding, Codings, ColdLayout, GlobalScale, PageSpec

_E = TypeVar("_E", bound=Enum)


class Rope(str, Enum):
    """How rotary columns are stored that are a part of K or of a latent."""

    NVFP4 = "nvfp4"
    TWO_FP4 = "2fp4"
    FP8 = "fp8"
    KEEP = "keep"


_ROPE_CODINGS = {Rope.NVFP4: None, Rope.TWO_FP4: Coding.TWO_FP4, Rope.FP8: Coding.FP8, Rope.KEEP: Coding.RAW}
_FORMS = {
    (GlobalScale.PAGE, Rope.NVFP4): Form.NVFP4,
    (GlobalScale.PAGE, Rope.TWO_FP4): Form.NVFP4_ROPE_2FP4,
    (GlobalScale.PAGE, Rope.FP8): Form.NVFP4_ROPE_FP8,
    (GlobalScale.PAGE, Rope.KEEP): Form.NVFP4_ROPE_KEPT,
    (GlobalScale.IDENTITY, Rope.NVFP4): Form.NVFP4_IDENTITY,
    (GlobalScale.IDENTITY, Rope.TWO_FP4): Form.IDENTITY_ROPE_2FP4,
    (GlobalScale.IDENTITY, Rope.FP8): Form.IDENTITY_ROPE_FP8,
    (GlobalScale.IDENTITY, Rope.KEEP): Form.IDENTITY_ROPE_KEPT,
    (GlobalScale.CHECKPOINT, Rope.NVFP4): Form.NVFP4_CHECKPOINT,
    (GlobalScale.CHECKPOINT, Rope.TWO_FP4): Form.CHECKPOINT_ROPE_2FP4,
    (GlobalScale.CHECKPOINT, Rope.FP8): Form.CHECKPOINT_ROPE_FP8,
    (GlobalScale.CHECKPOINT, Rope.KEEP): Form.CHECKPOINT_ROPE_KEPT,
}


class Nvfp4Codec(NativeCodec):
    """FP32 buffers are rounded to BF16 first. A page is refused if a valid row of a compressed buffer holds NaN or
    infinity, or a value that would clip even at the largest global scale (FP16 above 44 544). With global scale
    identity or checkpoint values clip at 2688 over the global scale.

    scales: of global scale checkpoint. Without them such a codec only reads."""

    id: ClassVar[str] = "nvfp4"
    version: ClassVar[int] = 1

    def __init__(
        self,
        global_scale: GlobalScale | str = GlobalScale.PAGE,
        rope: Rope | str = Rope.NVFP4,
        max_relative_error: float | None = None,
        quality_sample: float = 0.0,
        quality_budget: float | None = None,
        scales: CheckpointScales | None = None,
    ) -> None:
        super().__init__(max_relative_error, quality_sample, quality_budget)
        self._global_scale = _member(GlobalScale, "global_scale", global_scale)
        self._rope = _member(Rope, "rope", rope)
        if scales is not None and self._global_scale is not GlobalScale.CHECKPOINT:
            raise ConfigError(f"scales belong to global_scale = 'checkpoint', not to {self._global_scale.value!r}")
        self._scales = scales

    @property
    def form(self) -> Form:
        return _FORMS[self._global_scale, self._rope]

    @property
    def config(self) -> dict[str, str | int | float | bool]:
        rope = {} if self._rope is Rope.NVFP4 else {"rope": self._rope.value}
        scales = {} if self._scales is None else {"scales": self._scales.digest}
        return {"global_scale": self._global_scale.value, **rope, **scales}

    def finer_layout(self, spec: PageSpec, levels: tuple[int, ...]) -> ColdLayout:
        codings = Codings(rotary=_ROPE_CODINGS[self._rope], levels=levels)
        checkpoint = None if self._scales is None else self._scales.of(spec)
        return ColdLayout.of(
            spec, quantize=True, global_scale=self._global_scale, codings=codings, checkpoint=checkpoint
        )

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
        if self._global_scale is GlobalScale.CHECKPOINT and self._scales is None:
            raise CodecError("global_scale = 'checkpoint' without scales: this codec was made to read pages")
        return super().encode(layout, pool, page_ids, valid_tokens, arena, offsets, seeds)


class KeyFormCodec(NativeCodec):
    """K in a form that a constant offset of its channels does not break; all else as in nvfp4 with global scale page.
    Decoded pages do not always encode to the same bytes again. A page whose K is above 464 in FP8, or above half of
    what nvfp4 takes in the forms with a mean, is refused as well."""

    version: ClassVar[int] = 1
    _coding: ClassVar[Coding]
    _form: ClassVar[Form]

    @property
    def form(self) -> Form:
        return self._form

    @property
    def config(self) -> dict[str, str | int | float | bool]:
        return {}

    def finer_layout(self, spec: PageSpec, levels: tuple[int, ...]) -> ColdLayout:
        return ColdLayout.of(spec, quantize=True, codings=Codings(key=self._coding, levels=levels))


class Nvfp4OffsetCodec(KeyFormCodec):
    id: ClassVar[str] = "nvfp4_offset"
    _coding = Coding.OFFSET
    _form = Form.NVFP4_OFFSET


class Nvfp4TokenCodec(KeyFormCodec):
    id: ClassVar[str] = "nvfp4_token"
    _coding = Coding.TOKEN
    _form = Form.NVFP4_TOKEN


class K8V4Codec(KeyFormCodec):
    id: ClassVar[str] = "k8v4"
    _coding = Coding.FP8_MEAN
    _form = Form.K8V4


class Key2Fp4Codec(KeyFormCodec):
    id: ClassVar[str] = "2fp4"
    _coding = Coding.TWO_FP4
    _form = Form.K_2FP4


def _member(kind: type[_E], name: str, value: _E | str) -> _E:
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(str(member.value) for member in kind)
        raise ConfigError(f"{name} = {value!r}: use one of {names}") from None
