"""Second entry point of the group ``sglang.srt.plugins``: compression methods on SGLang's live cache. Independent of
the connector; both may be active at once."""

from __future__ import annotations

import logging
import multiprocessing

from kvtier.connectors.sglang import compression_hooks, hooks, incomplete
from kvtier.errors import EngineError

_log = logging.getLogger(__name__)


def register() -> None:
    """Add ``--kv-cache-compression-config``, and hook the scheduler where this engine was started with a method.

    Never raises, so that other engines are not affected by a mismatch; one with a method is refused when its arguments
    are parsed, and again when its scheduler was built."""
    try:
        if multiprocessing.parent_process() is None or hooks.has_engine():
            try:
                hooks.install(compression_hooks.argument_hooks())
                _accept_keyword()
            except ImportError as error:
                hooks.install(incomplete.StandIn(incomplete.EVICTION, error).hooks())
        if hooks.has_scheduler() and compression_hooks.asked_for():
            hooks.install(compression_hooks.scheduler_hooks())
    except (EngineError, ImportError) as error:
        _log.warning("%s", error)


def _accept_keyword() -> None:
    from sglang.srt.entrypoints.engine import Engine

    from kvtier.connectors.sglang.compression_arguments import EngineArguments

    if not isinstance(Engine.server_args_class, EngineArguments):
        Engine.server_args_class = EngineArguments(Engine.server_args_class)
