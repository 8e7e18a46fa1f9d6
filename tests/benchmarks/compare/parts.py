"""What is measured: parts, each a command in an environment of its own, whose result is kept in a file named after
everything that it depends on."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
_SOURCES = ("kvtier", "kernels", "connectors", "storage_backends", "tests/benchmarks/compare")
_SUFFIXES = (".py", ".cpp", ".h")
_NOT_MEASURED = ("__main__.py", "groups.py", "page.py", "plots.py")
"""Of the comparison itself: what only shows results."""

_PACKAGES = ("torch", "numpy", "transformers", "lmcache", "torchao", "kvpress", "sglang", "redis")
_OWN = "tests.benchmarks.compare"


class PartError(RuntimeError):
    """A part's command failed; the message ends with what it said."""


@dataclass(frozen=True, slots=True)
class Part:
    """environment: a name of tools/env-engine.sh; empty: the Python that runs this. command: of its Python, with
    ``{kv}``, ``{folder}`` and ``{kvpress}``, the Python of the environment with kvpress, to be filled in. expected_s:
    on two quiet cores, of which the time that is left is the sum."""

    name: str
    environment: str
    command: tuple[str, ...]
    expected_s: float

    def key(self, kv: str, sources: str) -> str:
        """Of the name of its file."""
        text = json.dumps([self.name, self.environment, self.command, kv, sources])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _bench(name: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", "kvtier.cli", "bench", name, "--json", *arguments)


FULL = (
    Part("codecs", "compare", ("-m", f"{_OWN}.codecs", "{kv}", "7"), 150),
    Part("lmcache", "compare", _bench("lmcache", "--kv", "{kv}", "--rounds", "7", "--directory", "{folder}"), 330),
    Part("redis", "compare", _bench("server"), 60),
    Part("hicache", "sglang", ("-m", f"{_OWN}.hicache", "{kv}", "7", "{folder}"), 150),
    Part("kvzip", "lmcache", ("-m", f"{_OWN}.kvzip", "1024", "3", "{kvpress}"), 90),
    Part("ttft", "sglang", _bench("sglang", "--model", "smollm2", "--directory", "{folder}"), 480),
)
KV_TOKENS = 4096

SMOKE = (
    Part("codecs", "", ("-m", f"{_OWN}.codecs", "{kv}", "1"), 5),
    Part("redis", "", ("-m", f"{_OWN}.smoke", "redis"), 10),
)
"""Nothing but the environment of the tests, nothing real, seconds."""

SMOKE_TOKENS = 256


def small(part: Part) -> Part:
    """The same in its own environment, as short as it goes: figures that say nothing, to try whether all works."""
    command = {
        "codecs": ("-m", f"{_OWN}.codecs", "{kv}", "1"),
        "lmcache": _bench("lmcache", "--kv", "{kv}", "--rounds", "1", "--directory", "{folder}"),
        "redis": ("-m", f"{_OWN}.smoke", "redis"),
        "hicache": ("-m", f"{_OWN}.hicache", "{kv}", "1", "{folder}"),
        "kvzip": ("-m", f"{_OWN}.kvzip", "256", "1", "{kvpress}"),
        "ttft": _bench("sglang", "--model", "tiny", "--cold", "6", "--hits", "1", "--directory", "{folder}"),
    }
    return replace(part, command=command[part.name])


def sources() -> str:
    """Digest of the code that is measured."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        for path in sorted(p for p in (ROOT / name).rglob("*") if p.suffix in _SUFFIXES):
            if name == _SOURCES[-1] and path.name in _NOT_MEASURED:
                continue
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def python_of(environment: str) -> str:
    """The Python of an environment, which is made where it is not there. Raises PartError where it cannot be."""
    if not environment:
        return sys.executable
    done = subprocess.run(
        [ROOT / "tools" / "env-engine.sh", environment], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise PartError(f"tools/env-engine.sh {environment} ended with status {done.returncode}")
    return f"{done.stdout.splitlines()[-1]}/bin/python"


def execute(part: Part, python: str, kv: Path, folder: Path) -> list[dict[str, Any]]:
    """Run it; its rows. Its progress and warnings go to standard error."""
    given = {"{kv}": str(kv), "{folder}": str(folder)}
    if "{kvpress}" in part.command:
        given["{kvpress}"] = python_of("compare")
    command = [python, *(given.get(argument, argument) for argument in part.command)]
    return run_json(command, part.name)


def run_json(command: Sequence[str], name: str) -> list[dict[str, Any]]:
    """The JSON that a command prints as its last line. Raises PartError where it fails or prints something else."""
    out = run_command(command, name)
    try:
        rows: list[dict[str, Any]] = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        raise PartError(f"{name}: {' '.join(command)} printed no rows") from None
    return rows


def run_command(command: Sequence[str], name: str) -> str:
    """What a command prints. Raises PartError where it fails."""
    environment = {
        **os.environ,
        "OMP_WAIT_POLICY": "passive",  # waiting threads would burn the cores that are measured
        "PYTHONWARNINGS": "ignore",
        "SGLANG_USE_CPU_ENGINE": "1",
    }
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode:
        status = f"status {done.returncode}"
        raise PartError(f"{name}: {' '.join(command)} ended with {status}; the lines above say why")
    return done.stdout


def machine() -> dict[str, Any]:
    """What figures depend on."""
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in cpu.splitlines() if line.startswith("model name")]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(memory_bytes / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def load() -> float:
    """Processes that wanted to run in the last minute, this one's own included."""
    return round(os.getloadavg()[0], 2)


def versions(python: str) -> dict[str, str]:
    """Of the packages of an environment, and of redis-server."""
    script = (
        "import json, sys, importlib.metadata as m\n"
        "found = {d.metadata['Name'].lower(): d.version for d in m.distributions() if d.metadata['Name']}\n"
        "print(json.dumps({n: found[n] for n in sys.argv[1:] if n in found}))"
    )
    if python == sys.executable:
        found = {d.metadata["Name"].lower(): d.version for d in metadata.distributions() if d.metadata["Name"]}
        known = {name: found[name] for name in _PACKAGES if name in found}
    else:
        done = subprocess.run([python, "-c", script, *_PACKAGES], capture_output=True, text=True, check=True)
        known = json.loads(done.stdout)
    server = shutil.which("redis-server")
    if server is not None:
        told = subprocess.run([server, "--version"], capture_output=True, text=True, check=False).stdout
        known["redis-server"] = next((word[2:] for word in told.split() if word.startswith("v=")), "")
    return known


def measure(part: Part, kv: Path, kv_name: str, folder: Path) -> dict[str, Any]:
    """Everything that the page says of a part. kv_name: of the values in the file `kv`."""
    python = python_of(part.environment)
    load_before, began, start = load(), time.strftime("%Y-%m-%d %H:%M"), time.monotonic()
    rows = execute(part, python, kv, folder)
    return {
        "part": part.name,
        "command": " ".join(part.command),
        "environment": part.environment,
        "kv": kv_name,
        "began": began,
        "seconds": round(time.monotonic() - start, 1),
        "load_before": load_before,
        "machine": machine(),
        "versions": versions(python),
        "rows": rows,
    }
