"""``kvtier compact``: a context that will be used again, made small once; and what such a file holds."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from kvtier.cli.options import at_least, check_writable
from kvtier.errors import ArtefactError, ConfigError

if TYPE_CHECKING:
    from kvtier.compression.compaction.manifest import Described, Manifest


class _DefaultGroup(TyperGroup):
    """``kvtier compact MODEL CONTEXT ...`` is ``kvtier compact run MODEL CONTEXT ...``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_DefaultGroup,
    help="Make a context small that will be used again: kvtier compact MODEL CONTEXT --ratio 0.8 --out FILE.",
    no_args_is_help=True,
)


@app.command("run")
def run(
    model: Annotated[
        str, typer.Argument(help="A folder with the model and its tokenizer, or a name transformers knows.")
    ],
    context: Annotated[Path, typer.Argument(help="UTF-8 text, or a JSON list of token ids (a name ending in .json).")],
    out: Annotated[Path, typer.Option(help="File to write; its name ends in .safetensors.")],
    method: Annotated[str, typer.Option(help="kvzip, am (Attention Matching), random or recent.")] = "kvzip",
    selector: Annotated[
        str | None,
        typer.Option(
            help="kvzip: pair, uniform, head; on MLA raw_max, normalized_max, log_coverage. am: hak, omp, indexer_hak, "
            "indexer_omp."
        ),
    ] = None,
    ratio: Annotated[float, typer.Option(help="Share of the tokens to remove.")] = 0.5,
    queries: Annotated[
        str | None, typer.Option(help="am: repeat, self_study, context, or given (with --given).")
    ] = None,
    given: Annotated[
        Path | None, typer.Option(help="Texts that will follow the context, one per line, for --queries given.")
    ] = None,
    head_scores: Annotated[
        Path | None, typer.Option(help="Scores per head for --selector head: safetensors with a tensor 'scores'.")
    ] = None,
    system_tokens: Annotated[int, typer.Option(help="First tokens of the context that always stay.")] = 0,
    page_tokens: Annotated[
        int, typer.Option(help="Keep whole pages of so many rows, as SGLang needs: its --page-size. Fewer are removed.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    name: Annotated[
        str | None, typer.Option(help="Name the model is known by; by default the last part of MODEL.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Compute in: bf16, fp16, fp32, or auto (fp32 on a CPU).")] = "auto",
    work: Annotated[
        Path | None, typer.Option(help="Folder in which the work so far is kept; a run that was stopped goes on.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Compact CONTEXT for MODEL, and write it as one file."""
    from kvtier.cli.compact_run import Job

    at_least(0, system_tokens=system_tokens)
    at_least(1, page_tokens=page_tokens)
    if not 0.0 <= ratio < 1.0:
        raise ConfigError(f"--ratio {ratio}: it is the share of the tokens to remove; give 0 or more, and less than 1")
    if out.suffix != ".safetensors":
        raise ConfigError(f"--out {str(out)!r}: give a name that ends in .safetensors")
    if dtype not in ("auto", "bf16", "fp16", "fp32"):
        raise ConfigError(f"--dtype {dtype}: use auto, bf16, fp16 or fp32")
    if (queries == "given") != (given is not None):
        raise ConfigError("--queries given and --given FILE belong together: give both or none")
    if (selector == "head") != (head_scores is not None):
        raise ConfigError(
            "--selector head and --head-scores FILE (of kvtier compact head-scores) belong together: give both or none"
        )
    _check_file(out)
    if work is not None:
        check_writable("--work", work)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
    seconds = Job(
        model=model,
        context=context,
        out=out,
        method=method,
        selector=selector or "",
        ratio=ratio,
        queries=queries or "",
        given=given,
        head_scores=head_scores,
        system_tokens=system_tokens,
        page_tokens=page_tokens,
        seed=seed,
        name=_name_of(model) if name is None else name,
        dtype=dtype,
        work=work,
    ).run()
    sys.stderr.write(f"{out}: compacted in {seconds:.1f} s\n")
    inspect(out, as_json=as_json)


def _check_file(out: Path) -> None:
    """Before minutes of work, not after."""
    if out.is_dir():
        raise ConfigError(f"--out {str(out)!r} is a folder: give the name of a file")
    check_writable("--out", out.parent)


def _name_of(model: str) -> str:
    """What a model is known by: the last part of its name, or of its folder's."""
    return (Path(model).resolve() if Path(model).is_dir() else Path(model)).name


@app.command("head-scores")
def head_scores(
    model: Annotated[str, typer.Argument(help="A folder with the model and its tokenizer, or a known name.")],
    text: Annotated[Path, typer.Argument(help="Any text of some thousand tokens, UTF-8, or a JSON list of token ids.")],
    out: Annotated[Path, typer.Option(help="File to write; its name ends in .safetensors.")],
    system_tokens: Annotated[int, typer.Option(help="First tokens of the text that are not scored.")] = 0,
    dtype: Annotated[str, typer.Option(help="Compute in: bf16, fp16, fp32, or auto (fp32 on a CPU).")] = "auto",
) -> None:
    """Measure, once for a model, which heads repeat what they read: for --selector head of any context."""
    from kvtier.cli.compact_head_scores import measure

    at_least(0, system_tokens=system_tokens)
    if out.suffix != ".safetensors":
        raise ConfigError(f"--out {str(out)!r}: give a name that ends in .safetensors")
    if dtype not in ("auto", "bf16", "fp16", "fp32"):
        raise ConfigError(f"--dtype {dtype}: use auto, bf16, fp16 or fp32")
    _check_file(out)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
    layers, heads = measure(model, text, out, system_tokens=system_tokens, dtype=dtype)
    sys.stdout.write(f"{out}: {layers} layers x {heads} KV heads\n")


@app.command("inspect")
def inspect(
    file: Annotated[Path, typer.Argument(help="A file of kvtier compact.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What FILE holds, and whether its bytes are whole. Needs no torch."""
    described, one_set = _read(file)
    told = _told(described, one_set, file)
    if as_json:
        sys.stdout.write(json.dumps(told) + "\n")
        return
    _print(described.manifest, told)


def _read(file: Path) -> tuple[Described, list[bool]]:
    """The manifest, checked against the file's bytes, and per layer whether its heads share one set."""
    import numpy as np

    from kvtier.compression.compaction.manifest import HEADER_MAX_BYTES, checksum_of, read_header

    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            described = read_header(opened.read(8 + HEADER_MAX_BYTES), size)
            opened.seek(described.data_offset)
            manifest, one_set = described.manifest, {}

            def parts() -> Any:
                for name, entry in manifest.tensors().items():
                    raw = opened.read(entry.nbytes)
                    if name.endswith(".kept"):
                        layer = manifest.layers[int(name.partition(".")[0])]
                        heads = np.split(np.frombuffer(raw, "<i4"), np.cumsum(layer.kept)[:-1])
                        one_set[int(name.partition(".")[0])] = all(np.array_equal(h, heads[0]) for h in heads)
                    yield name, entry, raw

            if checksum_of(manifest.encoded(), parts()) != described.checksum:
                raise ArtefactError(f"{file.name}: its bytes do not match its checksum: the file is damaged")
    except OSError as e:
        raise ArtefactError(f"{str(file)!r} cannot be read ({e.strerror}): give a file of kvtier compact") from e
    return described, [one_set[n] for n in range(len(described.manifest.layers))]


def _told(described: Described, one_set: list[bool], file: Path) -> dict[str, Any]:
    manifest = described.manifest
    rows = [list(layer.kept) for layer in manifest.layers]
    equal = all(len(set(counts)) == 1 for counts in rows)
    shape = "one set per layer" if all(one_set) else ("sets of equal size" if equal else "sets of different sizes")
    return {
        **{k: v for k, v in manifest.as_json().items() if k not in ("layers", "layer_figures")},
        "key": described.key,
        "file_bytes": file.stat().st_size,
        "compact_bytes": manifest.compact_bytes,
        "tokens_removed": round(manifest.tokens_removed, 6),
        "bytes_removed": round(manifest.bytes_removed, 6),
        "layers": len(manifest.layers),
        "rows": rows,
        "sets": shape,
        "biases": any(layer.bias_heads for layer in manifest.layers),
        "fitted_values": any(layer.fitted for layer in manifest.layers),
        "layer_figures": manifest.as_json()["layer_figures"],
    }


def _print(manifest: Manifest, told: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvtier.cli.place import printable

    recipe = manifest.recipe
    flat = [n for counts in told["rows"] for n in counts]
    table = Table(show_header=False, title="compacted prefix")

    def add_row(*cells: str) -> None:
        table.add_row(*(Text(printable(cell)) for cell in cells))  # a file is others': no markup, no escapes

    add_row("model", f"{manifest.model}, weights {manifest.weights[:12]}, {manifest.family}, rows {manifest.dtype}")
    add_row("context", f"{manifest.tokens:,} tokens, SHA-256 {manifest.tokens_sha256[:12]}")
    how = [recipe.method, recipe.selector, recipe.queries and f"queries {recipe.queries}", f"seed {recipe.seed}"]
    add_row("made by", ", ".join(part for part in how if part))
    add_row("tokens removed", f"{100 * manifest.tokens_removed:.2f} % ({recipe.ratio:.0%} asked for)")
    add_row(
        "bytes removed",
        f"{100 * manifest.bytes_removed:.2f} % ({manifest.original_bytes:,} B of rows are now "
        f"{manifest.compact_bytes:,} B, positions and biases included)",
    )
    add_row("rows per head", f"{min(flat):,} to {max(flat):,}; {told['sets']}")
    extras = [what for what, has in (("biases", told["biases"]), ("fitted values", told["fitted_values"])) if has]
    add_row("beside rows", ", ".join(extras) or "nothing")
    add_row("key", told["key"])
    for name, value in manifest.figures.items():
        add_row(name, f"{value:.6g}")
    Console().print(table)
