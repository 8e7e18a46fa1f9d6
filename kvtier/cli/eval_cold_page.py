"""``kvtier eval cold-page``: what each form of the cold page costs a real model.

A text's first tokens are computed in float32; their cache goes through one form; then the text's next tokens are fed
and compared with what the untouched cache gives: KL divergence, agreement of the likeliest token, change of NLL, and
the NLL of a pass key in the stored part that the rest asks for. Controls are measured alike: int2 and dropping half of
the tokens must look bad, or the measure is blind."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.cli.eval_forms import CODECS, FORMS, Again, Record
from kvtier.cli.options import at_least, check_writable
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    import torch

PAGE_TOKENS = 64
OFFSET = (80.0, 40.0, 20.0)
"""What `offset` adds to three channels of every key head, and takes away again behind the codec: it does not change
attention, and stands for models with a bias in their key projection."""

_NAMED: dict[str, tuple[str, dict[str, str]]] = {"nvfp4_identity": ("nvfp4", {"global_scale": "identity"})}
"""Codec and options of the names in CODECS that are not a codec's own."""

Layers = list[tuple["torch.Tensor", "torch.Tensor"]]
"""Per layer K and V, ``[batch, kv_heads, tokens, head_dim]``, float32, K after RoPE."""


@dataclass(frozen=True, slots=True)
class Trip:
    """A cache that went through a form. positions: of its tokens, where some are gone."""

    layers: Layers
    bytes_per_value: float
    compressed: float
    kept: range | list[int]


def evaluate(
    contexts: Annotated[str, typer.Option(help="Stored tokens, several with commas.")] = "768",
    windows: Annotated[int, typer.Option(help="Stretches of text at each length.")] = 3,
    continuation: Annotated[int, typer.Option(help="Tokens fed behind them.")] = 128,
    keys: Annotated[int, typer.Option(help="Texts with a pass key; 0 leaves them out.")] = 6,
    key_context: Annotated[
        int | None, typer.Option(help="Stored tokens of a text with a pass key; as many as --contexts by default.")
    ] = None,
    forms: Annotated[str, typer.Option(help=f"Any of {', '.join(FORMS)}.")] = ",".join(FORMS),
    offset: Annotated[
        bool, typer.Option(help="Measure each codec with a constant in some key channels as well.")
    ] = True,
    again: Annotated[bool, typer.Option(help="Measure a second trip as well.")] = False,
    model: Annotated[Path | None, typer.Option(help="Folder of a model; by default SmolLM2-135M-Instruct.")] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Folder for accuracy.json with every figure, a table and a plot; rows there are replaced."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Accuracy of every form of the cold page on a real model, on the CPU."""
    at_least(1, windows=windows, continuation=continuation)
    at_least(0, keys=keys)
    try:
        lengths = [int(part) for part in contexts.split(",")]
    except ValueError:
        raise ConfigError(f"--contexts {contexts}: give whole numbers with commas between") from None
    for length in (*lengths, *(() if key_context is None else (key_context,))):
        if length < PAGE_TOKENS or length % PAGE_TOKENS:
            raise ConfigError(f"{length} stored tokens: give a multiple of {PAGE_TOKENS}, the tokens of a page")
    names = forms.split(",")
    unknown = [name for name in names if name not in FORMS]
    if unknown:
        raise ConfigError(f"--forms {unknown[0]}: use any of {', '.join(FORMS)}")
    if report is not None:
        check_writable("--report", report)
    bench = ColdPageEval.load(model)
    cases = [(name, False) for name in names]
    cases += [(name, True) for name in names if name in CODECS and name != "lossless"] if offset else []
    records: list[Record] = []
    for length in lengths:
        texts = bench.windows(windows, length + continuation)
        pass_keys = bench.key_texts(keys, key_context or length) if keys else None
        records += bench.measure(texts, length, cases, again=again, keys=pass_keys)
    if report is not None:
        from kvtier.cli import eval_report

        eval_report.write(records, report)
    if as_json:
        sys.stdout.write(json.dumps([row for record in records for row in rows_of(record)]) + "\n")
        return
    print_table(records)


def rows_of(record: Record) -> list[dict[str, str | float | None]]:
    """`record` as in the JSON list: what was measured under one name, a second trip under a name of its own."""
    form = f"{record.form}, keys with an offset" if record.offset else record.form
    row: dict[str, str | float | None] = {
        "form": form,
        "context_tokens": record.context_tokens,
        "kl": record.kl,
        "top1": record.top1,
        "delta_nll": record.delta_nll,
        "key_nll": record.key_nll,
        "bytes_per_value": record.bytes_per_value,
    }
    if record.again is None:
        return [row]
    return [row, {**row, "form": f"{form}, second trip", **asdict(record.again)}]


class ColdPageEval:
    """A model in float32 and its tokenizer. Not thread-safe."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer

    @staticmethod
    def load(folder: Path | None = None) -> ColdPageEval:
        from kvtier.cli.demo_model import load_model

        return ColdPageEval(*load_model(folder))

    def windows(self, count: int, tokens: int) -> torch.Tensor:
        """``[count, tokens]``: stretches of the shipped agent sessions, spread over them; long ones overlap."""
        import torch

        from kvtier.cli.sessions import load_turns

        last = {turn.session: turn.prompt + turn.output for turn in load_turns()}
        text = "\n\n".join(last.values())
        ids = list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        if len(ids) < tokens + count:
            raise ConfigError(f"{count} windows of {tokens} tokens: the text has only {len(ids)}; give shorter ones")
        starts = [n * (len(ids) - tokens) // max(1, count - 1) for n in range(count)]
        return torch.tensor([ids[start : start + tokens] for start in starts])

    def key_texts(self, count: int, tokens: int) -> tuple[torch.Tensor, range]:
        """Texts whose first `tokens` hold a pass key, then a question for it and the key; where the key is."""
        from kvtier.cli.eval_quality import pass_keys

        prompt = PAGE_TOKENS
        return pass_keys(self.tokenizer, count, prompt=prompt, tokens=tokens - prompt, beta=PAGE_TOKENS)

    def measure(
        self,
        texts: torch.Tensor,
        context: int,
        cases: Sequence[tuple[str, bool]],
        *,
        again: bool = False,
        keys: tuple[torch.Tensor, range] | None = None,
    ) -> list[Record]:
        """`texts` ``[windows, context + continuation]``. cases: forms, and whether keys get an offset."""
        import torch

        records = []
        with torch.inference_mode():
            stored = self.cache_of(texts[:, :context])
            exact = self._after(stored, range(context), texts, context)
            key_stored, key_at, key_start = None, range(0), 0
            if keys is not None:
                key_at = keys[1]
                key_start = (key_at.start - 1) // PAGE_TOKENS * PAGE_TOKENS
                key_stored = self.cache_of(keys[0][:, :key_start])
            for name, shifted in cases:
                trip, key_trip = send(stored, name, shifted), None
                logits = self._after(trip.layers, trip.kept, texts, context)
                record = _compare(exact, logits, texts[:, context + 1 :], name, context, trip, shifted)
                if key_stored is not None and keys is not None:
                    key_trip = send(key_stored, name, shifted)
                    record = replace(record, key_nll=self._key_nll(key_trip, keys[0], key_at, key_start))
                if again and name in CODECS:
                    second, key_nll = send(trip.layers, name, shifted), None
                    logits = self._after(second.layers, second.kept, texts, context)
                    if key_trip is not None and keys is not None:
                        twice = send(key_trip.layers, name, shifted)
                        key_nll = self._key_nll(twice, keys[0], key_at, key_start)
                    r = _compare(exact, logits, texts[:, context + 1 :], name, context, second, shifted)
                    record = replace(record, again=Again(r.kl, r.top1, r.delta_nll, key_nll))
                records.append(record)
        return records

    def _key_nll(self, trip: Trip, texts: torch.Tensor, key_at: range, start: int) -> float:
        """Nats per token of the keys at `key_at` of `texts`, whose tokens before `start` are those of `trip`."""
        found = self._after(trip.layers, trip.kept, texts, start)
        first = key_at.start - 1 - start
        nll = _nll(found[:, first : first + len(key_at)], texts[:, key_at.start : key_at.stop])
        return round(float(nll.mean()), 4)

    def cache_of(self, ids: torch.Tensor) -> Layers:
        cache = self.model(ids, use_cache=True, logits_to_keep=1).past_key_values
        return [(layer.keys, layer.values) for layer in cache.layers]

    def _after(self, layers: Layers, kept: range | list[int], texts: torch.Tensor, context: int) -> torch.Tensor:
        """Logits of the tokens from `context` on, but for the last: ``[batch, tokens, vocabulary]``."""
        import torch
        import transformers

        from kvtier.connectors.transformers.compat import cache_argument

        cache = transformers.DynamicCache(config=self.model.config)
        for n, (k, v) in enumerate(layers):
            cache.update(k.clone(), v.clone(), n)
        fed = texts[:, context:-1]
        positions = torch.arange(context, context + fed.shape[1])[None].expand(len(texts), -1)
        # A cache that lost tokens is shorter; the rest keep their places.
        mask = torch.ones(len(texts), len(kept) + fed.shape[1], dtype=torch.long)
        given = {cache_argument(self.model): cache}
        logits: torch.Tensor = self.model(fed, position_ids=positions, attention_mask=mask, **given).logits
        return logits


def send(layers: Layers, form: str, shifted: bool = False) -> Trip:
    """`layers` through `form`."""
    tokens = layers[0][0].shape[2]
    if form == "recency_50":
        kept = [*range(4), *range(tokens - tokens // 2 + 4, tokens)]
        return Trip([(k[:, :, kept], v[:, :, kept]) for k, v in layers], 2.0, 0.0, kept)
    if form in _ROUNDINGS:
        rounding, size = _ROUNDINGS[form]
        return Trip([(rounding(k), rounding(v)) for k, v in layers], size, 1.0, range(tokens))
    return _through_codec(layers, form, shifted)


def _through_codec(layers: Layers, form: str, shifted: bool) -> Trip:
    import numpy as np
    import torch

    from kvtier.codecs.registry import codec
    from kvtier.hot import HotLayout, HotPool
    from kvtier.spec import DType, PageSpec

    batch, heads, tokens, dim = layers[0][0].shape
    constant = torch.zeros(dim)
    if shifted:
        # In the low rotary frequencies, where a bias of the projection survives.
        constant[[dim // 2 - 2, dim // 2 + dim // 4 - 2, dim - 2]] = torch.tensor(OFFSET)
    spec = PageSpec.mha(layers=len(layers), kv_heads=heads, head_dim=dim, page_tokens=PAGE_TOKENS, dtype=DType.BF16)
    name, options = _NAMED.get(form, (form, {}))
    which = codec(name, **options)
    layout, pages = which.layout(spec), tokens // PAGE_TOKENS
    ids, valid = np.arange(pages, dtype=np.int64), np.full(pages, PAGE_TOKENS, np.int32)
    arena = np.zeros(pages * layout.cold_page_bytes, np.uint8)
    rows, refused, stored_bytes = [], 0, 0
    for n in range(batch):
        hot = [x[n].to(torch.bfloat16).contiguous() for k, v in layers for x in (k + constant, v)]
        back = [x.clone() for x in hot]
        offsets = ids * layout.cold_page_bytes
        seeds = np.zeros(pages, np.uint64)
        result = which.encode(layout, HotPool.of(spec, hot, HotLayout.SEQ), ids, valid, arena, offsets, seeds)
        good = np.flatnonzero(~result.refused)
        refused += int(result.refused.sum())
        sizes = np.full(pages, layout.cold_page_bytes) if result.nbytes is None else result.nbytes
        stored_bytes += int(np.where(result.refused, spec.hot_page_bytes, sizes).sum())
        # A refused page is stored without loss, and comes back as it was.
        which.decode(layout, HotPool.of(spec, back, HotLayout.SEQ), good, valid[good], arena, offsets[good])
        rows.append([x.float() for x in back])
    stacked = [torch.stack([row[i] for row in rows]) for i in range(2 * len(layers))]
    out = [(stacked[2 * i] - constant, stacked[2 * i + 1]) for i in range(len(layers))]
    values = 2 * len(layers) * heads * PAGE_TOKENS * dim * pages * batch
    return Trip(out, stored_bytes / values, 1 - refused / (batch * pages), range(tokens))


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def _fp8(x: torch.Tensor) -> torch.Tensor:
    import torch

    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def _int2(x: torch.Tensor) -> torch.Tensor:
    """Four levels between the least and the largest of 32 neighbours."""
    groups = x.unflatten(-1, (-1, 32))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low).clamp_min(1e-9) / 3
    levels: torch.Tensor = ((groups - low) / step).round() * step + low
    return levels.flatten(-2)


_ROUNDINGS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float]] = {
    "bf16": (_bf16, 2.0),
    "fp8": (_fp8, 1.0),
    "int2": (_int2, 0.375),
}


def _compare(
    exact: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, form: str, context: int, trip: Trip, shifted: bool
) -> Record:
    kl = _kl(exact, logits)
    same = (exact.argmax(-1) == logits.argmax(-1)).float().mean()
    delta = _nll(logits, target).mean() - _nll(exact, target).mean()
    return Record(
        form=form,
        context_tokens=context,
        kl=round(float(kl.mean()), 5),
        top1=round(float(same), 4),
        delta_nll=round(float(delta), 4),
        key_nll=None,
        bytes_per_value=round(trip.bytes_per_value, 4),
        compressed=round(trip.compressed, 4),
        kl_max=round(float(kl.max()), 5),
        offset=shifted,
    )


def _kl(exact: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens of each window."""
    p, q = exact.log_softmax(-1), logits.log_softmax(-1)
    divergence: torch.Tensor = (p.exp() * (p - q)).sum(-1).mean(-1)
    return divergence


def _nll(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    chosen: torch.Tensor = logits.log_softmax(-1).gather(-1, target[..., None])
    return -chosen[..., 0]


def print_table(records: Sequence[Record]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="cold pages against the float32 cache")
    for name in (
        "form",
        "tokens",
        "B/value",
        "KL",
        "KL max",
        "top-1",
        "NLL change",
        "key NLL",
        "compressed",
        "KL again",
    ):
        table.add_column(name, justify="left" if name == "form" else "right")
    for r in records:
        name = f"{r.form}, keys with an offset" if r.offset else r.form
        key = "" if r.key_nll is None else f"{r.key_nll:.3f}"
        second = "" if r.again is None else f"{r.again.kl:.4f}"
        table.add_row(
            name, str(r.context_tokens), f"{r.bytes_per_value:.3f}", f"{r.kl:.4f}", f"{r.kl_max:.4f}", f"{r.top1:.1%}",
            f"{r.delta_nll:+.4f}", key, f"{r.compressed:.0%}", second,
        )  # fmt: skip
    Console().print(table)
