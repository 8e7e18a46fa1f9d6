"""The work of ``kvtier compact``: load, read the context, run the method, write; and what is kept to go on later."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.errors import ConfigError, KVTierError, missing_extra

if TYPE_CHECKING:
    import torch

    from kvtier.compression.compaction.recipe import Recipe

_SAVE_EVERY_S = 5.0
_WORK_VERSION = 2
"""Of what is kept to go on later."""


@dataclass(frozen=True, slots=True)
class Job:
    """The options of one run, as the command has them."""

    model: str
    context: Path
    out: Path
    method: str
    selector: str
    ratio: float
    queries: str
    given: Path | None
    head_scores: Path | None
    system_tokens: int
    page_tokens: int
    seed: int
    name: str
    dtype: str
    work: Path | None

    def run(self) -> float:
        """Write the file; the seconds that compacting took. Raises ConfigError for options that cannot work, before the
        model is run where possible."""
        from kvtier.cli.compact_progress import shown

        _text("CONTEXT", self.context)  # before the model is loaded
        import_torch()
        from kvtier.compression.compaction.recipe import Recipe
        from kvtier.connectors.transformers import compact_methods
        from kvtier.connectors.transformers.attention import family_of
        from kvtier.connectors.transformers.compaction import compacted, identity_of
        from kvtier.connectors.transformers.identity import check_model_name
        from kvtier.connectors.transformers.kvzip import protected_positions

        check_model_name(self.name)
        tokenizer = load_tokenizer(self.model)
        token_ids = read_tokens(self.context, tokenizer)
        if self.system_tokens >= len(token_ids):
            raise ConfigError(f"--system-tokens {self.system_tokens}: the context has {len(token_ids)} tokens")
        protected = protected_positions(len(token_ids), self.system_tokens)
        ratio = whole_pages(len(token_ids), self.ratio, self.page_tokens, protected)
        self._check_system(len(token_ids), ratio)
        given = [] if self.given is None else read_lines(self.given, tokenizer)
        head_scores = None if self.head_scores is None else read_head_scores(self.head_scores)
        asked = Recipe(self.method, ratio, self.selector, self.seed, self.queries)
        with shown("loading the model") as show:
            model = load_model(self.model, self.dtype)
            recipe = compact_methods.complete(asked, family_of(model))
            identity = identity_of(model, self.name, folder=folder_of(self.model))
            key = self._key(identity.weights, token_ids, recipe, given)
            kept = None if self.work is None else Work.open(self.work, key)
            started = time.perf_counter()
            context = compact_methods.Context.read(
                model, tokenizer, token_ids, system_tokens=self.system_tokens, progress=show
            )
            compaction = compact_methods.compact(
                context,
                recipe,
                given=given,
                head_scores=head_scores,
                progress=show,
                state=None if kept is None else kept.state(),
                checkpoint=None if kept is None else kept.save,
            )
        compacted(identity, token_ids, context.cache, compaction).save(self.out)
        if kept is not None:
            kept.done()
        return time.perf_counter() - started

    def _check_system(self, tokens: int, ratio: float) -> None:
        from kvtier.compression.compaction.recipe import budget_tokens

        budget = budget_tokens(tokens, ratio)
        if self.system_tokens > budget:
            most = int(1000 * (1 - self.system_tokens / tokens)) / 1000
            raise ConfigError(
                f"--system-tokens {self.system_tokens}: --ratio {self.ratio} leaves {budget} of {tokens} tokens, less "
                f"than these: give a ratio up to {most}, or fewer tokens"
            )

    def _key(self, weights: str, token_ids: list[int], recipe: Recipe, given: list[list[int]]) -> str:
        said = [_WORK_VERSION, weights, self.dtype, token_ids, recipe.encoded(), given, self.system_tokens]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model. Raises ConfigError for one that cannot be had, or whose model's attention is not known:
    before weights are loaded."""
    import transformers

    from kvtier.connectors.transformers.attention import check_known

    with _told(name):
        check_known(transformers.AutoConfig.from_pretrained(name))
        return transformers.AutoTokenizer.from_pretrained(name)


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Whatever libraries raise for a model that cannot be loaded, as a ConfigError that names it."""
    from safetensors import SafetensorError

    try:
        yield
    except KVTierError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, SafetensorError) as e:
        lines = [line for line in str(e).splitlines() if line.strip()] or [type(e).__name__]
        raise ConfigError(f"MODEL {name!r} cannot be loaded: {lines[0].strip()}") from e


def load_model(name: str, dtype: str) -> Any:
    """A model, on the GPU where there is one. Raises ConfigError for one that cannot be had."""
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = dtype if dtype != "auto" else ("bf16" if device == "cuda" else "fp32")
    numbers = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[chosen]
    with _told(name):
        return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=numbers).eval().to(device)


def folder_of(name: str) -> Path | None:
    """Where the files of a model lie that was just loaded; None where that cannot be told."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def whole_pages(tokens: int, ratio: float, page_tokens: int, protected: int = 0) -> float:
    """The ratio nearest below `ratio` at which whole pages stay, and `protected` tokens at least. Raises ConfigError
    where the context is no page."""
    from kvtier.compression.compaction.recipe import budget_tokens

    if tokens < page_tokens:
        raise ConfigError(f"--page-tokens {page_tokens}: the context has {tokens} tokens; give a longer one")
    if page_tokens == 1:
        return ratio
    rows = -(-max(protected, budget_tokens(tokens, ratio)) // page_tokens) * page_tokens
    return 1.0 - min(rows, tokens // page_tokens * page_tokens) / tokens


class Work:
    """A folder with the state of one run. It is of no use to another: a different job in it is refused."""

    def __init__(self, folder: Path, key: str) -> None:
        self._job, self._state, self._key = folder / "job.json", folder / "state.safetensors", key
        self._saved_s = 0.0

    @staticmethod
    def open(folder: Path, key: str) -> Work:
        """Raises ConfigError where the folder holds the work of another job."""
        work = Work(folder, key)
        try:
            held = json.loads(work._job.read_text())["job"] if work._job.exists() else None
        except (ValueError, KeyError, TypeError, OSError):
            held = "unreadable"
        if held is not None and held != key:
            raise ConfigError(
                f"--work {str(folder)!r} holds the work of another model, context or recipe: give another folder, or "
                "remove it"
            )
        if held is None:
            work._state.unlink(missing_ok=True)  # whatever it is of
        with _room(folder):
            new = work._job.with_suffix(".new")
            new.write_text(json.dumps({"job": key}) + "\n")
            new.replace(work._job)
        return work

    def state(self) -> dict[str, torch.Tensor] | None:
        """What an earlier run had reached."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        if not self._state.exists():
            return None
        try:
            return load_file(self._state)
        except (SafetensorError, OSError) as e:
            raise ConfigError(f"--work: {self._state} cannot be read ({e}): remove the folder to begin anew") from None

    def save(self, state: dict[str, torch.Tensor]) -> None:
        """Keep `state`, whole or not at all; not more often than every few seconds."""
        from safetensors.torch import save_file

        if time.monotonic() - self._saved_s < _SAVE_EVERY_S:
            return
        new = self._state.with_suffix(".new")
        with _room(self._state.parent):
            save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}, new)
            new.replace(self._state)
        self._saved_s = time.monotonic()

    def done(self) -> None:
        """The file is written: nothing is left to go on from."""
        for path in (self._state, self._job):
            path.with_suffix(".new").unlink(missing_ok=True)  # of a run that was killed while it wrote
            path.unlink(missing_ok=True)


@contextmanager
def _room(folder: Path) -> Iterator[None]:
    """A full disk and the like as a ConfigError; what was kept before stays."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as e:
        raise ConfigError(
            f"--work {str(folder)!r}: the work so far cannot be written ({e}): make room and run again, or give "
            "another folder"
        ) from e


def read_tokens(path: Path, tokenizer: Any) -> list[int]:
    """Token ids of a text, or of a JSON list. Raises ConfigError for a file that is neither."""
    text = _text("CONTEXT", path)
    if path.suffix == ".json":
        try:
            ids = json.loads(text)
        except (ValueError, RecursionError):
            ids = None
        if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ConfigError(f"CONTEXT {str(path)!r}: a name that ends in .json must hold a JSON list of token ids")
        size = len(tokenizer)
        if any(not 0 <= i < size for i in ids):
            raise ConfigError(f"CONTEXT {str(path)!r}: token ids must be from 0 to {size - 1}")
    else:
        ids = list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    if not ids:
        raise ConfigError(f"CONTEXT {str(path)!r} is empty: give the text to compact")
    return ids


def read_lines(path: Path, tokenizer: Any) -> list[list[int]]:
    """Token ids of each line that is not empty; ``\\n`` in a line is a line break."""
    lines = [line.replace("\\n", "\n") for line in _text("--given", path).splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"--given {str(path)!r} is empty: give texts that follow the context, one per line")
    return [list(tokenizer(line, add_special_tokens=False, verbose=False).input_ids) for line in lines]


def read_head_scores(path: Path) -> torch.Tensor:
    """float32 ``[layers, kv_heads]``."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)["scores"].float()
    except (SafetensorError, OSError, KeyError) as e:
        raise ConfigError(f"--head-scores {str(path)!r} cannot be read ({e}): give safetensors with 'scores'") from None


def _text(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(
            f"{option} {str(path)!r} cannot be read ({getattr(e, 'strerror', None) or e}): give a file of UTF-8 text"
        ) from None


def import_torch() -> Any:
    """torch, with transformers there as well, or the error that names the extra."""
    try:
        import torch
        import transformers
    except ImportError as e:
        raise missing_extra(str(e.name), "transformers") from e
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return torch
