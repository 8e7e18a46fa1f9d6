"""An LMCache that would call us otherwise is refused when it is started, with the release that fits."""

from __future__ import annotations

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


@pytest.mark.parametrize("drift", ["another parameter", "another name", "another method"])
def test_a_release_with_other_calls_is_refused_by_name(drift: str) -> None:
    import abc

    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

    from kvtier.connectors.lmcache import KvtierL2Adapter
    from kvtier.connectors.lmcache.host import check_calls

    class Later(L2AdapterInterface):
        if drift == "another parameter":

            def submit_unlock(self, keys: Any, reason: Any) -> None: ...

        elif drift == "another name":

            def submit_load_task(self, keys: Any, memory: Any) -> Any: ...

        else:

            @abc.abstractmethod
            def submit_pin_task(self, keys: Any) -> int: ...

    ours = type("Ours", (KvtierL2Adapter, Later), {})
    changed = {"another parameter": "submit_unlock", "another name": "submit_load_task"}.get(drift, "submit_pin_task")
    with pytest.raises(EngineError, match=rf"Later\.{changed} .* works with LMCache 0\.5\.6: install that, or start"):
        check_calls(ours, Later)
