"""What stands in the pages of the documentation: blocks of code, commands, links, headings. Markdown as these pages use
it, and no more."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
"""What a user reads. Commands there are run, or listed with the reason why not."""
ALL = tuple(
    sorted({*GUIDE, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")})
)  # fmt: skip
"""Every page whose links and options must be right."""

PROGRAMS = (
    "bash", "cd", "curl", "docker", "helm", "install", "kubectl", "kvtier", "lmcache", "make", "openssl", "pip",
    "python", "python3", "redis-cli", "sglang", "systemctl", "vllm",
)  # fmt: skip
_SHELLS = ("sh", "bash")
_BESIDE = ("", "text")
"""Languages of blocks that hold commands among other things."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code. language: empty for an indented one. line: of its first line, counted from 1."""

    page: Path
    language: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command as it would be typed, without a comment behind it. line: of its block."""

    page: Path
    line: int
    text: str

    @property
    def where(self) -> str:
        return f"{name_of(self.page)}:{self.line}: {self.text}"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    return tuple(_blocks(page))


def _blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        fence = re.fullmatch(r"\s*```(\w*).*", lines[at])
        if fence:
            end = next(n for n in range(at + 1, len(lines)) if lines[n].strip() == "```")
            yield Block(page, fence[1] or "text", at + 2, "\n".join(lines[at + 1 : end]))
            at = end + 1
        elif re.match(r" {4}\S", lines[at]) and (at == 0 or not lines[at - 1].strip()):
            end = at
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            yield Block(page, "", at + 1, "\n".join(line[4:] for line in lines[at:end]).rstrip())
            at = end
        else:
            at += 1


def commands(page: Path) -> list[Command]:
    """Commands in shells, and lines of other blocks that begin with a program. Those of consoles are in `steps`."""
    found = []
    for block in blocks(page):
        if block.language in (*_SHELLS, *_BESIDE):
            for text in _logical_lines(block.text):
                text = without_comment(text).strip()
                if text and (block.language in _SHELLS or is_command(text)):
                    found.append(Command(page, block.line, text))
    return found


def _logical_lines(text: str) -> Iterator[str]:
    """Lines, joined where a backslash or an open quote says that they go on."""
    waiting = ""
    for line in text.splitlines():
        waiting += ("\n" if waiting else "") + line
        if line.endswith("\\") or without_comment(waiting).count("'") % 2:
            continue
        yield waiting
        waiting = ""
    yield waiting


def without_comment(text: str) -> str:
    return "\n".join(re.sub(r"\s+#\s.*$|^#\s.*$", "", line) for line in text.split("\n"))


def is_command(text: str) -> bool:
    words = text.split()
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    return bool(words) and (
        words[0] in PROGRAMS or bool(re.match(r"tools/|\$\(tools/|\"?\$env/bin/|env=\$\(", words[0]))
    )


def words_of(command: str) -> list[str]:
    """Words of a command, up to a pipe or what follows it."""
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    ends = [n for n, word in enumerate(words) if word in ("|", "&&", ";", "&", ">", "2>", "2>>")]
    return words[: ends[0]] if ends else words


@dataclass(frozen=True, slots=True)
class Step:
    """A command of a console, and the lines below it; ``...`` stands for anything, alone in a line for any lines."""

    page: Path
    command: str
    printed: tuple[str, ...]


def steps(page: Path) -> list[Step]:
    found = []
    for block in blocks(page):
        if block.language == "console":
            for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
                command, _, printed = part.partition("\n")
                found.append(Step(page, command, tuple(printed.splitlines())))
    return found


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for block in blocks(page):
        for n in range(block.line - 1, block.line - 1 + block.text.count("\n") + 1):
            lines[n] = ""
    return "\n".join(lines)


def links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "`code`", prose(page))
    return re.findall(r"\]\(([^()\s]+)\)", text)


@cache
def anchors(page: Path) -> frozenset[str]:
    """What GitHub calls a page's headings."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#+ +(.+?)\s*$", prose(page), re.M):
        name = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        count = found.get(name, 0)
        found[name] = count + 1
        names.add(f"{name}-{count}" if count else name)
    return frozenset(names)


def inline_commands(page: Path) -> list[str]:
    """``kvtier ...`` in running text."""
    return re.findall(r"`(kvtier [a-z][a-z-]*(?: [^`\n]*)?)`", prose(page))
