"""``kvtier eval triattention``: what eviction of generated tokens costs in quality and gains in memory and speed."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.cli.options import at_least
from kvtier.errors import ConfigError, missing_extra

if TYPE_CHECKING:
    import torch

    from kvtier.abc.compression import CompressionManager
    from kvtier.compression.triattention import Calibration

METHODS = ("triattention", "random", "recent_window", "attention")
JSON_KEYS = ("method", "budget", "nll", "key_nll", "kv_bytes", "decode_tok_per_s", "batch")
_PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the result. Quality and speed do not depend on each other: a field that was not measured for this
    method and batch is None. nll: of held-out text; nll_generated: of text that the model wrote; key_nll: of pass
    keys; all in nats per token. kv_bytes: the most that one sequence holds. decode_tok_per_s: of the whole batch; a
    batch without it does not fit the pool. nll_generated and note are in the table only."""

    method: str
    budget: int | None
    nll: float | None = None
    nll_generated: float | None = None
    key_nll: float | None = None
    kv_bytes: int | None = None
    decode_tok_per_s: float | None = None
    batch: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Setup:
    model: Any
    tokenizer: Any
    calibration: Calibration
    beta: int
    mode: str


def evaluate(
    model: Annotated[Path | None, typer.Option(help="Folder of the model; by default the demo's SmolLM2-135M.")] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Its calibration; by default made from the first shipped session.")
    ] = None,
    budgets: Annotated[str, typer.Option(help="Budgets in tokens, with commas between.")] = "64,128,256,512",
    methods: Annotated[str, typer.Option(help="Methods, with commas between.")] = ",".join(METHODS),
    mode: Annotated[str, typer.Option(help="TriAttention's eviction mode.")] = "union",
    beta: Annotated[int, typer.Option(help="Tokens between two rounds.")] = 64,
    text: Annotated[Path | None, typer.Option(help="Held-out text; by default the second shipped session.")] = None,
    windows: Annotated[int, typer.Option(help="Stretches of the text; 0 leaves them out.")] = 2,
    window_tokens: Annotated[int, typer.Option(help="Tokens of a stretch; NLL is measured on its second half.")] = 1536,
    keys: Annotated[int, typer.Option(help="Pass keys; 0 leaves them out.")] = 6,
    key_tokens: Annotated[int, typer.Option(help="Tokens of text around a pass key.")] = 768,
    generated: Annotated[int, typer.Option(help="Sequences that the model writes first and is measured on.")] = 0,
    context: Annotated[int, typer.Option(help="Generated tokens at which decoding is timed; 0 leaves it out.")] = 8192,
    batch: Annotated[str, typer.Option(help="Batch sizes of decoding, with commas between.")] = "1,4",
    pool_mib: Annotated[int, typer.Option(help="Pool for sequences at the largest batch that fits.")] = 1536,
    steps: Annotated[int, typer.Option(help="Timed decode steps.")] = 12,
    plot: Annotated[Path | None, typer.Option(help="Write a plot (PNG or SVG).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of records.")] = False,
) -> None:
    """NLL, pass keys, KV bytes and decode speed of TriAttention and of simpler evictions, at several budgets."""
    at_least(1, beta=beta, window_tokens=window_tokens, steps=steps, pool_mib=pool_mib)
    at_least(0, windows=windows, keys=keys, context=context, generated=generated)
    sizes, batches = _numbers("--budgets", budgets), _numbers("--batch", batch)
    names = tuple(methods.split(","))
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise ConfigError(f"--methods {methods}: {unknown[0]!r} is not one of {', '.join(METHODS)}")
    if windows + generated and max(sizes) + beta > window_tokens // 2 - _PROMPT_TOKENS:
        raise ConfigError(
            f"--window-tokens {window_tokens}: the largest budget, {max(sizes)}, would never evict before the measured "
            "second half; give more tokens or smaller budgets"
        )
    setup, held_out = _load(model, calibration, text, beta, mode)
    from rich.console import Console

    console = Console(stderr=True)
    records = [*_quality(setup, held_out, names, sizes, windows, window_tokens, keys, key_tokens, generated, console)]
    if context:
        records += _speed(setup, sizes, batches, context, pool_mib << 20, steps, console)
    if plot is not None:
        _plot(records, plot)
    if as_json:
        sys.stdout.write(json.dumps([{key: getattr(record, key) for key in JSON_KEYS} for record in records]) + "\n")
    else:
        _table(records)


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(f"{option} {text}: give whole numbers with commas between") from None
    if numbers[0] < 1:
        raise ConfigError(f"{option} {text}: give numbers from 1 up")
    return numbers


def _load(
    model: Path | None, calibration: Path | None, text: Path | None, beta: int, mode: str
) -> tuple[_Setup, list[int]]:
    from kvtier.cli.demo_model import ensure_model, import_transformers, load_model

    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
    torch, _ = import_transformers()
    from kvtier.compression.triattention import load_calibration
    from kvtier.connectors.transformers.calibration import calibrate

    folder = model if model is not None else ensure_model()
    loaded, tokenizer = load_model(folder)
    if calibration is not None:
        statistics_ = load_calibration(calibration)
    else:
        ids = torch.tensor(_ids(tokenizer, _session(0)), dtype=torch.int64)
        statistics_ = calibrate(loaded, ids, model_name=folder.name)
    try:
        held_out = _session(1) if text is None else text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--text {str(text)!r} cannot be read ({e}): give a file of UTF-8 text") from None
    return _Setup(loaded, tokenizer, statistics_, beta, mode), _ids(tokenizer, held_out)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _session(number: int) -> str:
    """All that one shipped agent session says: its last prompt holds the others, and the answers."""
    folder = resources.files("kvtier") / "data" / "agent_sessions"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".jsonl")), key=lambda f: f.name)
    lines = [json.loads(line) for line in files[number].read_text(encoding="utf-8").splitlines()]
    return "\n".join([lines[-1]["input"], *(line["output"] for line in lines)])


def _make(setup: _Setup, name: str, budget: int) -> CompressionManager:
    from kvtier.cli import eval_baselines
    from kvtier.compression.triattention import TriAttention
    from kvtier.connectors.transformers.eviction import rotary_reader

    if name == "triattention":
        read = rotary_reader(setup.model.config)
        return TriAttention(
            setup.calibration,
            lambda layer: read(layer, setup.calibration.rope_style),
            budget=budget,
            beta=setup.beta,
            eviction_mode=setup.mode,
        )
    classes: dict[str, Callable[[int, int], CompressionManager]] = {
        c.algorithm: c for c in (eval_baselines.RandomRows, eval_baselines.RecentWindow, eval_baselines.AttentionScore)
    }
    return classes[name](budget, setup.beta)


def _quality(
    setup: _Setup,
    held_out: list[int],
    names: tuple[str, ...],
    budgets: list[int],
    windows: int,
    window_tokens: int,
    keys: int,
    key_tokens: int,
    generated: int,
    console: Any,
) -> list[Record]:
    from kvtier.cli.eval_quality import measure, pass_keys, windows_of

    texts: dict[str, tuple[torch.Tensor, range]] = {}
    if windows:
        texts["nll"] = windows_of(held_out, windows, window_tokens), range(window_tokens // 2, window_tokens)
        if not len(texts["nll"][0]):
            raise ConfigError(f"--window-tokens {window_tokens}: the text has only {len(held_out)} tokens")
    if keys:
        texts["key_nll"] = pass_keys(setup.tokenizer, keys, prompt=_PROMPT_TOKENS, tokens=key_tokens, beta=setup.beta)
    if generated:
        with console.status(f"the model writes {generated} x {window_tokens} tokens"):
            written = _written(setup, generated, window_tokens)
        texts["nll_generated"] = (written, range(window_tokens // 2, window_tokens))
    if not texts:
        return []
    records = []
    for name, budget in [("dense", None), *((name, budget) for name in names for budget in budgets)]:
        values: dict[str, Any] = {}
        evicted = 0
        for field, (batch, measured) in texts.items():
            method = None if budget is None else _make(setup, name, budget)
            with console.status(f"{name}, budget {budget}: {field}"):
                found = measure(setup.model, batch, method, prompt=_PROMPT_TOKENS, beta=setup.beta, measured=measured)
            values[field] = round(statistics.fmean(found.nll), 4)
            evicted += found.evicted_tokens
            values.setdefault("kv_bytes", found.kv_bytes)
        if budget is not None and not evicted:
            raise ConfigError(f"--budgets {budget}: nothing was evicted in the measured texts; give more tokens")
        records.append(Record(name, budget, **values))
        console.print(f"{name:>14} {budget or '':>5} {values}", highlight=False)
    return records


def _written(setup: _Setup, sequences: int, tokens: int) -> torch.Tensor:
    """``[sequences, tokens]`` sampled by the dense model, from the beginning of a story."""
    import torch

    from kvtier.compression import CompressionPipeline
    from kvtier.connectors.transformers.eviction import EvictingGeneration, platform_of

    start = torch.tensor(_ids(setup.tokenizer, "Once upon a time, in a small town by the sea,"))
    torch.manual_seed(0)
    with EvictingGeneration(setup.model, CompressionPipeline([], platform_of(setup.model))) as generation:
        written: torch.Tensor = generation.generate(
            start.expand(sequences, -1),
            max_length=tokens,
            min_length=tokens,
            do_sample=True,
            temperature=0.8,
            top_k=0,
            pad_token_id=0,
        )
    return written


def _speed(
    setup: _Setup, budgets: list[int], batches: list[int], context: int, pool_bytes: int, steps: int, console: Any
) -> list[Record]:
    from kvtier.cli.eval_speed import compare, fitting
    from kvtier.compression.triattention import TriAttention

    records = []
    prompt = _PROMPT_TOKENS
    budget = max(budgets)
    most_dense = fitting(setup.model, prompt + context, pool_bytes)
    most_evicted = fitting(setup.model, prompt + budget + setup.beta, pool_bytes)
    pairs: list[tuple[int | None, int]] = [(b, b) for b in batches if b <= most_dense]
    pairs += [(None, b) for b in batches if b > most_dense]
    pairs.append((most_dense or None, most_evicted))
    for dense_batch, evicted_batch in pairs:
        method = _make(setup, "triattention", budget)
        if not isinstance(method, TriAttention):
            raise ConfigError("only triattention is timed")
        with console.status(f"decoding at {context} tokens, batches {dense_batch} and {evicted_batch}"):
            dense, evicted = compare(
                setup.model,
                method,
                beta=setup.beta,
                batches=(dense_batch, evicted_batch),
                prompt=prompt,
                context=context,
                steps=steps,
            )
        largest = (dense_batch, evicted_batch) == pairs[-1]
        note = f"largest batch in {pool_bytes >> 20} MiB" if largest else ""
        if dense is None:
            records.append(Record("dense", None, batch=evicted_batch, note=f"does not fit {pool_bytes >> 20} MiB"))
        for name, size, speed in (("dense", None, dense), ("triattention", budget, evicted)):
            if speed is not None:
                records.append(
                    Record(
                        name,
                        size,
                        kv_bytes=speed.kv_bytes,
                        decode_tok_per_s=round(speed.tokens_per_s, 2),
                        batch=speed.batch,
                        note=f"{note} round {1e3 * speed.round_s:.0f} ms".strip() if size else note,
                    )
                )
                console.print(str(records[-1]), highlight=False)
    return records


def _table(records: list[Record]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="eviction of generated tokens")
    fields = ("method", "budget", "nll", "nll_generated", "key_nll", "kv_bytes", "decode_tok_per_s", "batch", "note")
    for field in fields:
        table.add_column(field, justify="left" if field in ("method", "note") else "right")
    for record in records:
        values = asdict(record)
        table.add_row(*("" if values[field] is None else str(values[field]) for field in fields))
    Console().print(table)


def _plot(records: list[Record], path: Path) -> None:
    try:
        import matplotlib as mpl
    except ImportError as e:
        raise missing_extra("matplotlib", "demo") from e
    mpl.use("Agg")
    from matplotlib import pyplot

    measured = [record for record in records if record.decode_tok_per_s is None and not record.note]
    panels = [
        (field, label)
        for field, label in (
            ("nll", "NLL of held-out text, nats per token"),
            ("nll_generated", "NLL of text the model wrote"),
            ("key_nll", "NLL of the pass key"),
        )
        if any(getattr(record, field) is not None for record in measured)
    ]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.5 * len(panels), 3.6), squeeze=False)
    for axis, (field, label) in zip(axes[0], panels, strict=True):
        for name in METHODS:
            line = [(r.budget, getattr(r, field)) for r in measured if r.method == name]
            if line:
                axis.plot(*zip(*line, strict=True), marker="o", label=name.replace("_", " "))
        dense = [getattr(r, field) for r in measured if r.method == "dense"]
        if dense:
            axis.axhline(dense[0], color="black", linestyle="--", linewidth=1, label="dense")
        axis.set_xscale("log", base=2)
        budgets = sorted({r.budget for r in measured if r.budget is not None})
        axis.set_xticks(budgets, [str(b) for b in budgets])
        axis.set_xlabel("budget, generated tokens kept")
        axis.set_title(label, fontsize=10)
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as e:
        raise ConfigError(f"--plot {str(path)!r} cannot be written: {e}") from e
    finally:
        pyplot.close(figure)
