"""The demo's run through SGLang: the same sessions on the real engine, once without kvtier and once with it."""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvtier.cli.demo import DemoOptions
from kvtier.cli.demo_model import MODEL_NAME, ensure_model, import_transformers
from kvtier.cli.metrics_text import samples
from kvtier.cli.report import DemoResult, TurnResult, turn_line
from kvtier.cli.sessions import Request, load_turns, tokenized
from kvtier.codecs import registry
from kvtier.config import parse_bytes
from kvtier.errors import KVTierError
from kvtier.ledger import LedgerSnapshot
from kvtier.spec import DType, PageSpec

_WARM_UP_TOKENS = 256
_SETTLE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Served:
    """ranked: the token ranked first at each position of the recorded output."""

    first_token_s: float
    restored_tokens: int
    ranked: list[int]


def run(options: DemoOptions, console: Console) -> DemoResult:
    """Serve the sessions twice; progress goes to `console`. Engines are ended, a temporary directory is removed."""
    version = _sglang_version()
    turns = load_turns(options.sessions, options.turns)
    _, transformers = import_transformers()
    folder = ensure_model(console=console)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    requests = tokenized(turns, tokenizer)
    spec = _page_spec(transformers.AutoConfig.from_pretrained(folder), options.page_tokens)
    cold = registry.codec(options.codec.resolved(spec)).layout(spec).cold_page_bytes
    pages = options.pages_of(max(len(r.prompt) + len(r.output) for r in requests))
    host_capacity = options.room_for(pages, cold)
    engine_options = {
        "model_path": str(folder),
        "served_model_name": MODEL_NAME,
        "page_size": options.page_tokens,
        "max_total_tokens": 2 * pages * options.page_tokens,
    }
    with options.open_directory() as directory, _progress(requests, console) as progress:
        with _engine(engine_options, options.threads) as engine:
            plain = [_recompute(engine, request, progress) for request in requests]
        port = _free_port()
        connector = {"kv_connector": "kvtier", "kv_connector_config": _block(options, directory, host_capacity, port)}
        with _engine(engine_options | connector, options.threads) as engine:
            metrics = _Metrics(port)
            served = []
            results = []
            for number, request in enumerate(requests):
                result, answer = _restore(engine, metrics, request, plain[number], progress)
                results.append(result)
                served.append(answer)
            ledger = metrics.ledger(spec)
    return DemoResult(
        setup=(
            f"{MODEL_NAME} in SGLang {version}, computing in FP32 on {options.threads} CPU threads; {len(turns)} turns "
            f"of {len({t.session for t in turns})} agent sessions, {sum(len(r.prompt) for r in requests):,} prompt "
            f"tokens; pages of {options.page_tokens} tokens as {options.codec.resolved(spec)}, {cold:,} B each; "
            f"host tier {parse_bytes(host_capacity) / 2**20:.0f} MiB, NVMe tier in {directory}"
        ),
        turns=tuple(results),
        ledger=ledger,
        agreeing=sum(
            x == y for a, b in zip(plain, served, strict=True) for x, y in zip(a.ranked, b.ranked, strict=True)
        ),
        positions=sum(len(r.output) for r in requests),
        notes=(
            "Two engines, one after the other; the device cache is flushed after each turn, as if others had used it.",
            "SGLang's own attention for CPUs spends on a restored prefix what it spends on a computed one, which no "
            "accelerator does: the gain in time is understated here.",
        ),
    )


def _recompute(engine: Any, request: Request, progress: Progress) -> _Served:
    answer = _serve(engine, request)
    _flush(engine)
    progress.advance(progress.task_ids[0], len(request.prompt))
    return answer


def _restore(
    engine: Any, metrics: _Metrics, request: Request, plain: _Served, progress: Progress
) -> tuple[TurnResult, _Served]:
    before = metrics.read("kvtier_hits_total")
    answer = _serve(engine, request)
    after = metrics.read("kvtier_hits_total")
    _flush(engine)
    metrics.settle()
    result = TurnResult(
        request.turn.session,
        request.turn.number,
        len(request.prompt),
        answer.restored_tokens,
        {tier: int(n - before[tier]) for tier, n in after.items()},
        plain.first_token_s,
        answer.first_token_s,
    )
    progress.console.print(turn_line(result), highlight=False, soft_wrap=True)
    progress.advance(progress.task_ids[0], len(request.prompt))
    return result, answer


def _serve(engine: Any, request: Request) -> _Served:
    """The prompt for its first token, and then the prompt with the recorded output for what the model would have said:
    the second finds the first's pages on the device, restored ones among them."""
    greedy = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    start = time.perf_counter()
    first = engine.generate(input_ids=request.prompt, sampling_params=greedy)
    first_token_s = time.perf_counter() - start
    along = engine.generate(
        input_ids=request.prompt + request.output[:-1],
        sampling_params=greedy,
        return_logprob=True,
        logprob_start_len=len(request.prompt) - 1,
        top_logprobs_num=1,
    )
    inside = [best[0][1] for best in along["meta_info"]["input_top_logprobs"] if best]
    return _Served(first_token_s, first["meta_info"]["cached_tokens"], [*inside, along["output_ids"][0]])


def _flush(engine: Any) -> None:
    """Forget the device cache; refused while a request is being wound up, so tried for a while."""
    give_up = time.monotonic() + _SETTLE_S
    while not engine.flush_cache().success:
        if time.monotonic() > give_up:
            raise KVTierError("SGLang did not flush its cache: see its log above")
        time.sleep(0.05)


@contextmanager
def _engine(options: dict[str, Any], threads: int) -> Iterator[Any]:
    """A real engine on the CPU, warmed up."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # SGLang's, about accelerators that are not there
    import sglang

    engine = sglang.Engine(
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        grammar_backend="none",
        disable_cuda_graph=True,
        mem_fraction_static=0.2,
        max_running_requests=4,
        skip_tokenizer_init=True,
        log_level="error",
        **options,
    )
    try:
        engine.generate(
            input_ids=list(range(10, 10 + _WARM_UP_TOKENS)),
            sampling_params={"temperature": 0, "max_new_tokens": 1},
        )
        _flush(engine)
        yield engine
    finally:
        engine.shutdown()


class _Metrics:
    """The ledger of a scheduler in another process, over its metrics port."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._start = samples(port)

    def read(self, name: str) -> dict[str, int]:
        """A counter by its label's value, without what the warm-up counted."""
        return {label: int(n - self._start[name][label]) for label, n in samples(self._port)[name].items()}

    def settle(self) -> None:
        """Wait until pages have stopped moving down: an agent thinks for seconds between turns, these do not."""
        give_up = time.monotonic() + _SETTLE_S
        last = self.read("kvtier_spill_pages_total")
        while time.monotonic() < give_up:
            time.sleep(0.2)
            now = self.read("kvtier_spill_pages_total")
            if now == last:
                return
            last = now

    def ledger(self, spec: PageSpec) -> LedgerSnapshot:
        spills: dict[str, dict[str, int]] = defaultdict(dict)
        for label, n in self.read("kvtier_spill_pages_total").items():
            tier, _, status = label.partition("/")
            spills[tier][status] = n
        hot = self.read("kvtier_hot_bytes_total")
        return LedgerSnapshot(
            lookups=self.read("kvtier_lookups_total")[""],
            hits=self.read("kvtier_hits_total"),
            misses=self.read("kvtier_misses_total"),
            lookup_polls=self.read("kvtier_lookup_polls_total")[""],
            offloads=self.read("kvtier_offload_pages_total"),
            hot_bytes=hot,
            hot_bytes_16bit={k: n * spec.hot_page_bytes_16bit // spec.hot_page_bytes for k, n in hot.items()},
            cold_bytes=self.read("kvtier_cold_bytes_total"),
            spills=dict(spills),
            load_failures=self.read("kvtier_load_failures_total")[""],
            errors=self.read("kvtier_errors_total"),
        )


def _block(options: DemoOptions, directory: Path, host_capacity: str, port: int) -> dict[str, Any]:
    return {
        "kv_cache_compression_config": [{"algorithm": "quantization_for_cold_page", "quant": options.codec.quant}],
        "tiers": [
            {"type": "host", "capacity": host_capacity},
            {"type": "nvme", "path": str(directory), "capacity": options.nvme_capacity},
        ],
        "promote_deadline": "30s",
        "http": {"port": port},
    }


def _page_spec(model: Any, page_tokens: int) -> PageSpec:
    return PageSpec.mha(
        layers=model.num_hidden_layers,
        kv_heads=model.num_key_value_heads,
        head_dim=model.hidden_size // model.num_attention_heads,
        page_tokens=page_tokens,
        dtype=DType.FP32,
    )


@contextmanager
def _progress(requests: list[Request], console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        progress.add_task("serving twice", total=2 * sum(len(r.prompt) for r in requests))
        yield progress


def _sglang_version() -> str:
    try:
        from importlib.metadata import version

        import sglang  # noqa: F401
    except ImportError:
        raise KVTierError(
            "--engine sglang needs SGLang, which kvtier does not install: use `make demo-sglang`, or run kvtier in an "
            "environment that has it"
        ) from None
    return version("sglang")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port
