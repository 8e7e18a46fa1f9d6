"""``kvtier replay``: what a stack of tiers would have answered to a recorded stream of requests."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.cli.options import at_least
from kvtier.errors import ConfigError
from kvtier.spec import DType, GlobalScale

if TYPE_CHECKING:
    from kvtier.replay.page import BlockBytes
    from kvtier.replay.simulate import ClosedLoop, Timing
    from kvtier.replay.stack import Placement, TierPlan
    from kvtier.replay.trace import Trace

ENGINE = "Engine model"
PAGES = "What pages weigh"
DEFAULT_MODEL = "Qwen/Qwen3-8B"


class Format(str, Enum):
    AUTO = "auto"
    MOONCAKE = "mooncake"
    WEKA = "weka"
    PROMPTS = "prompts"
    RECORDED = "recorded"
    COMPACT = "compact"


class Codec(str, Enum):
    RAW = "raw"
    FP8 = "fp8"
    NVFP4 = "nvfp4"


class Place(str, Enum):
    WRITE_THROUGH = "write-through"
    WRITE_BACK = "write-back"


class Show(str, Enum):
    HIT_RATE = "hit_rate"
    TIER_SHARE = "tier_share"
    TTFT_P50 = "ttft_p50"
    TTFT_P99 = "ttft_p99"
    REQUESTS_COMPLETED = "requests_completed"


def replay(
    trace: Annotated[
        str,
        typer.Argument(
            help="A file, a directory of sessions, or mooncake-conversation, mooncake-synthetic, agent-sessions."
        ),
    ],
    kind: Annotated[Format, typer.Option("--format", help="Of the trace; auto looks at its beginning.")] = Format.AUTO,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME:SIZE and, after commas, bandwidth=6GB/s, latency=200us, ttl=1h, policy=lru (or fifo, s3fifo). "
            "GB is decimal, GiB binary, SIZE may be unlimited. Repeatable, fastest first. Without: memory without end."
        ),
    ] = None,
    codec: Annotated[Codec, typer.Option(help="How pages are stored.")] = Codec.NVFP4,
    placement: Annotated[
        Place,
        typer.Option(
            help="write-through: pages in every tier, as the store does. write-back: in one, and down when evicted."
        ),
    ] = Place.WRITE_THROUGH,
    bytes_per_token: Annotated[
        int | None, typer.Option(help="Of the KV cache at 16 bits a value.", rich_help_panel=PAGES)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help=f"A model in the table of geometries; default {DEFAULT_MODEL}.", rich_help_panel=PAGES),
    ] = None,
    page: Annotated[
        str | None,
        typer.Option(
            help="Geometry: mha:36x8x128 (layers, KV heads, dim), mla:61x576, or with index keys mla:79x576+22x132.",
            rich_help_panel=PAGES,
        ),
    ] = None,
    page_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens in one page of --model or --page; default 64, or a whole block.", rich_help_panel=PAGES
        ),
    ] = None,
    dtype: Annotated[
        DType, typer.Option(help="Of the hot cache of --model or --page.", rich_help_panel=PAGES)
    ] = DType.BF16,
    global_scale: Annotated[
        GlobalScale, typer.Option(help="Of nvfp4 pages of --model or --page.", rich_help_panel=PAGES)
    ] = GlobalScale.PAGE,
    block_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens in one block of a mooncake (512) or prompts (64) trace.", rich_help_panel=PAGES),
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Replay only this many requests from the beginning.")] = None,
    sessions: Annotated[
        int | None,
        typer.Option(help="Closed loop: this many users at once, each sends when its last answer is complete."),
    ] = None,
    duration: Annotated[
        str | None, typer.Option(help="Simulated time of a closed loop, 600s say; default: until the trace ends.")
    ] = None,
    session_gap: Annotated[
        str | None, typer.Option(help="Time between the beginnings of two weka sessions; default: all begin together.")
    ] = None,
    prefill_s_per_token: Annotated[
        float | None, typer.Option(help="Seconds per prompt token; default 0.0001.", rich_help_panel=ENGINE)
    ] = None,
    prefill_measured: Annotated[
        str | None,
        typer.Option(help="TOKENS:TIME instead, from one measurement: 8192:650ms.", rich_help_panel=ENGINE),
    ] = None,
    prefill_base_s: Annotated[
        float, typer.Option(help="Seconds per prefill besides its tokens.", rich_help_panel=ENGINE)
    ] = 0.0,
    decode_step_s: Annotated[
        float, typer.Option(help="Seconds per decode step (closed loop).", rich_help_panel=ENGINE)
    ] = 0.015,
    decode_step_per_request_s: Annotated[
        float, typer.Option(help="And per request in its batch.", rich_help_panel=ENGINE)
    ] = 0.00025,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Hit rate against the size of the last tier, for raw, fp8 and nvfp4.")
    ] = False,
    sizes: Annotated[
        str | None,
        typer.Option(help="Sizes of --sweep, 200GB,400GB,800GB say; default: 12 up to all that is distinct."),
    ] = None,
    show: Annotated[
        Show | None, typer.Option(help="What --sweep shows; default hit_rate. The last needs --sessions.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the curves of --sweep to this PNG.")] = None,
    live: Annotated[
        bool,
        typer.Option(
            "--live", help="Replay against the real store, scaled down, and compare its ledger to the simulator."
        ),
    ] = False,
    live_page_bytes: Annotated[
        int, typer.Option(help="Bytes that stand for one block with --live; capacities shrink alike.")
    ] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Hit rates, bytes moved and time to first token of a trace, for any tiers, sizes and codecs."""
    from kvtier.replay.formats import TraceFormat, read_trace
    from kvtier.replay.simulate import ClosedLoop
    from kvtier.replay.stack import Placement, check_stack, parse_tier

    at_least(1, bytes_per_token=bytes_per_token, page_tokens=page_tokens, block_tokens=block_tokens)
    at_least(1, sessions=sessions, requests=requests)
    if live and (sweep or sessions is not None):
        raise ConfigError("--live goes without --sweep and without --sessions: remove one")
    for option, value, needs, there in (
        ("--sizes", sizes, "--sweep", sweep),
        ("--plot", plot, "--sweep", sweep),
        ("--show", show and show.value, "--sweep", sweep),
        ("--duration", duration, "--sessions", sessions is not None),
    ):
        if value is not None and not there:
            raise ConfigError(f"{option} {value}: it belongs to {needs}; add that, or remove this")
    timing = _timing(prefill_s_per_token, prefill_measured, prefill_base_s, decode_step_s, decode_step_per_request_s)
    tiers = check_stack([parse_tier(text) for text in tier or ()])
    gap_s = _seconds("--session-gap", session_gap) if session_gap is not None else 0.0
    loaded = read_trace(trace, TraceFormat(kind.value), block_tokens=block_tokens, session_gap_s=gap_s)
    if requests is not None:
        loaded = loaded.head(requests)
    weight = _block_bytes(loaded, bytes_per_token, model, page, page_tokens, dtype, global_scale)
    where = Placement[placement.name]
    duration_s = _seconds("--duration", duration) if duration is not None else math.inf
    loop = None if sessions is None else ClosedLoop(sessions, duration_s)
    if sweep:
        _sweep(trace, loaded, tiers, weight, where, timing, loop, sizes, show or Show.HIT_RATE, plot, as_json)
    elif live:
        _live(loaded, tiers, codec, weight, where, live_page_bytes, as_json)
    else:
        _replay(trace, loaded, tiers, codec, weight, where, timing, loop, as_json)


def _replay(
    name: str,
    trace: Trace,
    tiers: tuple[TierPlan, ...],
    codec: Codec,
    weight: BlockBytes,
    placement: Placement,
    timing: Timing,
    loop: ClosedLoop | None,
    as_json: bool,
) -> None:
    from kvtier.replay.page import ReplayCodec
    from kvtier.replay.report import ReplayInput, replay

    replayed = ReplayCodec(codec.value)
    report = replay(ReplayInput(trace, tiers, replayed, weight(replayed)), placement, timing, loop)
    if as_json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        _print(name, report)


def _sweep(
    name: str,
    trace: Trace,
    tiers: tuple[TierPlan, ...],
    weight: BlockBytes,
    placement: Placement,
    timing: Timing,
    loop: ClosedLoop | None,
    sizes: str | None,
    show: Show,
    plot: Path | None,
    as_json: bool,
) -> None:
    from dataclasses import replace

    from kvtier.replay.page import ReplayCodec
    from kvtier.replay.plot import sweep_png, sweep_text
    from kvtier.replay.stack import SPEEDS
    from kvtier.replay.sweep import Metric, advice, decimal, default_sizes, sweep

    if show is Show.REQUESTS_COMPLETED and loop is None:
        raise ConfigError("--show requests_completed: only a closed loop counts them; add --sessions")
    if tiers[-1].name == "unlimited":
        tiers = (replace(tiers[-1], name="host", bandwidth=SPEEDS["host"][0]),)
    chosen = _sizes(sizes) if sizes is not None else default_sizes(trace, weight(ReplayCodec.RAW))
    result = sweep(trace, tiers, weight, chosen, placement, timing, loop)
    metric = Metric(show.value)
    if plot is not None:
        sweep_png(result, metric, plot, name)
    if as_json:
        figures: dict[str, Any] = {"tier": result.tier, "sizes_bytes": result.sizes_bytes}
        for one, curves in result.curves.items():
            figures[one.value] = {codec.value: curve for codec, curve in curves.items()}
        figures |= {"unlimited_hit_rate": result.ideal, "advice": advice(result)}
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    curves = result.curves[metric]
    table = Table(title=f"{name}: {metric.label}")
    for column in (result.tier, *(c.value for c in curves)):
        table.add_column(column, justify="right")
    digits = {Metric.REQUESTS_COMPLETED: 0, Metric.TTFT_P50: 3, Metric.TTFT_P99: 3}.get(metric, 1)
    for i, size in enumerate(result.sizes_bytes):
        table.add_row(decimal(size), *(f"{curve[i]:.{digits}f}" for curve in curves.values()))
    Console().print(table)
    sys.stdout.write(f"{sweep_text(result, metric)}\n\n{advice(result)}\n")


def _live(
    trace: Trace,
    tiers: tuple[TierPlan, ...],
    codec: Codec,
    weight: BlockBytes,
    placement: Placement,
    page_bytes: int,
    as_json: bool,
) -> None:
    from kvtier.replay.live import run_live
    from kvtier.replay.page import ReplayCodec

    with _progress(trace.requests) as progress:
        result = run_live(trace, tiers, weight(ReplayCodec(codec.value)), placement, page_bytes, progress)
    figures = result.as_dict()
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{result.requests} requests through the real store, blocks of {page_bytes} bytes: prefix hits, %"
    )
    for column in ("", "simulator", "ledger"):
        table.add_column(column, justify="right")
    for key, simulated in result.simulated.items():
        table.add_row(key, f"{simulated:.2f}", f"{result.ledger[key]:.2f}")
    Console().print(table)
    sys.stdout.write(f"largest difference: {result.largest_difference:.2f} points\n")


@contextlib.contextmanager
def _progress(requests: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("replaying", total=requests)
        yield lambda done: bar.update(task, completed=done)


def _print(name: str, report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{name}: {report['requests']:,} requests, {report['blocks']:,} blocks, {report['codec']}")
    for column in ("tier", "hits, %", "in the prefix, %", "read", "written", "capacity, blocks"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    from kvtier.replay.sweep import decimal

    for tier, rate in report["hit_rate"].items():
        moved = report["bytes_moved"].get(tier)
        capacity = report["capacity_blocks"].get(tier)
        table.add_row(
            tier,
            f"{rate:.2f}",
            f"{report['prefix_hit_rate'][tier]:.2f}",
            "" if moved is None else decimal(moved["read"]),
            "" if moved is None else decimal(moved["written"]),
            "" if capacity is None else "unlimited" if capacity < 0 else f"{capacity:,}",
        )
    Console().print(table)
    ttft = report["ttft_s"]
    if ttft["p50"] is not None:
        sys.stdout.write(
            f"time to first token: p50 {ttft['p50']:.3f} s, p90 {ttft['p90']:.3f} s, p99 {ttft['p99']:.3f} s, "
            f"mean {ttft['mean']:.3f} s\n"
        )
    for key, value in report.get("closed_loop", {}).items():
        sys.stdout.write(f"{key.replace('_', ' ')}: {value}\n")
    sys.stdout.write("; ".join(f"{k.replace('_', ' ')}: {v}" for k, v in report["conventions"].items()) + "\n")


def _block_bytes(
    trace: Trace,
    bytes_per_token: int | None,
    model: str | None,
    page: str | None,
    page_tokens: int | None,
    dtype: DType,
    global_scale: GlobalScale,
) -> BlockBytes:
    from kvtier.replay.page import from_bytes_per_token, from_geometry, geometry_of_model, parse_geometry

    if sum(x is not None for x in (bytes_per_token, model, page)) > 1:
        raise ConfigError("--model, --page and --bytes-per-token say the same thing: give one of them")
    if bytes_per_token is not None:
        if page_tokens is not None:
            raise ConfigError(f"--page-tokens {page_tokens}: it belongs to --model and --page; remove it")
        return from_bytes_per_token(bytes_per_token, trace.block_tokens)
    geometry = parse_geometry(page) if page is not None else geometry_of_model(model or DEFAULT_MODEL)
    return from_geometry(geometry, trace.block_tokens, page_tokens=page_tokens, dtype=dtype, global_scale=global_scale)


def _timing(
    per_token: float | None, measured: str | None, base_s: float, step_s: float, step_per_request_s: float
) -> Timing:
    from kvtier.replay.simulate import Timing

    for option, value in (
        ("--prefill-s-per-token", per_token),
        ("--prefill-base-s", base_s),
        ("--decode-step-s", step_s),
        ("--decode-step-per-request-s", step_per_request_s),
    ):
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"{option} {value}: give seconds from 0 up")
    if measured is not None:
        if per_token is not None:
            raise ConfigError("--prefill-measured and --prefill-s-per-token say the same thing: give one of them")
        tokens, colon, taken = measured.partition(":")
        if not colon or not tokens.isdecimal() or int(tokens) < 1:
            raise ConfigError(f"--prefill-measured {measured}: give TOKENS:TIME, such as 8192:650ms")
        rest_s = _seconds("--prefill-measured", taken) - base_s
        if rest_s < 0:
            raise ConfigError(f"--prefill-measured {measured}: it is shorter than --prefill-base-s {base_s}")
        per_token = rest_s / int(tokens)
    return Timing(base_s, Timing().prefill_s_per_token if per_token is None else per_token, step_s, step_per_request_s)


def _sizes(text: str) -> tuple[int, ...]:
    from kvtier.config import parse_bytes

    try:
        sizes = tuple(sorted({parse_bytes(part) for part in text.split(",")}))
    except ValueError as error:
        raise ConfigError(f"--sizes {text}: each {error}") from None
    if len(sizes) < 2:
        raise ConfigError(f"--sizes {text}: give two or more, such as 200GB,400GB,800GB")
    return sizes


def _seconds(option: str, text: str) -> float:
    from kvtier.config import parse_seconds

    try:
        return parse_seconds(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from None
