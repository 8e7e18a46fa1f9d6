"""Rows of a compacted prefix as an engine's own pages hold them: which prefixes fit, and their bytes.

transformers and SGLang compute the same rows and write some of them differently. Rotary columns that turn in pairs lie
pair by pair in SGLang, in transformers first components before second ones. Index keys are FP8 with a scale per token,
one row of bytes per page, and in some engines turned by a Hadamard matrix, as their queries are, which leaves scores as
they were. Rows of DSA may be packed: latents in FP8 with a scale per 128, then the rotary part in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.compression.compaction.artefact import CompactLayer, CompactPrefix
from kvtier.connectors.sglang.pools import DevicePool
from kvtier.errors import ArtefactError
from kvtier.spec import BufferSpec, DType, PageSpec, Role

_ROWS = {Role.K: "keys", Role.V: "values"}
_DTYPES = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16, DType.FP32: torch.float32}
_FAMILIES = {
    frozenset({Role.K, Role.V}): "dense",
    frozenset({Role.LATENT}): "mla",
    frozenset({Role.LATENT, Role.INDEX_KEY}): "mla",
    frozenset({Role.OPAQUE, Role.INDEX_KEY}): "mla",
}
"""Families of prefixes by what the pages of an engine hold; a pool with opaque rows is DSA's with packed ones."""
_FP8_MAX = 448.0
_INDEX_DIM, _SCALE_BYTES, _PACKED_GROUP = 128, 4, 128
_ARCHITECTURES = {"DeepseekV3ForCausalLM": False, "DeepseekV32ForCausalLM": False, "GlmMoeDsaForCausalLM": True}
"""Of MLA, those whose rotary columns transformers keeps first components before second ones; whether an indexer turns
pairs, too. Where it does not, it turns halves."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The part of a model's KV heads that this rank has: `first` to `first + count` of `total`."""

    first: int
    count: int
    total: int

    @staticmethod
    def of(tp_rank: int, tp_size: int, count: int, total: int) -> Heads:
        """`count`: heads of a rank. Where there are fewer heads than ranks, adjacent ranks have the same one."""
        return Heads(tp_rank * count if total >= tp_size else tp_rank * total // tp_size, count, total)


ONE_ROW = Heads(0, 1, 1)
"""Of MLA: every rank has the one row of each token."""


@dataclass(frozen=True, slots=True)
class LatentForm:
    """How an engine writes rows of MLA. pairs: rotary columns of a row lie pair by pair; index_pairs: those of an index
    key do. index_turned: index keys are multiplied by a Hadamard matrix."""

    pairs: bool
    index_pairs: bool = False
    index_turned: bool = False

    @staticmethod
    def of(config: Any, device: str) -> LatentForm:
        """Of an engine with the pool on `device`. `config`: the model's, as SGLang read it. Raises ArtefactError where
        the form is not known."""
        architecture = (getattr(config, "architectures", None) or ["unknown"])[0]
        if architecture not in _ARCHITECTURES:
            raise ArtefactError(
                f"this model is a {architecture}, whose rows transformers may write in another order than SGLang: of "
                f"MLA, {', '.join(_ARCHITECTURES)} are served; remove the option compacted"
            )
        pairs = bool(getattr(config, "rope_interleave", True))
        if getattr(config, "index_topk", None) is None:
            return LatentForm(pairs)
        index_pairs = bool(getattr(config, "indexer_rope_interleave", False))
        if index_pairs != _ARCHITECTURES[architecture]:
            raise ArtefactError(
                f"indexer_rope_interleave = {index_pairs} in the configuration of a {architecture}: transformers "
                "turns its index keys the other way, so that those of a file are not this engine's. Correct the "
                "model's config.json, or remove the option compacted"
            )
        if device == "cuda" and torch.version.hip is not None:
            raise ArtefactError(
                "how index keys lie in memory is known for CUDA only: remove the option compacted on ROCm"
            )
        return LatentForm(pairs, index_pairs, index_turned=not (device == "cuda" and index_pairs and _fuses_indexers()))


def _fuses_indexers() -> bool:
    from sglang.srt.environ import envs

    return not envs.SGLANG_DISABLE_DSA_INDEXER_FUSION.get()


def check_model(prefix: CompactPrefix, checkpoint: str | None) -> None:
    """Raise ArtefactError unless `prefix` is of the model with these files, None where it is not known."""
    if not checkpoint:
        raise ArtefactError(
            "this engine's weights are not those of safetensors files as they are (quantized, overridden, another "
            "format, or given later), so that nobody can tell whether the prefix is theirs: remove the option compacted"
        )
    found = prefix.manifest
    if found.checkpoint != checkpoint:
        raise ArtefactError(
            f"it is of another model ({found.model!r}, checkpoint {found.checkpoint[:12] or 'unknown'}; this is "
            f"{checkpoint[:12]}): compact the context with this engine's model folder"
        )


def check_rows(prefix: CompactPrefix, pool: DevicePool, heads: Heads) -> None:
    """Raise ArtefactError, with the way out, for a prefix whose rows `pool` cannot hold exactly."""
    spec = pool.spec
    family = _FAMILIES.get(frozenset(b.role for b in spec.buffers))
    if pool.variant or family != prefix.manifest.family:
        raise ArtefactError(
            "it, or this engine's cache, is neither plain K and V of every layer nor rows of MLA of every layer: only "
            "those are served by SGLang; use kvtier.connectors.transformers for others"
        )
    if any(layer.bias is not None or layer.fitted for layer in prefix.layers):
        raise ArtefactError(
            "it has biases or fitted values (--method am), which SGLang's attention cannot take: use --method kvzip, "
            "or kvtier.connectors.transformers"
        )
    counts = {int(kept.shape[0]) for layer in prefix.layers for kept in layer.kept}
    if len(counts) != 1:
        raise ArtefactError(
            f"its heads keep {min(counts)} to {max(counts)} rows, and a page holds as many of each: compact with "
            "--selector uniform instead of pair or head"
        )
    if counts.pop() % spec.page_tokens:
        raise ArtefactError(
            f"its rows are not whole pages of {spec.page_tokens} tokens: compact with --page-tokens {spec.page_tokens}"
        )
    if len(prefix.layers) != spec.num_layers:
        raise ArtefactError(
            f"it has {len(prefix.layers)} layers and this rank {spec.num_layers}: a stage of a pipeline serves no "
            "prefix; use --pp-size 1 (--tp-size may be larger), or remove the option compacted"
        )
    other = [b.dtype for b in spec.buffers if b.role not in (Role.INDEX_KEY, Role.OPAQUE) and b.dtype not in _DTYPES]
    if other:
        raise ArtefactError(f"this engine's cache is {other[0].value}: use --kv-cache-dtype auto, or bf16 for MLA")
    for n, layer in enumerate(prefix.layers):
        of_layer = [b for b in spec.buffers if b.layer == n]
        if len(layer.kept) != heads.total or not all(_fits(b, layer, spec.page_tokens) for b in of_layer):
            raise ArtefactError(f"layer {n}: its heads are not those of this engine")
    _check_groups(prefix, spec)


def _fits(buffer: BufferSpec, layer: CompactLayer, page_tokens: int) -> bool:
    dims = {role: int(rows[0].shape[1]) for role, rows in layer.rows.items()}
    if buffer.role in _ROWS:
        return dims[_ROWS[buffer.role]] == buffer.dim
    if buffer.role is Role.LATENT:
        return dims["latent"] + dims["rotary_key"] == buffer.dim
    if buffer.role is Role.OPAQUE:
        scales = dims["latent"] // _PACKED_GROUP * _SCALE_BYTES
        return not dims["latent"] % _PACKED_GROUP and dims["latent"] + scales + 2 * dims["rotary_key"] == buffer.dim
    return dims.get("index_keys") == _INDEX_DIM and buffer.dim == page_tokens * (_INDEX_DIM + _SCALE_BYTES)


def _check_groups(prefix: CompactPrefix, spec: PageSpec) -> None:
    """Layers that use one indexer's choice find a token in the same slot: they must keep the same ones."""
    leaders = {b.layer for b in spec.buffers if b.role is Role.INDEX_KEY}
    leader = 0
    for n, layer in enumerate(prefix.layers if leaders else ()):
        if n in leaders:
            leader = n
        elif not torch.equal(layer.kept[0], prefix.layers[leader].kept[0]):
            raise ArtefactError(
                f"layers {leader} and {n} share the choice of one indexer and keep different rows: compact with "
                "--method kvzip, which keeps one set for each such group"
            )


def arrays_of(prefix: CompactPrefix, spec: PageSpec, heads: Heads, form: LatentForm | None) -> tuple[torch.Tensor, ...]:
    """The pages that `prefix` is, which has passed `check_rows`: for each buffer of a page ``[pages, heads, tokens,
    dim]``, without tokens where it has one row per page. form: of MLA."""
    found = []
    for b in spec.buffers:
        rows = prefix.layers[b.layer].rows
        if b.role in _ROWS:
            part: Sequence[torch.Tensor] = rows[_ROWS[b.role]][heads.first : heads.first + heads.count]
            lines = torch.stack(list(part)).to(_DTYPES[b.dtype])
        elif form is None:
            raise ArtefactError("rows of MLA in an engine of which nobody said how it writes them")
        elif b.role is Role.INDEX_KEY:
            lines = index_pages(rows["index_keys"][0], rows["rotary_key"][0].shape[1], spec.page_tokens, form)[None]
        else:
            latent, rotary = rows["latent"][0], _paired(rows["rotary_key"][0], form.pairs)
            lines = packed(latent, rotary) if b.role is Role.OPAQUE else torch.cat([latent, rotary], dim=1)
            lines = lines.to(_DTYPES.get(b.dtype, torch.uint8))[None]
        pages = lines.reshape(b.heads, -1, b.tokens, b.dim).transpose(0, 1).contiguous()
        found.append(pages if b.tokens == spec.page_tokens else pages[:, :, 0])
    return tuple(found)


def _paired(rotary: torch.Tensor, pairs: bool) -> torch.Tensor:
    """Columns ``[rows, dim]`` as they are, first components before second ones, or pair by pair."""
    if not pairs:
        return rotary
    half = rotary.shape[1] // 2
    return torch.stack([rotary[:, :half], rotary[:, half:]], dim=2).reshape(rotary.shape)


def index_pages(keys: torch.Tensor, rotary_dim: int, page_tokens: int, form: LatentForm) -> torch.Tensor:
    """Index keys ``[rows, 128]`` as uint8 ``[pages, page_tokens * 132]``: the keys of a page in FP8, then its fp32
    scales. rotary_dim: leading columns with a position."""
    rows = torch.cat([_paired(keys[:, :rotary_dim], form.index_pairs), keys[:, rotary_dim:]], dim=1).float()
    if form.index_turned:
        rows = rows @ hadamard(_INDEX_DIM)
    values, scales = _fp8(rows, floor=1e-4)
    bits = [values.view(torch.uint8).reshape(-1, page_tokens * _INDEX_DIM)]
    bits.append(scales.view(torch.uint8).reshape(-1, page_tokens * _SCALE_BYTES))
    return torch.cat(bits, dim=1)


def packed(latent: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Rows of DSA as its FP8 cache has them: uint8 ``[rows, latent + latent / 128 * 4 + 2 * rotary]``."""
    values, scales = _fp8(latent.float().reshape(len(latent), -1, _PACKED_GROUP), floor=1e-30)
    parts = (values, scales, rotary.to(torch.bfloat16))
    return torch.cat([part.contiguous().view(torch.uint8).reshape(len(latent), -1) for part in parts], dim=1)


def _fp8(rows: torch.Tensor, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`rows` over their last axis as e4m3 and fp32 scales ``[..., 1]``. floor: the least maximum that sets a scale."""
    scales = rows.abs().amax(dim=-1, keepdim=True).clamp(min=floor) / _FP8_MAX
    return (rows / scales).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn), scales


def hadamard(dim: int) -> torch.Tensor:
    """The symmetric, orthogonal matrix ``[dim, dim]`` of Sylvester's order; dim: a power of two."""
    found = torch.ones(1, 1)
    while found.shape[0] < dim:
        found = torch.cat([torch.cat([found, found], dim=1), torch.cat([found, -found], dim=1)])
    return found.mul(dim**-0.5)
