"""Entry point of the group ``sglang.srt.plugins``: SGLang calls `register` in each of its processes before it parses
arguments or builds a scheduler."""

from __future__ import annotations

import logging
import multiprocessing

from kvtier.connectors.sglang import hicache_hooks, hooks, incomplete
from kvtier.errors import EngineError

_log = logging.getLogger(__name__)


def register() -> None:
    """Add ``--kv-connector`` and hook the scheduler where there is one.

    Never raises, so that an engine that does not use kvtier is not affected by a mismatch; one that does is refused
    when its arguments are parsed, and again when its linker is built."""
    try:
        # An engine may also be built in a child of somebody else's program, which has imported it then.
        if multiprocessing.parent_process() is None or hooks.has_engine():
            try:
                hooks.install(hooks.argument_hooks())
                _accept_keywords()
            except ImportError as error:
                hooks.install(incomplete.StandIn(incomplete.CONNECTOR, error).hooks())
        if hooks.has_scheduler():
            hooks.install(hooks.scheduler_hooks())
            hooks.install(hicache_hooks.scheduler_hooks())
    except (EngineError, ImportError) as error:
        _log.warning("%s", error)


def _accept_keywords() -> None:
    from sglang.srt.entrypoints.engine import Engine

    from kvtier.connectors.sglang.arguments import EngineArguments

    if not isinstance(Engine.server_args_class, EngineArguments):
        Engine.server_args_class = EngineArguments(Engine.server_args_class)
