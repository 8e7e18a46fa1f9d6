"""Install a wheel of kvtier with each extra into an environment of its own, and use what the extra is for.

Run by `make package-check` for those that download little, by `make package-check-extras` for the others.
Usage: package_extras.py [--light] [--wheel WHEEL] [EXTRA ...]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "tools" / "constraints.txt"

LIGHT = {
    "events": """
import msgspec
from kvtier.kv_events import BlockRemoved, EventOptions, Publisher
publisher = Publisher(EventOptions("tcp://127.0.0.1:*"))
publisher.publish(BlockRemoved([1]))
publisher.close()
""",
    "lossless": """
from kvtier.codecs.registry import codec
assert codec("lossless").id == "lossless"
""",
    "otel": """
from kvtier.telemetry import Spans
Spans().offload(0.0, 1.0, outcomes={"stored": 1})
""",
    "redis": """
from kvtier.storage_backends.redis.options import RedisOptions
from kvtier.storage_backends.redis.tier import RedisTier
RedisOptions.of("redis://127.0.0.1")
""",
}
_TORCH = """
import torch
from kvtier.nvfp4 import dequantize, quantize
values = torch.full((2, 16), 6.0, dtype=torch.bfloat16)
assert torch.equal(dequantize(*quantize(values), dtype=torch.bfloat16), values)
"""
HEAVY = {
    "compaction": "import kvtier.compression.compaction.matching_reference, kvtier.connectors.transformers.matching",
    "demo": "import accelerate, gguf, matplotlib, kvtier.cli.demo_model, kvtier.connectors.transformers.prefix_cache",
    "lmcache": _TORCH,
    "sglang": _TORCH + "import kvtier.connectors.sglang.plugin\n",
    "torch": _TORCH,
    "transformers": "import kvtier.connectors.transformers.prefix_cache, kvtier.cli.compact_run",
    "triton": _TORCH + "import triton, kvtier.kernels.nvfp4.triton\n",
}
NOT_FOR_USERS = frozenset({"docs", "lint", "test"})


class ExtraError(Exception):
    """What is wrong with an extra, for people."""


def check(wheel: Path, extra: str, folder: Path) -> None:
    """Raises ExtraError where `extra` cannot be installed, or not be used."""
    venv.create(folder, with_pip=False)
    python = folder / "bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "-qq"]
    constraints = CONSTRAINTS
    if extra in HEAVY:
        pin = re.search(r"^torch==.*$", CONSTRAINTS.read_text(), re.M)
        if pin is None:
            raise ExtraError(f"{CONSTRAINTS} has no line for torch")
        index = os.environ.get("TORCH_INDEX")
        _run(extra, [*pip, pin[0], *(("--index-url", index) if index else ())])
        if list(folder.glob("lib/python*/site-packages/triton-*")):  # a torch for GPUs has brought the one it needs
            constraints = folder / "constraints.txt"
            constraints.write_text(re.sub(r"^triton==.*$", "", CONSTRAINTS.read_text(), flags=re.M))
    _run(extra, [*pip, "-c", str(constraints), f"{wheel}[{extra}]"])
    _run(extra, [str(python), "-W", "error::DeprecationWarning:kvtier", "-c", {**LIGHT, **HEAVY}[extra]], cwd=folder)
    _run(extra, [str(folder / "bin/kvtier"), "--version"], cwd=folder)


def _run(extra: str, command: list[str], cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ExtraError(f"kvtier[{extra}]: {' '.join(command)}\n{done.stdout}{done.stderr}")


def check_all(wheel: Path, extras: Iterable[str], folder: Path) -> None:
    for extra in extras:
        with tempfile.TemporaryDirectory(prefix=f"{extra}-", dir=folder) as name:
            check(wheel, extra, Path(name) / "env")
        print(f"package-check: kvtier[{extra}] installs alone and works", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="those that need torch, if none is given")
    parser.add_argument("--light", action="store_true", help="those that download little")
    parser.add_argument("--wheel", type=Path, help="the wheel; else it is built from the tree")
    given = parser.parse_args()
    extras = given.extras or sorted(LIGHT if given.light else HEAVY)
    if unknown := sorted(set(extras) - {*LIGHT, *HEAVY}):
        raise ExtraError(f"unknown extras {unknown}; there are {sorted({*LIGHT, *HEAVY})}")
    with tempfile.TemporaryDirectory(prefix="kvtier-extras-") as name:
        folder = Path(name)
        wheel = given.wheel or _built(folder)
        check_all(wheel, extras, folder)


def _built(folder: Path) -> Path:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    _run("wheel", command)
    (wheel,) = folder.glob("*.whl")
    return wheel


if __name__ == "__main__":
    try:
        main()
    except ExtraError as problem:
        sys.exit(f"package-check: {problem}")
