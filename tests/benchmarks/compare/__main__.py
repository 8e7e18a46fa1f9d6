"""Runs the comparison and writes its page.

    python -m tests.benchmarks.compare [--parts codecs,lmcache,...] [--json] [--again] [--small | --smoke]
    python -m tests.benchmarks.compare --render docs/results/compare.json --report docs/results

``make compare`` does it in the environment of the tests. Results are kept in build/compare, each under the digest of
all that it depends on: a run that was interrupted goes on where it was, ``--again`` measures anew."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.compare import kv, parts
from tests.benchmarks.compare.page import write
from tests.benchmarks.compare.parts import Part, PartError


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.render is not None:
        results = json.loads(options.render.read_text())
        return _show(options, results)
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    chosen = _chosen(options)
    try:
        values = _values(options, folder)
        results = _results(chosen, values, folder, again=options.again)
    except PartError as e:
        _say(str(e))
        return 1
    return _show(options, results)


def _show(options: argparse.Namespace, results: list[dict[str, Any]]) -> int:
    if options.json:
        sys.stdout.write(json.dumps(results) + "\n")
    if options.report is not None:
        _say(f"written: {write(results, options.report)}")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = ", ".join(part.name for part in parts.FULL)
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.compare", description=__doc__)
    parser.add_argument("--parts", default="", help=f"any of {names}, with commas; default all")
    parser.add_argument("--folder", type=Path, default=parts.ROOT / "build" / "compare", help="where results are kept")
    parser.add_argument("--report", type=Path, help="folder of the page compare.md, its figures and plots")
    parser.add_argument("--json", action="store_true", help="print all results as one JSON list")
    parser.add_argument("--again", action="store_true", help="measure anew what is kept already")
    parser.add_argument("--render", type=Path, metavar="FILE", help="measure nothing; the results are in FILE")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true", help="every part as short as it goes: does all of it work?")
    size.add_argument("--smoke", action="store_true", help="the same with what the tests' own environment has")
    return parser.parse_args(arguments)


def _chosen(options: argparse.Namespace) -> list[Part]:
    known = {part.name: part for part in (parts.SMOKE if options.smoke else parts.FULL)}
    if options.small:
        known = {name: parts.small(part) for name, part in known.items()}
    names = [name for name in options.parts.split(",") if name] or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"--parts {unknown[0]}: use any of {', '.join(known)}")
    return [known[name] for name in names]


def _values(options: argparse.Namespace, folder: Path) -> Path:
    """The file of K and V that all parts are given."""
    if options.smoke or options.small:
        path = folder / f"kv-random-{parts.SMOKE_TOKENS}.npy"
        if not path.exists():
            np.save(path, kv.random_kv(parts.SMOKE_TOKENS))
        return path
    path = folder / f"kv-smollm2-{parts.KV_TOKENS}.npy"
    if not path.exists():
        _say(f"K and V of SmolLM2 for {parts.KV_TOKENS:,} tokens (once, half a minute)")
        command = [parts.python_of("compare"), "-m", f"{__package__}.kv", str(path), str(parts.KV_TOKENS)]
        parts.run_command(command, "kv")
    return path


def _results(chosen: Sequence[Part], values: Path, folder: Path, *, again: bool) -> list[dict[str, Any]]:
    sources = parts.sources()
    digest = hashlib.sha256(values.read_bytes()).hexdigest()[:12]
    name = f"{values.stem} (SHA-256 {digest}...)"
    files = {part.name: folder / f"{part.name}-{part.key(digest, sources)}.json" for part in chosen}
    left = [part for part in chosen if again or not files[part.name].exists()]
    for n, part in enumerate(left):
        rest_s = sum(p.expected_s for p in left[n:])
        _say(f"{part.name}: {n + 1} of {len(left)}, about {rest_s / 60:.0f} min left until all is done")
        with tempfile.TemporaryDirectory(prefix=f"{part.name}-", dir=folder) as work:
            result = parts.measure(part, values, name, Path(work))
        new = files[part.name].with_suffix(".new")  # so that what is there is whole
        new.write_text(json.dumps(result, indent=1) + "\n")
        new.replace(files[part.name])
        _say(f"{part.name}: done in {result['seconds']:.0f} s")
    return [json.loads(files[part.name].read_text()) for part in chosen]


def _say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    raise SystemExit(main())
