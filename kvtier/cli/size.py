"""``kvtier size``: what a page costs hot and cold, from its geometry alone."""

from __future__ import annotations

import json
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.options import at_least, at_most
from kvtier.errors import ConfigError
from kvtier.spec import BufferSpec, Coding, Codings, ColdLayout, DType, GlobalScale, PageSpec, Role

app = typer.Typer(help="Bytes of one KV page, hot and cold.", no_args_is_help=True)


_LAYERS_MAX = 100_000
"""Every layer is laid out by itself: many more, surely a typing error, would take minutes."""


class SizeCodec(str, Enum):
    AUTO = "auto"
    NVFP4 = "nvfp4"
    NVFP4_OFFSET = "nvfp4_offset"
    NVFP4_TOKEN = "nvfp4_token"
    K8V4 = "k8v4"
    TWO_FP4 = "2fp4"
    LOSSLESS = "lossless"
    RAW = "raw"


class SizeRope(str, Enum):
    NVFP4 = "nvfp4"
    TWO_FP4 = "2fp4"
    FP8 = "fp8"
    KEEP = "keep"


Layers = Annotated[int, typer.Option(help="Attention layers.")]
Tokens = Annotated[int, typer.Option(help="Tokens in one page.")]
Dtype = Annotated[DType, typer.Option(help="Element type of the hot cache.")]
Codec = Annotated[
    SizeCodec, typer.Option(help="How pages are stored. auto: nvfp4_token, or nvfp4 with its options or short pages.")
]
Scale = Annotated[
    GlobalScale,
    typer.Option(
        help="Second-level scale of nvfp4: page stores one byte per buffer, checkpoint four, identity nothing."
    ),
]
ScalePath = Annotated[
    Path | None,
    typer.Option(help="Checkpoint whose scales --global-scale checkpoint takes; without it, what they would need."),
]
Rope = Annotated[SizeRope, typer.Option(help="How nvfp4 stores rotary columns that are a part of the row.")]
Lossless = Annotated[
    list[int] | None,
    typer.Option(help="Bytes of one more lossless buffer in every layer (recurrent state, say). Repeatable."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def mha(
    layers: Layers,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads (1 is MQA).")],
    head_dim: Annotated[int, typer.Option(help="Values per head.")],
    tokens: Tokens = 64,
    dtype: Dtype = DType.BF16,
    rotary_dim: Annotated[int, typer.Option(help="Leading columns of K with a rotary position, if not all.")] = 0,
    codec: Codec = SizeCodec.AUTO,
    global_scale: Scale = GlobalScale.PAGE,
    scale_checkpoint_path: ScalePath = None,
    rope: Rope = SizeRope.NVFP4,
    lossless_bytes: Lossless = None,
    as_json: AsJson = False,
) -> None:
    """MHA, MQA and GQA: K and V in every layer."""
    at_least(1, layers=layers, kv_heads=kv_heads, head_dim=head_dim, tokens=tokens)
    at_most(_LAYERS_MAX, layers=layers)
    at_least(0, rotary_dim=rotary_dim)
    spec = PageSpec.mha(
        layers=layers, kv_heads=kv_heads, head_dim=head_dim, page_tokens=tokens, dtype=dtype, rotary_dim=rotary_dim
    )
    extra = [_lossless(layer, n) for layer in range(layers) for n in lossless_bytes or ()]
    _report(spec.with_buffers(extra), codec, global_scale, scale_checkpoint_path, rope, as_json)


@app.command()
def mla(
    layers: Layers,
    latent_dim: Annotated[int, typer.Option(help="Values of the latent vector.")] = 512,
    rope_dim: Annotated[int, typer.Option(help="Values of the rotary key beside it.")] = 64,
    tokens: Tokens = 64,
    dtype: Dtype = DType.BF16,
    index_buffers: Annotated[int, typer.Option(help="Layers with a sparse-attention index-key buffer.")] = 0,
    index_page_bytes: Annotated[int, typer.Option(help="Bytes of one index-key buffer per page.")] = 8448,
    codec: Codec = SizeCodec.AUTO,
    global_scale: Scale = GlobalScale.PAGE,
    scale_checkpoint_path: ScalePath = None,
    rope: Rope = SizeRope.NVFP4,
    lossless_bytes: Lossless = None,
    as_json: AsJson = False,
) -> None:
    """MLA: one latent row per token and layer; index keys of sparse attention are stored losslessly."""
    at_least(1, layers=layers, latent_dim=latent_dim, tokens=tokens, index_page_bytes=index_page_bytes)
    at_most(_LAYERS_MAX, layers=layers)
    at_least(0, rope_dim=rope_dim, index_buffers=index_buffers)
    if index_buffers > layers:
        raise ConfigError(f"--index-buffers {index_buffers} is more than --layers {layers}: at most one per layer")
    spec = PageSpec.mla(
        layers=layers,
        page_tokens=tokens,
        dtype=dtype,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        index_layers=range(index_buffers),
        index_page_bytes=index_page_bytes,
    )
    extra = [_lossless(layer, n) for layer in range(layers) for n in lossless_bytes or ()]
    _report(spec.with_buffers(extra), codec, global_scale, scale_checkpoint_path, rope, as_json)


def _lossless(layer: int, nbytes: int) -> BufferSpec:
    at_least(1, lossless_bytes=nbytes)
    return BufferSpec(Role.OPAQUE, layer, 1, 1, nbytes, DType.UINT8)


def _resolved(spec: PageSpec, codec: SizeCodec, global_scale: GlobalScale, rope: SizeRope) -> SizeCodec:
    """What auto means for `spec`, as in the configuration."""
    if codec is not SizeCodec.AUTO:
        return codec
    if rope is not SizeRope.NVFP4 or global_scale is not GlobalScale.PAGE:
        return SizeCodec.NVFP4
    from kvtier.build import default_quant

    return SizeCodec(default_quant(spec))


def _layout(
    spec: PageSpec, codec: SizeCodec, global_scale: GlobalScale, rope: SizeRope, scale_checkpoint_path: Path | None
) -> ColdLayout:
    if scale_checkpoint_path is not None:
        if global_scale is not GlobalScale.CHECKPOINT:
            raise ConfigError("--scale-checkpoint-path belongs to --global-scale checkpoint; give both or neither")
        from kvtier.codecs.checkpoint_scales import CheckpointScales

        CheckpointScales.load(scale_checkpoint_path).of(spec)
    if codec is SizeCodec.NVFP4:
        rotary = _ROPE_CODINGS[rope]
        return ColdLayout.of(spec, quantize=True, global_scale=global_scale, codings=Codings(rotary=rotary))
    if rope is not SizeRope.NVFP4 or global_scale is not GlobalScale.PAGE:
        raise ConfigError(f"--rope and --global-scale belong to --codec nvfp4, not to {codec.value}; leave them out")
    if codec is SizeCodec.RAW:
        return ColdLayout.of(spec, quantize=False)
    if codec is SizeCodec.LOSSLESS:
        from kvtier.codecs.lossless import LosslessCodec

        return LosslessCodec().layout(spec)
    return ColdLayout.of(spec, quantize=True, codings=Codings(key=_KEY_CODINGS[codec]))


_ROPE_CODINGS = {
    SizeRope.NVFP4: None,
    SizeRope.TWO_FP4: Coding.TWO_FP4,
    SizeRope.FP8: Coding.FP8,
    SizeRope.KEEP: Coding.RAW,
}
_KEY_CODINGS = {
    SizeCodec.NVFP4_OFFSET: Coding.OFFSET,
    SizeCodec.NVFP4_TOKEN: Coding.TOKEN,
    SizeCodec.K8V4: Coding.FP8_MEAN,
    SizeCodec.TWO_FP4: Coding.TWO_FP4,
}


def _report(
    spec: PageSpec,
    codec: SizeCodec,
    global_scale: GlobalScale,
    scale_checkpoint_path: Path | None,
    rope: SizeRope,
    as_json: bool,
) -> None:
    from kvtier.abc.tier import SLOT_ALIGN

    codec = _resolved(spec, codec, global_scale, rope)
    layout = _layout(spec, codec, global_scale, rope, scale_checkpoint_path)
    cold = layout.cold_page_bytes
    attention = [b for b in spec.buffers if b.role.attention]
    kept = spec.hot_page_bytes - sum(b.hot_bytes for b in attention)
    slot = -(-cold // SLOT_ALIGN) * SLOT_ALIGN
    figures: dict[str, int | float | str] = {
        "codec": codec.value,
        "page_tokens": spec.page_tokens,
        "hot_page_bytes": spec.hot_page_bytes,
        "cold_page_bytes": cold,
        "ratio": round(layout.ratio, 4),
        "hot_page_bytes_16bit": spec.hot_page_bytes_16bit,
        "ratio_16bit": round(spec.hot_page_bytes_16bit / cold, 4),
        "hot_bytes_per_token": round(spec.hot_page_bytes / spec.page_tokens, 1),
        "bytes_per_value": round((cold - kept) / sum(b.values for b in attention), 4),
        "cold_bytes_per_token": round(cold / spec.page_tokens, 1),
        "slot_bytes": slot,
        "pages_per_gib": (1 << 30) // slot,
    }
    if codec is SizeCodec.LOSSLESS:
        figures["at_most"] = True  # what a page takes depends on its values
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    name = f"nvfp4, global scale {global_scale.value}" if codec is SizeCodec.NVFP4 else codec.value
    if rope is not SizeRope.NVFP4:
        name += f", rotary part {rope.value}"
    table = Table(title=f"one page of {spec.page_tokens} tokens, {name}", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    for label, value in (
        ("hot, as it lies on the device", f"{spec.hot_page_bytes:,} B"),
        ("cold, at most" if "at_most" in figures else "cold, as it is stored", f"{cold:,} B"),
        ("hot over cold", f"{layout.ratio:.4f}"),
        ("16-bit values over cold", f"{figures['ratio_16bit']:.4f}"),
        ("cold bytes per attention value", f"{figures['bytes_per_value']:.4f}"),
        ("hot bytes per token", f"{figures['hot_bytes_per_token']:,}"),
        ("cold bytes per token", f"{figures['cold_bytes_per_token']:,}"),
        (f"slot in a local tier ({SLOT_ALIGN}-byte steps)", f"{slot:,} B"),
        ("pages per GiB", f"{figures['pages_per_gib']:,}"),
        ("tokens per GiB", f"{(1 << 30) // slot * spec.page_tokens:,}"),
    ):
        table.add_row(label, value)
    Console().print(table)
