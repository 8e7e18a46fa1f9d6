"""What eviction costs: NLL of text that is fed as if it were generated, and of a pass key that lies in it.

A text's first tokens are the prompt; the rest is fed in stretches of `beta` tokens, which is the same as token by
token, because rounds come at multiples of `beta` and the cache only grows in between."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from kvtier.abc.compression import CompressionManager
from kvtier.compression import CompressionPipeline
from kvtier.connectors.transformers.eviction import EvictingGeneration, platform_of

_SUBJECTS = ("heron", "miller", "ferry", "lantern", "orchard", "clerk", "river", "teacher", "wagon", "sailor")
_VERBS = ("waited for", "passed", "watched", "remembered", "followed", "painted", "forgot", "answered")
_PLACES = ("by the bridge", "in the morning", "near the old wall", "after the rain", "at the market", "on the hill")
_ADJECTIVES = ("grey", "quiet", "tall", "young", "tired", "bright", "patient", "distant")


@dataclass(frozen=True, slots=True)
class Quality:
    """nll: nats per token of the measured tokens, per sequence of the batch. kv_bytes: the most that one sequence's
    rows held while they were measured. evicted_tokens: over all sequences."""

    nll: list[float]
    kv_bytes: int
    evicted_tokens: int


def measure(
    model: Any, texts: torch.Tensor, method: CompressionManager | None, *, prompt: int, beta: int, measured: range
) -> Quality:
    """Feed `texts` ``[batch, tokens]`` with `method` between the steps. measured: positions of tokens whose NLL
    counts."""
    attention = method is not None and method.algorithm == "attention"
    managers = [] if method is None else [method]
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager" if attention else implementation)
    options = {"output_attentions": True} if attention else {}
    losses = []
    most = 0
    try:
        with EvictingGeneration(model, CompressionPipeline(managers, platform_of(model))) as generation:
            logits = generation.prefill(texts[:, :prompt], logits_to_keep=0, **options)
            position = prompt  # of the next token to feed
            while True:
                first = position - logits.shape[1] + 1  # of the token that logits[:, 0] speak of
                wanted = range(max(first, measured.start), min(position + 1, measured.stop))
                if wanted:
                    predicted = logits[:, wanted.start - first : wanted.stop - first]
                    target = texts[:, wanted.start : wanted.stop]
                    losses.append(cross_entropy(predicted.transpose(1, 2).float(), target, reduction="none"))
                stretch = texts[:, position : position + beta]
                if position + 1 >= measured.stop or not stretch.shape[1]:
                    break
                # Logits are a fifth of a small model's work: only the last where nothing before it is measured.
                kept = 1 if position + stretch.shape[1] <= measured.start else 0
                rows = generation.requests[0].length + stretch.shape[1]  # before a round takes some away
                logits = generation.step(stretch, logits_to_keep=kept, **options)
                position += stretch.shape[1]
                if position > measured.start and generation.cache is not None:
                    most = max(most, rows * generation.cache.rows_bytes() // generation.requests[0].length)
            evicted = sum(request.evicted_tokens for request in generation.requests)
    finally:
        model.set_attn_implementation(implementation)
    nll = torch.cat(losses, dim=1).mean(dim=1)
    return Quality(nll.tolist(), most // len(texts), evicted)


def windows_of(ids: list[int], count: int, tokens: int) -> torch.Tensor:
    """``[count or fewer, tokens]``: stretches of a text, one after the other."""
    count = min(count, len(ids) // tokens)
    return torch.tensor(ids[: count * tokens]).view(count, tokens)


def pass_keys(tokenizer: Any, count: int, *, prompt: int, tokens: int, beta: int) -> tuple[torch.Tensor, range]:
    """Texts with a pass key in their generated part and a question for it at their end, and the key's place there.

    The question follows a round, so that what was evicted cannot be read. Raises ValueError where `tokens` is too
    short."""
    rng = random.Random(0)
    body = tokens // beta * beta

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    def filler(length: int) -> list[int]:
        out: list[int] = []
        while len(out) < length:
            sentence = f" The {rng.choice(_ADJECTIVES)} {rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} the "
            out += ids(f"{sentence}{rng.choice(_SUBJECTS)} {rng.choice(_PLACES)}.")
        return out[:length]

    opening = ids("A pass key is hidden in the following text. Find it and remember it.")
    question = ids("\n\nWhat is the pass key that the text mentions? The pass key is ")
    rows = []
    key = 0
    for n in range(count):
        digits = "".join(rng.choice("123456789") for _ in range(5))
        needle = ids(f" The pass key is {digits}. Remember it. {digits} is the pass key.")
        room = body - len(needle)
        if room < 0:
            raise ValueError(f"{tokens} tokens do not hold a pass key of {len(needle)}")
        # Between a tenth and seven tenths of the way.
        before = int(room * (0.1 + 0.6 * n / max(1, count - 1)))
        answer = ids(digits)
        key = len(answer)
        start = (opening + filler(prompt))[:prompt]
        rows.append(start + filler(before) + needle + filler(room - before) + question + answer)
    first = prompt + body + len(question)
    return torch.tensor(rows), range(first, first + key)
