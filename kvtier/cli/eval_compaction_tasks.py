"""Contexts with questions whose answers can be checked: generated lookups, lists of tools, and what real agent sessions
hold. A question comes with wrong answers of its own kind, out of the same context where there are some."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from kvtier.cli.sessions import load_turns

TASKS = ("lookup", "tools", "session")
RUNS_MAX = 8

_NAMES = (
    "Maria", "Tomas", "Ines", "Pavel", "Aiko", "Bruno", "Chidi", "Dana", "Erik", "Farah", "Goran", "Hana", "Igor",
    "Jonas", "Kemal", "Lucia", "Marek", "Nadia", "Oscar", "Petra", "Quinn", "Rosa", "Samir", "Tania", "Ulf", "Vera",
    "Wanda", "Xenia", "Yusuf", "Zoe",
)  # fmt: skip
_CITIES = ("Lisbon", "Oslo", "Quito", "Dakar", "Turin", "Perth", "Osaka", "Riga", "Cork", "Lima", "Graz", "Brno")
_COLOURS = ("amber", "blue", "coral", "green", "ivory", "olive", "pink", "silver", "teal", "violet")
_ANIMALS = ("badger", "crane", "falcon", "gecko", "heron", "lynx", "otter", "panda", "raven", "tiger")
_COMMANDS = {
    "grep": "searches files for a pattern",
    "sed": "replaces text in a file",
    "cat": "writes a new file",
    "nl": "shows the lines of a file with numbers",
    "ls": "lists the files of a folder",
    "git": "shows what was changed",
    "pip": "installs a package",
    "pylint": "checks the style of a module",
    "python": "runs a script",
    "echo": "prints a message",
}
"""Commands that the agents of the sessions use, and what for."""


@dataclass(frozen=True, slots=True)
class Question:
    """text: asks. stem: how the answer begins. answer, wrong: how it may go on, each with its leading blank. call: the
    answer names a tool, inside quotes."""

    text: str
    stem: str
    answer: str
    wrong: tuple[str, ...]
    call: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """One context. tools: the names that a call may have, where it lists tools."""

    name: str
    run: int
    context: str
    questions: tuple[Question, ...]
    tools: tuple[str, ...] = ()


def make(name: str, run: int, questions: int) -> Task:
    """Task `name` of one run: equal for equal arguments, different for each run. `questions` at most."""
    return {"lookup": _lookup, "tools": _tools, "session": _session}[name](run, questions)


def _lookup(run: int, questions: int) -> Task:
    rng = random.Random(f"lookup {run}")
    names = rng.sample(_NAMES, 13)
    codes = [f"{n}" for n in rng.sample(range(1000, 10000), len(names))]
    cities = [rng.choice(_CITIES) for _ in names]
    lines = [
        f"- {name} lives in {city}. The locker code of {name} is {code}."
        for name, city, code in zip(names, cities, codes, strict=True)
    ]
    asked = []
    for i in rng.sample(range(len(names)), questions):
        others = rng.sample([code for code in codes if code != codes[i]], 3)
        asked.append(
            Question(
                f"What is the locker code of {names[i]}?",
                f"The locker code of {names[i]} is",
                f" {codes[i]}",
                tuple(f" {code}" for code in others),
            )
        )
    return Task("lookup", run, "\n".join(["These people have lockers at the station.", *lines]), tuple(asked))


def commands_used() -> list[str]:
    """The commands of `_COMMANDS` that the shipped sessions really name."""
    text = "\n".join(f"{turn.prompt}\n{turn.output}" for turn in load_turns())
    return [name for name in _COMMANDS if re.search(rf"\b{name}\b", text)]


def _tools(run: int, questions: int) -> Task:
    rng = random.Random(f"tools {run}")
    names = [f"{colour}_{animal}" for colour in _COLOURS for animal in _ANIMALS]
    commands = rng.sample(commands_used(), 8)
    tools = dict(zip(commands, rng.sample(names, len(commands)), strict=True))
    rng.shuffle(commands)
    lines = [
        f'{{"name": "{tools[c]}", "description": "Tool that {_COMMANDS[c]}, with the command {c}.", '
        '"parameters": {"arguments": "string"}}'
        for c in commands
    ]
    asked = []
    for c in rng.sample(commands, min(questions, len(commands))):
        others = rng.sample([tools[o] for o in commands if o != c], 3)
        asked.append(
            Question(
                f"Call the tool that {_COMMANDS[c]}.",
                '{"name": "',
                tools[c],
                tuple(others),
                call=True,
            )
        )
    return Task("tools", run, "\n".join(["You can call these tools:", *lines]), tuple(asked), tuple(tools.values()))


def _session(run: int, questions: int) -> Task:
    prompts = list({turn.session: turn.prompt for turn in load_turns()}.values())
    maker = (_flush, _numpy, _collecting, _downloading)[run % 4]
    context, asked = maker(prompts)
    rng = random.Random(f"session {run}")
    # A second round over the same contexts asks the other questions.
    rng.shuffle(asked)
    return Task("session", run, context, tuple(asked[:questions] if run < 4 else asked[-questions:]))


def _between(text: str, start: str, end: str) -> str:
    first = text.index(start)
    return text[first : text.index(end, first)].strip()


def _flush(prompts: list[str]) -> tuple[str, list[Question]]:
    text = next(p for p in prompts if "execute_sql_flush" in p)
    description = _between(text, "<pr_description>", "<instructions>")
    tail = text[text.rindex("</instructions>") + len("</instructions>") :].strip()
    rules = _between(text, "## Important Boundaries", "2. Create a script")
    context = f"{description}\n\n{rules}\n\n{tail[:110]}"
    return context, [
        Question(
            "Which method's signature is to be simplified?",
            "The method is `DatabaseOperations.",
            "execute_sql_flush()",
            ("sql_flush_all()", "execute_many_flush()", "flush_connection()"),
        ),
        Question(
            "Which argument can be dropped?", "The argument is `", "using`", ("sql_list`", "alias`", "connection`")
        ),
        Question(
            "What does the calling instance infer it from?",
            "It is inferred from `self.",
            "connection.alias`",
            ("database.name`", "settings.using`", "operations.sql`"),
        ),
        Question(
            "In which line of operations.py is the method defined?", "It is in line", " 403", (" 412", " 398", " 511")
        ),
        Question(
            "Which file defines the method?",
            "The file is django/db/backends/",
            "base/operations.py",
            ("sqlite3/base.py", "mysql/features.py", "oracle/schema.py"),
        ),
        Question(
            "What is the first step of the recommended workflow?",
            "First,",
            " analyze the codebase",
            (" edit the source code", " test edge cases", " verify your fix"),
        ),
        Question(
            "Which files must not be modified?",
            "Do not modify",
            " tests",
            (" models", " views", " images"),
        ),
        Question(
            "Which files may be modified?",
            "You may modify",
            " regular source code files",
            (" only generated documents", " all binary packages", " any database tables"),
        ),
    ]


def _numpy(prompts: list[str]) -> tuple[str, list[Question]]:
    text = next(p for p in prompts if "FutureWarning" in p)
    description = _between(text, "<pr_description>", "<instructions>")
    context = description
    return context, [
        Question(
            "Which version of astroid is used?", "The version is", " 2.12.13", (" 2.14.10", " 3.10.12", " 1.24.13")
        ),
        Question(
            "Which numpy attribute raises the warning?", "The attribute is `np.", "long`", ("bool`", "float`", "str`")
        ),
        Question(
            "What kind of warning is shown?",
            "It is a",
            " FutureWarning",
            (" UserWarning", " ImportWarning", " SyntaxWarning"),
        ),
        Question("In which line of raw_building.py is it raised?", "It is line", " 470", (" 407", " 512", " 740")),
        Question("Which seed does the test case use?", "The seed is", " 1234", (" 4321", " 2023", " 1000")),
        Question("Which Python version is installed?", "It is python", "3.10", ("3.12", "3.11", "2.10")),
        Question(
            "Which file does the warning come from?",
            "It comes from astroid/",
            "raw_building.py",
            ("node_classes.py", "brain_numpy.py", "inference_tip.py"),
        ),
        Question(
            "What is the expected behaviour?",
            "There should be",
            " no future warnings",
            (" two test failures", " more detailed logs", " a faster linter"),
        ),
    ]


def _installed(prompts: list[str]) -> str:
    text = next(p for p in prompts if "Collecting pylint" in p)
    start = text.index("Collecting pylint")
    return text[start : text.index("WARNING: Running pip", start)].strip()


def _collecting(prompts: list[str]) -> tuple[str, list[Question]]:
    whole = _installed(prompts)
    context = whole[: whole.index("Requirement already satisfied")].strip()
    found = dict(re.findall(r"Downloading ([a-z_]+)-([\d.]+)-py3", context))
    asked = [
        Question(
            f"Which version of {name} is downloaded?",
            f"The version of {name} is",
            f" {version}",
            tuple(f" {other}" for other in _others(list(found.values()), version, k)),
        )
        for k, (name, version) in enumerate(list(found.items())[:6])
    ]
    return context, asked


def _downloading(prompts: list[str]) -> tuple[str, list[Question]]:
    whole = _installed(prompts)
    start = whole.index("Downloading pylint-3.3.9-py3-none-any.whl (")
    context = whole[start : whole.index("Attempting uninstall")].strip()
    sizes = re.findall(r"Downloading ([a-z_]+)-[\d.]+-py3-none-any\.whl \((\d+\.?\d*) kB\)", context)
    asked = []
    for k, (name, size) in enumerate(sizes[:8]):
        asked.append(
            Question(
                f"How large is the download of {name}?",
                f"The download of {name} is",
                f" {size} kB",
                tuple(f" {other} kB" for other in _others([s for _, s in sizes], size, k)),
            )
        )
    return context, asked


def _others(values: list[str], right: str, first: int) -> list[str]:
    """Three different wrong ones, beginning at `first`."""
    wrong = [value for value in dict.fromkeys(values) if value != right]
    return (wrong[first % len(wrong) :] + wrong)[:3]
