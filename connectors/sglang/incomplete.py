"""Where a part of kvtier cannot be imported, its native library above all: its flags are there all the same, so that
who gives one is told what is wrong, and not that there is no such flag. Imports nothing that may be missing itself."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from kvtier.connectors.sglang import hooks
from kvtier.errors import EngineError

CONNECTOR = ("--kv-connector", "--kv-connector-config")
EVICTION = ("--kv-cache-compression-config",)


def refusal(flag: str, error: ImportError) -> EngineError:
    """The error for an option that needs what is missing."""
    return EngineError(
        f"{flag}: kvtier is not installed completely ({error}); install it again for this Python (pip install "
        "--force-reinstall --no-deps kvtier), or start without the option"
    )


class StandIn:
    """Takes the place of what handles `flags`, none of which is accepted."""

    def __init__(self, flags: Sequence[str], error: ImportError) -> None:
        self._flags = {flag.removeprefix("--").replace("-", "_"): flag for flag in flags}
        self._error = error

    def hooks(self) -> tuple[hooks.Hook, ...]:
        args = "sglang.srt.server_args.ServerArgs."
        return (
            hooks.Hook(args + "add_cli_args", "AFTER", ("parser",), self._add),
            hooks.Hook(args + "from_cli_args", "AROUND", ("cls", "args"), self._translate),
        )

    def _add(self, _: Any, parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("kvtier, which is not installed completely")
        for flag in self._flags.values():
            group.add_argument(flag, help="Refused, with the reason.")

    def _translate(self, original: Callable[..., Any], cls: Any, args: argparse.Namespace) -> Any:
        options = vars(args)
        for name, flag in self._flags.items():
            if options.get(name) is not None:
                raise SystemExit(f"error: {refusal(flag, self._error)}") from self._error
        return original(cls, argparse.Namespace(**{k: v for k, v in options.items() if k not in self._flags}))
