"""The demo's run through transformers: every turn served twice, recomputed and with kvtier, and compared."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvtier.cli.demo import DemoCodec, DemoOptions
from kvtier.cli.demo_model import MODEL_NAME, ensure_model, import_transformers
from kvtier.cli.report import DemoResult, TurnResult, turn_line
from kvtier.cli.sessions import Request, load_turns, tokenized
from kvtier.codecs import registry
from kvtier.config import Config, parse_bytes, parse_config
from kvtier.errors import KVTierError

_WARM_UP_TOKENS = 256
_SPILL_TIMEOUT_S = 60.0


def run(options: DemoOptions, console: Console) -> DemoResult:
    """Serve the sessions; progress goes to `console`. Everything opened is closed, a temporary directory removed."""
    turns = load_turns(options.sessions, options.turns)
    torch, transformers = import_transformers()
    from kvtier.connectors.transformers import PrefixCache, cache_argument, page_spec_of
    from kvtier.spec import DType

    folder = ensure_model(console=console)
    torch.set_num_threads(options.threads)
    with console.status(f"loading {MODEL_NAME}"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    requests = tokenized(turns, tokenizer)
    spec = page_spec_of(model.config, page_tokens=options.page_tokens, dtype=DType.FP32)
    with options.open_directory() as directory:
        cold = registry.codec(options.codec.resolved(spec)).layout(spec).cold_page_bytes
        longest = max(len(r.prompt) + len(r.output) for r in requests)
        host_capacity = options.room_for(options.pages_of(longest), cold)
        config = _config(options, directory, host_capacity)
        compute = _Compute(torch, transformers, model, cache_argument(model))
        with PrefixCache.open(model, config, model_name=MODEL_NAME, page_tokens=options.page_tokens) as prefixes:
            results, agreeing = _serve(compute, prefixes, requests, console)
            snapshot = prefixes.ledger.snapshot()
    return DemoResult(
        setup=(
            f"{MODEL_NAME}, computing in FP32 on {options.threads} CPU threads; {len(turns)} turns of "
            f"{len({t.session for t in turns})} agent sessions, {sum(len(r.prompt) for r in requests):,} prompt "
            f"tokens; pages of {options.page_tokens} tokens as {options.codec.resolved(spec)}, {cold:,} B each; "
            f"host tier {parse_bytes(host_capacity) / 2**20:.0f} MiB, NVMe tier in {directory}"
        ),
        turns=tuple(results),
        ledger=snapshot,
        agreeing=agreeing,
        positions=sum(len(r.output) for r in requests),
        notes=_notes(options),
    )


def _serve(compute: _Compute, prefixes: Any, requests: list[Request], console: Console) -> tuple[list[TurnResult], int]:
    results: list[TurnResult] = []
    agreeing = 0
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("serving", total=sum(len(r.prompt) for r in requests))
        compute.warm_up(requests[0].prompt[:_WARM_UP_TOKENS])
        for number, request in enumerate(requests):
            progress.update(task, description=f"session {request.turn.session}, turn {request.turn.number}")
            start = time.perf_counter()
            plain = compute.first(request.prompt, compute.empty_cache())
            recompute_s = time.perf_counter() - start
            expected = compute.follow(plain, request.output)
            del plain

            start = time.perf_counter()
            restored = prefixes.restore(f"turn-{number}", request.prompt)
            reached = compute.first(request.prompt[restored.tokens :], restored.cache)
            kvtier_s = time.perf_counter() - start
            got = compute.follow(reached, request.output)
            agreeing += sum(a == b for a, b in zip(got, expected, strict=True))

            _offload(prefixes, request.prompt + request.output[:-1], restored.cache)
            results.append(
                TurnResult(
                    request.turn.session,
                    request.turn.number,
                    len(request.prompt),
                    restored.tokens,
                    restored.pages,
                    recompute_s,
                    kvtier_s,
                )
            )
            progress.console.print(turn_line(results[-1]), highlight=False, soft_wrap=True)
            progress.advance(task, len(request.prompt))
        progress.update(task, description="served")
    return results, agreeing


def _offload(prefixes: Any, tokens: list[int], cache: Any) -> None:
    """Offload and wait: an agent thinks for seconds between turns, these turns follow each other at once, and pages
    still on their way would be measured as the next turn's work."""
    outcome = prefixes.offload(tokens, cache).result()
    if not outcome.ok:
        said = ", ".join(f"{n} {o.value}" for o, n in outcome.outcomes.items())
        raise KVTierError(f"pages could not be stored ({said}): raise --host-capacity or --nvme-capacity")
    prefixes.store.flush(_SPILL_TIMEOUT_S)


class _Compute:
    """The model: prefill, and what it would have said along the recorded output."""

    def __init__(self, torch: Any, transformers: Any, model: Any, cache_argument: str) -> None:
        self._torch = torch
        self._transformers = transformers
        self._model = model
        self._cache_argument = cache_argument

    def empty_cache(self) -> Any:
        return self._transformers.DynamicCache(config=self._model.config)

    def warm_up(self, tokens: list[int]) -> None:
        self.first(tokens, self.empty_cache())

    def first(self, tokens: list[int], cache: Any) -> tuple[int, Any]:
        """Compute `tokens` into `cache`; the most likely next token, and the cache."""
        return self._ranked(tokens, cache, last_only=True)[-1], cache

    def follow(self, reached: tuple[int, Any], output: list[int]) -> list[int]:
        """The token ranked first at each position of `output`, which is fed in whatever is ranked first. Leaves the
        cache with all of `output` but its last token."""
        first, cache = reached
        return [first, *(self._ranked(output[:-1], cache, last_only=False) if len(output) > 1 else [])]

    def _ranked(self, tokens: list[int], cache: Any, *, last_only: bool) -> list[int]:
        ids = self._torch.tensor([tokens])
        with self._torch.inference_mode():
            options = {self._cache_argument: cache, "use_cache": True, "logits_to_keep": 1 if last_only else 0}
            ranked: list[int] = self._model(ids, **options).logits[0].argmax(-1).tolist()
        return ranked


def _config(options: DemoOptions, directory: Path, host_capacity: str) -> Config:
    return parse_config(
        {
            "kv_cache_compression_config": [{"algorithm": "quantization_for_cold_page", "quant": options.codec.quant}],
            "tiers": [
                {"type": "host", "capacity": host_capacity},
                {"type": "nvme", "path": str(directory), "capacity": options.nvme_capacity},
            ],
            "promote_deadline": "30s",
        }
    )


def _notes(options: DemoOptions) -> tuple[str, ...]:
    notes = [
        "Both runs alternate, turn by turn, in one process; time to first token excludes splitting text into tokens."
    ]
    if options.codec is DemoCodec.RAW:
        notes.append(
            "raw keeps the FP32 cache as it is, every byte; but a prefill of the rest alone sums in another order than "
            "one of the whole prompt, so that a near tie may still rank differently."
        )
    return tuple(notes)
