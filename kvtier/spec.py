"""What a KV page is made of (PageSpec), and where each of its bytes lies once it is cold (ColdLayout).

The cold layout follows the layout of TensorRT-LLM's cold-page codec (developer guide
`kv-cache-cold-page-codec`); `docs/formats.md` states it in full. Nothing here touches page data.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from enum import Enum

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
    """

    PAGE = "page"
    IDENTITY = "identity"


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One buffer of one page: ``[heads, tokens, dim]`` in cold order, whatever the hot layout is.

    `tokens` is the page's token count for per-token buffers; a state or index buffer that is stored once per
    page has ``heads = tokens = 1`` and `dim` its bytes.
    """

    role: Role
    layer: int
    heads: int
    tokens: int
    dim: int
    dtype: DType

    def __post_init__(self) -> None:
        for field, value in (("heads", self.heads), ("tokens", self.tokens), ("dim", self.dim)):
            if value < 1:
                raise SpecError(f"{self.role.value} buffer of layer {self.layer}: {field} = {value}, must be at least 1")
        if self.layer < 0:
            raise SpecError(f"{self.role.value} buffer: layer = {self.layer}, must not be negative")

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
    """The buffers of one page, in the order in which their bytes are laid out: by layer, K before V."""

    page_tokens: int
    buffers: tuple[BufferSpec, ...]

    def __post_init__(self) -> None:
        if self.page_tokens < 1:
            raise SpecError(f"page_tokens = {self.page_tokens}, must be at least 1")
        if not self.buffers:
            raise SpecError("a page needs at least one buffer")
        layers = [b.layer for b in self.buffers]
        if layers != sorted(layers):
            raise SpecError("buffers must be ordered by layer")
        odd = sorted({b.dim for b in self.buffers if b.role.attention and not b.compressible})
        if odd:
            _log.info("attention buffers with dim %s are stored losslessly: not a multiple of %d", odd, GROUP)

    @staticmethod
    def mha(*, layers: int, kv_heads: int, head_dim: int, page_tokens: int, dtype: DType) -> PageSpec:
        """MHA, MQA and GQA: per layer K then V, each ``[kv_heads, page_tokens, head_dim]``."""
        if layers < 1:
            raise SpecError(f"layers = {layers}, must be at least 1")
        return PageSpec(
            page_tokens,
            tuple(
                BufferSpec(role, layer, kv_heads, page_tokens, head_dim, dtype)
                for layer in range(layers)
                for role in (Role.K, Role.V)
            ),
        )

    @property
    def hot_page_bytes(self) -> int:
        return sum(b.hot_bytes for b in self.buffers)

    @property
    def hot_page_bytes_16bit(self) -> int:
        """The page counted at 16 bits per attention value: the base that ratios are stated against."""
        return sum(b.values * 2 if b.role.attention else b.hot_bytes for b in self.buffers)

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
        return h.digest()


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """Byte offsets of one buffer inside a cold page. `scale_offset` is -1 for a buffer stored losslessly."""

    compressed: bool
    data_offset: int
    data_bytes: int
    scale_offset: int
    scale_bytes: int


@dataclass(frozen=True, slots=True)
class ColdLayout:
    """Where every byte of a cold page lies. Independent of the hot layout.

    Per layer, one record: nibbles of each compressed buffer, then scale bytes of each, then the buffers stored
    losslessly, then zeros up to 16 bytes. With ``GlobalScale.PAGE`` one signed byte k per compressed buffer
    follows the last record, padded alike; `scale_table_offset` is -1 when there is no such table.
    """

    spec: PageSpec
    global_scale: GlobalScale
    buffers: tuple[BufferLayout, ...]
    scale_table_offset: int
    scale_table_bytes: int
    cold_page_bytes: int

    @property
    def ratio(self) -> float:
        """Hot bytes, as they lie on the device, over cold bytes."""
        return self.spec.hot_page_bytes / self.cold_page_bytes

    @staticmethod
    def of(spec: PageSpec, *, quantize: bool, global_scale: GlobalScale = GlobalScale.PAGE) -> ColdLayout:
        """The layout of `spec` with its compressible buffers as NVFP4, or, without `quantize`, all of them raw."""
        layouts: list[BufferLayout | None] = [None] * len(spec.buffers)
        at = 0
        for layer in sorted({b.layer for b in spec.buffers}):
            members = [i for i, b in enumerate(spec.buffers) if b.layer == layer]
            packed = [i for i in members if quantize and spec.buffers[i].compressible]
            data_offset = {}
            for i in packed:
                data_offset[i] = at
                at += spec.buffers[i].values // 2
            for i in packed:
                values = spec.buffers[i].values
                layouts[i] = BufferLayout(True, data_offset[i], values // 2, at, values // GROUP)
                at += values // GROUP
            for i in members:
                if i not in data_offset:
                    layouts[i] = BufferLayout(False, at, spec.buffers[i].hot_bytes, -1, 0)
                    at += spec.buffers[i].hot_bytes
            at = _align(at)
        done = tuple(x for x in layouts if x is not None)
        compressed = sum(x.compressed for x in done)
        table, table_bytes = -1, 0
        if global_scale is GlobalScale.PAGE and compressed:
            table, table_bytes = at, compressed
            at = _align(at + compressed)
        return ColdLayout(spec, global_scale, done, table, table_bytes, at)


def _align(n: int) -> int:
    return -(-n // RECORD_ALIGN) * RECORD_ALIGN
