"""CompactServing: a transformers model that goes on from a compacted prefix, with its own `generate`.

    with CompactServing(model, prefix, model_name="SmolLM2-135M-Instruct") as serving:
        tokens = serving.generate(question_ids, max_new_tokens=64)      # [batch, question + new]

The cache holds the compact rows and says that it holds the context: its length is that of the original, so positions
go on behind it, and masks come out for the original's columns. A hook on each attention module then narrows the mask
to the rows that are there and adds biases: heads with sets of their own are padded and masked, which is exact. The
model's own attention (``sdpa`` or ``eager``) does the rest; where nothing was removed and nothing added, no hook runs.

With an indexer (DSA), compact rows without bias that a whole group of layers shares take part in its top-k; others
are always attended to, and the top-k chooses among what came after. One thread, one serving per model at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

from kvtier.compression.compaction.artefact import CompactLayer, CompactPrefix, ModelIdentity
from kvtier.connectors.transformers.compaction import identity_of
from kvtier.connectors.transformers.compat import cache_argument
from kvtier.errors import ConfigError, SpecError

IMPLEMENTATIONS = ("sdpa", "eager")

TokenIds = torch.Tensor | Sequence[int] | Sequence[Sequence[int]]
"""``[batch, n]``, or one sequence."""


class CompactRows(DynamicLayer):
    """Compact rows, then rows of tokens behind them. `removed`: rows less than the context had tokens."""

    removed = 0

    def get_seq_length(self) -> int:
        """Tokens seen, removed ones included."""
        return int(super().get_seq_length()) + self.removed


class CompactIndexedRows(DynamicIndexedLayer):
    """The same, with index keys."""

    removed = 0

    def get_seq_length(self) -> int:
        """Tokens seen, removed ones included."""
        return int(super().get_seq_length()) + self.removed


class CompactCache(DynamicCache):
    """A cache that begins with a compacted prefix. Its length is logical; it is never the plain KV of its tokens, so a
    prefix cache refuses it."""


@dataclass(frozen=True, slots=True)
class _Served:
    """One layer, ready to be attended to. keys, values: ``[1, heads, rows, dim]``, padded to the longest head. columns:
    the context's positions in the rows, int64 ``[1 or query_heads, rows]``, 0 where padded. bias: ``[1, query_heads,
    1, rows]``, -inf where padded; None: no bias and no padding. fitted: ``[rows, query_heads, value_dim]``, what MLA's
    latents are as values. identity: nothing was removed, and nothing added."""

    keys: torch.Tensor
    values: torch.Tensor
    columns: torch.Tensor
    bias: torch.Tensor | None
    index_keys: torch.Tensor | None
    fitted: torch.Tensor | None
    identity: bool


class CompactServing:
    """See the module's docstring. Hooks are on the model inside the ``with`` block only."""

    def __init__(
        self, model: Any, prefix: CompactPrefix, *, model_name: str, identity: ModelIdentity | None = None
    ) -> None:
        """identity: the model's, where it is known; None: read from it. Raises ArtefactError for another model's
        prefix, ConfigError for an attention implementation that takes no mask."""
        identity = identity_of(model, model_name) if identity is None else identity
        prefix.check_model(identity)
        implementation = model.config._attn_implementation
        if implementation not in IMPLEMENTATIONS:
            raise ConfigError(
                f"attn_implementation = {implementation!r}: a compacted prefix needs masks of numbers: "
                f"load the model with {' or '.join(IMPLEMENTATIONS)}"
            )
        self._model = model
        self.prefix = prefix
        self._config = model.config.get_text_config(decoder=True)
        self._attentions: list[Any] = [layer.self_attn for layer in model.get_decoder().layers]
        if len(self._attentions) != len(prefix.layers):
            raise SpecError(f"the prefix has {len(prefix.layers)} layers, the model {len(self._attentions)}")
        self._mla = identity.family == "mla"
        self._groups = _index_groups(self._attentions) if self._mla else []
        self._bypass = self._bypassing()
        self._served = self._prepare()
        self._hooks: list[Any] = []
        self._indexed_masks: dict[int, torch.Tensor] = {}

    # -- use -----------------------------------------------------------------------------------------------------------

    def new_cache(self, batch: int = 1) -> CompactCache:
        """A cache that holds the compacted prefix, for `batch` sequences that go on from it."""
        cache = CompactCache(config=self._config)
        layers: list[Any] = []
        for served in self._served:
            layer: Any = CompactRows() if served.index_keys is None else CompactIndexedRows()
            keys, values = (t.expand(batch, -1, -1, -1) for t in (served.keys, served.values))
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            layer.removed = self.prefix.tokens - keys.shape[-2]
            if served.index_keys is not None:
                index_keys = served.index_keys.expand(batch, -1, -1)
                layer.lazy_initialization_indexer(index_keys)
                layer.indexer_keys = index_keys
            layers.append(layer)
        cache.layers = layers
        return cache

    def generate(self, token_ids: TokenIds, **kwargs: Any) -> Any:
        """``model.generate`` from the prefix: `token_ids` ``[batch, n]`` (or one sequence) are what follows it. The
        answer holds them and what the model added, never the context. attention_mask: of `token_ids`, 0 where they are
        padding, which stands before them. compact_cache: of an earlier call, to go on behind it; then `token_ids` are
        those that it does not hold yet, the last token of its answer first. Raises ConfigError for options that need
        the context's own tokens."""
        ids = self._ids(token_ids)
        for option in _NEED_TOKENS:
            if kwargs.get(option) is not None:
                raise ConfigError(f"option {option!r}: not supported from a compacted prefix; leave it out")
        for option in ("num_beams", "num_return_sequences"):
            if (self._asked(option, kwargs) or 1) > 1:
                raise ConfigError(f"option {option!r}: not supported from a compacted prefix; use 1")
        cache = self._cache(kwargs.pop("compact_cache", None), ids)
        mask = self._whole_mask(kwargs.pop("attention_mask", None), cache, ids)
        return self._model.generate(ids, attention_mask=mask, **{cache_argument(self._model): cache}, **kwargs)

    def forward(self, token_ids: TokenIds, cache: CompactCache | None = None, **kwargs: Any) -> Any:
        """The model's answer for `token_ids` ``[batch, n]`` behind `cache` (None: the prefix alone). attention_mask: as
        in `generate`."""
        ids = self._ids(token_ids)
        cache = self._cache(cache, ids)
        if kwargs.get("attention_mask") is not None:
            mask = self._whole_mask(kwargs["attention_mask"], cache, ids)
            positions = (mask.cumsum(-1) - 1)[:, -ids.shape[1] :]
            kwargs = {"position_ids": positions, **kwargs, "attention_mask": mask}
        with torch.no_grad():
            return self._model(ids, use_cache=True, **{cache_argument(self._model): cache}, **kwargs)

    def _asked(self, option: str, kwargs: dict[str, Any]) -> Any:
        """What `generate` would take: its argument, else of the configuration given, else of the model's."""
        config = kwargs.get("generation_config") or self._model.generation_config
        return kwargs[option] if kwargs.get(option) is not None else getattr(config, option, None)

    def _cache(self, cache: Any, ids: torch.Tensor) -> CompactCache:
        if cache is None:
            return self.new_cache(ids.shape[0])
        if not isinstance(cache, CompactCache) or cache.layers[0].keys.shape[0] != ids.shape[0]:
            raise ConfigError(
                f"the cache is not one of new_cache({ids.shape[0]}), for as many sequences as the token ids have"
            )
        return cache

    def _whole_mask(self, given: Any, cache: CompactCache, ids: torch.Tensor) -> torch.Tensor:
        """``[batch, tokens of the cache and of ids]``: everything, but what `given` ``[batch, n]`` leaves out."""
        past = int(cache.get_seq_length())
        mask = torch.ones(ids.shape[0], past + ids.shape[1], dtype=torch.long, device=ids.device)
        if given is not None:
            own = torch.as_tensor(given, device=ids.device)
            if own.shape != ids.shape:
                raise ConfigError(
                    f"attention_mask of shape {tuple(own.shape)} for token ids of {tuple(ids.shape)}: give that of the "
                    "token ids, without the context's"
                )
            if not bool(own.all()) and any(layer.is_sliding for layer in DynamicCache(config=self._config).layers):
                raise ConfigError(
                    "attention_mask with padding: this model has layers with a window, which would count the padding "
                    "between the prefix and the tokens; give sequences of one length, or one at a time"
                )
            mask[:, past:] = own
        return mask

    def __enter__(self) -> CompactServing:
        if any(hasattr(attention, _MARK) for attention in self._attentions):
            raise ConfigError("this model already serves a compacted prefix: leave that `with` block first")
        try:
            for n, (attention, served) in enumerate(zip(self._attentions, self._served, strict=True)):
                setattr(attention, _MARK, True)
                if not served.identity:
                    self._install(n, attention, served)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._indexed_masks.clear()
        for attention in self._attentions:
            if hasattr(attention, _MARK):
                delattr(attention, _MARK)

    # -- preparing -----------------------------------------------------------------------------------------------------

    def _ids(self, token_ids: TokenIds) -> torch.Tensor:
        if not self._hooks and not all(served.identity for served in self._served):
            raise SpecError("the prefix is not being served: use the object in a `with` block")
        ids = torch.as_tensor(token_ids, device=next(self._model.parameters()).device)
        ids = ids[None] if ids.dim() == 1 else ids
        if ids.dim() != 2 or not ids.shape[1]:
            raise ConfigError(f"token ids of shape {tuple(ids.shape)}: give at least one token that follows the prefix")
        return ids

    def _bypassing(self) -> set[int]:
        """Layers whose compact rows are attended to whatever an indexer says."""
        found: set[int] = set()
        for group in self._groups:
            layers = [self.prefix.layers[n] for n in group]
            shared = all(torch.equal(layer.kept[0], layers[0].kept[0]) for layer in layers)
            if not shared or any(layer.bias is not None or layer.fitted for layer in layers):
                found.update(group)
        return found

    def _prepare(self) -> list[_Served]:
        rows = [max(len(k) for k in layer.kept) for layer in self.prefix.layers]
        for group in self._groups:  # one indexer's rows are the same rows in all of its layers
            most = max(rows[n] for n in group)
            for n in group:
                rows[n] = most
        return [self._serve(n, layer, rows[n]) for n, layer in enumerate(self.prefix.layers)]

    def _serve(self, n: int, layer: CompactLayer, rows: int) -> _Served:
        parameter = next(self._attentions[n].parameters())
        device, dtype = parameter.device, parameter.dtype
        heads = len(layer.kept)
        names = ("latent", "rotary_key") if self._mla else ("keys", "values")
        keys, values = (_padded(layer.rows[name], rows).to(device) for name in names)
        lengths = [len(k) for k in layer.kept]
        query_heads = self._query_heads(n, heads) if layer.bias is None else len(layer.bias)
        bias = None
        if layer.bias is not None or min(lengths) < rows:
            bias = torch.full((1, query_heads, 1, rows), float("-inf"))
            for h in range(query_heads):
                length = lengths[h * heads // query_heads]
                bias[0, h, 0, :length] = 0.0 if layer.bias is None else layer.bias[h]
            bias = bias.to(device=device, dtype=dtype)
        columns = torch.zeros(heads, rows, dtype=torch.int64)
        for h, kept in enumerate(layer.kept):
            columns[h, : len(kept)] = kept
        if bool((columns == columns[0]).all()):
            columns = columns[:1]
        else:
            columns = columns.repeat_interleave(query_heads // heads, dim=0)
        fitted = None
        if "fitted" in layer.rows:
            fitted = self._expanded(n, _padded(layer.rows["fitted"], rows).to(device))
        index_keys = None
        if "index_keys" in layer.rows:
            index_keys = _padded(layer.rows["index_keys"], rows)[:, 0].to(device)
        identity = rows == self.prefix.tokens and bias is None and fitted is None and n not in self._bypass
        return _Served(keys, values, columns.to(device), bias, index_keys, fitted, identity)

    def _query_heads(self, n: int, heads: int) -> int:
        attention = self._attentions[n]
        groups = getattr(attention, "num_key_value_groups", None)
        if self._mla or groups is None:
            return int(getattr(attention, "num_heads", None) or self._config.num_attention_heads)
        return int(heads * groups)

    def _expanded(self, n: int, fitted: torch.Tensor) -> torch.Tensor:
        """Values ``[rows, query_heads, value_dim]`` that the latents `fitted` ``[1, 1, rows, latent]`` stand for."""
        attention = self._attentions[n]
        with torch.no_grad():
            out = attention.kv_b_proj(fitted)[0, 0]
        nope = int(attention.qk_nope_head_dim)
        values: torch.Tensor = out.view(out.shape[0], -1, nope + int(attention.v_head_dim))[..., nope:]
        return values.clone()

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def _install(self, n: int, attention: Any, served: _Served) -> None:
        leads = n in self._bypass and any(group[0] == n for group in self._groups)

        def narrow(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            cache = kwargs.get(cache_argument(self._model))
            if "attention_mask" not in kwargs or not isinstance(cache, CompactCache):
                raise SpecError(
                    f"{type(attention).__name__}: while a compacted prefix is served, run the model with a cache from "
                    "new_cache()"
                )
            mask = kwargs["attention_mask"]
            hidden = args[0] if args else kwargs["hidden_states"]
            past = int(cache.layers[n].keys.shape[-2])
            if leads:
                plain = self._narrowed(served, mask, None, past, hidden.shape[1])
                self._indexed_masks[n] = _without_prefix(plain, served.keys.shape[-2])
            return args, dict(kwargs, attention_mask=self._narrowed(served, mask, served.bias, past, hidden.shape[1]))

        self._hooks.append(attention.register_forward_pre_hook(narrow, with_kwargs=True))
        if served.fitted is not None:
            self._hooks.append(attention.kv_b_proj.register_forward_hook(_value_hook(attention, served.fitted)))
        if leads:
            indexer = attention.indexer
            self._hooks.append(
                indexer.register_forward_pre_hook(lambda _, args: (*args[:3], self._indexed_masks.pop(n), *args[4:]))
            )
            self._hooks.append(indexer.register_forward_hook(_union_hook(served.keys.shape[-2])))

    def _narrowed(
        self, served: _Served, mask: torch.Tensor | None, bias: torch.Tensor | None, past: int, queries: int
    ) -> torch.Tensor | None:
        """The mask for this layer's rows ``[batch, heads, queries, rows + live]``, from the model's own, whose columns
        are the context's and then the live tokens'. past: rows in the cache before this pass."""
        if mask is None:
            if queries > 1:
                raise SpecError("the model made no mask for several tokens behind a prefix: this version is not known")
            if bias is None:
                return None
            live = bias.new_zeros(1, bias.shape[1], 1, past + queries - bias.shape[-1])
            return torch.cat([bias, live], dim=-1)
        if len(served.columns) == 1:
            prefix = mask[..., served.columns[0]]
        else:
            prefix = torch.stack([mask[:, 0][..., columns] for columns in served.columns], dim=1)
        live = mask[..., self.prefix.tokens :]
        if bias is not None:
            prefix, live = _numbers(prefix, bias.dtype), _numbers(live, bias.dtype)
            prefix = prefix + bias
        return torch.cat([prefix, live.expand(-1, prefix.shape[1], -1, -1)], dim=-1)


_NEED_TOKENS = (
    "assistant_model",
    "prompt_lookup_num_tokens",
    "inputs_embeds",
    "cache_implementation",
    "cache",
    "past_key_values",
)
"""Options of ``generate`` that would look for the context's own tokens, or bring a cache of their own."""
_MARK = "_kvtier_compact_serving"
"""Attribute of an attention module that serves a prefix."""


def _padded(heads: Sequence[torch.Tensor], rows: int) -> torch.Tensor:
    """``[1, heads, rows, dim]``, zeros behind the shorter ones."""
    out = heads[0].new_zeros(1, len(heads), rows, heads[0].shape[1])
    for h, tensor in enumerate(heads):
        out[0, h, : len(tensor)] = tensor
    return out


def _numbers(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as numbers to add to scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


def _without_prefix(mask: torch.Tensor | None, rows: int) -> torch.Tensor:
    """``[batch, queries, columns]``: the mask for an indexer that is to choose among live tokens only."""
    if mask is None:
        raise SpecError("the model made no mask for its indexer: this version is not known")
    out = mask[:, 0].clone()
    out[..., :rows] = False if out.dtype == torch.bool else float("-inf")
    return out


def _union_hook(rows: int) -> Any:
    """Adds the compact rows to what an indexer chose, ``[batch, queries, k]``."""

    def union(_: Any, __: Any, chosen: torch.Tensor) -> torch.Tensor:
        prefix = torch.arange(rows, dtype=chosen.dtype, device=chosen.device).expand(*chosen.shape[:2], -1)
        return torch.cat([prefix, chosen], dim=-1)

    return union


def _value_hook(attention: Any, fitted: torch.Tensor) -> Any:
    """Puts fitted values in place of those that ``kv_b_proj`` makes of the first rows' latents."""
    nope, rows = int(attention.qk_nope_head_dim), len(fitted)

    def replace(_: Any, __: Any, out: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        heads = out.view(*out.shape[:-1], fitted.shape[1], nope + fitted.shape[2])
        heads[..., :rows, :, nope:] = fitted
        return out

    return replace


def _index_groups(attentions: Sequence[Any]) -> list[tuple[int, ...]]:
    """Layers that use one indexer's choice, the one that has it first; none where there are no indexers."""
    groups: list[list[int]] = []
    for n, attention in enumerate(attentions):
        if getattr(attention, "indexer", None) is not None:
            groups.append([n])
        elif groups and getattr(attention, "skip_topk", False):
            groups[-1].append(n)
    return [tuple(group) for group in groups]
