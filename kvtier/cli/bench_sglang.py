"""``kvtier bench sglang``: time to the first token of a reused prefix in the real SGLang, with kvtier and without.

All engines of a model run at once and take turns, request by request, each with the same prompts, so that what else
runs on the machine hits all alike; an engine whose turn it is not sleeps. SGLang without an accelerator, with two
stand-ins (`kvtier.cli.sglang_on_cpu`): attention that pays for the new tokens of a prefill only, as on an accelerator,
and plain copies in the place of the kernels of its host pools.

- ``sglang``: no cache behind the device's. Its ``recompute`` is what the others are to be compared with.
- ``sglang, hicache file``: SGLang's own hierarchical cache with its ``file`` storage; ``host`` is its host memory.
- ``kvtier linker`` and ``kvtier staged``: the two connectors, each with a host tier with room for one prompt, so that
  another prompt's pages come from NVMe. ``nothing`` is a prompt that is looked up and not found; cost_percent is what
  it takes longer than in the engine without kvtier, by pairs of the same prompt one after the other, with the interval
  that holds the median of such pairs with 95 percent (`kvtier.cli.bench_sglang_cost`).
- ``sglang again``, where only this cost is asked for: a second engine without kvtier, whose cost is the noise.
- scheduler_ms: taken from the scheduler's thread beside the forward, per request, by SGLang and what is behind it:
  queue_ms (it is queued, and looked up), schedule_ms (until its batch is built), finish_ms (what was computed is
  inserted and copied out). lookup_us, load_us, offload_us: of these, kvtier's own, means per call of the whole run; the
  staged path has no calls on this thread.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvtier.cli import bench_sglang_cost
from kvtier.cli.bench_sglang_cost import AGAIN
from kvtier.cli.bench_sglang_process import EngineProcess, Served
from kvtier.errors import ConfigError, KVTierError, MissingExtraError

PROMPT_TOKENS = 1000
PAGE_TOKENS = 64
PAGES = PROMPT_TOKENS // PAGE_TOKENS
COLD, HITS = 9, 4
COST_PAIRS = 120
MODELS = ("tiny", "smollm2")
PLAIN, FILE, LINKER, STAGED = "sglang", "sglang, hicache file", "kvtier linker", "kvtier staged"
_DEVICE_TOKENS = 2 * (PAGES + 2) * PAGE_TOKENS
"""Room for two prompts, so that a third makes SGLang move the first to its host memory."""

Row = dict[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class _System:
    name: str
    engine: EngineProcess
    codec: str
    samples: dict[str, list[Served]] = field(default_factory=lambda: defaultdict(list))
    calls_us: dict[str, float] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        return self.name in (LINKER, STAGED)


def run(
    *,
    models: Sequence[str] = MODELS,
    codecs: Sequence[str] = ("auto", "none"),
    cold: int = COLD,
    hits: int = HITS,
    cost: bool = False,
    pairs: int = COST_PAIRS,
    directory: Path | None = None,
    report: Path | None = None,
) -> list[Row]:
    """Rows of ``{"model", "system", "codec", "served_from", "prompt_tokens", "ttft_s", ...}``, medians of the runs.
    cold: prompts that nobody knows, per engine. hits: restores of each of two prompts. cost: no restores, but as many
    new prompts as it takes to see what they cost, at most `pairs`. Progress goes to standard error.
    Raises KVTierError where SGLang is missing, or an engine does not do what it should."""
    if importlib.util.find_spec("sglang") is None:
        raise MissingExtraError(
            "this measures SGLang, which is not installed here: use an environment that has it, or in a clone of "
            "kvtier: $(tools/env-engine.sh sglang | tail -n 1)/bin/kvtier bench sglang"
        )
    for name in models:
        if name not in MODELS:
            raise ConfigError(f"--model {name}: use one of {', '.join(MODELS)}")
    rows: list[Row] = []
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory) as folder:
        for name in models:
            # What a random model of 4 layers computes in no time says nothing about forms.
            for codec in codecs if name != "tiny" else codecs[-1:]:
                where = Path(folder) / f"{name}-{codec}"
                if cost:
                    rows += _measure_cost(name, codec, where, pairs, console)
                else:
                    everything = codec == codecs[0] or name == "tiny"
                    rows += _measure(name, codec, where, cold, hits, console, everything=everything)
    if report is not None:
        from kvtier.cli.bench_sglang_report import write

        write(rows, report)
    return rows


def _measure(
    model: str, codec: str, folder: Path, cold: int, hits: int, console: Console, *, everything: bool
) -> list[Row]:
    names = [PLAIN, FILE, LINKER, STAGED] if everything else [PLAIN, LINKER, STAGED]
    turns = cold * len(names) + 2 * hits * (2 * len(names) - 1)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(*columns, console=console))
        task = progress.add_task(f"{model}, {codec}: starting {len(names)} engines", total=turns)
        systems = stack.enter_context(_engines(model, codec, folder, names))
        progress.update(task, description=f"{model}, {codec}")
        progress.console.print(f"{model}, {codec}: {len(names)} engines serve")  # where there is no bar to watch

        def done() -> None:
            progress.advance(task)

        _cold(systems, cold, done)
        progress.console.print(f"{model}, {codec}: {cold} new prompts each; now restores")
        _hits(systems, hits, done)
        for system in systems:
            if system.ours:
                system.calls_us.update(system.engine.calls_us())
    return [row for system in systems for row in _rows(model, system, systems[0])]


def _measure_cost(model: str, codec: str, folder: Path, pairs: int, console: Console) -> list[Row]:
    with _engines(model, codec, folder, [PLAIN, AGAIN, LINKER, STAGED]) as systems:
        console.print(f"{model}, {codec}: {len(systems)} engines serve")
        first, again = systems[0].samples, systems[1].samples
        for n in range(pairs):
            _new_prompt(systems, n, lambda: None)
            if bench_sglang_cost.enough(again["recompute"], first["recompute"]):
                break
            if n % 10 == 9:
                console.print(f"{model}, {codec}: {n + 1} new prompts each")
        for system in systems:
            if system.ours:
                system.calls_us.update(system.engine.calls_us())
    return [row for system in systems for row in _rows(model, system, systems[0])]


@contextmanager
def _engines(model: str, codec: str, folder: Path, names: Sequence[str]) -> Iterator[list[_System]]:
    """All engines, started at once, warmed up, and ended."""
    path = _model(model, folder)
    page_bytes = _cold_bytes(path, codec)
    processes: list[EngineProcess] = []
    try:
        for name in names:
            where = folder / name.replace(", ", "-").replace(" ", "-")
            processes.append(EngineProcess(path, where, _options(name, codec, page_bytes, where)))
        for process in processes:
            process.started()
        systems = [_System(name, process, codec) for name, process in zip(names, processes, strict=True)]
        for system in systems:
            for n in range(2):
                system.engine.serve("warm up", prompt(900 + n))
            system.engine.flush()
        yield systems
    finally:
        for process in processes:
            process.kill()


def _model(name: str, folder: Path) -> Path:
    if name == "tiny":
        from kvtier.testing.tiny_model import write_model

        return write_model(folder / "model", seed=1)
    from kvtier.cli.demo_model import ensure_model

    return ensure_model()


def _cold_bytes(model: Path, codec: str) -> int:
    """Length of a cold page, in whole slots of a tier."""
    import json

    from kvtier.abc.tier import SLOT_ALIGN
    from kvtier.build import open_codec
    from kvtier.config import parse_config
    from kvtier.spec import DType, PageSpec

    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    spec = PageSpec.mha(
        layers=config["num_hidden_layers"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        page_tokens=PAGE_TOKENS,
        dtype=DType.FP32,
    )
    block = {"kv_cache_compression_config": [_quantization(codec)], "tiers": [{"type": "host", "capacity": "64MiB"}]}
    nbytes = open_codec(parse_config(block), spec).layout(spec).cold_page_bytes
    return -(-nbytes // SLOT_ALIGN) * SLOT_ALIGN


def _quantization(codec: str) -> dict[str, str]:
    return {"algorithm": "quantization_for_cold_page", "quant": codec}


def _options(name: str, codec: str, page_bytes: int, folder: Path) -> dict[str, Any]:
    """SGLang's keyword arguments beside those that all engines have."""
    options: dict[str, Any] = {
        "page_size": PAGE_TOKENS,
        "max_total_tokens": _DEVICE_TOKENS,
        "dtype": "float32",
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "page_first_direct",
    }
    if name == FILE:
        return options | {
            "enable_hierarchical_cache": True,
            "hicache_ratio": 3.0,
            "hicache_storage_backend": "file",
            "hicache_storage_prefetch_policy": "wait_complete",
            "file_storage_path": str(folder / "pages"),
        }
    if name in (PLAIN, AGAIN):
        return options
    block = {
        "kv_cache_compression_config": [_quantization(codec)],
        "tiers": [
            # Extents of the host tier are whole; with one more than a prompt's pages, another prompt's push them out.
            {"type": "host", "capacity": f"{(PAGES + 1) * page_bytes}B"},
            {"type": "nvme", "path": str(folder / "pages"), "capacity": "2GiB"},
        ],
        "promote_deadline": "30s",
        "break_even": False,
    }
    return options | {"kv_connector": "kvtier" if name == LINKER else "kvtier-hicache", "kv_connector_config": block}


def prompt(n: int) -> list[int]:
    """Token ids that every model here has, another sequence for each `n`, from the first page on."""
    return [(n * 131 + i * (2 * n + 7) + i * i % 11) % 500 + 5 for i in range(PROMPT_TOKENS)]


# -- rounds ------------------------------------------------------------------------------------------------------------


def _cold(systems: Sequence[_System], rounds: int, done: Callable[[], None]) -> None:
    """Prompts that nobody has seen, the same for all; who is first changes from round to round."""
    for n in range(rounds):
        _new_prompt(systems, n, done)
    for system in systems:
        system.engine.flush()


def _new_prompt(systems: Sequence[_System], n: int, done: Callable[[], None]) -> None:
    for system in (*systems[n % len(systems) :], *systems[: n % len(systems)]):
        served = system.engine.serve(f"cold {n}", prompt(n))
        if served.reused:
            raise KVTierError(f"{system.name}: {served.reused} tokens of a new prompt were reused: {served}")
        system.samples["recompute" if system.name in (PLAIN, AGAIN) else "nothing"].append(served)
        system.engine.settle()
        done()


def _hits(systems: Sequence[_System], rounds: int, done: Callable[[], None]) -> None:
    """The last two prompts again and again, so that each comes from every place in turn."""
    for n in range(rounds):
        for which in (0, 1):
            for system in systems:
                _restore(system, f"{n} {which}", prompt(which), prompt(which + 2), done)


def _restore(system: _System, name: str, ids: list[int], other: list[int], done: Callable[[], None]) -> None:
    """From below, and then from above it."""
    engine, samples = system.engine, system.samples
    if system.name == PLAIN:
        engine.serve(f"first {name}", ids)
        _take(samples, "device", engine.serve(f"device {name}", ids), "device")
        engine.flush()
    elif system.name == FILE:
        engine.flush()
        _take(samples, "file", engine.serve(f"file {name}", ids), "storage")
        done()
        # Two other prompts push it out of the device's cache; SGLang's host memory has it still.
        engine.settle()
        for other_name, more in (("x", other), ("y", prompt(5))):
            engine.serve(f"{other_name} {name}", more)
            engine.settle()
        _take(samples, "host", engine.serve(f"host {name}", ids), "host")
    else:
        for place in ("nvme", "host"):
            engine.flush()
            before = engine.hits()
            served = engine.serve(f"{place} {name}", ids)
            engine.settle()
            found = {tier: after - before[tier] for tier, after in engine.hits().items()}
            # A page of it may have stayed in host memory, or been pushed out of it.
            if found[place] >= PAGES - 2 and served.reused == PAGES * PAGE_TOKENS:
                samples[place].append(served)
            if place == "nvme":
                done()
        engine.flush()
    done()


def _take(samples: dict[str, list[Served]], place: str, served: Served, told: str) -> None:
    """Keep what SGLang says came from there, but for a page at most."""
    if served.details.get(told, 0) >= (PAGES - 1) * PAGE_TOKENS:
        samples[place].append(served)


# -- rows --------------------------------------------------------------------------------------------------------------


def _rows(model: str, system: _System, plain: _System) -> Iterator[Row]:
    for place, runs in system.samples.items():
        if not runs:
            continue
        times = [run.ttft_s for run in runs]
        row: Row = {
            "model": model,
            "system": system.name,
            "codec": system.codec if system.ours else "",
            "served_from": place,
            "prompt_tokens": PROMPT_TOKENS,
            "reused_tokens": round(statistics.median(run.reused for run in runs)),
            "ttft_s": round(statistics.median(times), 4),
            "least_s": round(min(times), 4),
            "most_s": round(max(times), 4),
            "runs": len(runs),
            "scheduler_ms": round(1e3 * statistics.median(run.scheduler_s for run in runs), 3),
            "queue_ms": round(1e3 * statistics.median(run.queue_s for run in runs), 3),
            "schedule_ms": round(1e3 * statistics.median(run.schedule_s for run in runs), 3),
            "finish_ms": round(1e3 * statistics.median(run.finish_s for run in runs), 3),
            "attention_replaced": True,
        }
        if place == "nothing" or system.name == AGAIN:
            row |= bench_sglang_cost.differences(runs, plain.samples["recompute"])
            row |= {f"{call}_us": round(us, 1) for call, us in system.calls_us.items()}
        yield row
