"""What is wrong with a configuration block, for the people who wrote it: the option, its value, and the way out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

_MESSAGES = {
    "tuple_type": "must be a list",
    "model_type": "must be a mapping of options",
    "model_attributes_type": "must be a mapping of options",
}
"""Where pydantic would speak of Python's types to people who write YAML."""
_MEANT = {
    "size": "capacity", "max_size": "capacity", "limit": "capacity", "dir": "path", "directory": "path",
    "paths": "path", "host": "url", "address": "url", "uri": "url", "password": "password_file",
    "token": "token_file", "deadline": "timeout", "eviction": "policy", "compression": "kv_cache_compression_config",
    "bind": "listen", "metrics": "http",
}  # fmt: skip
"""Names from elsewhere, and what the option is called here; used where the place has such an option."""
_SECRET = re.compile("^salt|passw|secret|^token$", re.I)
"""In the name of an option, known or not: its value is nobody's to read in a log."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """place: keys and indices down to the option, in the block itself. option: the same as one writes it. value: what
    was found there, passwords masked. text: the whole message."""

    place: tuple[str | int, ...]
    option: str
    value: Any
    text: str


def mistakes_of(error: ValidationError, model: type[BaseModel]) -> list[Mistake]:
    """All that pydantic found wrong with a block for `model`."""
    return [_mistake(found, model) for found in error.errors()]


def _mistake(error: Any, model: type[BaseModel]) -> Mistake:
    place, names = _walk(error["loc"], model)
    option, value = written(place), _without_passwords(error["input"])
    if place and _SECRET.search(str(place[-1])) and not str(place[-1]).endswith("_file"):
        value = "***"
    return Mistake(place, option, value, _explain(error, option, value, names))


def _explain(error: Any, option: str, value: Any, names: list[str]) -> str:
    kind = error["type"]
    if kind == "extra_forbidden":
        return f"unknown option {option!r} (value {value!r}); {_meant(str(error['loc'][-1]), names)}"
    if kind == "missing":
        return f"option {option!r} is missing; give it a value"
    if kind == "union_tag_not_found":
        return f"option {option!r} = {value!r}: {error['ctx']['discriminator']} is missing; it says what the rest means"
    message = _MESSAGES.get(kind) or str(error["msg"]).removeprefix("Value error, ")
    if kind == "value_error" and not option:
        return message
    return f"option {option!r} = {value!r}: {message}"


def written(place: tuple[str | int, ...]) -> str:
    """``tiers[0].capacity`` for ``("tiers", 0, "capacity")``."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _walk(loc: tuple[str | int, ...], model: type[BaseModel]) -> tuple[tuple[str | int, ...], list[str]]:
    """The place in the block that pydantic's `loc` means, without the tags of its unions, and the options that there
    are around it."""
    place: list[str | int] = []
    here: list[type[BaseModel]] = [model]
    for n, part in enumerate(loc):
        tagged = [m for m in here if part in _tags(m)] if n and isinstance(loc[n - 1], int) else []
        if tagged:
            here = tagged
            continue
        place.append(part)
        if isinstance(part, str) and n < len(loc) - 1:
            fields = [m.model_fields[part] for m in here if part in m.model_fields]
            here = [inner for field in fields for inner in _models(field.annotation)]
    return tuple(place), sorted({name for m in here for name in m.model_fields})


def _tags(model: type[BaseModel]) -> tuple[Any, ...]:
    """What tells `model` from the others in a list: the values of its ``type`` or ``algorithm``."""
    field = model.model_fields.get("type") or model.model_fields.get("algorithm")
    return () if field is None else get_args(field.annotation)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _meant(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    if _MEANT.get(name.lower()) in names:
        near = [_MEANT[name.lower()]]
    if near:
        return f"did you mean {near[0]!r}? Else remove it"
    return f"remove it or check its spelling: {', '.join(names)}" if names else "remove it or check its spelling"


def _without_passwords(value: Any) -> Any:
    """`value` for a message: passwords in URLs, which do not belong there, as ``***``."""
    if isinstance(value, str):
        return re.sub(r"(://[^:@/?#\s]*):.*@", r"\1:***@", value)
    if isinstance(value, Mapping):
        return {key: _without_passwords(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_passwords(inner) for inner in value]
    return value
