"""A trace in memory: requests in order, each a chain of numbered blocks of its prompt."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError

FORMAT_VERSION = 1
_MAX_BLOCK = np.iinfo(np.int32).max
T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Request:
    """One request as a reader finds it. `blocks`: ids of any integers, equal ids are equal prefixes."""

    time_s: float
    input_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    session: int
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order in which they arrive.

    blocks: int32 ``[N]``, ids from 0 to ``unique_blocks - 1``; request r has ``blocks[offsets[r] : offsets[r + 1]]``,
    and two equal ids are the same prefix. offsets: int64 ``[R + 1]``. times_s: float64 ``[R]``, arrival. input_tokens,
    output_tokens: int64 ``[R]``. sessions: int32 ``[R]``, numbered in the order of their first request; the requests of
    a session follow each other. think_s: float64 ``[R]``, the pause of a session before this request.
    block_tokens: tokens in one block; a last block that is not full counts as full.
    """

    block_tokens: int
    blocks: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    times_s: npt.NDArray[np.float64]
    input_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    sessions: npt.NDArray[np.int32]
    think_s: npt.NDArray[np.float64]
    unique_blocks: int

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ConfigError(f"block_tokens = {self.block_tokens}, must be at least 1")
        requests = len(self.times_s)
        for name in ("input_tokens", "output_tokens", "sessions", "think_s"):
            if len(getattr(self, name)) != requests:
                raise ConfigError(f"a trace of {requests} requests with {len(getattr(self, name))} {name}")
        if len(self.offsets) != requests + 1 or self.offsets[0] != 0 or self.offsets[-1] != len(self.blocks):
            raise ConfigError(
                "offsets of a trace must lead from 0 to the number of its blocks, one per request and one more"
            )
        if np.any(np.diff(self.offsets) < 0):
            raise ConfigError("offsets of a trace must not decrease")
        if len(self.blocks) and not 0 <= int(self.blocks.min()) <= int(self.blocks.max()) < self.unique_blocks:
            raise ConfigError(f"blocks of a trace must lie in [0, {self.unique_blocks})")

    @property
    def requests(self) -> int:
        return len(self.times_s)

    @property
    def span_s(self) -> float:
        """From the first arrival to the last."""
        return float(self.times_s[-1] - self.times_s[0]) if self.requests else 0.0

    def blocks_of(self, request: int) -> npt.NDArray[np.int32]:
        return self.blocks[self.offsets[request] : self.offsets[request + 1]]

    def head(self, requests: int) -> Trace:
        """The first `requests` requests."""
        ids, blocks = np.unique(self.blocks[: self.offsets[: requests + 1][-1]], return_inverse=True)
        return Trace(
            self.block_tokens,
            blocks.astype(np.int32),
            self.offsets[: requests + 1],
            self.times_s[:requests],
            self.input_tokens[:requests],
            self.output_tokens[:requests],
            self.sessions[:requests],
            self.think_s[:requests],
            len(ids),
        )

    @staticmethod
    def of(requests: Iterable[Request], block_tokens: int) -> Trace:
        """Sort by arrival (equal times keep their order) and renumber blocks and sessions."""
        ordered = sorted(requests, key=lambda r: r.time_s)
        sizes = np.fromiter((len(r.blocks) for r in ordered), np.int64, len(ordered))
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        raw = np.fromiter((b for r in ordered for b in r.blocks), np.int64, int(offsets[-1]))
        ids, blocks = np.unique(raw, return_inverse=True)
        if len(ids) > _MAX_BLOCK:
            raise ConfigError(
                f"the trace has {len(ids):,} distinct blocks, more than {_MAX_BLOCK:,}; replay a part of it"
            )
        sessions: dict[int, int] = {}
        return Trace(
            block_tokens,
            blocks.astype(np.int32),
            offsets,
            np.fromiter((r.time_s for r in ordered), np.float64, len(ordered)),
            np.fromiter((r.input_tokens for r in ordered), np.int64, len(ordered)),
            np.fromiter((r.output_tokens for r in ordered), np.int64, len(ordered)),
            np.fromiter((sessions.setdefault(r.session, len(sessions)) for r in ordered), np.int32, len(ordered)),
            np.fromiter((r.think_s for r in ordered), np.float64, len(ordered)),
            len(ids),
        )

    def save(self, path: Path) -> None:
        """Write the compact form: a compressed .npz of the arrays, block ids and times as differences."""
        fields: dict[str, npt.NDArray[Any] | np.int64] = {
            "version": np.int64(FORMAT_VERSION),
            "block_tokens": np.int64(self.block_tokens),
            "unique_blocks": np.int64(self.unique_blocks),
            "block_steps": np.diff(self.blocks, prepend=np.int32(0)),
            "sizes": np.diff(self.offsets).astype(np.int32),
            "time_steps_us": np.diff(np.rint(self.times_s * 1e6).astype(np.int64), prepend=0),
            "input_tokens": self.input_tokens.astype(np.int32),
            "output_tokens": self.output_tokens.astype(np.int32),
            "session_steps": np.diff(self.sessions, prepend=np.int32(0)),
            "think_us": np.rint(self.think_s * 1e6).astype(np.int64),
        }
        with path.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **fields)

    @staticmethod
    def load(path: Path) -> Trace:
        """Read what `save` wrote. Times come back rounded to a microsecond."""
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as z:
                version = int(z["version"])
                if version != FORMAT_VERSION:
                    raise ConfigError(
                        f"trace {str(path)!r} has format version {version}; this kvtier reads {FORMAT_VERSION}"
                    )
                return Trace(
                    int(z["block_tokens"]),
                    _summed(z["block_steps"], np.int32),
                    np.concatenate(([0], np.cumsum(z["sizes"], dtype=np.int64))),
                    _summed(z["time_steps_us"], np.int64) / 1e6,
                    z["input_tokens"].astype(np.int64),
                    z["output_tokens"].astype(np.int64),
                    _summed(z["session_steps"], np.int32),
                    z["think_us"] / 1e6,
                    int(z["unique_blocks"]),
                )
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"trace {str(path)!r} is not a compact trace of kvtier: {error}; give its --format"
            ) from None


def _summed(steps: npt.NDArray[np.generic], dtype: type[T]) -> npt.NDArray[T]:
    return np.cumsum(steps, dtype=dtype)
