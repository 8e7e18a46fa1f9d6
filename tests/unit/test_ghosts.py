"""The sampled list of recent pages: native and reference agree number by number, and both tell what real sizes would."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.kernels import _native
from kvtier.kernels.ghosts import reference


def key(number: int) -> bytes:
    """A key whose hash is spread like a digest's."""
    mixed = (number * 0x9E3779B97F4A7C15 + 0x1234567) % (1 << 64)
    return (number.to_bytes(8, "little") + (mixed >> 32).to_bytes(4, "little")).ljust(32, b"\0")


def histogram(stack: _native.GhostStack | reference.GhostStack) -> list[float]:
    out = np.zeros(reference.BUCKETS + 1)
    stack.histogram(out)
    return out.tolist()


numbers = st.lists(st.integers(0, 60), max_size=8)
calls = st.lists(
    st.one_of(
        st.tuples(st.just("looked_up"), numbers),
        st.tuples(st.just("stored"), numbers, st.integers(0, 9000)),
        st.tuples(st.just("dropped"), numbers),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(max_keys=st.integers(1, 12), max_bytes=st.integers(1, 60_000), calls=calls)
def test_native_is_the_reference(max_keys: int, max_bytes: int, calls: list[tuple[object, ...]]) -> None:
    native, plain = _native.GhostStack(max_keys, max_bytes), reference.GhostStack(max_keys, max_bytes)
    for name, asked, *rest in calls:
        joined = b"".join(key(n) for n in asked)  # type: ignore[attr-defined]
        extra = [np.array([size + n for n in asked], np.int64) for size in rest]  # type: ignore[attr-defined,operator]
        for stack in (native, plain):
            getattr(stack, str(name))(joined, *extra)
        assert (native.threshold, native.keys, native.lookups) == (plain.threshold, plain.keys, plain.lookups)
        assert histogram(native) == histogram(plain)


def test_buckets_start_where_they_say() -> None:
    starts = reference.bucket_starts()
    assert len(starts) == reference.BUCKETS + 1 == _native.GHOST_BUCKETS + 1
    assert (np.diff(starts) > 0).all()
    for bucket in (0, 15, 16, 17, 31, 32, 100, 500):
        assert reference.bucket_of(int(starts[bucket])) == bucket
        assert reference.bucket_of(int(starts[bucket + 1]) - 1) == bucket


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="max_keys"):
        _native.GhostStack(0, 1)
    with pytest.raises(ValueError, match="32 bytes"):
        _native.GhostStack(1, 1).looked_up(b"abc")
    with pytest.raises(ValueError, match="one number per key"):
        _native.GhostStack(1, 1).stored(bytes(32), np.zeros(2, np.int64))
