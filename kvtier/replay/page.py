"""What a block of a trace weighs: from a model's KV geometry through `ColdLayout`, or from bytes per token alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvtier.errors import ConfigError
from kvtier.spec import BufferSpec, ColdLayout, DType, GlobalScale, PageSpec, Role

DEFAULT_PAGE_TOKENS = 64


class ReplayCodec(str, Enum):
    """How pages are stored. fp8: one byte per attention value, as an engine with an FP8 cache would offload them; it is
    here to compare with."""

    RAW = "raw"
    FP8 = "fp8"
    NVFP4 = "nvfp4"


@dataclass(frozen=True, slots=True)
class Geometry:
    """The KV cache of a model. An MLA model has one latent row per token and layer: kv_heads 1, latent True.

    index_layers: layers that also keep an index key for sparse attention, `index_bytes_per_token` each.
    """

    layers: int
    kv_heads: int
    head_dim: int
    latent: bool = False
    index_layers: int = 0
    index_bytes_per_token: int = 132

    def page(self, page_tokens: int, dtype: DType) -> PageSpec:
        if not self.latent:
            return PageSpec.mha(
                layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim, page_tokens=page_tokens, dtype=dtype
            )
        buffers = []
        for layer in range(self.layers):
            buffers.append(BufferSpec(Role.LATENT, layer, 1, page_tokens, self.head_dim, dtype))
            if layer < self.index_layers:
                nbytes = page_tokens * self.index_bytes_per_token
                buffers.append(BufferSpec(Role.INDEX_KEY, layer, 1, 1, nbytes, DType.UINT8))
        return PageSpec(page_tokens, tuple(buffers))


MODELS: dict[str, Geometry] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": Geometry(30, 3, 64),
    "Qwen/Qwen2.5-7B-Instruct": Geometry(28, 4, 128),
    "Qwen/Qwen3-0.6B": Geometry(28, 8, 128),
    "Qwen/Qwen3-4B": Geometry(36, 8, 128),
    "Qwen/Qwen3-8B": Geometry(36, 8, 128),
    "Qwen/Qwen3-14B": Geometry(40, 8, 128),
    "Qwen/Qwen3-32B": Geometry(64, 8, 128),
    "Qwen/Qwen3-30B-A3B": Geometry(48, 4, 128),
    "Qwen/Qwen3-235B-A22B": Geometry(94, 4, 128),
    "Qwen/Qwen3.5-397B-A17B": Geometry(16, 2, 256),
    "meta-llama/Llama-3.1-8B-Instruct": Geometry(32, 8, 128),
    "meta-llama/Llama-3.3-70B-Instruct": Geometry(80, 8, 128),
    "deepseek-ai/DeepSeek-V3": Geometry(61, 1, 576, latent=True),
    "deepseek-ai/DeepSeek-V3.2": Geometry(61, 1, 576, latent=True, index_layers=61),
    "zai-org/GLM-5.2": Geometry(79, 1, 576, latent=True, index_layers=22),
}
"""Geometries of some models. Of hybrid models (Qwen3.5) the attention pages only: their state comes on top."""


def geometry_of_model(name: str) -> Geometry:
    """The geometry of a model by its full name, or by the part behind the slash, in any case of letters."""
    for known, geometry in MODELS.items():
        if name.lower() in (known.lower(), known.lower().rpartition("/")[2]):
            return geometry
    raise ConfigError(
        f"--model {name}: not in the table; give --page (mha:LAYERSxHEADSxDIM) or --bytes-per-token, or one of "
        + ", ".join(MODELS)
    )


def parse_geometry(text: str) -> Geometry:
    """``mha:36x8x128`` (layers, KV heads, head dim), ``mla:61x576`` (layers, latent with its rotary part), or
    ``mla:79x576+22x132`` (and index keys: layers, bytes per token)."""
    if match := re.fullmatch(r"mha:(\d+)x(\d+)x(\d+)", text):
        layers, kv_heads, head_dim = map(int, match.groups())
        return Geometry(layers, kv_heads, head_dim)
    if match := re.fullmatch(r"mla:(\d+)x(\d+)(?:\+(\d+)x(\d+))?", text):
        layers, dim, index_layers, index_bytes = (int(g or 0) for g in match.groups())
        if index_layers > layers:
            raise ConfigError(
                f"--page {text}: {index_layers} layers with index keys are more than the {layers} there are"
            )
        return Geometry(layers, 1, dim, True, index_layers, index_bytes)
    raise ConfigError(f"--page {text}: give mha:LAYERSxHEADSxDIM, mla:LAYERSxDIM or mla:LAYERSxDIM+INDEX_LAYERSxBYTES")


BlockBytes = Callable[[ReplayCodec], int]
"""Bytes of one block of the trace in a codec."""


def from_bytes_per_token(bytes_per_token: int, block_tokens: int) -> BlockBytes:
    """`bytes_per_token`: of the cache at 16 bits a value. FP8 is half of that, NVFP4 4.5 bits a value."""

    def nbytes(codec: ReplayCodec) -> int:
        per_32 = {ReplayCodec.RAW: 32, ReplayCodec.FP8: 16, ReplayCodec.NVFP4: 9}[codec]
        return -(-bytes_per_token * block_tokens * per_32 // 32)

    return nbytes


def from_geometry(
    geometry: Geometry,
    block_tokens: int,
    *,
    page_tokens: int | None = None,
    dtype: DType = DType.BF16,
    global_scale: GlobalScale = GlobalScale.PAGE,
) -> BlockBytes:
    """Cold pages as kvtier lays them out; a block is as many whole pages as its tokens fill."""
    if page_tokens is None:
        page_tokens = DEFAULT_PAGE_TOKENS if block_tokens % DEFAULT_PAGE_TOKENS == 0 else block_tokens
    if page_tokens < 1 or block_tokens % page_tokens:
        raise ConfigError(f"--page-tokens {page_tokens}: must divide the {block_tokens} tokens of a block of the trace")
    pages = block_tokens // page_tokens
    hot = geometry.page(page_tokens, dtype)
    one_byte = geometry.page(page_tokens, DType.FP8_E4M3)

    def nbytes(codec: ReplayCodec) -> int:
        if codec is ReplayCodec.NVFP4:
            layout = ColdLayout.of(hot, quantize=True, global_scale=global_scale)
        else:
            layout = ColdLayout.of(hot if codec is ReplayCodec.RAW else one_byte, quantize=False)
        return pages * layout.cold_page_bytes

    return nbytes
