"""``kvtier calibrate``: TriAttention's query statistics of a model, from one pass over plain text."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.options import at_least
from kvtier.errors import ConfigError, missing_extra


class Dtype(str, Enum):
    AUTO = "auto"
    BF16 = "bf16"
    FP32 = "fp32"


def calibrate(
    model: Annotated[
        str, typer.Argument(help="A folder with the model and its tokenizer, or a name transformers knows.")
    ],
    text: Annotated[Path, typer.Option(help="Plain text of the kind the model will write. UTF-8.")],
    output: Annotated[Path, typer.Option(help="File to write; its name ends in .safetensors.")],
    tokens: Annotated[int, typer.Option(help="Tokens of the text to use, at most.")] = 32768,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens per forward pass.")] = 1024,
    dtype: Annotated[Dtype, typer.Option(help="Compute in; auto is bf16 on a GPU and fp32 on a CPU.")] = Dtype.AUTO,
) -> None:
    """Collect TriAttention's query statistics of MODEL, once per model."""
    at_least(64, tokens=tokens, chunk_tokens=chunk_tokens)
    if output.suffix != ".safetensors":
        raise ConfigError(f"--output {str(output)!r}: give a name that ends in .safetensors")
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(
            f"--text {str(text)!r} cannot be read ({getattr(e, 'strerror', None) or e}): give a file of UTF-8 text"
        ) from None
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
    try:
        import torch
        import transformers

        from kvtier.connectors.transformers.calibration import calibrate as run
    except ImportError as e:
        raise missing_extra(str(e.name), "transformers") from e
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    transformers.utils.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wide = dtype is Dtype.FP32 or (dtype is Dtype.AUTO and device == "cpu")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32 if wide else torch.bfloat16
        )
    except (OSError, ValueError) as e:
        raise ConfigError(f"MODEL {model!r} cannot be loaded: {str(e).splitlines()[0]}") from e
    ids = torch.tensor(
        tokenizer(content, add_special_tokens=False, verbose=False).input_ids[:tokens], dtype=torch.int64
    )
    limit = getattr(loaded.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None:
        ids = ids[:limit]
    console = Console(stderr=True)
    columns = (
        TextColumn("calibrating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=len(ids))
        statistics = run(
            loaded.eval().to(device),
            ids,
            model_name=Path(model).name,
            chunk_tokens=chunk_tokens,
            progress=lambda n: bar.advance(task, n),
        )
    statistics.save(output)
    layers, heads, _ = statistics.q_mean.shape
    typer.echo(f"{output}: {layers} layers, {heads} query heads, {len(ids)} tokens, rope style {statistics.rope_style}")
