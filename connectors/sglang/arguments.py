"""The flags of the connector on SGLang's command line and among the keyword arguments of `Engine`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from kvtier.connectors.sglang import hicache_hooks, hicache_options, hooks, incomplete, options
from kvtier.connectors.sglang.versions import Part
from kvtier.errors import KVTierError


def add_flags(_: Any, parser: argparse.ArgumentParser) -> None:
    """After ``ServerArgs.add_cli_args``."""
    group = parser.add_argument_group("kvtier")
    group.add_argument(
        "--kv-connector",
        choices=[options.NAME, hicache_options.NAME],
        help="Keep KV pages that leave the device in kvtier's tiers and restore them from there: directly, or through "
        "the host memory of SGLang's hierarchical cache.",
    )
    group.add_argument(
        "--kv-connector-config",
        metavar="FILE",
        help="YAML or JSON file with kvtier's configuration: tiers, codec, ports. Default: 4 GiB of host memory.",
    )


def translate_namespace(original: Callable[..., Any], cls: Any, args: argparse.Namespace) -> Any:
    """Around ``ServerArgs.from_cli_args``: the same call with SGLang's own options in place of ours. What cannot work
    ends the program with one line, as argparse does."""
    try:
        options = translate(vars(args))
    except KVTierError as error:
        raise SystemExit(f"error: {error}") from error
    return original(cls, argparse.Namespace(**options))


def translate(given: dict[str, Any]) -> dict[str, Any]:
    """SGLang's options; the engine is checked only when the connector is asked for."""
    name = given.get(options.CONNECTOR_OPTION)
    try:
        return _translate(name, given)
    except ImportError as error:
        raise incomplete.refusal(f"--kv-connector {name}", error) from error


def _translate(name: str | None, given: dict[str, Any]) -> dict[str, Any]:
    if name is not None:
        hooks.check_engine()
    if name == hicache_options.NAME:
        hooks.check_version(Part.STAGED)
        hooks.check_used(hicache_hooks.USED)
        hooks.check_hooks(hicache_hooks.scheduler_hooks())
        return hicache_options.hicache_options(given)
    return options.linker_options(given)


class EngineArguments:
    """Stands in ``Engine.server_args_class``: takes the connector's keyword arguments too. An instance, not a
    function, so that it does not become a method of the engine."""

    def __init__(self, server_args: Callable[..., Any]) -> None:
        self.server_args = server_args

    def __call__(self, **kwargs: Any) -> Any:
        return self.server_args(**translate(kwargs))
