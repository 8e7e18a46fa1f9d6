"""Every place where this connector reaches into SGLang, what it expects to find there, and the check that it did.

SGLang only logs a hook that cannot be applied. Half a connector would hold requests for ever or restore stale pages,
so nothing is installed unless every target is there with the expected parameters, and an engine that asks for the
connector is refused with the supported versions named.
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.connectors.sglang.versions import SUPPORTED, Part, installed, refusal

_SCHEDULER = "sglang.srt.managers.scheduler"
_ENGINE = "sglang.srt.entrypoints.engine"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
WEIGHT_UPDATES = tuple(
    f"{_UPDATER}.{name}"
    for name in (
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_tensor",
        "update_weights_from_ipc",
        "begin_weight_update",
        "end_weight_update",
        "check_weights",
        "resume_memory_occupation",
    )
)
"""Every way in which an engine's weights may change in place. Adapters that are loaded later have ids of their own."""


FORWARD_PARAMETERS = (
    "cls",
    "batch",
    "model_runner",
    "capture_hidden_mode",
    "return_hidden_states_before_norm",
    "extend_position_info",
    "spec_mrope_positions",
    "kv_loc_plan",
    "write_cols",
)
"""Of ``ForwardBatch.init_new``."""


def changes_weights(request: Any) -> bool:
    """Whether a call of one of `WEIGHT_UPDATES` with this request does: a check does where it overwrites them, and
    memory that is taken back may hold anything where they lay in it."""
    kind = type(request).__name__
    if kind == "CheckWeightsReqInput":
        return bool(request.action == "reset_tensors")
    if kind == "ResumeMemoryOccupationReqInput":
        return not request.tags or "weights" in request.tags
    return True


@dataclass(frozen=True, slots=True)
class Hook:
    """One wrapped function of the engine. kind: name of a `HookType`. parameters: those of the original, in order."""

    target: str
    kind: str
    parameters: tuple[str, ...]
    function: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Expected:
    """Something of the engine that is used as it is: attributes of a class, by name."""

    target: str
    attributes: tuple[str, ...]


USED = (
    Expected(
        "sglang.srt.mem_cache.unified_cache.unified_cache_linker.LayerWiseLoadCounter",
        ("update_producer", "complete", "fail", "finish", "wait_until", "reset"),
    ),
    Expected(
        "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper",
        ("match", "load_back", "finish_loads", "release_request"),
    ),
    Expected("sglang.srt.mem_cache.unified_cache.linker_factory", ("create_unified_cache_linker",)),
    Expected("sglang.srt.managers.schedule_batch.Req", ("init_next_round_input", "set_finish_with_abort")),
    Expected("sglang.srt.managers.scheduler.Scheduler", ("_add_request_to_queue",)),
    Expected("sglang.srt.managers.schedule_policy.PrefillAdder", ("budget_state",)),
    Expected("sglang.srt.managers.schedule_batch.ScheduleBatch", ("launch_ts", "extend_num_tokens")),
)
LINKER_METHODS = frozenset(
    {
        "lookup",
        "load",
        "start_layer_wise_loading",
        "finish_layer_wise_loading",
        "cancel_queued_load",
        "offload",
        "num_completed_offloads",
        "pop_completed_offload",
        "reset",
        "close",
    }
)
"""Abstract methods of UnifiedCacheLinker: one more would be a duty that this connector does not know."""


def argument_hooks() -> tuple[Hook, ...]:
    """Hooks on the command line, for the process that parses it."""
    from kvtier.connectors.sglang import arguments

    args = "sglang.srt.server_args.ServerArgs."
    return (
        Hook(args + "add_cli_args", "AFTER", ("parser",), arguments.add_flags),
        Hook(args + "from_cli_args", "AROUND", ("cls", "args"), arguments.translate_namespace),
    )


def scheduler_hooks() -> tuple[Hook, ...]:
    """Hooks in the process of the scheduler."""
    from kvtier.connectors.sglang import compacted, hold

    scheduler = f"{_SCHEDULER}.Scheduler."
    return (
        Hook(scheduler + "_prefetch_kvcache", "AFTER", ("self", "req", "storage_hit_end"), hold.request_queued),
        Hook(scheduler + "get_next_batch_to_run", "BEFORE", ("self", "running_batch", "last_batch"), hold.next_batch),
        Hook(
            scheduler + "_get_new_batch_prefill_raw",
            "AROUND",
            ("self", "prefill_delayer_single_pass", "running_batch"),
            hold.build_batch,
        ),
        Hook(
            "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
            "AROUND",
            ("self", "req", "has_chunked_req", "truncation_align_size"),
            hold.admit,
        ),
        Hook(
            "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.release_aborted_request",
            "AFTER",
            ("self", "request"),
            hold.request_aborted,
        ),
        Hook(
            "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
            "AFTER",
            FORWARD_PARAMETERS,
            compacted.positions,
        ),
        Hook(scheduler + "process_batch_result", "BEFORE", ("self", "batch", "result"), hold.settle_loads),
        Hook(scheduler + "process_batch_result", "AFTER", ("self", "batch", "result"), hold.batch_done),
        Hook(f"{_UPDATER}.release_memory_occupation", "BEFORE", ("self", "recv_req"), hold.memory_released),
        *(Hook(target, "BEFORE", ("self", "recv_req"), hold.weights_change) for target in WEIGHT_UPDATES),
    )


def install(hooks: Sequence[Hook]) -> None:
    """Register `hooks` with SGLang, all of them or none. EngineError names the first that does not fit."""
    check_hooks(hooks)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])


def check_engine() -> None:
    """EngineError unless the installed SGLang is one that this connector knows. Imports the scheduler."""
    check_version(Part.CONNECTOR)
    check_used(USED)
    linker = _resolve("sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinker")
    if linker.__abstractmethods__ != LINKER_METHODS:
        changed = sorted(linker.__abstractmethods__ ^ LINKER_METHODS)
        raise refusal(f"UnifiedCacheLinker differs in {', '.join(changed)}")
    check_hooks((*argument_hooks(), *scheduler_hooks()))


def check_version(part: Part) -> None:
    """EngineError for a release that the tests of this part did not run against."""
    version = installed()
    if version not in SUPPORTED[part]:
        raise refusal(f"SGLang {version} is installed")


def check_used(used: Sequence[Expected]) -> None:
    """EngineError for the first attribute that is not there."""
    for expected in used:
        owner = _resolve(expected.target)
        missing = [name for name in expected.attributes if not hasattr(owner, name)]
        if missing:
            raise refusal(f"{expected.target} has no {', '.join(missing)}")


def check_hooks(hooks: Sequence[Hook]) -> None:
    """EngineError for the first function that does not have the parameters that its hook expects."""
    for hook in hooks:
        _check(hook)


def verify_installed(hooks: Sequence[Hook]) -> None:
    """EngineError unless every one of `hooks` was applied in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    def applied(hook: Hook) -> bool:
        """Patched, and by us: another plugin may have hooked the same function."""
        registered = HookRegistry._hooks.get(hook.target, ())
        return hook.target in HookRegistry._patched and any(entry[1] is hook.function for entry in registered)

    missing = [hook.target for hook in hooks if not applied(hook)]
    if missing:
        raise refusal(f"the plugin could not be installed completely: {', '.join(missing)} was not hooked")


def has_scheduler() -> bool:
    """Whether this process runs, or may start, a scheduler: importing one elsewhere costs seconds and memory."""
    return _SCHEDULER in sys.modules


def has_engine() -> bool:
    """Whether this process may build an `Engine`."""
    return _ENGINE in sys.modules


def _check(hook: Hook) -> None:
    original = inspect.unwrap(_resolve(hook.target))
    found = tuple(inspect.signature(original).parameters)
    if found not in (hook.parameters, hook.parameters[1:] if hook.parameters[0] == "cls" else ()):
        raise refusal(f"{hook.target} takes {found}, not {hook.parameters}")


def _resolve(target: str) -> Any:
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        raise refusal(f"{target} is not there ({error})") from error
