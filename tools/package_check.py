"""Check what would be published: build the sdist, a wheel from it and a wheel from the tree, and compare them with
each other and with the tree; then install the wheel with its base dependencies only, and with each light extra, and use
it.

Run by `make package-check`, in the test environment.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINKED = ("connectors", "kernels", "storage_backends")
LEAVES = (
    "kvtier.codecs.lossless",
    "kvtier.compression.compaction.matching_reference",
    "kvtier.kv_events",
    "kvtier.telemetry",
)
"""Modules of the core that need an extra, and say which."""
NOT_SHIPPED = {".cpp", ".h", ".hpp", ".pyc", ".so"}

USE = """
import importlib, importlib.util, json, pkgutil, sys
import kvtier, kvtier.kernels._native
core = [m.name for m in pkgutil.walk_packages(kvtier.__path__, "kvtier.", onerror=lambda name: None)]
core = [name for name in core if name.split(".")[1] not in ("cli", "connectors", "kernels", "testing")]
from kvtier.errors import MissingExtraError
leaves, tensors = [], []
for name in core:
    try:
        importlib.import_module(name)
    except MissingExtraError:
        leaves.append(name)
    except ModuleNotFoundError as e:
        # Reached through connectors and commands only, which name the extra.
        if e.name != "torch" or not name.startswith("kvtier.compression.compaction."):
            raise
        tensors.append(name)
folders = ("connectors", "kernels", "storage_backends")
print(json.dumps({
    "modules": len(core) - len(leaves) - len(tensors),
    "leaves": leaves,
    "bare": [n for n in folders if importlib.util.find_spec(n)],
    "folders": [n for n in folders if importlib.util.find_spec("kvtier." + n)],
    "extras": sorted({"torch", "transformers", "redis", "triton"} & set(sys.modules)),
}))
"""

SIZE = "size mha --layers 36 --kv-heads 8 --head-dim 128 --tokens 32 --dtype bf16 --codec nvfp4 --global-scale identity"


class CheckError(Exception):
    """What is wrong with the packages, for people."""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def say(text: str) -> None:
    print(f"package-check: {text}", flush=True)


def build_sdist(into: Path) -> Path:
    """Build the sdist and unpack it; returns the unpacked tree."""
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", into, ROOT)
    (archive,) = into.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(into, filter="data")
    (tree,) = (p for p in into.iterdir() if p.is_dir())
    return tree


def build_wheel(tree: Path, into: Path) -> Path:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", into, tree)
    (wheel,) = into.glob("*.whl")
    return wheel


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def files_of_tree() -> set[str]:
    """What a wheel must hold, under its names there: every file of the package folders except what is compiled."""
    expected = set()
    for name, base in (("kvtier", ROOT / "kvtier"), *((f"kvtier/{n}", ROOT / n) for n in LINKED)):
        for path in base.rglob("*"):
            inner = path.relative_to(base)
            through_link = (base / inner.parts[0]).is_symlink()
            if path.is_file() and not through_link and path.suffix not in NOT_SHIPPED and "csrc" not in inner.parts:
                expected.add(f"{name}/{inner}")
    return expected


def compare(direct: set[str], from_sdist: set[str], tree: set[str]) -> None:
    if direct != from_sdist:
        raise CheckError(
            f"wheels differ: only in the direct one {sorted(direct - from_sdist)}, "
            f"only in the one from the sdist {sorted(from_sdist - direct)}"
        )
    package = {name for name in direct if name.startswith("kvtier/")}
    native = {name for name in package if name.endswith(".so")}
    if len(native) != 1 or not next(iter(native)).startswith("kvtier/kernels/_native"):
        raise CheckError(f"the wheel should hold one extension, kvtier/kernels/_native, and holds {sorted(native)}")
    if package - native != tree:
        raise CheckError(
            f"the wheel lacks {sorted(tree - package)} and has besides {sorted(package - native - tree)}: "
            "see tool.scikit-build in pyproject.toml, and .gitignore"
        )
    if outside := {name for name in direct if not name.startswith("kvtier")}:
        raise CheckError(f"the wheel installs outside its package: {sorted(outside)}")


def use(wheel: Path, folder: Path) -> int:
    """Install the wheel into an empty environment and use it from a folder that has nothing of ours. Returns how
    many modules of the core were imported."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv/bin/python"
    constraints = ROOT / "tools/constraints.txt"
    run(python, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "-c", constraints, wheel, cwd=folder)
    seen = json.loads(run(python, "-c", USE, cwd=folder))
    if seen["bare"]:
        raise CheckError(f"importable without kvtier.: {seen['bare']}")
    if seen["folders"] != list(LINKED):
        raise CheckError(f"importable below kvtier: {seen['folders']}, should be {list(LINKED)}")
    if seen["leaves"] != list(LEAVES):
        raise CheckError(f"modules that need an extra: {seen['leaves']}, should be {list(LEAVES)}")
    if seen["extras"]:
        raise CheckError(f"loaded without being asked for: {seen['extras']}")
    size = json.loads(run(folder / "venv/bin/kvtier", *SIZE.split(), "--json", cwd=folder))
    got = (size["hot_page_bytes"], size["cold_page_bytes"], round(size["ratio"], 4))
    if got != (4718592, 1327104, 3.5556):
        raise CheckError(f"kvtier {SIZE} printed {size}")
    return int(seen["modules"])


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kvtier-package-") as name:
        folder = Path(name)
        say("sdist")
        unpacked = build_sdist(folder / "sdist")
        say("wheel from the sdist")
        from_sdist = build_wheel(unpacked, folder / "from_sdist")
        say("wheel from the tree")
        direct = build_wheel(ROOT, folder / "direct")
        compare(files_of(direct), files_of(from_sdist), files_of_tree())
        say(f"{len(files_of(direct))} files, the same in both wheels and all that the tree has")
        say(f"installed alone: {use(from_sdist, folder)} modules import, bare names stay free, kvtier size is right")
        print(run(sys.executable, ROOT / "tools/package_extras.py", "--light", "--wheel", from_sdist), end="")


if __name__ == "__main__":
    try:
        main()
    except CheckError as problem:
        sys.exit(f"package-check: {problem}")
