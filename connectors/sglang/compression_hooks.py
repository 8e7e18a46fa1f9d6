"""Every place where compression of live caches reaches into SGLang. The checks are those of `hooks`."""

from __future__ import annotations

import os

from kvtier.connectors.sglang import hooks
from kvtier.connectors.sglang.compression_options import VARIABLE
from kvtier.connectors.sglang.hooks import Expected, Hook
from kvtier.connectors.sglang.versions import Part
from kvtier.errors import EngineError

PLUGIN = "kvtier_compression"
"""Name of the entry point, for ``SGLANG_PLUGINS``."""

_BATCH = "sglang.srt.managers.schedule_batch"

USED = (
    Expected("sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache", ("free_kv_row",)),
    Expected("sglang.srt.managers.schedule_policy", ("CLIP_MAX_NEW_TOKENS",)),
    Expected(f"{_BATCH}.ReqKvInfo", ("req_pool_idx", "cache_protected_len", "kv_committed_len", "kv_allocated_len")),
    Expected(f"{_BATCH}.FINISH_ABORT", ()),
)


def argument_hooks() -> tuple[Hook, ...]:
    """Hooks on the command line, for the process that parses it."""
    from kvtier.connectors.sglang import compression_arguments as arguments

    args = "sglang.srt.server_args.ServerArgs."
    return (
        Hook(args + "add_cli_args", "AFTER", ("parser",), arguments.add_flag),
        # Not around, as the connector's: SGLang warns of two of those on one function.
        Hook(args + "from_cli_args", "BEFORE", ("cls", "args"), arguments.translate_namespace),
    )


def scheduler_hooks() -> tuple[Hook, ...]:
    """Hooks in the process of the scheduler."""
    from kvtier.connectors.sglang import compression, compression_setup

    scheduler = "sglang.srt.managers.scheduler.Scheduler."
    return (
        Hook(scheduler + "__init__", "AFTER", ("self", "server_args", "port_args"), compression_setup.scheduler_built),
        Hook(scheduler + "stash_chunked_request", "AFTER", ("self", "req"), compression.chunk_ended),
        Hook(f"{_BATCH}.ScheduleBatch.prepare_for_decode", "BEFORE", ("self",), compression.before_decode),
        Hook(f"{_BATCH}.Req.reset_for_retract", "AFTER", ("self",), compression.retracted),
        Hook(
            "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
            "AFTER",
            hooks.FORWARD_PARAMETERS,
            compression.positions,
        ),
        Hook(
            "sglang.srt.mem_cache.common.release_kv_cache",
            "BEFORE",
            ("req", "tree_cache", "checkpoint"),
            compression.released,
        ),
        Hook(
            "sglang.srt.managers.schedule_policy.PrefillAdder._get_running_request_total_token_offset",
            "AROUND",
            ("self", "req"),
            compression.growth,
        ),
        Hook(
            "sglang.srt.beam_search.coordinator.BeamCoordinator.validate_and_init",
            "AROUND",
            ("self", "req", "recv_req"),
            compression.refuse_beams,
        ),
    )


def check_engine() -> None:
    """EngineError unless the installed SGLang is one that compression knows. Imports the scheduler."""
    hooks.check_version(Part.EVICTION)
    hooks.check_used(USED)
    hooks.check_hooks((*argument_hooks(), *scheduler_hooks()))


def asked_for() -> bool:
    """Whether the engine that this process belongs to was started with compression of live caches."""
    return VARIABLE in os.environ


def verify_installed() -> None:
    """EngineError where the scheduler of an engine that was asked to compress live caches lacks a hook."""
    if not asked_for():
        raise EngineError(
            f"kv_cache_compression_config names a method for live caches, but the plugin {PLUGIN!r} was not loaded: "
            "add it to SGLANG_PLUGINS"
        )
    hooks.verify_installed(scheduler_hooks())
