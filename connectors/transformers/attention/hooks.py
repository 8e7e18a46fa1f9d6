"""Forward hooks that read what an attention layer was given and what its projections made of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from kvtier.errors import SpecError


@dataclass(slots=True)
class LayerCall:
    """One forward call of an attention layer: its keyword arguments, the cache's length before it, and the outputs of
    the projections that were watched."""

    arguments: dict[str, Any] = field(default_factory=dict)
    first_row: int = 0
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    result: Any = None

    def positions(self, tokens: int) -> torch.Tensor:
        """int64 ``[tokens]``."""
        given = self.arguments.get("position_ids")
        if given is not None:
            return torch.as_tensor(given).reshape(-1)[-tokens:].long()
        return torch.arange(self.first_row, self.first_row + tokens)

    def rotation(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosines and sines that the layer was given."""
        cos, sin = self.arguments["position_embeddings"]
        return cos, sin


def watch(
    attn: Any, layer: int, projections: dict[str, Any], done: Callable[[LayerCall], None], hooks: ExitStack
) -> None:
    """Call `done` after each forward call of `attn`, with the outputs of `projections` (name -> module) in it."""
    call = LayerCall()

    def before(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if cache is None:
            raise SpecError("queries are captured with a cache: call the model with use_cache=True")
        names = ("hidden_states", "position_embeddings", "attention_mask")
        call.arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        call.first_row = int(cache.get_seq_length(layer))
        call.outputs.clear()

    def keep(name: str) -> Callable[[Any, Any, Any], None]:
        def hook(_: Any, __: Any, output: Any) -> None:
            call.outputs[name] = output.detach()

        return hook

    def after(_: Any, __: Any, output: Any) -> None:
        call.result = output
        try:
            done(call)
        finally:
            call.arguments, call.outputs, call.result = {}, {}, None

    handles = [attn.register_forward_pre_hook(before, with_kwargs=True), attn.register_forward_hook(after)]
    handles += [module.register_forward_hook(keep(name)) for name, module in projections.items()]
    for handle in handles:
        hooks.callback(handle.remove)
