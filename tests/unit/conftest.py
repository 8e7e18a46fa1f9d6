"""What several files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.kernels import _native


@pytest.fixture(params=_native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set that the native codec has here, one after the other."""
    before = _native.isa()
    _native.use_isa(request.param)
    yield request.param
    _native.use_isa(before)
