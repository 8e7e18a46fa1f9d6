"""Every command of the guide runs as it stands there, or is listed with the reason why not; what can be said of those
without running them (options, targets, extras) is right."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from kvtier.cli.app import app
from kvtier.replay.recorded import LookupRecorder
from kvtier.testing.redis_servers import kept_port
from tests.docs.commands import COMMANDS, Elsewhere, Run, Serve
from tests.docs.pages import (
    ALL,
    GUIDE,
    ROOT,
    Command,
    commands,
    inline_commands,
    is_command,
    name_of,
    steps,
    without_comment,
    words_of,
)
from tests.docs.snippets import write_files

PATIENCE_S = 240.0
OF_GUIDE = [command for page in GUIDE for command in commands(page)]


def entries(command: Command) -> list[Run | Serve | Elsewhere]:
    text = command.text.replace("\\\n", " ")
    return [entry for entry in COMMANDS if re.fullmatch(entry.pattern, text, re.S)]


def with_entry(kind: type) -> list[Any]:
    found = [(command, entry) for command in OF_GUIDE for entry in entries(command)[:1] if isinstance(entry, kind)]
    return [pytest.param(*both, id=f"{both[0].page.stem}-{n}") for n, both in enumerate(found)]


def environment() -> dict[str, str]:
    """As of a user: no options of ours, a wide terminal, this environment's programs first."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVTIER_", "PYTEST_"))}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return kept | {"PATH": path, "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1", "NO_COLOR": "1"}


def adapted(text: str, instead: tuple[tuple[str, str], ...], here: Path) -> str:
    for old, new in instead:
        text = text.replace(old, new)
    return text.replace("HERE", str(here))


# ---- nothing is left out


def test_every_command_is_listed_once() -> None:
    for command in OF_GUIDE:
        found = entries(command)
        assert found, f"{command.where}\nis not in tests/docs/commands.py: run it, or say why not"
        assert len(found) == 1, f"{command.where}\nis listed twice: {[entry.pattern for entry in found]}"


def test_every_entry_is_of_a_command() -> None:
    used = [entry for command in OF_GUIDE for entry in entries(command)]
    for entry in COMMANDS:
        assert entry in used, f"{entry.pattern!r} is in no page any more"


def test_what_is_said_to_be_elsewhere_is_there() -> None:
    for entry in COMMANDS:
        if isinstance(entry, Elsewhere):
            assert entry.reason and (ROOT / entry.test).exists(), entry
            assert entry.evidence in (ROOT / entry.test).read_text(), entry


def test_commands_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "text\n\n    kvtier size mha \\\n        --layers 3   # said\n\n    tiers: []\n\n"
        "```text\nPOST /generate\nA=1 kvtier top x\n```\n```sh\ncurl -d '{\n \"a\": 1}'\n```\n"
        "```console\n$ kvtier serve &\nready\n$ ls\n```\n"
    )
    found = [command.text for command in commands(page)]
    assert found == ["kvtier size mha \\\n    --layers 3", "A=1 kvtier top x", "curl -d '{\n \"a\": 1}'"]
    assert [(step.command, step.printed) for step in steps(page)] == [("kvtier serve &", ("ready",)), ("ls", ())]
    assert words_of("kvtier size mha \\\n  --layers 3 | tail") == ["kvtier", "size", "mha", "--layers", "3"]
    assert without_comment("kvtier top  # until") == "kvtier top" and not is_command("kvtiers")
    assert len(OF_GUIDE) > 40


# ---- those that are run


@pytest.mark.parametrize(("command", "entry"), with_entry(Run))
def test_it_runs(command: Command, entry: Run, tmp_path: Path) -> None:
    write_files(command.page, tmp_path)
    request = {"timestamp": 0, "input_length": 1000, "output_length": 10, "hash_ids": [1, 2]}
    (tmp_path / "trace.jsonl").write_text(json.dumps(request) + "\n")
    done = subprocess.run(
        ["bash", "-c", adapted(command.text, entry.instead, tmp_path)],
        cwd=tmp_path, env=environment(), text=True, check=False, timeout=PATIENCE_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, f"{command.where}\n{done.stdout}"
    assert re.search(entry.says, done.stdout), f"{command.where}\ndoes not say {entry.says!r}:\n{done.stdout}"


@pytest.mark.parametrize(("command", "entry"), with_entry(Serve))
def test_it_serves(command: Command, entry: Serve, tmp_path: Path) -> None:
    arguments = words_of(adapted(command.text, entry.instead, tmp_path))
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(arguments, cwd=tmp_path, env=environment(), stdout=log, stderr=log)
    try:
        assert ask(tmp_path / "cache.sock", b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\n1\r\n", server) == b"+OK\r\n", (
            tmp_path / "log"
        ).read_text()
        assert ask(tmp_path / "cache.sock", b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n", server) == b"$1\r\n1\r\n"
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()
    finally:
        server.kill()
        server.wait(PATIENCE_S)


def ask(path: Path, command: bytes, server: subprocess.Popen[bytes]) -> bytes:
    """What the server answers, once it listens; nothing where it ended before."""
    give_up = time.monotonic() + PATIENCE_S
    while server.poll() is None and time.monotonic() < give_up:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE_S)
            try:
                connection.connect(str(path))
            except OSError:  # not there yet
                time.sleep(0.05)
                continue
            connection.sendall(command)
            answer = b""
            while not answer.endswith(b"\r\n") or (answer.startswith(b"$") and answer.count(b"\r\n") < 2):
                received = connection.recv(4096)
                if not received:
                    break
                answer += received
            return answer
    return b""


def differs(printed: list[str], expected: tuple[str, ...]) -> str:
    """The first expected line that does not come, in order; empty where all do."""
    left = iter(printed)
    for line in expected:
        pattern = ".*".join(re.escape(part) for part in line.split("..."))
        if line != "..." and not any(re.fullmatch(pattern, actual.rstrip()) for actual in left):
            return line
    return ""


def test_what_differs_is_found() -> None:
    assert not differs(["a 1", "b", "c"], ("a ...", "...", "c"))
    assert differs(["a 1", "b"], ("b", "a ...")) == "a ..."
    assert differs(["a 1"], ("a",)) == "a"


CONSOLES = [page for page in GUIDE if steps(page)]


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl: apt-get install curl")
@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="no redis-cli: apt-get install redis-tools")
@pytest.mark.parametrize("page", CONSOLES, ids=lambda page: page.stem)
def test_consoles_print_what_the_page_says(page: Path, tmp_path: Path) -> None:
    """All consoles of a page are one session. The port of the pages may be taken here, so another one is used."""
    with LookupRecorder(tmp_path / "lookups.jsonl", page_tokens=64) as engine:
        for request in range(4):
            engine.record([bytes([n]) * 32 for n in range(8 + request)], input_tokens=64 * (8 + request))
    port, script = kept_port(), ["trap 'kill -9 $(jobs -p) 2> /dev/null; wait 2> /dev/null' EXIT"]
    for n, step in enumerate(steps(page)):
        script += [f"echo '@@ {n}'", step.command.replace("9404", str(port))]
        script += [f"sed -i 's/9404/{port}/' *.yaml 2> /dev/null"]
    done = subprocess.run(
        ["bash"], input="\n".join(script), cwd=tmp_path, env=environment(), text=True, check=False, timeout=240,
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
    for n, step in enumerate(steps(page)):
        missing = differs(outputs.get(n, []), step.printed)
        assert not missing, f"$ {step.command}\nlacks {missing!r}:\n" + "\n".join(outputs.get(n, ["(not run)"]))


def test_consoles_are_found() -> None:
    assert len(steps(ROOT / "docs" / "operate.md")) > 15 and len(CONSOLES) > 1


# ---- what can be said of a command without running it


def mistake(command: str) -> str:
    """What kvtier would refuse in its own command: a name or an option that it does not have."""
    words = words_of(command)
    words = words[: words.index("...")] if "..." in words else words
    words = words[[word.rpartition("/")[2] for word in words].index("kvtier") + 1 :]
    group: Any = typer.main.get_command(app)
    while hasattr(group, "commands"):
        if words and words[0] in group.commands:
            group = group.commands[words.pop(0)]
        elif words and not words[0].startswith("-") and "run" in group.commands:
            group = group.commands["run"]  # the one that need not be named
        else:
            break
    if not words:
        return ""
    if hasattr(group, "commands") and re.match(r"\w", words[0]):
        return words[0]
    known = {"--help", "-h", "--version"} | {o for p in group.params for o in (*p.opts, *p.secondary_opts)}
    return next((w for w in words if re.match(r"--\w", w) and w.partition("=")[0] not in known), "")


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_commands_and_options_of_kvtier_exist(page: Path) -> None:
    found = [c.text for c in commands(page) if re.match(r"(\S*/)?kvtier ", c.text)]
    found += [step.command for step in steps(page) if step.command.startswith("kvtier ")]
    for command in [*found, *inline_commands(page)]:
        assert not mistake(command), f"{name_of(page)}: `{command}`: there is no {mistake(command)!r}"


def test_mistakes_are_found() -> None:
    assert not mistake("kvtier size mha --layers 3") and not mistake("kvtier compact inspect FILE")
    assert mistake("kvtier sise mha") == "sise" and mistake("build/bin/kvtier size mha --layer 3") == "--layer"


def test_targets_exist() -> None:
    there = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in ALL:
        found = [word for c in commands(page) if c.text.startswith("make ") for word in words_of(c.text)[1:]]
        found += [w for text in re.findall(r"`make ([a-z -]+)`", page.read_text()) for w in text.split()]
        for target in found:
            assert "=" in target or target in there, f"{name_of(page)}: make {target}"


def test_extras_exist() -> None:
    optional = (
        (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    )
    there = set(re.findall(r"^(\w+) = \[", optional, re.M))
    for page in ALL:
        for extras in re.findall(r"kvtier\[([\w, ]+)\]", page.read_text()):
            assert {extra.strip() for extra in extras.split(",")} <= there, f"{name_of(page)}: {extras}"
