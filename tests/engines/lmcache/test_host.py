"""An LMCache that would call us otherwise is refused when it is started, with the release that fits."""

from __future__ import annotations

import abc
from typing import Any

import pytest

from kvtier.errors import EngineError


def test_the_installed_release_fits_and_is_the_one_that_is_named() -> None:
    import importlib.metadata

    from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

    from kvtier.connectors.lmcache.host import TESTED, check_calls
    from kvtier.connectors.lmcache.remote import KvtierRemoteConnector

    assert importlib.metadata.version("lmcache") in TESTED
    check_calls(KvtierRemoteConnector, RemoteConnector)


def another_parameter(self: Any, keys: Any, reason: Any) -> None: ...


def another_name(self: Any, keys: Any, memory: Any) -> None: ...


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("submit_unlock", another_parameter),
        ("submit_load_task", another_name),
        ("submit_pin_task", abc.abstractmethod(lambda self, keys: None)),
    ],
)
def test_a_release_with_other_calls_is_refused_by_name(name: str, method: Any) -> None:
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

    from kvtier.connectors.lmcache import KvtierL2Adapter
    from kvtier.connectors.lmcache.host import check_calls

    later = type("Later", (L2AdapterInterface,), {name: method})
    ours = type("Ours", (KvtierL2Adapter, later), {})
    with pytest.raises(EngineError, match=rf"Later\.{name} .* works with LMCache 0\.5\.6: install that, or start"):
        check_calls(ours, later)
