"""What the file of a compacted prefix says of itself, read and checked without torch.

The file is one safetensors file; its ``__metadata__`` holds one entry, the manifest, as JSON (`docs/formats.md`).
Nothing is allocated by what a file claims: every size must add up to the bytes that are there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from kvtier.compression.compaction.recipe import Recipe
from kvtier.errors import ArtefactError, ConfigError

FORMAT = "kvtier-compact-prefix"
VERSION = 1
METADATA_KEY = "kvtier.compact_prefix"
HEADER_MAX_BYTES = 8 << 20
LAYERS_MAX = 4096
HEADS_MAX = 4096
DIM_MAX = 1 << 16
TOKENS_MAX = (1 << 31) - 1

ROLES = {"dense": ("keys", "values"), "mla": ("latent", "rotary_key", "index_keys", "fitted")}
"""What a row holds, by family, in the order of the file. MLA layers have `index_keys` where they have an indexer, and
`fitted` where a method fitted latents that take the place of `latent` as values."""

KEY_PREFIX = "kvtier-compact:"
"""Of the names by which clients of an engine ask for a prefix."""

ROW_DTYPES = {"BF16": 2, "F16": 2, "F32": 4}
"""Element types of rows, as safetensors names them, and their bytes."""


@dataclass(frozen=True, slots=True)
class LayerManifest:
    """One layer. kept: rows per physical head. dims: elements of a row by role. bias_heads: query heads that have a
    bias over their rows; 0: there is none. fitted: the values are fitted, not those of the context."""

    kept: tuple[int, ...]
    dims: Mapping[str, int]
    bias_heads: int = 0
    fitted: bool = False

    @property
    def rows(self) -> int:
        return sum(self.kept)

    @property
    def bias_values(self) -> int:
        """Biases of all query heads."""
        if not self.bias_heads:
            return 0
        return self.rows * (self.bias_heads // len(self.kept))


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything but the tensors. dtype: of the rows, as safetensors names it. tokens: of the context, removed ones
    included; the next token's position. tokens_sha256: of the token ids as u32, little-endian, in hex.
    original_bytes: of the rows that the context's whole cache had. figures, layer_figures: what the method measured.
    checkpoint: fingerprint of the model's files, empty where it had none; engines that load them know no other."""

    family: str
    model: str
    weights: str
    dtype: str
    tokens: int
    tokens_sha256: str
    recipe: Recipe
    layers: tuple[LayerManifest, ...]
    original_bytes: int
    figures: Mapping[str, float] = field(default_factory=dict)
    layer_figures: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    checkpoint: str = ""

    @property
    def rows(self) -> int:
        return sum(layer.rows for layer in self.layers)

    @property
    def tokens_removed(self) -> float:
        """Share of (layer, physical head, token) rows that are gone."""
        heads = sum(len(layer.kept) for layer in self.layers)
        return 1.0 - self.rows / (heads * self.tokens)

    @property
    def compact_bytes(self) -> int:
        """Rows, fitted values, biases and positions."""
        return sum(t.nbytes for t in self.tensors().values())

    @property
    def bytes_removed(self) -> float:
        """Share of the original rows' bytes that is saved; negative where the object is larger."""
        return 1.0 - self.compact_bytes / self.original_bytes

    def tensors(self) -> dict[str, TensorEntry]:
        """Every tensor of the file by name, in the order of its bytes: four-byte elements first."""
        found: dict[str, TensorEntry] = {}
        for n, layer in enumerate(self.layers):
            found[f"{n}.kept"] = TensorEntry("I32", (layer.rows,))
            if layer.bias_heads:
                found[f"{n}.bias"] = TensorEntry("F32", (layer.bias_values,))
            for role, dim in layer.dims.items():
                found[f"{n}.{role}"] = TensorEntry(self.dtype, (layer.rows, dim))
        return dict(sorted(found.items(), key=lambda item: (-item[1].itemsize, item[0])))

    def as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "family": self.family,
            "model": {
                "name": self.model,
                "weights": self.weights,
                "checkpoint": self.checkpoint,
                "dtype": self.dtype,
            },
            "context": {"tokens": self.tokens, "sha256": self.tokens_sha256, "bytes": self.original_bytes},
            "recipe": {
                "method": self.recipe.method,
                "ratio": self.recipe.ratio,
                "selector": self.recipe.selector,
                "seed": self.recipe.seed,
                "queries": self.recipe.queries,
                "options": dict(self.recipe.options),
            },
            "layers": [
                {"kept": list(la.kept), "dims": dict(la.dims), "bias_heads": la.bias_heads, "fitted": la.fitted}
                for la in self.layers
            ],
            "figures": {name: _finite(value) for name, value in self.figures.items()},
            "layer_figures": {name: [_finite(v) for v in values] for name, values in self.layer_figures.items()},
        }

    def encoded(self) -> str:
        return json.dumps(self.as_json(), separators=(",", ":"), sort_keys=True, allow_nan=False)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return {"I32": 4, **ROW_DTYPES}[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


def checksum_of(manifest: str, tensors: Iterable[tuple[str, TensorEntry, Any]]) -> str:
    """xxh3-128 in hex over the manifest and every tensor: its name, type, shape and bytes, in the order of the file."""
    h = xxhash.xxh3_128(manifest.encode())
    for name, entry, data in tensors:
        h.update(json.dumps([name, entry.dtype, list(entry.shape)], separators=(",", ":")).encode())
        h.update(data)
    return str(h.hexdigest())


def header_of(manifest: Manifest, checksum: str) -> bytes:
    """Everything before the first tensor's bytes."""
    header: dict[str, Any] = {
        "__metadata__": {METADATA_KEY: f'{{"checksum":"{checksum}","manifest":{manifest.encoded()}}}'}
    }
    at = 0
    for name, entry in manifest.tensors().items():
        header[name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        at += entry.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


@dataclass(frozen=True, slots=True)
class Described:
    """A file's manifest, the checksum that it claims, and where its tensors begin."""

    manifest: Manifest
    checksum: str
    data_offset: int

    @property
    def key(self) -> str:
        """What clients of an engine call this very file."""
        return KEY_PREFIX + self.checksum


def read_header(head: bytes, total_bytes: int | None) -> Described:
    """Parse the beginning of a file of `total_bytes` bytes (None: its tensors are elsewhere); `head` holds at least
    `header_bytes(head)` of them. Raises ArtefactError for whatever is not exactly such a file."""
    end = header_bytes(head)
    if end > len(head) or (total_bytes is not None and end > total_bytes):
        raise ArtefactError(f"the header says {end - 8} bytes, the file has {total_bytes}: it was cut off")
    header = _object(_json(head[8:end], "header"), "header")
    metadata = _object(header.pop("__metadata__", None), "__metadata__")
    packed = metadata.get(METADATA_KEY)
    if not isinstance(packed, str):
        raise ArtefactError("a safetensors file, but no compacted prefix: it has no manifest")
    outer = _object(_json(packed.encode(), "manifest"), "manifest")
    manifest = manifest_of(outer.get("manifest"))
    checksum = _text(outer, "checksum", 32)
    at = 0
    expected = manifest.tensors()
    if set(header) != set(expected):
        raise ArtefactError("the file's tensors are not those that its manifest names: it is damaged")
    for name, entry in expected.items():
        claimed = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [at, at + entry.nbytes]}
        if header[name] != claimed:
            raise ArtefactError(f"tensor {name!r} is not as the manifest says: the file is damaged")
        at += entry.nbytes
    if total_bytes is not None and end + at != total_bytes:
        raise ArtefactError(
            f"the manifest's tensors take {at} bytes, the file has {total_bytes - end} for them: it was cut off, or "
            "its manifest is wrong"
        )
    return Described(manifest, checksum, end)


def header_bytes(head: bytes) -> int:
    """Where the tensors begin, by the first 8 bytes of a file. Raises ArtefactError for a size that is none."""
    size = int.from_bytes(head[:8], "little")
    if len(head) < 8 or not 2 <= size <= HEADER_MAX_BYTES:
        raise ArtefactError(f"not a compacted prefix: its header would have {size} bytes (2 to {HEADER_MAX_BYTES})")
    return 8 + size


def manifest_of(value: Any) -> Manifest:
    """The manifest in parsed JSON. Raises ArtefactError, naming the field, for whatever this version does not know."""
    top = _object(value, "manifest")
    if top.get("format") != FORMAT:
        raise ArtefactError(f"format is {str(top.get('format'))[:40]!r}, not {FORMAT!r}")
    if top.get("version") != VERSION:
        raise ArtefactError(
            f"version {str(top.get('version'))[:40]} of a compacted prefix; this kvtier reads version {VERSION}: "
            "compact the context again, or use the kvtier that wrote it"
        )
    family = _text(top, "family")
    if family not in ROLES:
        raise ArtefactError(f"family {family!r}: not one of {', '.join(ROLES)}")
    model, context = _object(top.get("model"), "model"), _object(top.get("context"), "context")
    dtype = _text(model, "dtype")
    if dtype not in ROW_DTYPES:
        raise ArtefactError(f"dtype {dtype!r}: not one of {', '.join(ROW_DTYPES)}")
    tokens = _number(context, "tokens", 1, TOKENS_MAX)
    layers = top.get("layers")
    if not isinstance(layers, list) or not 1 <= len(layers) <= LAYERS_MAX:
        raise ArtefactError(f"layers: not a list of 1 to {LAYERS_MAX}")
    figures = _object(top.get("figures"), "figures")
    per_layer = _object(top.get("layer_figures"), "layer_figures")
    for name, values in per_layer.items():
        if not isinstance(values, list) or len(values) != len(layers):
            raise ArtefactError(f"layer_figures {name[:40]!r}: not one number per layer")
    return Manifest(
        family=family,
        model=_text(model, "name"),
        weights=_text(model, "weights"),
        dtype=dtype,
        tokens=tokens,
        tokens_sha256=_text(context, "sha256", 64),
        recipe=_recipe(_object(top.get("recipe"), "recipe")),
        layers=tuple(_layer(n, layer, family, tokens) for n, layer in enumerate(layers)),
        original_bytes=_number(context, "bytes", 1, 1 << 62),
        figures={name: _figure(name, value) for name, value in figures.items()},
        layer_figures={name: tuple(_figure(name, v) for v in values) for name, values in per_layer.items()},
        checkpoint=_text(model, "checkpoint"),
    )


def _layer(n: int, value: Any, family: str, tokens: int) -> LayerManifest:
    layer = _object(value, f"layer {n}")
    kept, dims = layer.get("kept"), _object(layer.get("dims"), f"dims of layer {n}")
    if not isinstance(kept, list) or not 1 <= len(kept) <= HEADS_MAX:
        raise ArtefactError(f"layer {n}: kept is not a list of 1 to {HEADS_MAX} numbers")
    counts = tuple(_whole(rows, f"kept of layer {n}", 1, tokens) for rows in kept)
    needed = ROLES[family][:2]
    unknown = set(dims) - set(ROLES[family])
    if unknown or not set(needed) <= set(dims):
        raise ArtefactError(f"layer {n}: its rows hold {sorted(dims)[:8]}, not {', '.join(needed)}")
    bias_heads = _number(layer, "bias_heads", 0, HEADS_MAX)
    if bias_heads % len(counts):
        raise ArtefactError(f"layer {n}: biases of {bias_heads} query heads for {len(counts)} physical heads")
    fitted = layer.get("fitted")
    if not isinstance(fitted, bool) or (family == "mla" and fitted != ("fitted" in dims)):
        raise ArtefactError(f"layer {n}: 'fitted' does not say whether values are fitted")
    if family == "mla" and len(counts) != 1:
        raise ArtefactError(f"layer {n}: {len(counts)} physical heads; MLA has one")
    return LayerManifest(
        kept=counts,
        dims={role: _number(dims, role, 1, DIM_MAX) for role in ROLES[family] if role in dims},
        bias_heads=bias_heads,
        fitted=fitted,
    )


def _recipe(value: Mapping[str, Any]) -> Recipe:
    options = _object(value.get("options"), "options of the recipe")
    ratio = value.get("ratio")
    if isinstance(ratio, bool) or not isinstance(ratio, int | float):
        raise ArtefactError("recipe: ratio is no number")
    if not all(isinstance(v, str) for v in options.values()):
        raise ArtefactError("recipe: an option is no text")
    try:
        return Recipe(
            method=_text(value, "method"),
            ratio=float(ratio),
            selector=_text(value, "selector"),
            seed=_number(value, "seed", -(1 << 63), (1 << 64) - 1),
            queries=_text(value, "queries"),
            options=dict(options),
        )
    except (ConfigError, OverflowError) as e:
        raise ArtefactError(f"recipe: {e}") from None


def _json(raw: bytes, what: str) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise ArtefactError(f"the {what} is no JSON ({type(e).__name__}): not a compacted prefix, or damaged") from None


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ArtefactError(f"{what} is missing or no object: not a compacted prefix, or damaged")
    return value


def _text(values: Mapping[str, Any], name: str, length: int | None = None) -> str:
    text = values.get(name)
    if not isinstance(text, str) or (length is not None and len(text) != length):
        raise ArtefactError(f"{name!r} is missing or not a text{'' if length is None else f' of {length} characters'}")
    return text


def _number(values: Mapping[str, Any], name: str, low: int, high: int) -> int:
    return _whole(values.get(name), name, low, high)


def _whole(value: Any, name: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ArtefactError(f"{name}: not a whole number from {low} to {high}")
    return value


def _figure(name: str, value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        raise ArtefactError(f"figure {name[:40]!r} is no number")
    return float(value)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
