"""``--kv-cache-compression-config`` on SGLang's command line and among the keyword arguments of `Engine`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from kvtier.connectors.sglang import compression_hooks, compression_options, incomplete
from kvtier.errors import KVTierError


def add_flag(_: Any, parser: argparse.ArgumentParser) -> None:
    """After ``ServerArgs.add_cli_args``."""
    parser.add_argument_group("kvtier, live cache").add_argument(
        "--kv-cache-compression-config",
        metavar="FILE",
        help="YAML or JSON file with kvtier's kv_cache_compression_config: methods that evict generated tokens.",
    )


def translate_namespace(cls: Any, args: argparse.Namespace) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before ``ServerArgs.from_cli_args``: the same call without our option. What cannot work ends the program with one
    line, as argparse does."""
    try:
        options = translate(vars(args))
    except KVTierError as error:
        raise SystemExit(f"error: {error}") from error
    return (cls, argparse.Namespace(**options)), {}


def translate(given: dict[str, Any]) -> dict[str, Any]:
    """SGLang's options, and the methods told to the workers that start after this; the engine is checked only when
    there are methods."""
    reference = compression_options.reference_of(given)
    if reference is not None:
        try:
            compression_hooks.check_engine()
            compression_options.check(given, reference)
        except ImportError as error:
            raise incomplete.refusal("--kv-cache-compression-config", error) from error
    compression_options.tell_workers(reference)
    return {name: value for name, value in given.items() if name != compression_options.OPTION}


class EngineArguments:
    """Stands in ``Engine.server_args_class``: takes the keyword argument too. An instance, not a function, so that it
    does not become a method of the engine."""

    def __init__(self, server_args: Callable[..., Any]) -> None:
        self.server_args = server_args

    def __call__(self, **kwargs: Any) -> Any:
        return self.server_args(**translate(kwargs))
