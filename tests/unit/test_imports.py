"""Imports point one way: connectors -> kvtier -> kernels. Held by reading the source, and once by running it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ENGINES = {"sglang", "sgl_kernel", "lmcache", "vllm", "transformers"}
HEAVY = {"torch", "triton", "redis", "safetensors", "accelerate", "gguf", "matplotlib"}
TORCH_LEAVES = "kvtier.compression.compaction"
"""Modules of this package work on torch tensors; the rest of the core reaches them lazily, if at all."""
PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module. `lazy`: inside a function. `typing_only`: under ``if TYPE_CHECKING``."""

    module: str
    line: int
    lazy: bool
    typing_only: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Source:
    """A product file: `module` is its name below kvtier, `part` the area whose rules it follows."""

    path: Path
    module: str

    @property
    def part(self) -> str:
        names = self.module.split(".")
        return names[1] if len(names) > 1 else ""

    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(), str(self.path))


def product_sources() -> list[Source]:
    found = []
    for folder, name in (
        ("kvtier", "kvtier"),
        ("kernels", "kvtier.kernels"),
        ("connectors", "kvtier.connectors"),
        ("storage_backends", "kvtier.storage_backends"),
    ):
        base = ROOT / folder
        for path in sorted(base.rglob("*.py")):
            inner = path.relative_to(base)
            if (base / inner.parts[0]).is_symlink():
                continue  # the same files, met under their own folder
            parts = inner.with_suffix("").parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
            found.append(Source(path, ".".join((name, *parts))))
    return found


def imports_of(tree: ast.AST, module: str, is_package: bool) -> Iterator[Import]:
    """Every import of a file; ``from a import b`` counts as a.b, since b may be a module."""

    def visit(node: ast.AST, lazy: bool, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, lazy, typing_only)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    up = module.split(".")
                    up = up[: len(up) - child.level + is_package]
                    base = ".".join([*up, base] if base else up)
                for alias in child.names:
                    yield Import(f"{base}.{alias.name}", child.lineno, lazy, typing_only)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for part in child.body:
                    yield from visit(ast.Module([part], []), lazy, True)
                for part in child.orelse:
                    yield from visit(ast.Module([part], []), lazy, typing_only)
            else:
                function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from visit(child, lazy or function, typing_only)

    yield from visit(tree, False, False)


def under(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def import_violation(source: Source, imported: Import) -> str | None:
    """Why this file may not have this import; None where it may."""
    own = under(imported.module, "kvtier")
    if imported.top in {"kernels", "connectors", "storage_backends"}:
        return f"bare {imported.top!r}: say kvtier.{imported.top}"
    if imported.top in PICKLES:
        return "reads or writes code as data"
    if source.part in ("cli", "faults"):  # at the top: tools that put everything else to use
        return None

    if source.part == "kernels":
        if own and not under(imported.module, "kvtier.kernels"):
            return "kernels know nothing of ours"
        if not own and imported.top not in {"numpy", "torch", "triton"} and imported.top not in sys.stdlib_module_names:
            return "kernels use numpy, torch, triton and the standard library"
    elif source.part == "storage_backends":
        allowed = ("abc", "spec", "keys", "errors", "kernels", "storage_backends")
        if own and not under(imported.module, *(f"kvtier.{name}" for name in allowed)):
            return f"storage backends use of ours: {', '.join(allowed)}"
        if imported.top in ENGINES | HEAVY - {"redis"}:
            return "storage backends know no engine and no accelerator"
        if imported.top == "redis" and not under(source.module, "kvtier.storage_backends.redis"):
            return "redis belongs to storage_backends/redis"
    elif source.part == "connectors":
        if under(imported.module, "kvtier.cli", "kvtier.faults"):
            return "the command line is above the connectors"
        engine = ".".join(source.module.split(".")[:3])
        if under(imported.module, "kvtier.connectors") and not under(imported.module, engine):
            return "one connector does not use another"
        if imported.top in ENGINES - {engine.rpartition(".")[2]} and imported.top != "transformers":
            return "another connector's engine"
    elif source.part == "abc":
        contracts = ("kvtier.abc", "kvtier.spec", "kvtier.keys", "kvtier.errors")
        if own and not under(imported.module, *contracts) and not imported.typing_only:
            return "contracts import no implementation"
        if not own and imported.top != "numpy" and imported.top not in sys.stdlib_module_names:
            return "contracts use numpy and the standard library"
    else:
        if imported.typing_only:
            return None
        if under(imported.module, "kvtier.cli", "kvtier.faults", "kvtier.connectors"):
            return "the core knows nothing above it"
        if imported.top in ENGINES | {"redis", "triton"}:
            return "the core imports no engine, no redis, no triton"
        if source.part == "testing":
            return None
        leaf = under(source.module, TORCH_LEAVES)
        if imported.top in HEAVY and not imported.lazy and not (leaf and imported.top == "torch"):
            return "an extra, at module level"
        if under(imported.module, TORCH_LEAVES) and not imported.lazy and not leaf:
            return "needs torch: import it lazily"
        if under(imported.module, "kvtier.storage_backends") and not imported.lazy:
            return "tiers are reached by name, lazily"
        if under(imported.module, "kvtier.testing"):
            return "the test suites are not for the product"
    return None


def statement_violations(source: Source, tree: ast.AST) -> Iterator[str]:
    """Statements that product code does without."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and source.part != "testing":
            yield f"{source.path}:{node.lineno}: assert vanishes under -O; raise an error that says what to do"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hash":
            yield f"{source.path}:{node.lineno}: hash() differs from process to process"
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield f"{source.path}:{node.value.lineno}: reads or writes code as data"


SOURCES = product_sources()


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.module)
def test_source_keeps_the_rules(source: Source) -> None:
    tree = source.tree()
    violations = list(statement_violations(source, tree))
    for imported in imports_of(tree, source.module, source.path.name == "__init__.py"):
        reason = import_violation(source, imported)
        if reason:
            violations.append(f"{source.path}:{imported.line}: {imported.module}: {reason}")
    if violations:
        pytest.fail("\n".join(violations))


def test_every_folder_is_read() -> None:
    assert {"abc", "cli", "codecs", "kernels", "connectors", "storage_backends", "spec"} <= {s.part for s in SOURCES}
    assert len({s.path.resolve() for s in SOURCES}) == len(SOURCES)


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("kvtier.kernels.nvfp4.reference", "from kvtier.spec import PageSpec"),
        ("kvtier.kernels.nvfp4.reference", "from ...spec import PageSpec"),
        ("kvtier.kernels.nvfp4.reference", "import pydantic"),
        ("kvtier.storage_backends.nvme.tier", "from kvtier.store import TieredStore"),
        ("kvtier.storage_backends.nvme.tier", "from kvtier import store"),
        ("kvtier.storage_backends.nvme.tier", "import redis"),
        ("kvtier.connectors.sglang.linker", "from kvtier.connectors.transformers import cache"),
        ("kvtier.connectors.sglang.linker", "import lmcache"),
        ("kvtier.connectors.sglang.linker", "import kvtier.cli"),
        ("kvtier.abc.tier", "from kvtier.codecs import nvfp4"),
        ("kvtier.abc.tier", "import torch"),
        ("kvtier.store", "from kvtier.connectors import sglang"),
        ("kvtier.store", "def f():\n    import sglang"),
        ("kvtier.store", "import torch"),
        ("kvtier.store", "class A:\n    import torch"),
        ("kvtier.store", "from kvtier.compression.compaction import prefix"),
        ("kvtier.compression.compaction.artefact", "import safetensors"),
        ("kvtier.store", "try:\n    import torch\nexcept ImportError:\n    pass"),
        ("kvtier.store", "from kvtier.storage_backends.nvme import tier"),
        ("kvtier.store", "import kernels"),
        ("kvtier.store", "def f():\n    import pickle"),
        ("kvtier.store", "def f(x):\n    assert x"),
        ("kvtier.store", "def f(x):\n    return hash(x)"),
        ("kvtier.store", "import numpy as np\nnp.load('x', allow_pickle=True)"),
    ],
)
def test_rules_refuse(module: str, code: str) -> None:
    assert violations_in(module, code)


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("kvtier.kernels.nvfp4.triton", "import triton\nfrom kvtier.kernels.nvfp4 import reference"),
        ("kvtier.storage_backends.redis.tier", "import redis\nfrom kvtier.abc.tier import Tier"),
        ("kvtier.connectors.sglang.linker", "import sglang, torch\nfrom kvtier.store import TieredStore"),
        ("kvtier.store", "def f():\n    import torch"),
        ("kvtier.compression.compaction.prefix", "import torch"),
        ("kvtier.store", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("kvtier.store", "def f():\n    from kvtier.storage_backends.nvme import tier"),
        ("kvtier.cli.demo", "import transformers, kvtier.connectors.transformers"),
        ("kvtier.testing.tier", "def f(x):\n    assert x"),
    ],
)
def test_rules_allow(module: str, code: str) -> None:
    assert not violations_in(module, code)


def violations_in(module: str, code: str) -> list[str]:
    source = Source(Path("example.py"), module)
    tree = ast.parse(code)
    reasons = [import_violation(source, imported) for imported in imports_of(tree, module, False)]
    return [reason for reason in reasons if reason] + list(statement_violations(source, tree))


def test_core_runs_without_extras() -> None:
    """Importing every module of the core loads none of the extras, in a process of its own."""
    above = {"cli", "connectors", "kernels", "storage_backends", "testing"}
    core = [s.module for s in SOURCES if s.part not in above and not s.module.startswith(f"{TORCH_LEAVES}.")]
    code = (
        "import importlib, sys\n"
        f"for name in {core!r}: importlib.import_module(name)\n"
        f"print(sorted({(ENGINES | HEAVY)!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
