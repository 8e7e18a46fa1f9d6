"""Attention Matching on a transformers model: layer by layer, each on the queries that the compacted layers before it
lead to.

Fitting texts are run behind the context one decoder layer at a time. A layer first runs over its original rows, which
gives its queries; its rows are compacted for them; then it runs again over what is left, exactly as it will be served,
and its output goes to the next layer. Keys and values are the original ones throughout. So a layer costs two forward
passes of that layer, and what must be kept between layers is one activation per token of the fitting texts.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache

from kvtier.compression.compaction.artefact import ModelIdentity
from kvtier.compression.compaction.matching import MatchingOptions
from kvtier.compression.compaction.prefix import Compaction, LayerSelection, Progress
from kvtier.compression.compaction.recipe import Recipe, budget_tokens
from kvtier.connectors.transformers.attention import Family, FamilyKind, restore, snapshot
from kvtier.connectors.transformers.compact_serving import IMPLEMENTATIONS, CompactServing
from kvtier.connectors.transformers.compaction import compacted, held_positions
from kvtier.connectors.transformers.fitting_queries import FittingSequence, context_queries
from kvtier.connectors.transformers.kvzip import Checkpoint, State, positions_of, protected_positions
from kvtier.connectors.transformers.layer_steps import Activations, LayerSteps
from kvtier.connectors.transformers.matching_layer import (
    FIGURES,
    NO_FIGURES,
    Fitted,
    LayerFits,
    TextQueries,
    most_queries,
)
from kvtier.errors import ConfigError

BLOCK_TOKENS = 4096
_ERRORS = len(FIGURES) - 2


@dataclass(frozen=True, slots=True)
class MatchingPlan:
    """options: of each fit. block_tokens: longer contexts are cut into blocks of about as many tokens, each compacted
    on its own. system_tokens: first positions that always stay, 4 at least. context: the queries of reading the context
    are fitted to as well; these are always the model's own. on_policy: later layers are fitted to what the compacted
    ones before them lead to; without it, to the model's own queries. shared_sets: layers that share an indexer's
    choice keep the positions that the first of them keeps (with an indexer's selectors they always do)."""

    options: MatchingOptions = field(default_factory=MatchingOptions)
    block_tokens: int = BLOCK_TOKENS
    system_tokens: int = 0
    context: bool = False
    on_policy: bool = True
    shared_sets: bool = False

    def __post_init__(self) -> None:
        if self.block_tokens < 2:
            raise ConfigError(f"block_tokens = {self.block_tokens}: give 2 or more")

    @property
    def one_set_per_group(self) -> bool:
        return self.shared_sets or self.options.by_index

    def described(self) -> dict[str, str]:
        """What changes the result, as text for a recipe's options."""
        options, pursuit = self.options, "none"
        if options.pursues:
            pursuit = "auto"
            if options.pursuit is not None:
                pursuit = f"{options.pursuit.keys_per_step},{options.pursuit.refit_every}"
        return {
            "pursuit": pursuit,
            "bias": str(options.bias).lower(),
            "values": str(options.values).lower(),
            "ridge": repr(options.ridge),
            "max_queries": str(options.max_queries),
            "block_tokens": str(self.block_tokens),
            "system_tokens": str(self.system_tokens),
            "context": str(self.context).lower(),
            "on_policy": str(self.on_policy).lower(),
            "shared_sets": str(self.one_set_per_group).lower(),
        }


def match_context(
    family: Family,
    cache: DynamicCache,
    token_ids: Sequence[int],
    recipe: Recipe,
    sequences: Sequence[FittingSequence],
    *,
    plan: MatchingPlan | None = None,
    held_out: Sequence[FittingSequence] = (),
    state: State | None = None,
    checkpoint: Checkpoint | None = None,
    progress: Progress | None = None,
) -> Compaction:
    """`token_ids`, which `cache` holds plainly, at the recipe's ratio. The cache is unchanged afterwards.

    sequences: texts to fit. held_out: texts to measure on only, run on the same compacted layers. state: what
    `checkpoint` was given last, of the same run, to go on behind the layers that are done. Layers with a window stay
    as they are. Deterministic for equal arguments on one machine. ConfigError for arguments that do not go together,
    FitError, naming layer and head, for numbers that are not finite."""
    plan = plan or MatchingPlan()
    if recipe.selector and recipe.selector != plan.options.selector:
        raise ConfigError(f"a recipe of selector {recipe.selector!r} with options of {plan.options.selector!r}")
    if plan.options.by_index and family.geometry.kind is not FamilyKind.SPARSE:
        raise ConfigError(
            f"selector = {plan.options.selector!r}: {family.geometry.architecture} has no indexer; use hak or omp"
        )
    if not sequences and not plan.context:
        raise ConfigError("no queries to fit: give fitting sequences, or set context")
    longest = max((len(s.token_ids) for s in (*sequences, *held_out)), default=0)
    limit = positions_of(family)
    if limit is not None and len(token_ids) + longest > limit:
        raise ConfigError(
            f"a context of {len(token_ids)} tokens and a fitting sequence of {longest} behind it: the model has "
            f"{limit} positions: give a shorter context, or other texts to fit (--queries, --given)"
        )
    implementation = family.model.config._attn_implementation
    if plan.on_policy and implementation not in IMPLEMENTATIONS:
        raise ConfigError(
            f"attn_implementation = {implementation!r}: compacted layers need masks of numbers: load the model with "
            f"{' or '.join(IMPLEMENTATIONS)}, or set on_policy to false"
        )
    matching = _Matching(family, cache, token_ids, recipe, list(sequences), list(held_out), plan)
    return matching.run(state, checkpoint, progress)


class _Matching:
    """One run. `_given`: per text, what the next layer reads; `_chosen`: per text, the last indexer's choice among the
    original rows (that in `_given` numbers the compacted ones)."""

    def __init__(
        self,
        family: Family,
        cache: DynamicCache,
        token_ids: Sequence[int],
        recipe: Recipe,
        sequences: list[FittingSequence],
        held_out: list[FittingSequence],
        plan: MatchingPlan,
    ) -> None:
        self._family, self._cache, self._ids = family, cache, [int(t) for t in token_ids]
        self._recipe, self._plan = recipe, plan
        self._sequences, self._fitting = [*sequences, *held_out], len(sequences)
        self._geometry = family.geometry
        self._tokens = len(self._ids)
        self._whole = budget_tokens(self._tokens, recipe.ratio) == self._tokens
        mla = self._geometry.kind is not FamilyKind.DENSE
        self._identity = ModelIdentity("mla" if mla else "dense", "model", "")
        self._done: list[Fitted] = []
        self._given: list[Activations] = []
        self._chosen: list[torch.Tensor | None] = []

    def run(self, state: State | None, checkpoint: Checkpoint | None, progress: Progress | None) -> Compaction:
        start = time.perf_counter()
        plan, layers = self._plan, self._geometry.layers
        steps = []
        for sequence in self._sequences:
            steps.append(LayerSteps(self._family, self._cache, sequence.token_ids))
            if progress is not None:
                progress(len(steps), len(self._sequences), "reading what is fitted to")
        self._given = [s.first() for s in steps]
        self._chosen = [None] * len(steps)
        if state is not None:
            self._resume(state)
        context = {}
        if plan.context and len(self._done) < layers and not self._whole:
            most = max(1, most_queries(self._family, plan.options) // (2 if self._fitting else 1))
            context = context_queries(self._family, self._ids, most=most, progress=progress)
        fits = LayerFits(
            self._family,
            self._tokens,
            self._recipe.ratio,
            plan.options,
            block_tokens=plan.block_tokens,
            protected=protected_positions(self._tokens, plan.system_tokens),
            context=context,
        )
        for layer in range(len(self._done), layers):
            self._layer(layer, steps, fits)
            if checkpoint is not None:
                checkpoint(self._state())
            if progress is not None:
                progress(layer + 1, layers, "fitting layers")
        return self._compaction(time.perf_counter() - start)

    def _compaction(self, seconds: float) -> Compaction:
        figures = torch.tensor([done.figures for done in self._done], dtype=torch.float64)
        known = {name: figures[:, n] for n, name in enumerate(FIGURES[:_ERRORS]) if not figures[:, n].isnan().all()}
        return Compaction(
            self._recipe,
            self._tokens,
            tuple(done.selection for done in self._done),
            {
                **{name: float(column.nanmean()) for name, column in known.items()},
                **{name: float(figures[:, n].sum()) for n, name in enumerate(FIGURES) if n >= _ERRORS},
                "seconds": seconds,
            },
            {name: tuple(column.tolist()) for name, column in known.items()},
        )

    def _layer(self, layer: int, steps: list[LayerSteps], fits: LayerFits) -> None:
        """Fits `layer` and advances every text behind it."""
        before = snapshot(self._cache)
        texts: list[TextQueries] = []
        plain: list[Activations] = []
        for step, sequence, given, chosen in zip(steps, self._sequences, self._given, self._chosen, strict=True):
            try:
                with self._family.capture([layer]) as captured:
                    plain.append(step.run(layer, Activations(given.hidden, chosen), self._cache))
                texts.append(TextQueries(captured[layer], self._family.read(self._cache, layer), sequence.first_query))
            finally:
                restore(self._cache, before)
        self._chosen = [out.chosen for out in plain]
        held = held_positions(self._cache, layer, self._tokens)
        if self._whole or layer not in self._geometry.compactable_layers:
            self._done.append(Fitted(LayerSelection((held,) * self._geometry.kv_heads), NO_FIGURES))
        else:
            leader = self._group(layer)[0]
            reused = self._plan.one_set_per_group and leader != layer
            self._done.append(
                fits.fit(
                    layer,
                    self._family.read(self._cache, layer),
                    texts[: self._fitting],
                    texts[self._fitting :],
                    self._done[leader].selection.kept if reused else None,
                    self._family.read(self._cache, leader),
                )
            )
        if not self._plan.on_policy or self._whole or layer not in self._geometry.compactable_layers:
            self._given = plain
        elif layer + 1 < self._geometry.layers:
            with self._serving(layer) as serving:
                self._given = [
                    step.run(layer, given, serving.new_cache()) for step, given in zip(steps, self._given, strict=True)
                ]

    def _serving(self, layer: int) -> CompactServing:
        """The model with `layer` as it will be served. Layers outside of its group are not run: one row stands for
        each."""
        group = self._group(layer)
        selections = []
        for n in range(self._geometry.layers):
            if n not in group:
                row = held_positions(self._cache, n, self._tokens)[:1]
                selections.append(LayerSelection((row,) * self._geometry.kv_heads))
            else:
                mine = self._done[layer].selection
                selections.append(self._done[n].selection if n <= layer else LayerSelection(mine.kept))
        part = Compaction(self._recipe, self._tokens, tuple(selections))
        prefix = compacted(self._identity, self._ids, self._cache, part)
        return CompactServing(self._family.model, prefix, model_name=self._identity.name, identity=self._identity)

    def _group(self, layer: int) -> tuple[int, ...]:
        return next(group for group in self._geometry.index_groups if layer in group)

    # -- state ---------------------------------------------------------------------------------------------------------

    def _digest(self) -> torch.Tensor:
        """uint8 ``[32]``, of everything that decides the result."""
        parts = (self._recipe.encoded(), self._plan.described(), self._plan.options.selector, self._ids)
        texts = [(s.token_ids, s.first_query) for s in self._sequences]
        text = repr((parts, texts, self._fitting, self._geometry.architecture, self._geometry.layers))
        return torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)

    def _state(self) -> dict[str, torch.Tensor]:
        """The layers that are done, and everything that the next ones need."""
        state = {"run": self._digest(), "figures": torch.tensor([d.figures for d in self._done], dtype=torch.float64)}
        for n, done in enumerate(self._done):
            for name in ("kept", "bias", "values"):
                for h, tensor in enumerate(getattr(done.selection, name) or ()):
                    state[f"layer.{n}.{name}.{h}"] = tensor
        for n, (given, chosen) in enumerate(zip(self._given, self._chosen, strict=True)):
            state[f"text.{n}.hidden"] = given.hidden
            if given.chosen is not None and chosen is not None:
                state[f"text.{n}.chosen"] = given.chosen
                state[f"text.{n}.chosen_originally"] = chosen
        return state

    def _resume(self, state: Mapping[str, torch.Tensor]) -> None:
        if "run" not in state or not torch.equal(state["run"].cpu(), self._digest()):
            raise ConfigError("the saved state is that of another run: give its arguments again, or drop the state")
        for n, figures in enumerate(state["figures"].tolist()):
            found = {name: _numbered(state, f"layer.{n}.{name}.") for name in ("kept", "bias", "values")}
            selection = LayerSelection(found["kept"], found["bias"] or None, found["values"] or None)
            self._done.append(Fitted(selection, tuple(figures)))
        for n, first in enumerate(self._given):
            device = first.hidden.device
            chosen, originally = state.get(f"text.{n}.chosen"), state.get(f"text.{n}.chosen_originally")
            hidden = state[f"text.{n}.hidden"].to(device)
            self._given[n] = Activations(hidden, None if chosen is None else chosen.to(device))
            self._chosen[n] = None if originally is None else originally.to(device)


def _numbered(state: Mapping[str, torch.Tensor], prefix: str) -> tuple[torch.Tensor, ...]:
    found: list[torch.Tensor] = []
    while f"{prefix}{len(found)}" in state:
        found.append(state[f"{prefix}{len(found)}"])
    return tuple(found)
