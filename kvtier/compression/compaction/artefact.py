"""CompactPrefix: the rows, biases and fitted values that stand for a context, as one object and as one file.

The file is safetensors with a JSON manifest in it (`docs/formats.md`), version 1. Reading executes nothing, allocates
no more than the file's own length, and refuses whatever does not add up, its checksum last.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvtier.compression.compaction.manifest import (
    KEY_PREFIX,
    ROLES,
    LayerManifest,
    Manifest,
    TensorEntry,
    checksum_of,
    header_bytes,
    header_of,
    read_header,
)
from kvtier.compression.compaction.prefix import Compaction, LayerSelection
from kvtier.errors import ArtefactError, ConfigError

_TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32}
_NAMES = {dtype: name for name, dtype in _TORCH.items()}


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Whose rows these are. family: ``dense`` or ``mla``. name: the model's, never a path. weights: its fingerprint.
    checkpoint: that of its files, empty where it has none that can be read."""

    family: str
    name: str
    weights: str
    checkpoint: str = ""


@dataclass(frozen=True, slots=True)
class CompactLayer:
    """One layer. kept, bias: as in `LayerSelection`. rows: by role, per physical head ``[kept, dim]``, in the dtype of
    the cache; dense ``keys`` and ``values`` (the fitted ones where `fitted`); MLA ``latent``, ``rotary_key``,
    ``index_keys`` where the layer has an indexer, and ``fitted`` where values are fitted."""

    kept: tuple[torch.Tensor, ...]
    rows: Mapping[str, tuple[torch.Tensor, ...]]
    bias: tuple[torch.Tensor, ...] | None = None
    fitted: bool = False

    @property
    def selection(self) -> LayerSelection:
        return LayerSelection(self.kept, self.bias)


@dataclass(frozen=True, slots=True)
class CompactPrefix:
    """A compacted context. Tensors are on the CPU, and must not be changed."""

    manifest: Manifest
    layers: tuple[CompactLayer, ...]

    @staticmethod
    def of(
        model: ModelIdentity,
        token_ids: Sequence[int],
        compaction: Compaction,
        rows: Sequence[Mapping[str, tuple[torch.Tensor, ...]]],
        *,
        original_bytes: int,
    ) -> CompactPrefix:
        """From a method's answer and, per layer, the original rows at its positions by role; fitted values are taken
        from `compaction`. Raises ConfigError where they do not fit each other."""
        compaction.check()
        if len(token_ids) != compaction.tokens or len(rows) != len(compaction.layers):
            raise ConfigError(
                f"a compaction of {compaction.tokens} tokens and {len(compaction.layers)} layers for "
                f"{len(token_ids)} token ids and {len(rows)} layers of rows"
            )
        layers = []
        for selection, given in zip(compaction.layers, rows, strict=True):
            found = {role: tuple(t.detach().cpu().contiguous() for t in heads) for role, heads in given.items()}
            if selection.values is not None:
                dtype = next(iter(found.values()))[0].dtype
                fitted = tuple(v.detach().to(device="cpu", dtype=dtype).contiguous() for v in selection.values)
                found["values" if model.family == "dense" else "fitted"] = fitted
            kept = tuple(k.cpu() for k in selection.kept)
            bias = None if selection.bias is None else tuple(b.detach().cpu() for b in selection.bias)
            ordered = {role: found[role] for role in ROLES[model.family] if role in found}
            layers.append(CompactLayer(kept, ordered, bias, selection.values is not None))
        broken = _not_finite(layers)
        if broken:
            raise ConfigError(f"{broken}: the model computes them so in this dtype; load it in bf16 or fp32")
        first = layers[0].rows[ROLES[model.family][0]][0]
        if first.dtype not in _NAMES:
            raise ConfigError(f"rows of {first.dtype}: a cache of bf16, fp16 or fp32 can be compacted")
        manifest = Manifest(
            family=model.family,
            model=model.name,
            weights=model.weights,
            dtype=_NAMES[first.dtype],
            tokens=compaction.tokens,
            tokens_sha256=tokens_sha256(token_ids),
            recipe=compaction.recipe,
            layers=tuple(_describe(layer) for layer in layers),
            original_bytes=original_bytes,
            figures=dict(compaction.figures),
            layer_figures={name: tuple(values) for name, values in compaction.layer_figures.items()},
            checkpoint=model.checkpoint,
        )
        return CompactPrefix(manifest, tuple(layers))

    @property
    def tokens(self) -> int:
        """Of the context; the position of the token that comes next."""
        return self.manifest.tokens

    def check_model(self, identity: ModelIdentity) -> None:
        """Raise ArtefactError where this is another model's."""
        mine = self.manifest
        if mine.weights != identity.weights or mine.family != identity.family:
            raise ArtefactError(
                f"this prefix was compacted for model {mine.model!r} with weights {mine.weights[:12]}, this is "
                f"{identity.name!r} with {identity.weights[:12]}: compact the context with this model, or, where it is "
                f"the same one in another dtype, load it in that of the rows, {mine.dtype}"
            )

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Raise ArtefactError where it stands for other tokens."""
        if len(token_ids) != self.tokens or tokens_sha256(token_ids) != self.manifest.tokens_sha256:
            raise ArtefactError(
                f"this prefix stands for {self.tokens} other tokens than the {len(token_ids)} given: compact them, or "
                "give the context it was made from"
            )

    def tensors(self) -> dict[str, torch.Tensor]:
        """By the names of the manifest, in the order of the file."""
        found: dict[str, torch.Tensor] = {}
        for n, layer in enumerate(self.layers):
            found[f"{n}.kept"] = torch.cat(layer.kept).to(torch.int32)
            if layer.bias is not None:
                found[f"{n}.bias"] = torch.cat(layer.bias)
            for role, heads in layer.rows.items():
                found[f"{n}.{role}"] = torch.cat(heads)
        return {name: found[name] for name in self.manifest.tensors()}

    @property
    def key(self) -> str:
        """What clients of an engine call this very prefix (`extra_key`)."""
        return KEY_PREFIX + self.checksum()

    def checksum(self) -> str:
        """Of its file: equal for equal objects only."""
        return self._checksum({name: bytes_of(tensor) for name, tensor in self.tensors().items()})

    def to_bytes(self) -> bytes:
        data = {name: bytes_of(tensor) for name, tensor in self.tensors().items()}
        return b"".join([header_of(self.manifest, self._checksum(data)), *data.values()])

    def _checksum(self, data: Mapping[str, memoryview]) -> str:
        entries = self.manifest.tensors()
        return checksum_of(self.manifest.encoded(), ((name, entries[name], raw) for name, raw in data.items()))

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises ConfigError where it cannot be written."""
        try:
            handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(self.to_bytes())
                Path(name).replace(path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as e:
            raise ConfigError(
                f"{str(path)!r} cannot be written ({e.strerror}): give a path in a writable folder"
            ) from e

    @staticmethod
    def load(path: Path) -> CompactPrefix:
        """Read a file. Raises ArtefactError for one that is not whole and of this version."""
        try:
            raw = path.read_bytes()
        except OSError as e:
            raise ArtefactError(f"{str(path)!r} cannot be read ({e.strerror}): give a file of kvtier compact") from e
        try:
            return CompactPrefix.from_bytes(raw)
        except ArtefactError as e:
            raise ArtefactError(f"{path.name}: {e}") from None

    @staticmethod
    def from_bytes(raw: bytes | bytearray) -> CompactPrefix:
        """Raises ArtefactError for bytes that are not exactly one object of this version."""
        end = header_bytes(bytes(raw[:8]))
        described = read_header(bytes(raw[:end]), len(raw))
        manifest, at = described.manifest, described.data_offset
        entries, views = manifest.tensors(), {}
        memory = memoryview(raw)
        for name, entry in entries.items():
            views[name] = memory[at : at + entry.nbytes]
            at += entry.nbytes
        found = checksum_of(manifest.encoded(), ((name, entries[name], view) for name, view in views.items()))
        if found != described.checksum:
            raise ArtefactError("its bytes do not match its checksum: the file is damaged; compact the context again")
        return CompactPrefix.assemble(manifest, {name: tensor_of(views[name], entries[name]) for name in entries})

    @staticmethod
    def assemble(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> CompactPrefix:
        """From every tensor that the manifest names. Raises ArtefactError where positions or biases are none."""
        prefix = CompactPrefix(manifest, tuple(_layer(n, la, tensors) for n, la in enumerate(manifest.layers)))
        try:
            Compaction(manifest.recipe, manifest.tokens, tuple(layer.selection for layer in prefix.layers)).check()
        except ConfigError as e:
            raise ArtefactError(f"its sets are not those of a context: {e}") from None
        broken = _not_finite(prefix.layers)
        if broken:
            raise ArtefactError(f"{broken}: it was written from damaged rows; compact the context again")
        return prefix


def tokens_sha256(token_ids: Sequence[int]) -> str:
    """Hex SHA-256 of token ids as u32, little-endian. Raises ConfigError for what is none."""
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) >= 1 << 32:
        raise ConfigError("token ids: give one sequence of integers from 0 up, without a batch axis")
    return hashlib.sha256(ids.astype("<u4").tobytes()).hexdigest()


def _not_finite(layers: Sequence[CompactLayer]) -> str:
    """Which rows hold numbers that are none; empty where all are fine."""
    for n, layer in enumerate(layers):
        for role, heads in layer.rows.items():
            if not all(bool(torch.isfinite(rows).all()) for rows in heads):
                return f"layer {n}: {role} are not all finite"
    return ""


def _describe(layer: CompactLayer) -> LayerManifest:
    kept = tuple(int(k.shape[0]) for k in layer.kept)
    for role, heads in layer.rows.items():
        if tuple(int(t.shape[0]) for t in heads) != kept or len({(t.shape[1:], t.dtype) for t in heads}) != 1:
            raise ConfigError(f"rows {role!r} of a layer do not fit its positions: {[tuple(t.shape) for t in heads]}")
    return LayerManifest(
        kept=kept,
        dims={role: int(heads[0].shape[1]) for role, heads in layer.rows.items()},
        bias_heads=0 if layer.bias is None else len(layer.bias),
        fitted=layer.fitted,
    )


def _layer(n: int, described: LayerManifest, tensors: Mapping[str, torch.Tensor]) -> CompactLayer:
    kept = tuple(part.to(torch.int64) for part in tensors[f"{n}.kept"].split(list(described.kept)))
    bias = None
    if described.bias_heads:
        group = described.bias_heads // len(described.kept)
        bias = tensors[f"{n}.bias"].split([rows for rows in described.kept for _ in range(group)])
    rows = {role: tensors[f"{n}.{role}"].split(list(described.kept)) for role in described.dims}
    return CompactLayer(kept, rows, bias, described.fitted)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).numpy().reshape(-1)).cast("B")


def tensor_of(view: memoryview, entry: TensorEntry) -> torch.Tensor:
    flat: torch.Tensor = torch.frombuffer(bytearray(view), dtype=_TORCH[entry.dtype])
    return flat.reshape(entry.shape)
