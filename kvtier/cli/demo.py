"""``kvtier demo``: the main job, on a real model and real agent sessions."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli.options import THREADS_MAX, at_least, at_most, check_sizes, check_writable
from kvtier.errors import ConfigError, KVTierError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from kvtier.cli.report import DemoResult
    from kvtier.spec import PageSpec


class DemoCodec(str, Enum):
    AUTO = "auto"
    NVFP4 = "nvfp4"
    NVFP4_OFFSET = "nvfp4_offset"
    NVFP4_TOKEN = "nvfp4_token"
    K8V4 = "k8v4"
    TWO_FP4 = "2fp4"
    RAW = "raw"

    def resolved(self, spec: PageSpec) -> str:
        """The codec's name for pages of `spec`."""
        from kvtier.build import default_quant

        return default_quant(spec) if self is DemoCodec.AUTO else self.value

    @property
    def quant(self) -> str:
        """The option of the configuration."""
        return "none" if self is DemoCodec.RAW else self.value


class Engine(str, Enum):
    TRANSFORMERS = "transformers"
    SGLANG = "sglang"


_RUN = {
    Engine.TRANSFORMERS: "kvtier.cli.demo_transformers",
    Engine.SGLANG: "kvtier.cli.demo_sglang",
}
"""Modules with ``run(options: DemoOptions, console: Console) -> DemoResult``."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The demo's options, checked. directory: where the NVMe tier lives; None: a temporary one, removed at the end.
    host_capacity: as in the configuration; None: room for the longest prompt, not for all sessions."""

    host_capacity: str | None
    nvme_capacity: str
    directory: Path | None
    codec: DemoCodec
    page_tokens: int
    threads: int
    sessions: int | None
    turns: int | None

    @contextmanager
    def open_directory(self) -> Iterator[Path]:
        if self.directory is not None:
            yield self.directory
            return
        with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as folder:
            yield Path(folder)

    def room_for(self, pages: int, cold_page_bytes: int) -> str:
        """The host tier's capacity: what was chosen, or room for one sequence of `pages`, since what a request restores
        must fit as a whole."""
        from kvtier.abc.tier import SLOT_ALIGN

        return self.host_capacity or f"{pages * -(-cold_page_bytes // SLOT_ALIGN) * SLOT_ALIGN}B"

    def pages_of(self, tokens: int) -> int:
        """What a sequence of `tokens` takes, and a little more."""
        return tokens // self.page_tokens + 4


def demo(
    host_capacity: Annotated[
        str | None, typer.Option(help="Size of the host tier, such as 64MiB. Default: the longest prompt, no more.")
    ] = None,
    nvme_capacity: Annotated[str, typer.Option(help="Size of the NVMe tier.")] = "1GiB",
    directory: Annotated[
        Path | None, typer.Option(help="Where the NVMe tier lives, kept for the next run. Default: a temporary one.")
    ] = None,
    codec: Annotated[DemoCodec, typer.Option(help="How pages are stored.")] = DemoCodec.AUTO,
    page_tokens: Annotated[int, typer.Option(help="Tokens in one page.")] = 64,
    threads: Annotated[int | None, typer.Option(help="Threads that compute. Default: the cores there are.")] = None,
    sessions: Annotated[int | None, typer.Option(help="How many sessions to serve.")] = None,
    turns: Annotated[int | None, typer.Option(help="Turns of each session, for a shorter run.")] = None,
    engine: Annotated[Engine, typer.Option(help="What computes.")] = Engine.TRANSFORMERS,
    output: Annotated[Path, typer.Option(help="Folder for the plot.")] = Path("demo-output"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line; all else goes to stderr.")
    ] = False,
) -> None:
    """Serve real agent sessions with SmolLM2-135M on the CPU: pages go out compressed, to host memory and NVMe, and
    come back when the next turn needs them. Compares with recomputing everything."""
    at_least(1, page_tokens=page_tokens, threads=threads, sessions=sessions, turns=turns)
    at_most(THREADS_MAX, threads=threads)
    check_sizes(host_capacity=host_capacity, nvme_capacity=nvme_capacity)
    # Read when torch is imported: waiting threads would otherwise burn the cores that the workers run on.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    from rich.console import Console

    from kvtier.cli import report

    check_writable("--output", output)
    if directory is not None:
        check_writable("--directory", directory)
    options = DemoOptions(
        host_capacity,
        nvme_capacity,
        directory,
        codec,
        page_tokens,
        threads if threads is not None else len(os.sched_getaffinity(0)),
        sessions,
        turns,
    )
    progress_console = Console(stderr=True)
    result = _runner(engine)(options, progress_console)
    console = progress_console if as_json else Console()
    console.print(result.setup, highlight=False)
    report.print_report(result, console)
    report.plot(result.turns, output, console)
    if as_json:
        sys.stdout.write(json.dumps(result.as_json()) + "\n")
    if not result.adds_up:
        raise KVTierError("the ledger does not add up: lookups differ from hits and misses; please report this")


def _runner(engine: Engine) -> Callable[[DemoOptions, Console], DemoResult]:
    if importlib.util.find_spec(_RUN[engine]) is None:
        raise ConfigError(
            f"--engine {engine.value} is not part of this version: use --engine {Engine.TRANSFORMERS.value}"
        )
    run: Callable[[DemoOptions, Console], DemoResult] = importlib.import_module(_RUN[engine]).run
    return run
