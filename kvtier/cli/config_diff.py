"""``kvtier config diff``: what a change of the configuration means for pages that are stored."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.errors import KVTierError

if TYPE_CHECKING:
    from kvtier.config import Config

_NONE = "(none)"


class Effect(str, Enum):
    """NAMESPACE: pages get other keys, so none that is stored is found. PLACE: pages of one tier stay behind. SHRINK:
    pages go for want of room. RESTART: it counts from the next start on."""

    NAMESPACE = "namespace"
    PLACE = "place"
    SHRINK = "shrink"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class Difference:
    """before, after: in the units people write, secrets masked. text: what follows, for people."""

    option: str
    before: Any
    after: Any
    effects: tuple[Effect, ...]
    text: str

    def as_json(self) -> dict[str, Any]:
        effects = [effect.value for effect in self.effects]
        return {
            "option": self.option,
            "before": self.before,
            "after": self.after,
            "effects": effects,
            "text": self.text,
        }


def diff(
    before: Annotated[str, typer.Argument(help="A configuration file; - is standard input.")],
    after: Annotated[str, typer.Argument(help="What it is going to be.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what is different in effect, and what becomes of the pages that are stored.

    Defaults are filled in and units are normalized first, so that only what matters is a difference. Nothing is read
    while a process runs: every difference counts from its next start on. Exit status 1 if there is a difference.
    """
    from kvtier.cli.config_sources import only_block
    from kvtier.cli.config_text import flow

    a, b = only_block(before)[0], only_block(after)[0]
    found = list(differences(a, b))
    lost = any(Effect.NAMESPACE in one.effects for one in found)
    if as_json:
        whole = {"same": not found, "namespace_changes": lost, "restart": bool(found)}
        print(json.dumps({**whole, "differences": [one.as_json() for one in found]}, indent=2, default=str))
    else:
        for one in found:
            was, is_ = (value if isinstance(value, str) else flow(value) for value in (one.before, one.after))
            typer.echo(f"{one.option}: {was} -> {is_}\n    {one.text}")
        typer.echo(_summary(found, lost, a, b))
    if found:
        raise typer.Exit(1)


def _summary(found: list[Difference], lost: bool, a: Config, b: Config) -> str:
    if not found:
        return "no difference in effect"
    who = "kvtier serve" if a.server is not None and b.server is not None else "the engine"
    count = "1 difference" if len(found) == 1 else f"{len(found)} differences"
    if lost:
        kept = "pages stored so far are NOT found any more"
    elif any(Effect.PLACE in one.effects for one in found):
        kept = "pages stored so far keep their keys, but are not looked for in every place where they are"
    else:
        kept = "pages stored so far keep their keys"
    return f"{count}; restart {who} to have {'it' if len(found) == 1 else 'them'}; {kept}"


def differences(a: Config, b: Config) -> Iterator[Difference]:
    """In the order of the options; parts that only one of the two has are one difference."""
    left, right = _flat(a), _flat(b)
    parts = {part for side in (left, right) for part in side}
    for part in sorted(parts, key=lambda p: [*left, *right].index(p)):
        old, new = left.get(part), right.get(part)
        if old is None or new is None:
            yield _part(part, old, new)
            continue
        for option in dict.fromkeys((*old, *new)):
            was, is_ = old.get(option, (None, None)), new.get(option, (None, None))
            if was[0] != is_[0]:
                yield _option(part, option, was, is_, a, b)


def _flat(config: Config) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Value and text of every option by the part that it belongs to. Parts of lists go by their names, not by their
    places: ``tiers[nvme]``."""
    from kvtier.cli.config_text import leaves

    parts: dict[str, dict[str, tuple[Any, Any]]] = {"": {}}
    for leaf in leaves(config):
        place, name = leaf.place, ""
        if len(place) > 1 and place[0] == "tiers":
            name, place = f"tiers[{config.tiers[int(place[1])].type}]", place[2:]
        elif len(place) > 1 and place[0] == "kv_cache_compression_config":
            name, place = config.kv_cache_compression_config[int(place[1])].algorithm, place[2:]
        elif place[:2] == ("server", "users") and len(place) > 2 and config.server is not None:
            name, place = f"server.users[{config.server.users[int(place[2])].name}]", place[3:]
        elif len(place) > 1:
            name, place = str(place[0]), place[1:]
        elif leaf.value is None or place == ("kv_cache_compression_config",):
            continue  # a part that is not there
        parts.setdefault(name, {})[".".join(map(str, place))] = (leaf.value, leaf.shown)
    return parts


def _part(part: str, old: dict[str, tuple[Any, Any]] | None, new: dict[str, tuple[Any, Any]] | None) -> Difference:
    before, after = (_NONE if side is None else _brief(side) for side in (old, new))
    effects: tuple[Effect, ...] = (Effect.RESTART,)
    text = "counts from the next start on"
    if part == "quantization_for_cold_page":
        return Difference(part, before, after, (Effect.NAMESPACE, Effect.RESTART), _LOST)
    if part.startswith("tiers[") and new is None:
        effects, text = (Effect.PLACE, Effect.RESTART), "its pages stay where they are and are not looked for"
    elif part.startswith("tiers["):
        text = "begins with what is stored there already, or empty"
    return Difference(part, before, after, effects, text)


def _brief(options: dict[str, tuple[Any, Any]]) -> str:
    from kvtier.cli.config_text import flow

    named = [
        f"{name} {flow(options[name][1])}"
        for name in ("path", "url", "capacity", "quant", "listen", "port")
        if name in options
    ]
    return ", ".join(named) or "there"


_LOST = "pages get other keys: what is stored is not found any more, and makes room in time"


def _option(part: str, option: str, old: tuple[Any, Any], new: tuple[Any, Any], a: Config, b: Config) -> Difference:
    whole = f"{part}.{option}" if part else option
    effects, text = _consequence(part, option, old[0], new[0], a, b)
    return Difference(whole, _shown(old), _shown(new), (*effects, Effect.RESTART), text)


def _shown(value: tuple[Any, Any]) -> Any:
    return _NONE if value[1] is None else value[1]


def _consequence(part: str, option: str, old: Any, new: Any, a: Config, b: Config) -> tuple[tuple[Effect, ...], str]:
    server = a.server is not None and b.server is not None
    if _changes_keys(part, option, a, b):
        if server:
            return (), "kvtier serve does not use it: its values are the clients'"
        return (Effect.NAMESPACE,), _LOST
    if part == "tiers[redis]" and option in ("url", "prefix"):
        return (
            Effect.PLACE,
        ), "pages in Redis are looked for there from then on; what is at the old place is not found"
    if part == "tiers[nvme]" and option == "path":
        left = sorted(set(old) - set(new))
        if left:
            return (Effect.PLACE,), f"pages in {', '.join(left)} are not found; pages in directories that stay are"
        return (), "all directories stay, and their pages with them; each holds an equal share of the capacity"
    if option == "capacity" and part == "tiers[host]" and new < old:
        return (Effect.SHRINK,), "holds less from the next start on, when it begins empty in any case"
    if option == "capacity" and part.startswith("tiers[") and new < old:
        return (Effect.SHRINK,), "at the next start pages go until the rest fits: those used last stay"
    if part == "quantization_for_cold_page":
        return (), "for new pages; those stored so far are found and read as they are"
    if part.endswith("_file") or option.endswith(("_file", "_ca", "_cert", "_key")):
        return (), "the file is read at the start"
    return (), "counts from the next start on"


def _changes_keys(part: str, option: str, a: Config, b: Config) -> bool:
    """Whether the option changes the keys of pages."""
    if (part, option) == ("", "salt"):
        return True
    if part != "quantization_for_cold_page":
        return False
    changed = {option: getattr(b.cold_page, option)}
    if a.cold_page is None or b.cold_page is None:
        return True
    try:
        return _policies(a) != _policies(a.model_copy(update={"kv_cache_compression_config": (
            a.cold_page.model_copy(update=changed),
        )}))  # fmt: skip
    except KVTierError:  # a checkpoint that is not here, or options that only work together: compare all of them
        try:
            return _policies(a) != _policies(b)
        except KVTierError:
            return option in ("quant", "global_scale", "scale_checkpoint_path", "skip_rope_quantization", "rope_quant")


def _policies(config: Config) -> list[str]:
    """What the codec puts into a namespace, for pages of the kinds whose default forms differ."""
    from kvtier.build import open_codec
    from kvtier.mover import policy_of
    from kvtier.spec import DType, PageSpec

    specs = (
        PageSpec.mha(layers=1, kv_heads=1, head_dim=64, page_tokens=64, dtype=DType.BF16),
        PageSpec.mha(layers=1, kv_heads=1, head_dim=64, page_tokens=8, dtype=DType.BF16),
        PageSpec.mla(layers=1, page_tokens=64, dtype=DType.BF16),
    )
    log = logging.getLogger(open_codec.__module__)
    log.addFilter(_silent)  # what it tells of pages that are short is not about this engine's
    try:
        return [policy_of(open_codec(config, spec)).encoded() for spec in specs]
    finally:
        log.removeFilter(_silent)


def _silent(record: logging.LogRecord) -> bool:
    return False
