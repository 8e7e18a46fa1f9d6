"""docs/operate.md: its commands run as they stand and print what stands below them; its tables name every alert, and
options and series that there are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from kvtier.config import Config
from kvtier.replay.recorded import LookupRecorder
from kvtier.testing.redis_servers import free_port

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operate.md"
TEXT = PAGE.read_text()


@dataclass(frozen=True, slots=True)
class Step:
    """A command, and the lines below it; ``...`` stands for anything, alone in a line for any lines."""

    command: str
    printed: tuple[str, ...]


def steps() -> list[Step]:
    found: list[Step] = []
    for block in re.findall(r"```console\n(.*?)```", TEXT, re.S):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, printed = part.partition("\n")
            found.append(Step(command, tuple(printed.splitlines())))
    return found


def differs(printed: list[str], expected: tuple[str, ...]) -> str:
    """The first expected line that does not come, in order; empty where all do."""
    left = iter(printed)
    for line in expected:
        pattern = ".*".join(re.escape(part) for part in line.split("..."))
        if line != "..." and not any(re.fullmatch(pattern, actual.rstrip()) for actual in left):
            return line
    return ""


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl: apt-get install curl")
@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="no redis-cli: apt-get install redis-tools")
def test_commands_print_what_the_page_says(tmp_path: Path) -> None:
    with LookupRecorder(tmp_path / "lookups.jsonl", page_tokens=64) as engine:
        for request in range(4):
            engine.record([bytes([n]) * 32 for n in range(8 + request)], input_tokens=64 * (8 + request))
    port, script = free_port(), ["trap 'kill -9 $(jobs -p) 2> /dev/null; wait 2> /dev/null' EXIT"]
    for n, step in enumerate(steps()):
        script += [f"echo '@@ {n}'", step.command.replace("9404", str(port))]
        script += [f"sed -i 's/9404/{port}/' *.yaml 2> /dev/null"]  # the port of the presets may be taken here
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVTIER_")}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "200"}
    done = subprocess.run(
        ["bash"], input="\n".join(script), cwd=tmp_path, env=environment, text=True, check=False, timeout=240,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    outputs: dict[int, list[str]] = {}
    at = -1
    for line in done.stdout.splitlines():
        if line.startswith("@@ "):
            at = int(line[3:])
            outputs[at] = []
        else:
            outputs[at].append(line)
    for n, step in enumerate(steps()):
        missing = differs(outputs.get(n, []), step.printed)
        assert not missing, f"$ {step.command}\nlacks {missing!r}:\n" + "\n".join(outputs.get(n, ["(not run)"]))


def test_what_differs_is_found() -> None:
    assert not differs(["a 1", "b", "c"], ("a ...", "...", "c"))
    assert differs(["a 1", "b"], ("b", "a ...")) == "a ..."
    assert differs(["a 1"], ("a",)) == "a"
    assert len(steps()) > 15


def table(heading: str) -> list[list[str]]:
    text = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_every_alert_is_explained() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "grafana" / "kvtier-alerts.yaml").read_text())["groups"][0]["rules"]
    rows = table("What to watch")
    assert [row[0].strip("`") for row in rows] == [rule["alert"] for rule in rules]
    assert all(len(row[1]) > 20 and len(row[2]) > 20 for row in rows)


def option_names(model: Any = Config) -> set[str]:
    names = set()
    for name, field in model.model_fields.items():
        names.add(name)
        stack = [field.annotation]
        while stack:
            annotation = stack.pop()
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                names |= option_names(annotation)
            stack += getattr(annotation, "__args__", ())
    return names


def test_tuned_options_exist() -> None:
    options, named = option_names(), set()
    for row in table("Tuning"):
        for code in re.findall(r"`([^`]+)`", row[1]):
            name = re.split(r"[:=]", code)[0]
            if not code.startswith("--"):
                assert name in options, code
                named.add(name)
    assert len(named) > 20


def test_series_that_are_named_exist() -> None:
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    for name in set(re.findall(r"\bkvtier_(?!alerts)\w+", TEXT)):
        assert f"`{name}`" in metrics, name


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        path, _, anchor = target.partition("#")
        text = (PAGE.parent / path).resolve() if path else PAGE
        assert text.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", text.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}, target
