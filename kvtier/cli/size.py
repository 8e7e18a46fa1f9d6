"""``kvtier size``: what a page costs hot and cold, from its geometry alone."""

from __future__ import annotations

import json
import sys
from enum import Enum
from typing import Annotated

import typer

from kvtier.cli.options import at_least
from kvtier.errors import ConfigError
from kvtier.spec import BufferSpec, ColdLayout, DType, GlobalScale, PageSpec, Role

app = typer.Typer(help="Bytes of one KV page, hot and cold.", no_args_is_help=True)


class SizeCodec(str, Enum):
    NVFP4 = "nvfp4"
    RAW = "raw"


Layers = Annotated[int, typer.Option(help="Attention layers.")]
Tokens = Annotated[int, typer.Option(help="Tokens in one page.")]
Dtype = Annotated[DType, typer.Option(help="Element type of the hot cache.")]
Codec = Annotated[SizeCodec, typer.Option(help="How pages are stored.")]
Scale = Annotated[
    GlobalScale, typer.Option(help="Second-level scale of nvfp4: page stores one byte per buffer, identity nothing.")
]
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
    codec: Codec = SizeCodec.NVFP4,
    global_scale: Scale = GlobalScale.PAGE,
    lossless_bytes: Lossless = None,
    as_json: AsJson = False,
) -> None:
    """MHA, MQA and GQA: K and V in every layer."""
    at_least(1, layers=layers, kv_heads=kv_heads, head_dim=head_dim, tokens=tokens)
    spec = PageSpec.mha(layers=layers, kv_heads=kv_heads, head_dim=head_dim, page_tokens=tokens, dtype=dtype)
    extra = [_lossless(layer, n) for layer in range(layers) for n in lossless_bytes or ()]
    _report(_joined(spec, extra), codec, global_scale, as_json)


@app.command()
def mla(
    layers: Layers,
    latent_dim: Annotated[int, typer.Option(help="Values of the latent vector.")] = 512,
    rope_dim: Annotated[int, typer.Option(help="Values of the rotary key beside it.")] = 64,
    tokens: Tokens = 64,
    dtype: Dtype = DType.BF16,
    index_buffers: Annotated[int, typer.Option(help="Layers with a sparse-attention index-key buffer.")] = 0,
    index_page_bytes: Annotated[int, typer.Option(help="Bytes of one index-key buffer per page.")] = 8448,
    codec: Codec = SizeCodec.NVFP4,
    global_scale: Scale = GlobalScale.PAGE,
    lossless_bytes: Lossless = None,
    as_json: AsJson = False,
) -> None:
    """MLA: one latent row per token and layer; index keys of sparse attention are stored losslessly."""
    at_least(1, layers=layers, latent_dim=latent_dim, tokens=tokens, index_page_bytes=index_page_bytes)
    at_least(0, rope_dim=rope_dim, index_buffers=index_buffers)
    if index_buffers > layers:
        raise ConfigError(f"--index-buffers {index_buffers} is more than --layers {layers}: at most one per layer")
    spec = PageSpec(
        tokens,
        tuple(BufferSpec(Role.LATENT, layer, 1, tokens, latent_dim + rope_dim, dtype) for layer in range(layers)),
    )
    extra = [BufferSpec(Role.INDEX_KEY, n, 1, 1, index_page_bytes, DType.UINT8) for n in range(index_buffers)]
    extra += [_lossless(layer, n) for layer in range(layers) for n in lossless_bytes or ()]
    _report(_joined(spec, extra), codec, global_scale, as_json)


def _lossless(layer: int, nbytes: int) -> BufferSpec:
    at_least(1, lossless_bytes=nbytes)
    return BufferSpec(Role.OPAQUE, layer, 1, 1, nbytes, DType.UINT8)


def _joined(spec: PageSpec, extra: list[BufferSpec]) -> PageSpec:
    # A stable sort: within a layer, the attention buffers stay in front.
    return PageSpec(spec.page_tokens, tuple(sorted([*spec.buffers, *extra], key=lambda b: b.layer)))


def _report(spec: PageSpec, codec: SizeCodec, global_scale: GlobalScale, as_json: bool) -> None:
    from kvtier.abc.tier import SLOT_ALIGN

    layout = ColdLayout.of(spec, quantize=codec is SizeCodec.NVFP4, global_scale=global_scale)
    cold = layout.cold_page_bytes
    slot = -(-cold // SLOT_ALIGN) * SLOT_ALIGN
    figures: dict[str, int | float] = {
        "page_tokens": spec.page_tokens,
        "hot_page_bytes": spec.hot_page_bytes,
        "cold_page_bytes": cold,
        "ratio": round(layout.ratio, 4),
        "hot_page_bytes_16bit": spec.hot_page_bytes_16bit,
        "ratio_16bit": round(spec.hot_page_bytes_16bit / cold, 4),
        "hot_bytes_per_token": round(spec.hot_page_bytes / spec.page_tokens, 1),
        "cold_bytes_per_token": round(cold / spec.page_tokens, 1),
        "slot_bytes": slot,
        "pages_per_gib": (1 << 30) // slot,
    }
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    name = "raw" if codec is SizeCodec.RAW else f"nvfp4, global scale {global_scale.value}"
    table = Table(title=f"one page of {spec.page_tokens} tokens, {name}", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    for label, value in (
        ("hot, as it lies on the device", f"{spec.hot_page_bytes:,} B"),
        ("cold, as it is stored", f"{cold:,} B"),
        ("hot over cold", f"{layout.ratio:.4f}"),
        ("16-bit values over cold", f"{figures['ratio_16bit']:.4f}"),
        ("hot bytes per token", f"{figures['hot_bytes_per_token']:,}"),
        ("cold bytes per token", f"{figures['cold_bytes_per_token']:,}"),
        (f"slot in a local tier ({SLOT_ALIGN}-byte steps)", f"{slot:,} B"),
        ("pages per GiB", f"{figures['pages_per_gib']:,}"),
        ("tokens per GiB", f"{(1 << 30) // slot * spec.page_tokens:,}"),
    ):
        table.add_row(label, value)
    Console().print(table)
