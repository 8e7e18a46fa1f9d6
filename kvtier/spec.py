"""What a KV page is made of (PageSpec), and where each of its bytes lies once it is cold (ColdLayout).

The cold layout follows the layout of TensorRT-LLM's cold-page codec (developer guide
`kv-cache-cold-page-codec`); `docs/formats.md` states it in full. Nothing here touches page data.
"""

from __future__ import annotations

import hashlib
import logging
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache

from kvtier.errors import SpecError

_log = logging.getLogger(__name__)

GROUP = 16
"""Values that share one scale byte."""

RECORD_ALIGN = 16
"""Layer records and the trailing table are padded with zeros to this many bytes."""


class DType(str, Enum):
    """Element type of a hot buffer."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8_E4M3 = "fp8_e4m3"
    UINT8 = "uint8"

    @property
    def itemsize(self) -> int:
        return _ITEMSIZE[self]

    @property
    def quantizable(self) -> bool:
        return self is not DType.UINT8


_ITEMSIZE = {DType.BF16: 2, DType.FP16: 2, DType.FP32: 4, DType.FP8_E4M3: 1, DType.UINT8: 1}


class Role(str, Enum):
    """What a buffer holds. Attention roles may be quantized; the others are copied byte for byte."""

    K = "k"
    V = "v"
    LATENT = "latent"
    INDEX_KEY = "index_key"
    STATE = "state"
    OPAQUE = "opaque"

    @property
    def attention(self) -> bool:
        return self in (Role.K, Role.V, Role.LATENT)


class GlobalScale(str, Enum):
    """Where the second-level scale of NVFP4 comes from.

    page: one power of two per compressed buffer, chosen from the page and stored in it.
    identity: 1 everywhere, nothing stored (the public layout's exact bytes).
    checkpoint: calibrated numbers, one per layer for K and for V, stored in every page.
    """

    PAGE = "page"
    IDENTITY = "identity"
    CHECKPOINT = "checkpoint"


class Coding(str, Enum):
    """How the values of a buffer, or of a range of its columns, are stored. Bytes: `docs/formats.md`."""

    RAW = "raw"
    NVFP4 = "nvfp4"
    TWO_FP4 = "2fp4"
    """NVFP4, and once more NVFP4 of what the first left."""
    OFFSET = "nvfp4_offset"
    """NVFP4 of the distance from the page's mean, or of the value itself, by group."""
    TOKEN = "nvfp4_token"
    """NVFP4 along tokens, of the distance from the middle of each 16."""
    FP8 = "fp8"
    """e4m3 with scale 1."""
    FP8_MEAN = "fp8_mean"
    """e4m3 of the distance from the page's mean, or of the value itself, by row."""


@dataclass(frozen=True, slots=True)
class Codings:
    """What a codec does with attention buffers: `key` with K, `rotary` with the rotary range of K and of latents
    (None: like the columns beside it); everything else is NVFP4.

    levels: how much finer each buffer of the page is stored than that says, or nothing where none is: 0 not at all,
    1 as two NVFP4 components, 2 as it is."""

    key: Coding = Coding.NVFP4
    rotary: Coding | None = None
    levels: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One buffer of one page: ``[heads, tokens, dim]`` in cold order, whatever the hot layout is.

    `tokens` is the page's token count for per-token buffers; a state or index buffer that is stored once per
    page has ``heads = tokens = 1`` and `dim` its bytes. An FP8 element is worth its e4m3 value times `fp8_scale`.
    rotary: columns ``[begin, end)`` that carry a rotary position, where they are a part of the row.
    """

    role: Role
    layer: int
    heads: int
    tokens: int
    dim: int
    dtype: DType
    fp8_scale: float = 1.0
    rotary: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        for name, value in (("heads", self.heads), ("tokens", self.tokens), ("dim", self.dim)):
            if value < 1:
                raise SpecError(f"{self.role.value} buffer of layer {self.layer}: {name} = {value}, must be at least 1")
        if self.layer < 0:
            raise SpecError(f"{self.role.value} buffer: layer = {self.layer}, must not be negative")
        self._check_fp8_scale()
        self._check_rotary()

    def _check_fp8_scale(self) -> None:
        if self.fp8_scale == 1.0:
            return
        where = f"{self.role.value} buffer of layer {self.layer}: fp8_scale = {self.fp8_scale}"
        if self.dtype is not DType.FP8_E4M3:
            raise SpecError(f"{where} with dtype {self.dtype.value}; only fp8_e4m3 has a scale")
        # Of normal size with its inverse, as the float32 that kernels use.
        if not (math.isfinite(self.fp8_scale) and 2.0**-100 <= self.fp8_scale <= 2.0**100):
            raise SpecError(f"{where}, must be positive and between 2**-100 and 2**100")
        object.__setattr__(self, "fp8_scale", struct.unpack("<f", struct.pack("<f", self.fp8_scale))[0])

    def _check_rotary(self) -> None:
        begin, end = self.rotary
        if begin == end == 0:
            return
        where = f"{self.role.value} buffer of layer {self.layer}: rotary columns [{begin}, {end}) of {self.dim}"
        if not 0 <= begin < end <= self.dim:
            raise SpecError(f"{where} are no part of the row")
        if begin % GROUP or end % GROUP:
            raise SpecError(f"{where} must begin and end at a multiple of {GROUP}; leave the range out")
        if end - begin == self.dim:
            raise SpecError(f"{where} are the whole row; leave the range out, it is not treated apart")
        if begin and end != self.dim:
            raise SpecError(f"{where} lie in the middle; they must be the row's first or last columns")

    @property
    def rows(self) -> int:
        return self.heads * self.tokens

    @property
    def values(self) -> int:
        return self.rows * self.dim

    @property
    def hot_bytes(self) -> int:
        return self.values * self.dtype.itemsize

    @property
    def compressible(self) -> bool:
        return self.role.attention and self.dtype.quantizable and self.dim % GROUP == 0


@dataclass(frozen=True, slots=True)
class PageSpec:
    """The buffers of one page, in the order in which their bytes are laid out: by layer, K before V.

    hot_page_bytes: of the page on the device. hot_page_bytes_16bit: of the page at 16 bits per attention value, the
    base that ratios are stated against. Both are asked for with every batch of pages, so they are kept."""

    page_tokens: int
    buffers: tuple[BufferSpec, ...]
    hot_page_bytes: int = field(init=False, repr=False, compare=False)
    hot_page_bytes_16bit: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.page_tokens < 1:
            raise SpecError(f"page_tokens = {self.page_tokens}, must be at least 1")
        if not self.buffers:
            raise SpecError("a page needs at least one buffer")
        layers = [b.layer for b in self.buffers]
        if layers != sorted(layers):
            raise SpecError("buffers must be ordered by layer")
        for dim in sorted({b.dim for b in self.buffers if b.role.attention and b.dim % GROUP}):
            _tell_lossless(dim)
        wide = sum(b.values * 2 if b.role.attention else b.hot_bytes for b in self.buffers)
        object.__setattr__(self, "hot_page_bytes", sum(b.hot_bytes for b in self.buffers))
        object.__setattr__(self, "hot_page_bytes_16bit", wide)

    @staticmethod
    def mha(
        *,
        layers: int,
        kv_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        page_tokens: int,
        dtype: DType,
        rotary_dim: int = 0,
        fp8_scale: float = 1.0,
    ) -> PageSpec:
        """MHA, MQA and GQA: per layer K then V, each ``[kv_heads, page_tokens, head_dim]``.

        kv_heads, head_dim: one number, or one per layer. rotary_dim: leading columns of K with a rotary position,
        where they are not all of them."""
        if layers < 1:
            raise SpecError(f"layers = {layers}, must be at least 1")
        heads, dims = _per_layer("kv_heads", kv_heads, layers), _per_layer("head_dim", head_dim, layers)
        buffers = []
        for n in range(layers):
            rotary = (0, rotary_dim if rotary_dim != dims[n] else 0)
            buffers.append(BufferSpec(Role.K, n, heads[n], page_tokens, dims[n], dtype, fp8_scale, rotary))
            buffers.append(BufferSpec(Role.V, n, heads[n], page_tokens, dims[n], dtype, fp8_scale))
        return PageSpec(page_tokens, tuple(buffers))

    @staticmethod
    def mla(
        *,
        layers: int,
        page_tokens: int,
        dtype: DType,
        latent_dim: int = 512,
        rope_dim: int = 64,
        index_layers: Iterable[int] = (),
        index_page_bytes: int = 0,
        fp8_scale: float = 1.0,
    ) -> PageSpec:
        """MLA: per layer one row ``[latent_dim + rope_dim]`` per token, the rotary key behind the latent vector.

        index_layers: layers with a sparse-attention index key of `index_page_bytes` per page, stored losslessly."""
        if layers < 1:
            raise SpecError(f"layers = {layers}, must be at least 1")
        width = latent_dim + rope_dim
        aligned = rope_dim and latent_dim % GROUP == 0 == rope_dim % GROUP
        rotary = (latent_dim, width) if aligned else (0, 0)
        rows = [BufferSpec(Role.LATENT, n, 1, page_tokens, width, dtype, fp8_scale, rotary) for n in range(layers)]
        index = [BufferSpec(Role.INDEX_KEY, n, 1, 1, index_page_bytes, DType.UINT8) for n in index_layers]
        return PageSpec(page_tokens, tuple(rows)).with_buffers(index)

    def with_buffers(self, extra: Iterable[BufferSpec]) -> PageSpec:
        """The same page with more buffers, each behind those of its layer: recurrent or convolution state, say."""
        # A stable sort: within a layer, the attention buffers stay in front.
        return PageSpec(self.page_tokens, tuple(sorted((*self.buffers, *extra), key=lambda b: b.layer)))

    def with_draft(self, draft: PageSpec) -> PageSpec:
        """Target and draft (speculative decoding) as one page: the draft's layers follow those of the target."""
        if draft.page_tokens != self.page_tokens:
            raise SpecError(
                f"draft pages of {draft.page_tokens} tokens, target pages of {self.page_tokens}: must agree"
            )
        first = self.buffers[-1].layer + 1
        return self.with_buffers(replace(b, layer=b.layer + first) for b in draft.buffers)

    @property
    def num_layers(self) -> int:
        return len({b.layer for b in self.buffers})

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that are equal for equal specs only: BLAKE2b-128 over a tagged, fixed-width encoding."""
        h = hashlib.blake2b(digest_size=16, person=b"kvtier.pagespec1")
        h.update(self.page_tokens.to_bytes(8, "little") + len(self.buffers).to_bytes(8, "little"))
        for b in self.buffers:
            h.update(b.role.value.encode().ljust(16, b"\0") + b.dtype.value.encode().ljust(16, b"\0"))
            for n in (b.layer, b.heads, b.tokens, b.dim):
                h.update(n.to_bytes(8, "little"))
        for i, b in enumerate(self.buffers):
            # Behind the fixed part, so that pages without them keep the fingerprint of the first version.
            if b.fp8_scale != 1.0:
                h.update(struct.pack("<8sqd", b"fp8scale", i, b.fp8_scale))
            if b.rotary != (0, 0):
                h.update(struct.pack("<8sqqq", b"rotary", i, *b.rotary))
        return h.digest()


@lru_cache(maxsize=64)
def _tell_lossless(dim: int) -> None:
    """Once per process: the same pages are described many times."""
    _log.warning(
        "dim = %d: attention buffers of that width are stored losslessly, since only multiples of %d can be compressed",
        dim,
        GROUP,
    )


def _per_layer(name: str, value: int | Sequence[int], layers: int) -> Sequence[int]:
    if isinstance(value, int):
        return [value] * layers
    if len(value) != layers:
        raise SpecError(f"{name} has {len(value)} numbers for {layers} layers; give one, or one per layer")
    return value


@dataclass(frozen=True, slots=True)
class PartLayout:
    """A range of columns of one buffer, and where its bytes lie in a cold page: values, then scales, then what the
    coding keeps beside them (means, middles, flags). Offsets are -1 for what the coding does not have."""

    buffer: int
    column: int
    columns: int
    coding: Coding
    data_offset: int
    data_bytes: int
    scale_offset: int = -1
    scale_bytes: int = 0
    side_offset: int = -1
    side_bytes: int = 0

    @property
    def compressed(self) -> bool:
        return self.coding is not Coding.RAW

    @property
    def has_k(self) -> bool:
        return self.coding in _WITH_K


_WITH_K = frozenset({Coding.NVFP4, Coding.TWO_FP4, Coding.OFFSET, Coding.TOKEN})


@dataclass(frozen=True, slots=True)
class ColdLayout:
    """Where every byte of a cold page lies. Independent of the hot layout.

    Per layer, one record: the codes of each compressed part; then, buffer by buffer, scales, means and what is kept
    of each row; then the buffers stored losslessly, then zeros up to 16 bytes. With ``GlobalScale.PAGE`` one signed
    byte k per part with scales follows the last record, padded alike; `scale_table_offset` is -1 when there is none.
    `parts` are in the order of the buffers: one per buffer, two where its rotary columns are stored apart.
    `global_scales`, of each part, are those of ``GlobalScale.CHECKPOINT``, whose table holds a float32 instead of k.
    A page with `levels` ends with one byte for each buffer that says its level, padded alike, at `levels_offset`.
    """

    spec: PageSpec
    global_scale: GlobalScale
    parts: tuple[PartLayout, ...]
    scale_table_offset: int
    scale_table_bytes: int
    cold_page_bytes: int
    global_scales: tuple[float, ...] = ()
    levels: tuple[int, ...] = ()

    @property
    def levels_offset(self) -> int:
        return self.cold_page_bytes - levels_bytes(self.spec) if self.levels else -1

    @property
    def ratio(self) -> float:
        """Hot bytes, as they lie on the device, over cold bytes."""
        return self.spec.hot_page_bytes / self.cold_page_bytes

    @staticmethod
    def of(
        spec: PageSpec,
        *,
        quantize: bool,
        global_scale: GlobalScale = GlobalScale.PAGE,
        codings: Codings = Codings(),
        checkpoint: Mapping[int, float] | None = None,
    ) -> ColdLayout:
        """The layout of `spec` with its compressible buffers as `codings` say, or, without `quantize`, all of them raw.

        checkpoint: global scale by buffer, for ``GlobalScale.CHECKPOINT``; without it the layout serves to read pages,
        which hold their own. Raises SpecError where `codings` ask for what the page cannot have."""
        if codings.levels and len(codings.levels) != len(spec.buffers):
            raise SpecError(f"{len(codings.levels)} levels for a page of {len(spec.buffers)} buffers")
        rotary = any(b.rotary != (0, 0) for b in spec.buffers if b.compressible)
        if quantize and codings.rotary is not None and not rotary:
            raise SpecError(
                "the rotary part is to be stored apart, but no buffer of this page has rotary columns beside others: "
                "they are all of K, or unknown; leave skip_rope_quantization and rope_quant out"
            )
        parts: list[PartLayout] = []
        at = 0
        for layer in sorted({b.layer for b in spec.buffers}):
            members = [i for i, b in enumerate(spec.buffers) if b.layer == layer]
            split = [
                part
                for i in members
                if quantize and spec.buffers[i].compressible
                for part in _split(i, spec.buffers[i], codings)
                if part[3] is not Coding.RAW or part[2] != spec.buffers[i].dim
            ]
            sizes = [_part_bytes(spec.buffers[i], columns, coding) for i, _, columns, coding in split]
            data = []
            for (_, _, _, coding), size in zip(split, sizes, strict=True):
                data.append(-1 if coding in _KEPT else at)
                at += 0 if coding in _KEPT else size[0]
            done = []
            for n in _by_buffer(split):
                (i, column, columns, coding), (data_bytes, scale_bytes, side_bytes) = split[n], sizes[n]
                scale_offset = at if scale_bytes else -1
                at += scale_bytes
                side_offset = at if side_bytes else -1
                at += side_bytes
                data_offset = data[n]
                if coding in _KEPT:
                    data_offset, at = at, at + data_bytes
                done.append(
                    PartLayout(
                        i, column, columns, coding, data_offset, data_bytes,
                        scale_offset, scale_bytes, side_offset, side_bytes,
                    )
                )  # fmt: skip
            packed = {part.buffer for part in done}
            for i in members:
                b = spec.buffers[i]
                if i not in packed:
                    done.append(PartLayout(i, 0, b.dim, Coding.RAW, at, b.hot_bytes))
                    at += b.hot_bytes
            parts += sorted(done, key=lambda part: (part.buffer, part.column))
            at = _align(at)
        table, table_bytes = -1, sum(part.has_k for part in parts) * _TABLE_ENTRY_BYTES[global_scale]
        if table_bytes:
            table, at = at, _align(at + table_bytes)
        if codings.levels:
            at += levels_bytes(spec)
        scales: tuple[float, ...] = ()
        if global_scale is GlobalScale.CHECKPOINT and table_bytes:
            scales = tuple((checkpoint[p.buffer] if checkpoint else 1.0) if p.has_k else 0.0 for p in parts)
        return ColdLayout(spec, global_scale, tuple(parts), table, table_bytes, at, scales, codings.levels)


_TABLE_ENTRY_BYTES = {GlobalScale.PAGE: 1, GlobalScale.IDENTITY: 0, GlobalScale.CHECKPOINT: 4}
LEVEL_MAX = 2


def levels_bytes(spec: PageSpec) -> int:
    """Bytes of the levels at the end of a page that has some."""
    return _align(len(spec.buffers))


_Part = tuple[int, int, int, Coding]
_KEPT = frozenset({Coding.RAW, Coding.FP8})
"""Codings whose bytes follow the scales of their buffer, row by row."""


def _split(buffer: int, spec: BufferSpec, codings: Codings) -> list[_Part]:
    """(buffer, column, columns, coding) of each part of a compressed buffer, by column."""
    level = codings.levels[buffer] if codings.levels else 0
    if level:
        return [(buffer, 0, spec.dim, Coding.TWO_FP4 if level == 1 else Coding.RAW)]
    rest = codings.key if spec.role is Role.K else Coding.NVFP4
    begin, end = spec.rotary
    if codings.rotary is None or begin == end:
        return [(buffer, 0, spec.dim, rest)]
    rotary = (buffer, begin, end - begin, codings.rotary)
    return [rotary, (buffer, end, spec.dim - end, rest)] if begin == 0 else [(buffer, 0, begin, rest), rotary]


def _by_buffer(split: Sequence[_Part]) -> list[int]:
    """Indices of parts by buffer, within one those with scales first."""
    return sorted(range(len(split)), key=lambda n: (split[n][0], split[n][3] in _KEPT, split[n][1]))


def _part_bytes(spec: BufferSpec, columns: int, coding: Coding) -> tuple[int, int, int]:
    """Bytes of values, scales, and what lies beside them."""
    values, mean_bytes = spec.rows * columns, spec.heads * columns * 2
    if coding is Coding.TOKEN and spec.tokens % GROUP:
        raise SpecError(
            f"quant = nvfp4_token needs pages of a multiple of {GROUP} tokens, not {spec.tokens}; use nvfp4"
        )
    if coding in (Coding.OFFSET, Coding.FP8_MEAN) and spec.tokens < GROUP:
        name = "nvfp4_offset" if coding is Coding.OFFSET else "k8v4"
        raise SpecError(
            f"quant = {name} needs pages of at least {GROUP} tokens, not {spec.tokens}: a mean of fewer "
            "costs more than it saves; use nvfp4 or larger pages"
        )
    return {
        Coding.RAW: (values * spec.dtype.itemsize, 0, 0),
        Coding.FP8: (values, 0, 0),
        Coding.NVFP4: (values // 2, values // GROUP, 0),
        Coding.TWO_FP4: (values, values // (GROUP // 2), 0),
        Coding.OFFSET: (values // 2, values // GROUP, mean_bytes),
        Coding.TOKEN: (values // 2, values // GROUP, mean_bytes * (spec.tokens // GROUP)),
        Coding.FP8_MEAN: (values, 0, mean_bytes + -(-spec.rows // 8)),
    }[coding]


def _align(n: int) -> int:
    return -(-n // RECORD_ALIGN) * RECORD_ALIGN
