"""CompactStore: compacted prefixes in the same tiers as any other page, under namespaces of their own.

A prefix is found by its model, its tokens and its recipe, and by nothing else: its pages' keys come from a namespace
that says so (`docs/formats.md`), so that the plain KV of the same tokens never meets it. It is stored whole, bit for
bit, or with a codec: then rows are pages of that codec's form, and positions, biases, index keys and the manifest stay
as they are. Threads: any; calls block.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from kvtier.abc.codec import Codec
from kvtier.build import open_codec, open_store
from kvtier.codecs.registry import codec as codec_named
from kvtier.compression.compaction.artefact import CompactPrefix, ModelIdentity, bytes_of, tensor_of, tokens_sha256
from kvtier.compression.compaction.manifest import VERSION, Manifest, header_bytes, header_of, read_header
from kvtier.compression.compaction.recipe import Recipe
from kvtier.config import Config
from kvtier.errors import ArtefactError, CapacityError
from kvtier.hot import HotLayout, HotPool
from kvtier.keys import CodecPolicy, Namespace
from kvtier.mover import PageMover, policy_of
from kvtier.spec import BufferSpec, DType, PageSpec, Role
from kvtier.store import TieredStore

_log = logging.getLogger(__name__)

CHUNK_BYTES = 32 << 10
"""Bytes of one page of what is stored as it is."""
PAGE_ROWS = 512
"""Rows of one page of a codec's form: all layers' rows, one after the other."""
PREFIX_BYTES_MAX = 64 << 30
WAIT_S = 120.0
"""How long the work of one part may take before it is given up, whatever the tiers do."""

_DTYPE = {"BF16": DType.BF16, "F16": DType.FP16, "F32": DType.FP32}
_DIGEST_BYTES = 16
"""Behind what is stored beside coded rows: xxh3-128 of it, big-endian."""
_CHUNKS = PageSpec(1, (BufferSpec(Role.OPAQUE, 0, 1, 1, CHUNK_BYTES, DType.UINT8),))
_CODED_VERSION = 2
"""Of prefixes whose rows go through a codec; 1 named them without the object they are of."""
_CODED = {"dense": (("keys", "values"),), "mla": (("latent", "rotary_key"), ("fitted",))}
"""Roles that a codec takes, by family; those of one entry share a page."""


@dataclass(frozen=True, slots=True)
class _Stream:
    """Rows of several layers with one shape. columns: how many each role has."""

    roles: tuple[str, ...]
    columns: tuple[int, ...]
    layers: tuple[int, ...]
    rows: int

    @property
    def pages(self) -> int:
        return -(-self.rows // PAGE_ROWS)

    def spec(self, family: str, dtype: DType) -> PageSpec:
        if family == "dense":
            parts = [(Role.K, self.columns[0], (0, 0)), (Role.V, self.columns[1], (0, 0))]
        elif len(self.columns) == 2:
            latent, rope = self.columns
            rotary = (latent, latent + rope) if latent % 16 == 0 == rope % 16 else (0, 0)
            parts = [(Role.LATENT, latent + rope, rotary)]
        else:
            parts = [(Role.V, self.columns[0], (0, 0))]
        return PageSpec(
            PAGE_ROWS, tuple(BufferSpec(role, 0, 1, PAGE_ROWS, dim, dtype, rotary=at) for role, dim, at in parts)
        )


@dataclass(frozen=True, slots=True)
class _Name:
    """What a prefix is found by."""

    family: str
    model: str
    weights: str
    tokens_sha256: str
    recipe: Recipe

    @staticmethod
    def of(manifest: Manifest) -> _Name:
        return _Name(manifest.family, manifest.model, manifest.weights, manifest.tokens_sha256, manifest.recipe)

    def hashes(self, part: str, pages: Iterable[int]) -> list[bytes]:
        """Of pages of one part, by the tokens that the prefix stands for."""
        return [hashlib.sha256(f"{self.tokens_sha256} {part} {n}".encode()).digest() for n in pages]


class CompactStore:
    """Binds a store to compacted prefixes; any number of models may share it."""

    def __init__(self, store: TieredStore, config: Config, *, coded: bool = False) -> None:
        """coded: rows go through the codec that `config` names for cold pages."""
        self.store = store
        self._config = config
        self._coded = coded
        self._requests = itertools.count()

    @staticmethod
    def open(config: Config, *, coded: bool = False) -> CompactStore:
        """Open the tiers of `config`. Raises ConfigError or TierPathError."""
        return CompactStore(open_store(config), config, coded=coded)

    def put(self, prefix: CompactPrefix) -> None:
        """Store `prefix`: in host memory when this returns, and on its way to the tiers below. Raises CapacityError
        where not all of it found room."""
        manifest, name_of = prefix.manifest, _Name.of(prefix.manifest)
        tensors = prefix.tensors()
        streams = self._streams(manifest)
        names = {f"{n}.{role}" for stream in streams for role in stream.roles for n in stream.layers}
        content = prefix.checksum() if names else ""
        if names:
            rest = (bytes_of(t) for name, t in tensors.items() if name not in names)
            blob = _sealed(b"".join([header_of(manifest, content), *rest]))
        else:
            blob = prefix.to_bytes()
        raw = len(blob).to_bytes(8, "little") + blob
        chunks = np.zeros((-(-len(raw) // CHUNK_BYTES), 1, CHUNK_BYTES), np.uint8)
        chunks.reshape(-1)[: len(raw)] = np.frombuffer(raw, np.uint8)
        for i, stream in enumerate(streams):
            arrays = []
            for roles in _buffers(stream):
                rows = torch.zeros(
                    1, stream.pages * PAGE_ROWS, sum(stream.columns[stream.roles.index(r)] for r in roles)
                )
                rows = rows.to(tensors[f"{stream.layers[0]}.{roles[0]}"].dtype)
                parts = [torch.cat([tensors[f"{n}.{role}"] for role in roles], dim=1) for n in stream.layers]
                rows[0, : stream.rows] = torch.cat(parts)
                arrays.append(rows)
            spec = stream.spec(manifest.family, _DTYPE[manifest.dtype])
            valid = [min(PAGE_ROWS, stream.rows - p * PAGE_ROWS) for p in range(stream.pages)]
            mover = self._mover(name_of, spec, open_codec(self._config, spec))
            self._store(mover, arrays, name_of, f"rows{i} {content}", valid)
        # Last: its first page is what a prefix is found by.
        mover = self._mover(name_of, _CHUNKS, codec_named("raw"))
        self._store(mover, [chunks], name_of, "chunk", [1] * len(chunks))

    def get(self, identity: ModelIdentity, token_ids: Sequence[int], recipe: Recipe) -> CompactPrefix | None:
        """The prefix that was stored for these tokens, this model and this recipe, or None: there is none, or not all
        of it is there and whole. Every page asked for is counted."""
        wanted = _Name(identity.family, identity.name, identity.weights, tokens_sha256(token_ids), recipe)
        mover = self._mover(wanted, _CHUNKS, codec_named("raw"))
        blob: bytes | None = None
        try:
            blob = self._blob(mover, wanted)
            if blob is None:
                return None
            prefix = self._decoded(blob, wanted) if self._coded else CompactPrefix.from_bytes(blob)
            if prefix is not None:
                prefix.check_model(identity)
                prefix.check_tokens(token_ids)
                if prefix.manifest.recipe.encoded() != recipe.encoded():
                    raise ArtefactError("a stored prefix was made in another way than its key says")
            return prefix
        except ArtefactError as e:
            _log.warning("a stored compacted prefix cannot be used, and is a miss: %s", e)
            # Else what is stored in its place would find these pages there, and leave them.
            bad = range(1 if blob is None else -(-(8 + len(blob)) // CHUNK_BYTES))
            self.store.delete(mover.namespace.page_keys(wanted.hashes("chunk", bad)))
            return None
        finally:
            mover.close()

    def close(self) -> None:
        """Let queued work end for a moment, then close the tiers. Safe to call twice."""
        self.store.close()

    def __enter__(self) -> CompactStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _streams(self, manifest: Manifest) -> list[_Stream]:
        """What goes through the codec; nothing where prefixes are stored whole."""
        if not self._coded:
            return []
        found: dict[tuple[tuple[str, ...], tuple[int, ...]], list[int]] = {}
        for roles in _CODED[manifest.family]:
            for n, layer in enumerate(manifest.layers):
                if all(role in layer.dims for role in roles):
                    found.setdefault((roles, tuple(layer.dims[role] for role in roles)), []).append(n)
        return [
            _Stream(roles, columns, tuple(layers), sum(manifest.layers[n].rows for n in layers))
            for (roles, columns), layers in found.items()
        ]

    def _blob(self, mover: PageMover, wanted: _Name) -> bytes | None:
        """What was stored as it is. Its first page says how long it is."""
        first = self._load(mover, wanted, "chunk", range(1))
        if first is None:
            return None
        head = first[0].reshape(-1).numpy().tobytes()
        size = int.from_bytes(head[:8], "little")
        if not 8 <= size <= PREFIX_BYTES_MAX:
            raise ArtefactError(f"a stored prefix claims {size} bytes")
        rest = self._load(mover, wanted, "chunk", range(1, -(-(8 + size) // CHUNK_BYTES)))
        return None if rest is None else (head + b"".join(t.numpy().tobytes() for t in rest))[8 : 8 + size]

    def _decoded(self, blob: bytes, wanted: _Name) -> CompactPrefix | None:
        """From what was stored as it is, and the rows' pages. None where one of those is missing."""
        if _sealed(blob[:-_DIGEST_BYTES]) != blob:
            raise ArtefactError("a stored prefix is not whole: parts of two lie in its place, or it is damaged")
        end = header_bytes(blob[:8])
        # Of a whole file the header would be followed by every tensor; here the coded ones are elsewhere.
        described = read_header(blob[:end], None)
        manifest = described.manifest
        entries = manifest.tensors()
        tensors: dict[str, torch.Tensor] = {}
        streams = self._streams(manifest)
        names = {f"{n}.{role}" for stream in streams for role in stream.roles for n in stream.layers}
        at = end
        for name, entry in entries.items():
            if name not in names:
                if at + entry.nbytes > len(blob) - _DIGEST_BYTES:
                    raise ArtefactError(f"a stored prefix ends before its tensor {name!r}")
                tensors[name] = tensor_of(memoryview(blob)[at : at + entry.nbytes], entry)
                at += entry.nbytes
        for i, stream in enumerate(streams):
            spec = stream.spec(manifest.family, _DTYPE[manifest.dtype])
            mover = self._mover(wanted, spec, open_codec(self._config, spec))
            try:
                arrays = self._load(mover, wanted, f"rows{i} {described.checksum}", range(stream.pages))
            finally:
                mover.close()
            if arrays is None:
                return None
            for roles, rows in zip(_buffers(stream), arrays, strict=True):
                columns = [stream.columns[stream.roles.index(role)] for role in roles]
                by_layer = rows[0, : stream.rows].split([manifest.layers[n].rows for n in stream.layers])
                for n, part in zip(stream.layers, by_layer, strict=True):
                    for role, tensor in zip(roles, part.split(columns, dim=1), strict=True):
                        tensors[f"{n}.{role}"] = tensor.contiguous()
        return CompactPrefix.assemble(manifest, tensors)

    def _namespace(self, name: _Name, spec: PageSpec, codec: Codec) -> Namespace:
        rows = CodecPolicy("whole", 1).encoded()
        if self._coded:
            cold = self._config.cold_page
            rows = CodecPolicy(cold.quant if cold is not None else "none", _CODED_VERSION).encoded()
        return Namespace.of(
            spec,
            policy_of(codec),
            model=name.model,
            weights=name.weights,
            dtype="",
            salt=self._config.salt,
            pruning=f"compact {VERSION} {name.family} {rows} {name.recipe.encoded()}",
        )

    def _mover(self, name: _Name, spec: PageSpec, codec: Codec) -> PageMover:
        namespace = self._namespace(name, spec, codec)
        return PageMover(
            self.store, spec, namespace, codec, workers=1, offload_wait_s=self._config.offload_wait, beside=True
        )

    def _store(self, mover: PageMover, arrays: Sequence[object], name: _Name, part: str, valid: Sequence[int]) -> None:
        layout = HotLayout.NHD if part == "chunk" else HotLayout.SEQ
        try:
            pool = HotPool.of(mover.spec, arrays, layout)
            hashes = name.hashes(part, range(len(valid)))
            result = mover.offload(pool, hashes, range(len(valid)), valid_tokens=valid).result(WAIT_S)
        finally:
            mover.close()
        keys = mover.namespace.page_keys(hashes)
        below = self.store.known_below(keys)
        # Without a tier below, a small host tier lets its first pages go for the last ones.
        gone = [a or b for a, b in zip(self.store.host.contains_many(keys), below, strict=True)].count(False)
        if not result.ok or (gone and not any(tier.capabilities.shared for tier in self.store.lower)):
            told = {outcome.value: n for outcome, n in result.outcomes.items()}
            raise CapacityError(
                f"not all of the compacted prefix found room ({told}, {gone} of them gone again): give the host tier "
                "more capacity"
            )

    def _load(self, mover: PageMover, name: _Name, part: str, pages: range) -> list[torch.Tensor] | None:
        """The buffers of these pages, or None where not all of them are there and whole."""
        if not pages:
            return []
        hashes = name.hashes(part, pages)
        request = f"compact#{next(self._requests)}"
        lookup = self.store.lookup(request, mover.namespace.page_keys(hashes), hashes=hashes)
        loaded = False
        try:
            self.store.hold(lookup)
            if self.store.wait(lookup) < len(pages) or not self.store.hold(lookup, len(pages)):
                return None
            arrays = [_empty(mover.spec, buffer, len(pages)) for buffer in mover.spec.buffers]
            layout = HotLayout.NHD if part == "chunk" else HotLayout.SEQ
            loaded = mover.onboard(lookup, HotPool.of(mover.spec, arrays, layout), range(len(pages))).result(WAIT_S).ok
            return arrays if loaded else None
        finally:
            self.store.settle(request, loaded=loaded)


def _sealed(blob: bytes) -> bytes:
    return blob + xxhash.xxh3_128_digest(blob)


def _buffers(stream: _Stream) -> tuple[tuple[str, ...], ...]:
    """Roles by the buffer of the page that holds them: MLA's latent and rotary key share one."""
    return (stream.roles,) if stream.roles[0] in ("latent", "fitted") else tuple((role,) for role in stream.roles)


_TORCH: Mapping[DType, torch.dtype] = {
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
    DType.FP32: torch.float32,
    DType.UINT8: torch.uint8,
}


def _empty(spec: PageSpec, buffer: BufferSpec, pages: int) -> torch.Tensor:
    rows = pages * spec.page_tokens
    shape = (pages, 1, buffer.dim) if spec is _CHUNKS else (buffer.heads, rows, buffer.dim)
    return torch.empty(shape, dtype=_TORCH[buffer.dtype])
