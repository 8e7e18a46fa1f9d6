"""The public names of a Python module as MyST text: signatures and docstrings, read from the source without importing
it, so that the site needs neither torch nor a compiler.

Public is what has no leading underscore: classes and functions that a module defines, and constants that have a
docstring below them. Docstrings are Markdown.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_OUTER_FENCE = 6
"""Backticks around a name of a module; around its members one fewer. Docstrings have at most 3."""


class UnknownNameError(ValueError):
    """A page asks for a module or a name that is not there."""


@dataclass(frozen=True, slots=True)
class Member:
    """One public name. directive: of Sphinx's Python domain. options: its options, ready to be written."""

    name: str
    directive: str
    signature: str
    options: tuple[str, ...]
    text: str
    members: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True)
class Module:
    name: str
    text: str
    members: tuple[Member, ...]


def read_module(root: Path, name: str) -> Module:
    """The module of that dotted name below `root`. Raises UnknownNameError where there is none."""
    path = root.joinpath(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.is_file():
        raise UnknownNameError(f"{name}: there is no {path.relative_to(root)}; correct the name on the page")
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    return Module(name, ast.get_docstring(tree) or "", _members(tree.body, source.splitlines(), in_module=True))


def as_myst(module: Module, only: Sequence[str] = ()) -> str:
    """The module's docstring and every public name, or the names of `only` alone, in that order."""
    found = {member.name: member for member in module.members}
    missing = [name for name in only if name not in found]
    if missing:
        raise UnknownNameError(f"{module.name} has no public {', '.join(missing)}; it has {', '.join(found)}")
    parts = [] if only else [_prose(module.text)]
    parts += [_fenced(found[name], _OUTER_FENCE, module.name) for name in only or found]
    return "\n\n".join(part for part in parts if part) + "\n"


def _members(body: Sequence[ast.stmt], lines: Sequence[str], *, in_module: bool) -> tuple[Member, ...]:
    members = []
    for at, node in enumerate(body):
        if isinstance(node, ast.ClassDef):
            member: Member | None = _class(node, lines)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            member = _function(node, in_module=in_module)
        else:
            member = _variable(node, _text_below(body, at), in_module=in_module)
        if member is not None and not member.name.startswith("_"):
            members.append(member)
    return tuple(members)


def _class(node: ast.ClassDef, lines: Sequence[str]) -> Member:
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    text = ast.get_docstring(node) or ""
    if bases & {"Enum", "IntEnum", "StrEnum"}:
        values = tuple(_enum_value(node.body, at, lines) for at in range(len(node.body)))
        return Member(node.name, "class", node.name, (), text, tuple(value for value in values if value is not None))
    fields = [f for f in node.body if isinstance(f, ast.AnnAssign) and not ast.unparse(f.target).startswith("_")]
    is_record = "NamedTuple" in bases or any("dataclass" in ast.unparse(d) for d in node.decorator_list)
    members = _members(node.body, lines, in_module=False)
    signature = node.name
    if is_record:
        shown = [f for f in fields if not ast.unparse(f.annotation).startswith("ClassVar")]
        signature += f"({', '.join(map(_as_argument, shown))})"
        plain = {ast.unparse(f.target) for f in shown}
        members = tuple(m for m in members if m.name not in plain or m.text)
    else:
        made = next((f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"), None)
        if made is not None:
            signature += f"({_arguments(made, bound=True)})"
    return Member(node.name, "class", signature, (), text, members)


def _enum_value(body: Sequence[ast.stmt], at: int, lines: Sequence[str]) -> Member | None:
    node = body[at]
    name = _assigned(node)
    if not isinstance(node, ast.Assign) or name is None or name.startswith("_"):
        return None
    comment = lines[node.end_lineno - 1].partition("  # ")[2] if node.end_lineno else ""
    return Member(name, "attribute", name, (f":value: {ast.unparse(node.value)}",), _text_below(body, at) or comment)


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, *, in_module: bool) -> Member:
    decorators = {ast.unparse(d) for d in node.decorator_list}
    text = ast.get_docstring(node) or ""
    options = [":abstractmethod:"] if "abstractmethod" in decorators else []
    if decorators & {"property", "cached_property", "functools.cached_property"}:
        options += [f":type: {ast.unparse(node.returns)}"] if node.returns else []
        return Member(node.name, "property", node.name, tuple(options), text)
    options += [f":{d}:" for d in ("classmethod", "staticmethod") if d in decorators]
    options += [":async:"] if isinstance(node, ast.AsyncFunctionDef) else []
    signature = f"{node.name}({_arguments(node, bound=not in_module and 'staticmethod' not in decorators)})"
    if node.returns is not None:
        signature += f" -> {ast.unparse(node.returns)}"
    return Member(node.name, "function" if in_module else "method", signature, tuple(options), text)


def _variable(node: ast.stmt, text: str | None, *, in_module: bool) -> Member | None:
    name = _assigned(node)
    if name is None or (in_module and text is None):
        return None
    options = []
    if isinstance(node, ast.AnnAssign):
        options.append(f":type: {_one_line(node.annotation)}")
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    if value is not None and len(shown := _one_line(value)) <= 80:
        options.append(f":value: {shown}")
    return Member(name, "data" if in_module else "attribute", name, tuple(options), text or "")


def _assigned(node: ast.stmt) -> str | None:
    target: ast.expr | None = None
    if isinstance(node, ast.AnnAssign):
        target = node.target
    elif isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
    return target.id if isinstance(target, ast.Name) else None


def _text_below(body: Sequence[ast.stmt], at: int) -> str | None:
    below = body[at + 1] if at + 1 < len(body) else None
    if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
        return inspect.cleandoc(below.value.value)
    return None


def _one_line(node: ast.expr) -> str:
    return " ".join(ast.unparse(node).split())


def _as_argument(field: ast.AnnAssign) -> str:
    default = "" if field.value is None else f" = {_default(field.value)}"
    return f"{ast.unparse(field.target)}: {_one_line(field.annotation)}{default}"


def _default(value: ast.expr) -> str:
    return "..." if isinstance(value, ast.Call) else _one_line(value)  # field(default_factory=...)


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool) -> str:
    """As written, without the first one of a bound function."""
    arguments = node.args
    if bound and arguments.args:
        arguments = ast.arguments(
            arguments.posonlyargs,
            arguments.args[1:],
            arguments.vararg,
            arguments.kwonlyargs,
            arguments.kw_defaults,
            arguments.kwarg,
            arguments.defaults,
        )
    return ast.unparse(arguments)


def _fenced(member: Member, ticks: int, module: str = "") -> str:
    fence = "`" * ticks
    head = [f"{fence}{{py:{member.directive}}} {member.signature}"]
    head += [f":module: {module}"] if module else []
    head += member.options
    head += [":no-contents-entry:"] if member.directive == "attribute" else []
    parts = ["\n".join(head), _prose(member.text)]
    parts += [_fenced(inner, ticks - 1) for inner in member.members]
    return "\n\n".join(part for part in parts if part) + f"\n{fence}"


def _prose(text: str) -> str:
    """A docstring as Markdown: what is no code loses the signs that Markdown would take for HTML or a link."""
    lines = []
    for line in text.splitlines():
        if line.startswith("    "):  # a block of code
            lines.append(line)
        else:
            parts = re.split(r"(``[^`]+``|`[^`]+`)", line)
            lines.append("".join(p if p.startswith("`") else re.sub(r"([<*\[\]_$])", r"\\\1", p) for p in parts))
    return "\n".join(lines).strip()
