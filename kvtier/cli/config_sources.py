"""Configuration files as people have them: kvtier's own block in YAML or JSON, and blocks inside the engines' options.

Recognized, at any depth: LMCache's ``--l2-adapter`` (`adapter_params`), its serde ``kvtier_nvfp4``, its `extra_config`
for the in-process engine, SGLang's `linker_extra_config`, `kv_connector_config` and the extra options of its staged
cache, each also as JSON in a string. Anything else is a block.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import sys
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from kvtier.config import CompressionOptions, Config
from kvtier.config_mistakes import Mistake, mistakes_of, written
from kvtier.errors import ConfigError

Place = tuple[Hashable, ...]

LMCACHE_OWN = ("attention", "rope_dim", "instance", "weights", "config")
LMCACHE_ATTENTION = ("vllm", "sglang", "mla", "none")
"""What LMCache's door takes beside the block. It cannot be imported without LMCache; a test compares the two."""
_LMCACHE_MODULE, _LMCACHE_SERDE = "kvtier.connectors.lmcache", "kvtier_nvfp4"
_REMOTE = "remote_storage_plugin."
_SGLANG_LINKER, _SGLANG_STORAGE = "kvtier.connectors.sglang.linker", "kvtier.connectors.sglang.hicache"
_SMALL = {"tiers": [{"type": "host", "capacity": "4GiB"}]}
"""What the engines' doors take where a block has no tiers."""
SERDE = "LMCache serde"


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a file. place: where it lies in it. what: for people. options: the block itself.
    small_without_tiers: whether this door has tiers of its own where the block has none. elsewhere: the file that has
    the options, where this one only names it."""

    place: Place
    what: str
    options: Mapping[str, Any]
    small_without_tiers: bool = False
    elsewhere: str = ""

    def read(self) -> tuple[BaseModel | None, list[Mistake]]:
        """The validated block, or what is wrong with it."""
        given = dict(self.options)
        model: type[BaseModel] = Config
        if "tiers" not in given and self.small_without_tiers:
            given = {**_SMALL, **given}
        elif "tiers" not in given and set(given) <= {"kv_cache_compression_config", "http"} and given:
            model = CompressionOptions  # methods for live caches alone
        try:
            return model.model_validate(given), []
        except ValidationError as error:
            return None, mistakes_of(error, model)


@dataclass(frozen=True, slots=True)
class Source:
    """A file that was read. lines: of each place in it, from 1; twice: keys that a mapping gives twice, with lines."""

    path: str
    blocks: tuple[Block, ...]
    mistakes: tuple[Mistake, ...] = ()
    lines: Mapping[Place, int] = field(default_factory=dict)
    twice: tuple[tuple[str, int], ...] = ()

    def line(self, place: Place) -> int:
        """Of the option at `place`, or of what it should be in; 0 where that is not known."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place, 0)


def read_source(path: str) -> Source:
    """Read a file, or standard input for ``-``. Raises ConfigError where it holds no mapping at all."""
    text = _text(path)
    try:
        document = json.loads(text)
    except ValueError:  # YAML, which also says best what is wrong
        try:
            document = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"config file {path!r} is not YAML: {error}; give a YAML or JSON file") from None
    if not isinstance(document, (dict, list)):
        raise ConfigError(
            f"config file {path!r} must hold a mapping with the option 'tiers', got {type(document).__name__}; "
            "give a mapping"
        )
    blocks = tuple(_blocks(document))
    mistakes = [mistake for block in blocks for mistake in _own_mistakes(block)]
    mistakes += _misspelt_keys(document)
    if not blocks and isinstance(document, dict):
        blocks = (Block((), "block", document),)
    if not blocks and not mistakes:
        raise ConfigError(f"config file {path!r} holds a list without any block of kvtier's; give a mapping of options")
    lines, twice = _lines(text)
    return Source(path, tuple(_without_own(block) for block in blocks), tuple(mistakes), lines, twice)


def only_block(path: str) -> tuple[Config, Block]:
    """The one whole block of a file, validated, and as it stands there. Raises ConfigError."""
    source = read_source(path)
    if len(source.blocks) > 1:
        raise ConfigError(f"config file {path!r} holds {len(source.blocks)} blocks: give a file with one of them")
    if elsewhere := source.blocks[0].elsewhere:
        raise ConfigError(f"config file {path!r} only names the file of the block: give that one, {elsewhere!r}")
    config, mistakes = source.blocks[0].read()
    if source.mistakes or not isinstance(config, Config):
        text = "; ".join(m.text for m in (*source.mistakes, *mistakes)) or "it has no tiers; give a whole block"
        raise ConfigError(f"config file {path!r}: {text}")
    return config, source.blocks[0]


def _text(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"config file {path!r} cannot be read: {error.strerror}; give a readable file, "
            "kvtier config init writes one"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path!r} is not text in UTF-8: {error}; give a YAML file") from None


def _blocks(document: Any, place: Place = ()) -> Iterator[Block]:
    """The blocks inside an engine's options; none for a block that stands alone."""
    if isinstance(document, str) and document.lstrip().startswith("{") and "kvtier" in document:
        with contextlib.suppress(ValueError):  # text that is no JSON is not for us
            yield from _blocks(json.loads(document), place)
    if isinstance(document, list):
        for n, inner in enumerate(document):
            yield from _blocks(inner, (*place, n))
    if not isinstance(document, dict):
        return
    module = document.get("module_path")
    if isinstance(module, str) and module.startswith(_LMCACHE_MODULE):
        params = document.get("adapter_params", {})
        yield Block((*place, "adapter_params"), "LMCache adapter", _mapping(params, (*place, "adapter_params")), True)
        return
    if document.get("type") == _LMCACHE_SERDE:
        rest = {k: v for k, v in document.items() if k not in ("type", "max_workers")}
        yield Block(place, SERDE, rest, True)
        return
    if module == _SGLANG_STORAGE:
        yield from _reference(document, place)
        return
    if document.get("linker_module_path") == _SGLANG_LINKER:
        yield from _reference(document.get("linker_extra_config", {}), (*place, "linker_extra_config"))
        return
    for name, inner in document.items():
        if name in ("kv_connector_config", "kv-connector-config") and isinstance(inner, dict):
            yield Block((*place, name), "SGLang connector", inner)
        elif name == "extra_config" and isinstance(inner, dict):
            yield from _remote(inner, (*place, name))
        else:
            yield from _blocks(inner, (*place, name))


def _mapping(value: Any, place: Place) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"option {written(tuple(map(str, place)))!r} = {value!r}: must be a mapping; give kvtier's block"
        )
    return value


def _reference(extra: Any, place: Place) -> Iterator[Block]:
    """SGLang's reference to a block: given in Python, or the name of a file, which is validated by itself."""
    if isinstance(extra, dict) and "config" in extra:
        yield Block((*place, "config"), "SGLang connector", _mapping(extra["config"], (*place, "config")))


def _remote(extra: Mapping[str, Any], place: Place) -> Iterator[Block]:
    """LMCache's `extra_config`: the options of each remote storage plugin of ours, which begin with its name."""
    for name in extra:
        plugin, _, option = str(name).removeprefix(_REMOTE).partition(".")
        if not str(name).startswith(_REMOTE) or option != "module_path" or _LMCACHE_MODULE not in str(extra[name]):
            continue
        prefix = f"{_REMOTE}{plugin}."
        own = {str(k).removeprefix(prefix): v for k, v in extra.items() if str(k).startswith(prefix)}
        rest = {k: v for k, v in own.items() if k not in ("module_path", "class_name")}
        yield Block(place, f"LMCache plugin {plugin}", rest, True)


def _own_mistakes(block: Block) -> Iterator[Mistake]:
    """Of what LMCache's doors take beside the block."""
    if not block.small_without_tiers:
        return
    given = block.options
    attention, rope = given.get("attention", "none"), given.get("rope_dim", 0)

    def wrong(option: str, value: Any, way_out: str) -> Mistake:
        place = (*map(str, block.place), option)
        return Mistake(place, written(place), value, f"option {written(place)!r} = {value!r}: {way_out}")

    if attention not in LMCACHE_ATTENTION:
        yield wrong("attention", attention, f"give one of {', '.join(LMCACHE_ATTENTION)}")
    if not isinstance(rope, int) or isinstance(rope, bool) or rope < 0 or rope % 16:
        yield wrong("rope_dim", rope, "give a multiple of 16, or 0")
    elif rope and attention != "mla":
        yield wrong("rope_dim", rope, "is for attention = mla alone; leave it out, or set attention to mla")
    for option in ("instance", "weights", "config"):
        if not isinstance(given.get(option, ""), str):
            yield wrong(option, given[option], "give text")
    misspelt = _misspelt_own(given)
    for name, meant in misspelt.items():
        place = (*map(str, block.place), name)
        text = f"unknown option {written(place)!r} (value {given[name]!r}); did you mean {meant!r}? Else remove it"
        yield Mistake(place, written(place), given[name], text)
    others = sorted(set(given) - set(LMCACHE_OWN) - set(misspelt))
    if "config" in given and others:
        yield wrong("config", given["config"], f"is given together with {', '.join(others)}: write them into the file")


def _misspelt_keys(document: Any, place: Place = ()) -> Iterator[Mistake]:
    """Of an ``--l2-adapter`` of ours: LMCache passes over names that it does not know, and our options with them."""
    if isinstance(document, list):
        for n, inner in enumerate(document):
            yield from _misspelt_keys(inner, (*place, n))
    if not isinstance(document, dict):
        return
    if str(document.get("module_path", "")).startswith(_LMCACHE_MODULE):
        for name in document:
            if name != "adapter_params" and difflib.get_close_matches(str(name), ["adapter_params"]):
                here = (*map(str, place), str(name))
                text = f"unknown option {written(here)!r}, which LMCache passes over; did you mean 'adapter_params'?"
                yield Mistake(here, written(here), document[name], text)
    for name, inner in document.items():
        yield from _misspelt_keys(inner, (*place, name))


def _misspelt_own(given: Mapping[str, Any]) -> dict[str, str]:
    """Options that are meant for one of `LMCACHE_OWN`, of which a block's own check knows nothing, and for which."""
    near = {
        name: difflib.get_close_matches(name, (*LMCACHE_OWN, *Config.model_fields), n=1)
        for name in given
        if name not in LMCACHE_OWN and name not in Config.model_fields
    }
    return {name: names[0] for name, names in near.items() if names and names[0] in LMCACHE_OWN}


def _without_own(block: Block) -> Block:
    if not block.small_without_tiers:
        return block
    own = {*LMCACHE_OWN, *_misspelt_own(block.options)}
    rest = {k: v for k, v in block.options.items() if k not in own}
    elsewhere = block.options.get("config")
    return Block(block.place, block.what, rest, True, elsewhere if isinstance(elsewhere, str) and not rest else "")


def _lines(text: str) -> tuple[dict[Place, int], tuple[tuple[str, int], ...]]:
    lines: dict[Place, int] = {}
    twice: list[tuple[str, int]] = []

    def walk(node: yaml.Node, place: Place) -> None:
        lines.setdefault(place, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            for n, inner in enumerate(node.value):
                walk(inner, (*place, n))
        elif isinstance(node, yaml.MappingNode):
            for key, inner in node.value:
                here = (*place, key.value)
                if here in lines:
                    twice.append((str(key.value), key.start_mark.line + 1))
                lines[here] = key.start_mark.line + 1
                walk(inner, here)

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            walk(root, ())
    except (yaml.YAMLError, RecursionError):  # JSON with tabs, aliases that hold themselves: messages without lines
        return {}, ()
    return lines, tuple(twice)
