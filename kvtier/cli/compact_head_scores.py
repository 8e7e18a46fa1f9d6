"""The work of ``kvtier compact head-scores``: which heads of a model repeat what they read, measured once."""

from __future__ import annotations

from pathlib import Path

from kvtier.errors import ConfigError


def measure(model_name: str, text: Path, out: Path, *, system_tokens: int, dtype: str) -> tuple[int, int]:
    """Write the largest KVzip score of each head as `out`; the number of layers and of KV heads. Raises ConfigError for
    a model whose cache has no KV heads to choose from."""
    from kvtier.cli.compact_progress import shown
    from kvtier.cli.compact_run import import_torch, load_model, load_tokenizer, read_tokens

    import_torch()
    from safetensors.torch import save_file

    from kvtier.compression.compaction.selection import head_scores_of
    from kvtier.connectors.transformers import kvzip
    from kvtier.connectors.transformers.attention import family_of
    from kvtier.connectors.transformers.compaction import prefill

    tokenizer = load_tokenizer(model_name)
    token_ids = read_tokens(text, tokenizer)
    if system_tokens >= len(token_ids):
        raise ConfigError(f"--system-tokens {system_tokens}: the text has {len(token_ids)} tokens")
    with shown("loading the model") as show:
        model = load_model(model_name, dtype)
        family = family_of(model)
        kvzip.check_selector(family, "head")
        cache = prefill(model, token_ids, progress=show)
        prompts = kvzip.repeat_prompts(tokenizer)
        scores = kvzip.score_dense(family, cache, token_ids, prompts, system_tokens=system_tokens, progress=show)
    # The first tokens attract every head, whatever it does.
    per_head = head_scores_of(scores, kvzip.protected_positions(len(token_ids) - 1, system_tokens))
    save_file({"scores": per_head.contiguous()}, out, metadata={"measured_on_tokens": str(len(token_ids))})
    return int(per_head.shape[0]), int(per_head.shape[1])
