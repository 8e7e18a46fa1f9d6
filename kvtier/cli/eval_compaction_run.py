"""Measuring compacted contexts on a model: how well their questions are answered, and what the compaction took.

Methods: random, recent, kvzip (sets of their own per head), kvzip_uniform; hak and omp, Attention Matching fitted to
repeating the context; oracle, omp fitted to every second question itself, with its answer: on the questions between
them it is the row oracle_held_out."""

from __future__ import annotations

import ctypes
import gc
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.cli.eval_compaction_tasks import Question, Task

if TYPE_CHECKING:
    import torch

    from kvtier.compression.compaction.prefix import Compaction
    from kvtier.connectors.transformers.compact_methods import Context

CALL_TOKENS = 10


@dataclass(frozen=True, slots=True)
class Measured:
    """One method at one ratio on one task of one run. nll: nats per token of the right answers, per question. right:
    whether the right answer was the likeliest of those given. called, called_right: calls that name a tool of the
    list, and the right one. seconds, memory_bytes: of the compaction, scoring included. figures: the method's own."""

    method: str
    ratio: float
    task: str
    run: int
    nll: tuple[float, ...]
    right: tuple[bool, ...]
    calls: int
    called: int
    called_right: int
    tokens_removed: float
    bytes_removed: float
    seconds: float
    memory_bytes: int
    figures: dict[str, float]


@dataclass(frozen=True, slots=True)
class Bench:
    """A model in float32, its tokenizer, and who it is."""

    model: Any
    tokenizer: Any
    identity: Any

    @staticmethod
    def load(folder: Path | None) -> Bench:
        from kvtier.cli.demo_model import MODEL_NAME, load_model

        model, tokenizer = load_model(folder)
        from kvtier.connectors.transformers.compaction import identity_of

        name = MODEL_NAME if folder is None else folder.resolve().name
        return Bench(model, tokenizer, identity_of(model, name))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def turn(self) -> tuple[str, str]:
        """How a user's turn begins, and how it ends and an answer begins. Of a default system prompt nothing: it would
        be a large part of what a small budget keeps."""
        marker = "<<here>>"
        if not getattr(self.tokenizer, "chat_template", None):
            return "", "\n"
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": marker}], add_generation_prompt=True, tokenize=False
        )
        head, _, tail = str(text).rpartition(marker)
        user = head.rfind("<|im_start|>user")
        return (head[user:] if user > 0 else head), tail

    def read(self, task: Task) -> Context:
        """The context of `task`, the template's beginning protected."""
        from kvtier.connectors.transformers.compact_methods import Context

        head = self.encode(self.turn()[0])
        return Context.read(
            self.model, self.tokenizer, [*head, *self.encode(f"{task.context}\n\n")], system_tokens=len(head)
        )

    def asked(self, question: Question) -> list[int]:
        """What is fed behind the context before the answer."""
        return self.encode(f"{question.text}{self.turn()[1]}{question.stem}")


def measure(bench: Bench, task: Task, method: str, ratios: Sequence[float], seed: int) -> list[Measured]:
    """One method at every ratio; ``full`` is the whole context, whatever the ratios."""
    context = bench.read(task)
    if method == "full":
        return list(_answers(bench, context, task, "full", 0.0, _whole(context), 0.0, 0))
    scores: dict[str, Any] = {}
    found: list[Measured] = []
    for ratio in ratios:
        with peak_memory() as memory:
            start = time.perf_counter()
            compaction = _compact(bench, context, task, method, ratio, seed, scores)
            seconds = time.perf_counter() - start
        if method.startswith("kvzip"):  # one scoring serves all ratios; each is told what it would take alone
            seconds = scores["seconds"] + compaction.figures["select_s"]
            memory.peak_bytes = max(memory.peak_bytes, scores["memory_bytes"])
        found += _answers(bench, context, task, method, ratio, compaction, seconds, memory.peak_bytes)
    return found


def _whole(context: Context) -> Compaction:
    from kvtier.compression.compaction.recipe import Recipe
    from kvtier.connectors.transformers.compaction import whole

    return whole(Recipe("random", 0.0), context.cache, context.tokens)


def _compact(
    bench: Bench, context: Context, task: Task, method: str, ratio: float, seed: int, scores: dict[str, Any]
) -> Compaction:
    from kvtier.compression.compaction.recipe import Recipe
    from kvtier.connectors.transformers import compact_methods, kvzip
    from kvtier.connectors.transformers.fitting_queries import given_sequences

    if method.startswith("kvzip"):
        if not scores:
            with peak_memory() as memory:
                start = time.perf_counter()
                scores["scores"] = kvzip.score_dense(
                    context.family,
                    context.cache,
                    context.token_ids,
                    context.prompts,
                    system_tokens=context.system_tokens,
                )
                scores["seconds"] = time.perf_counter() - start
            scores["memory_bytes"] = memory.peak_bytes
        recipe = Recipe("kvzip", ratio, "uniform" if method == "kvzip_uniform" else "pair", seed)
        system = context.system_tokens
        return kvzip.select_heads(context.family, scores["scores"], recipe, context.tokens, system)
    if method in ("random", "recent"):
        return compact_methods.compact(context, Recipe(method, ratio, seed=seed))
    selector = "hak" if method == "hak" else "omp"
    texts = [[*bench.asked(q), *bench.encode(q.answer)] for q in task.questions]
    given = texts[::2] if method == "oracle" else ()
    asked = Recipe("am", ratio, selector, seed, "given" if given else "repeat")
    recipe = compact_methods.complete(asked, context.family)
    held_out = given_sequences(texts[1::2] if given else texts)
    return compact_methods.compact(context, recipe, given=given, held_out=held_out)


def _answers(
    bench: Bench,
    context: Context,
    task: Task,
    method: str,
    ratio: float,
    compaction: Compaction,
    seconds: float,
    memory_bytes: int,
) -> Iterator[Measured]:
    from kvtier.connectors.transformers.compact_serving import CompactServing
    from kvtier.connectors.transformers.compaction import compacted

    prefix = compacted(bench.identity, context.token_ids, context.cache, compaction)
    parts = {method: task.questions}
    if method == "oracle":
        parts = {"oracle": task.questions[::2], "oracle_held_out": task.questions[1::2]}
    name = bench.identity.name
    with CompactServing(bench.model, prefix, model_name=name, identity=bench.identity) as serving:
        for label, questions in parts.items():
            nll, right, calls, called, called_right = [], [], 0, 0, 0
            for question in questions:
                loss, best, call = _answer(bench, serving, question)
                nll.append(loss)
                right.append(best)
                if call is not None:
                    calls, called = calls + 1, called + (call in task.tools)
                    called_right += call == question.answer
            yield Measured(
                label,
                ratio,
                task.name,
                task.run,
                tuple(nll),
                tuple(right),
                calls,
                called,
                called_right,
                prefix.manifest.tokens_removed,
                prefix.manifest.bytes_removed,
                seconds,
                memory_bytes,
                dict(compaction.figures),
            )


def _answer(bench: Bench, serving: Any, question: Question) -> tuple[float, bool, str | None]:
    """NLL per token of the right answer, whether it is the likeliest, and the name that the model would call."""
    import torch

    cache = serving.new_cache()
    first = serving.forward(bench.asked(question), cache, logits_to_keep=1).logits[0, -1].float()
    choices = [bench.encode(text) for text in (question.answer, *question.wrong)]
    longest = max(len(choice) for choice in choices)
    padded = torch.tensor([choice + [0] * (longest - len(choice)) for choice in choices])
    call = None
    if question.call:
        call = _call(bench, serving, cache, first)
    behind: torch.Tensor | None = None
    if longest > 1:
        for layer in cache.layers:
            layer.batch_repeat_interleave(len(choices))
        behind = serving.forward(padded[:, :-1], cache).logits.float()
    losses = []
    for n, choice in enumerate(choices):
        logits = first[None] if behind is None else torch.cat([first[None], behind[n, : len(choice) - 1]])
        picked = torch.log_softmax(logits, dim=-1)[torch.arange(len(choice)), torch.tensor(choice)]
        losses.append(float(-picked.mean()))
    return losses[0], losses[0] < min(losses[1:]), call


def _call(bench: Bench, serving: Any, cache: Any, first: torch.Tensor) -> str:
    """The likeliest name behind the opening quote, up to the closing one. `cache` is as before afterwards."""
    from kvtier.connectors.transformers.attention import restore, snapshot

    before = snapshot(cache)
    token, said = int(first.argmax()), []
    for _ in range(CALL_TOKENS):
        said.append(token)
        if '"' in bench.tokenizer.decode([token]):
            break
        token = int(serving.forward([token], cache).logits[0, -1].argmax())
    restore(cache, before)
    return str(bench.tokenizer.decode(said)).partition('"')[0]


class Peak:
    """peak_bytes: resident memory beyond that at the beginning, known at the end."""

    peak_bytes = 0


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """The kernel's own peak of this process's resident memory, which is reset first. What the allocator has kept of
    earlier work is given back before, since new work would take that unseen."""
    status = Path("/proc/self/status")

    def kib(field: str) -> int:
        return int(re.search(rf"^{field}:\s*(\d+) kB$", status.read_text(), re.MULTILINE)[1])  # type: ignore[index]

    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    peak, start = Peak(), kib("VmRSS")
    try:
        yield peak
    finally:
        peak.peak_bytes = (kib("VmHWM") - start) << 10
