"""A validated configuration as text: values in the units that people write, and where each comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import yaml
from pydantic import BaseModel, BeforeValidator

from kvtier.config import parse_bytes, parse_seconds
from kvtier.config_mistakes import written
from kvtier.server.page import masked_value

Place = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One option. place: keys and indices down to it. value: as JSON has it. shown: in the units people write, secrets
    masked. given: not a default."""

    place: Place
    value: Any
    shown: Any
    given: bool

    @property
    def option(self) -> str:
        return written(self.place)


def leaves(block: BaseModel, place: Place = (), given: bool = True) -> Iterator[Leaf]:
    """Every option of a block, defaults among them, in order. given: whether the block itself was."""
    for name, info in type(block).model_fields.items():
        value, here = getattr(block, name), (*place, name)
        said = given and name in block.model_fields_set
        if isinstance(value, BaseModel):
            yield from leaves(value, here, said)
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            for n, inner in enumerate(value):
                yield from leaves(inner, (*here, n), said)
        else:
            plain = block.model_dump(mode="json", include={name})[name]
            yield Leaf(here, plain, masked_value(name, _in_units(plain, info.annotation, info.metadata)), said)


def as_yaml(block: BaseModel, origin: Callable[[Leaf], str]) -> str:
    """The block as YAML that reads as the same block (but for masked secrets), with the origin of each option."""
    origins = {leaf.option: (leaf, origin(leaf)) for leaf in leaves(block)}
    rows = list(_rows(block, (), origins))
    width = min(48, max(len(text) for text, _ in rows) + 2)
    return "".join(f"{text:<{width - 1}} # {where}\n" if where else f"{text}\n" for text, where in rows)


def _rows(block: BaseModel, place: Place, leaf_of: Mapping[str, tuple[Leaf, str]]) -> Iterator[tuple[str, str]]:
    # What says what the rest means comes first.
    for name in sorted(type(block).model_fields, key=lambda name: name not in ("type", "algorithm", "name")):
        value, here = getattr(block, name), (*place, name)
        if isinstance(value, BaseModel):
            yield f"{name}:", ""
            yield from ((f"  {text}", where) for text, where in _rows(value, here, leaf_of))
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            yield f"{name}:", ""
            for n, inner in enumerate(value):
                marks = ["- ", "  "]
                for text, where in _rows(inner, (*here, n), leaf_of):
                    yield f"{marks[0]}{text}", where
                    marks = marks[1:] * 2
        else:
            leaf, where = leaf_of[written(here)]
            yield f"{name}: {flow(leaf.shown)}", where


def flow(value: Any) -> str:
    """On one line, as YAML has it."""
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).removesuffix("\n").removesuffix("\n...")


def _in_units(value: Any, *annotations: Any) -> Any:
    """A size or a time as text; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    validators = {inner.func for inner in _metadata(annotations) if isinstance(inner, BeforeValidator)}
    if parse_bytes in validators:
        return size_text(int(value))
    return time_text(value) if parse_seconds in validators else value


def _metadata(annotation: Any) -> Iterator[Any]:
    if isinstance(annotation, (list, tuple)):
        for inner in annotation:
            yield from _metadata(inner)
        return
    yield annotation
    yield from _metadata(getattr(annotation, "__metadata__", ()))
    yield from _metadata(get_args(annotation))


def size_text(nbytes: int) -> str:
    """Exactly `nbytes`, in the largest unit that divides it: ``64GiB``, ``400GB``, ``4097B``."""
    binary = [(1024**power, f"{letter}iB") for power, letter in ((4, "T"), (3, "G"), (2, "M"), (1, "K"))]
    decimal = [(1000**power, f"{letter}B") for power, letter in ((4, "T"), (3, "G"), (2, "M"))]
    for unit, name in sorted(binary + decimal, reverse=True):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return f"{nbytes}B"


def time_text(seconds: float) -> str:
    """Exactly `seconds`, in the largest unit that divides it: ``1d``, ``90s``, ``500ms``."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "m"), (1, "s")):
        if seconds >= unit and seconds % unit == 0:
            return f"{int(seconds // unit)}{name}"
    if round(seconds * 1000) == seconds * 1000:
        return f"{round(seconds * 1000)}ms"
    return f"{seconds:.9f}".rstrip("0") + "s"
