"""A Llama in plain fp32 that keeps every row and hides the evicted ones behind a mask: what decoding with eviction must
answer. It shares the fp64 oracle of the score with the product, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from kvtier.compression.triattention import Calibration
from kvtier.kernels.triattention import reference

from .tiny_model import DIM, HEADS, HIDDEN, KV_HEADS, LAYERS

EPSILON, BASE = 1e-6, 10000.0
GROUP = HEADS // KV_HEADS


def statistics(seed: int = 0) -> Calibration:
    """Random query statistics of the tiny model, which any rule of eviction may be tested with."""
    draw = np.random.default_rng(seed)
    shape = (LAYERS, HEADS, DIM // 2)
    mean = (draw.standard_normal(shape) + 1j * draw.standard_normal(shape)).astype(np.complex64)
    spread = draw.uniform(0.1, 1.0, shape).astype(np.float32)
    return Calibration(mean, (np.abs(mean) + spread).astype(np.float32), np.ones(shape[:2], np.bool_))


@dataclass(frozen=True)
class Decoded:
    """margin: the smallest distance of a best logit from the second: how far rounding is from changing a token."""

    tokens: list[int]
    evicted: int
    margin: float


class MaskedReference:
    def __init__(self, model: Path, calibration: Calibration, mode: str, budget: int, beta: int) -> None:
        self.weights = {name: w.float() for name, w in load_file(model / "model.safetensors").items()}
        self.calibration = calibration
        self.mode, self.budget, self.beta = mode, budget, beta
        self.omega = 1.0 / BASE ** (torch.arange(0, DIM, 2).float() / DIM)

    def generate(self, prompt: list[int], tokens: int) -> Decoded:
        self.keys: list[torch.Tensor] = [torch.empty(0, KV_HEADS, DIM)] * LAYERS
        self.values = list(self.keys)
        self.hidden = torch.zeros(LAYERS, KV_HEADS, len(prompt) + tokens, dtype=torch.bool)
        logits = self.forward(prompt, 0)
        out, margin, evicted = [int(logits.argmax())], float("inf"), 0
        while len(out) < tokens:
            generated = len(self.keys[0]) - len(prompt)
            if generated and generated % self.beta == 0:
                evicted += self.evict(len(prompt))
            logits = self.forward([out[-1]], len(prompt) + generated)
            best = logits.topk(2).values
            margin = min(margin, float(best[0] - best[1]))
            out.append(int(logits.argmax()))
        return Decoded(out, evicted, margin)

    def evict(self, prompt: int) -> int:
        rows = len(self.keys[0])
        visible = [[(~h[prompt:rows]).nonzero()[:, 0].numpy() for h in layer] for layer in self.hidden]
        before = len(visible[0][0])
        if before <= self.budget:
            return 0
        real, imag = np.arange(DIM // 2), np.arange(DIM // 2, DIM)
        omega, gain = self.omega.double().numpy(), np.ones(DIM // 2)
        scores = np.array([
            [
                reference.score(
                    self.keys[layer][prompt:rows, q // GROUP].numpy()[visible[layer][q // GROUP]], real, imag,
                    self.calibration.q_mean[layer, q], self.calibration.q_abs[layer, q], omega, gain, rows,
                )
                for q in range(HEADS)
            ]
            for layer in range(LAYERS)
        ])  # fmt: skip
        reduced = reference.reduce(scores, KV_HEADS, self.mode)
        kept = np.broadcast_to(reference.select(reduced, self.budget), (LAYERS, KV_HEADS, self.budget))
        for layer in range(LAYERS):
            for head in range(KV_HEADS):
                self.hidden[layer, head, prompt:rows] = True
                self.hidden[layer, head, prompt + visible[layer][head][kept[layer, head]]] = False
        return before - self.budget

    def forward(self, ids: list[int], first: int) -> torch.Tensor:
        """Logits ``[vocabulary]`` behind the last of `ids`, whose positions begin at `first`."""
        w = self.weights
        positions = torch.arange(first, first + len(ids))
        x = w["model.embed_tokens.weight"][ids]
        for layer in range(LAYERS):
            at = f"model.layers.{layer}."
            h = norm(x, w[at + "input_layernorm.weight"])
            q, k, v = (
                (h @ w[f"{at}self_attn.{name}_proj.weight"].T).view(len(ids), -1, DIM) for name in ("q", "k", "v")
            )
            self.keys[layer] = torch.cat([self.keys[layer], self.turn(k, positions)])
            self.values[layer] = torch.cat([self.values[layer], v])
            attended = self.attend(layer, self.turn(q, positions))
            x = x + attended @ w[at + "self_attn.o_proj.weight"].T
            h = norm(x, w[at + "post_attention_layernorm.weight"])
            gate = torch.nn.functional.silu(h @ w[at + "mlp.gate_proj.weight"].T)
            x = x + (gate * (h @ w[at + "mlp.up_proj.weight"].T)) @ w[at + "mlp.down_proj.weight"].T
        return norm(x[-1], w["model.norm.weight"]) @ w["lm_head.weight"].T

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        rows, new = len(self.keys[layer]), len(q)
        k, v = (x[layer].repeat_interleave(GROUP, dim=1) for x in (self.keys, self.values))
        weights = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
        future = torch.ones(new, rows, dtype=torch.bool).triu(rows - new + 1)
        hidden = self.hidden[layer, :, None, :rows].repeat_interleave(GROUP, dim=0)
        weights = weights.masked_fill(future | hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(new, HIDDEN)

    def turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(positions.float(), self.omega)[:, None]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight
