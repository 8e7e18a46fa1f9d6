"""Write docs/options.md: every option of the configuration block, from its pydantic models, and of every command, from
typer. What an option of the block means stands here; a test holds that there is a line for each and that the page is
current.

Usage: python tools/options_page.py
"""

from __future__ import annotations

import enum
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from kvtier.cli.app import app
from kvtier.config import Bytes, Config, Seconds

PAGE = Path(__file__).parents[1] / "docs" / "options.md"

HEAD = """# Options

Every option of the [configuration block](#the-configuration-block) and of [every command](#commands). This page is
written by `tools/options_page.py` from the code. `kvtier config init` writes a file with comments, `kvtier config
validate FILE` names the line of a mistake, `kvtier config show FILE` prints what is in effect, and where each value
comes from.

Sizes are numbers of bytes or text such as `64GiB` (binary) and `400GB` (decimal); times are seconds, or text such as
`500ms`, `2s`, `1d`. A bold option must be given.

## The configuration block

The same in YAML, as a Python mapping, and inside an engine's own options. Unknown options are errors.
"""

MEANINGS = {
    "": {
        "kv_cache_compression_config": "list of methods, each at most once; empty: pages as they are",
        "tiers": "list, fastest first: one `host`, then `nvme`, `redis`, each at most once",
        "http": "[metrics, health and the status page](metrics.md); without it there is no port",
        "server": "of [`kvtier serve`](serve.md) alone",
        "promote_deadline": "how long a waiting request may be held for pages on their way up from lower tiers",
        "lease": "how long a page that was looked up and not loaded stays pinned; with several ranks, no clock",
        "offload_wait": "how long an offload worker waits for room in host memory",
        "workers": "threads that encode and decode",
        "salt": "separates [tenants](security.md#tenants): pages under different salts never meet",
        "priority": "of this engine's pages where several share tiers; low ones make room first",
        "break_even": "leaves pages where they are that are [sooner computed than loaded](tiers.md#what-is-loaded)",
        "prefill_s_per_token": "what a prompt's token costs to compute; else the connector measures it",
        "compacted": "files of `kvtier compact` that [SGLang serves](compaction.md#using-it-in-sglang)",
        "ghosts": "[hit rates of other sizes](status.md#ghosts-another-size-another-form), live",
        "explain_sample": "share of the requests that [`kvtier explain`](status.md#one-request) knows",
        "slow_restore": "restores that take longer are [counted and logged](status.md#slow-restores); `null`: none",
        "record": "a new file for [lookups](replay.md#recorded-lookups), to size with",
        "opentelemetry": "[spans](status.md#opentelemetry); needs `kvtier[otel]`",
        "kv_events": "what [routers](kv-events.md) are told of stored pages",
        "debug": "checks the accounting while running",
    },
    "quantization_for_cold_page": {
        "algorithm": "how pages are encoded when they leave the device: [precision.md](precision.md)",
        "quant": "the form of stored pages",
        "global_scale": "the second-level scale of `nvfp4`: per page, 1, or the checkpoint's",
        "scale_checkpoint_path": "with `checkpoint`: folder or file of safetensors that has the scales",
        "skip_rope_quantization": "rotary columns stay as they are (`nvfp4`, where they are a part of the row)",
        "rope_quant": "the form of rotary columns (as above)",
        "max_relative_error": "pages whose error is larger are stored without compression",
        "quality_sample": "share of the pages whose error is measured",
        "quality_budget": "a layer's K or V whose sampled error stays above is stored finer from then on",
    },
    "triattention": {
        "algorithm": "evicts generated tokens of live caches: [triattention.md](triattention.md)",
        "budget": "generated tokens that stay",
        "beta": "generated tokens between two rounds",
        "eviction_mode": "one set of tokens for all, per KV head, or per layer and KV head",
        "normalize_scores": "z-scores per query head before heads are compared",
        "calibration_path": "a file of `kvtier calibrate`, or a published one",
    },
    "host": {
        "type": "host memory",
        "capacity": "per node; a rank takes its share",
        "policy": "[what makes room](tiers.md#what-makes-room)",
        "ttl": "pages that nobody used for this long are gone",
        "budget": "takes the capacity out of [one that processes of a node share](tiers.md#a-nodes-budget)",
        "huge_pages": "as the kernel gives them, or from those set aside (`vm.nr_hugepages`)",
    },
    "host, budget": {"path": "a file, the same for all processes", "capacity": "their sum"},
    "nvme": {
        "type": "local disks",
        "path": "a directory, or a list of them, [one per device](faults.md#several-disks)",
        "capacity": "per node, of all directories together; a rank takes its share",
        "io_threads": "transfers at a time",
        "policy": "as for `host`",
        "ttl": "as for `host`",
        "write": "at once, when a page is about to leave host memory, or [never](tiers.md#what-lower-tiers-get)",
        "admission": "every page, or those that are asked for again",
        "refresh": "pages used in host memory stay longer here",
    },
    "redis": {
        "type": "[Redis or Valkey](redis.md), or `kvtier serve`",
        "url": "`redis://`, `rediss://` or `unix://`; several hosts separated by commas; never a password",
        "mode": "`auto` asks the servers",
        "service": "the master's name, where the URL names sentinels",
        "username": "the ACL user",
        "password_file": "else `KVTIER_REDIS_PASSWORD`",
        "sentinel_password_file": "else `KVTIER_REDIS_SENTINEL_PASSWORD`",
        "tls_ca": "PEM: who signed the server's certificate; else the system's authorities",
        "tls_cert": "PEM: the client's own certificate",
        "tls_key": "PEM: its key",
        "tls_check_hostname": "whether the certificate must name the host",
        "prefix": "of every key",
        "ttl": "pages vanish this long after they were written",
        "timeout": "of one batch, connecting included",
        "connections": "per server",
        "write": "as for `nvme`",
        "admission": "as for `nvme`",
        "refresh": "as for `nvme`",
    },
    "http": {
        "host": "the address; anything but loopback needs `allow_remote` and a token",
        "port": "rank r listens on `port + r`; 0: any free one",
        "allow_remote": "[other machines](security.md#ports) may ask",
        "token_file": "else `KVTIER_HTTP_TOKEN`",
        "names": "by which it may be asked for where there is no token, beside localhost and `host`",
    },
    "kv_events": {
        "publisher": "ZeroMQ; needs `kvtier[events]`",
        "endpoint": "where the publisher listens: `tcp://HOST:PORT` or `ipc://PATH`",
        "topic": "of every message",
        "queue": "events that may wait; more are dropped and counted",
        "allow_remote": "other machines may listen; ZeroMQ asks nobody for a password",
    },
    "server": {
        "listen": "list of `unix:PATH`, `tcp:HOST:PORT`, `tls:HOST:PORT`",
        "password_file": "of the default user; else `KVTIER_SERVER_PASSWORD`",
        "users": "list of further users, below",
        "tls_cert": "PEM, for `tls:`",
        "tls_key": "PEM, for `tls:`",
        "tls_client_ca": "PEM: clients need a certificate of this authority",
        "max_connections": "clients at a time",
        "max_value": "the largest value",
        "client_timeout": "for the rest of a command, or for taking a reply",
        "drain": "how long a stop waits for clients, and for writing",
    },
    "server, users": {
        "name": "of the user",
        "password_file": "its password",
        "prefixes": "of the keys that it sees and can touch; none: all",
        "read_only": "reads only",
        "quota": "of the values under its keys",
        "priority": "of these values; low ones make room first",
    },
}
HEADINGS = {
    "": "The block itself",
    "quantization_for_cold_page": "kv_cache_compression_config: quantization_for_cold_page",
    "triattention": "kv_cache_compression_config: triattention",
    "host": "tiers: host",
    "host, budget": "tiers: host, budget",
    "nvme": "tiers: nvme",
    "redis": "tiers: redis",
}


def blocks(model: type[BaseModel] = Config, name: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every model of the block, by the name that it has in `MEANINGS`, in the order in which it is read."""
    yield name, model
    for option, field in model.model_fields.items():
        for inner in dict.fromkeys(_models(field.annotation)):
            tag = next((_values(inner.model_fields[t].annotation)[0] for t in _TAGS if t in inner.model_fields), option)
            yield from blocks(inner, f"{name}, {tag}" if name else tag)


_TAGS = ("algorithm", "type")


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models(part)


def _values(annotation: Any) -> list[str]:
    """What may be written, where that is a choice."""
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return [str(member.value) for member in annotation]
    if typing.get_origin(annotation) is typing.Literal:
        return [str(value) for value in typing.get_args(annotation)]
    return [value for part in typing.get_args(annotation) for value in _values(part)]


def _kind(annotation: Any, metadata: list[Any]) -> str:
    """A type as a user would say it."""
    markers = [type(m).__name__ + str(getattr(m, "func", "")) for m in metadata]
    text = str(annotation) + " ".join(markers)
    if values := _values(annotation):
        return " ".join(f"`{value}`" for value in values)
    if "parse_bytes" in text or annotation == Bytes:
        return "size"
    if "parse_seconds" in text or annotation == Seconds:
        return "time"
    if "bool" in text:
        return "`true` `false`"
    names = {"int": "whole number", "float": "number", "PosixPath": "path", "Path": "path", "str": "text"}
    kind = next((said for name, said in names.items() if re.search(rf"\b{name}\b", text)), "block")
    if next(_models(annotation), None) is not None:
        kind = "block"
    return f"list of {kind}s" if "tuple[" in text else kind


def _default(value: Any) -> str:
    if value is None or value == () or value == "":
        return ""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"{value >> 20}MiB"
    if isinstance(value, float) and value == int(value):
        return str(int(value))
    return "[{algorithm: quantization_for_cold_page}]" if isinstance(value, tuple) else str(value)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ").strip() for cell in cells) + " |"


def configuration() -> Iterator[str]:
    for name, model in blocks():
        yield f"\n### {HEADINGS.get(name, name)}\n"
        yield from ("| option | default | takes | |", "|---|---|---|---|")
        for option, field in sorted(model.model_fields.items(), key=lambda item: item[0] not in _TAGS):
            required = field.default is PydanticUndefined
            default = "" if required else _default(field.default)
            shown = f"**`{option}`**" if required else f"`{option}`"
            kind = _kind(field.annotation, field.metadata)
            yield _row(shown, f"`{default}`" if default else "", kind, MEANINGS[name][option])


def commands(group: Any, path: str = "kvtier") -> Iterator[tuple[str, Any]]:
    """Every command that does something, by what is typed for it."""
    inner = getattr(group, "commands", None)
    if inner is None or getattr(group, "invoke_without_command", False):
        yield path, group
    for name, command in (inner or {}).items():
        yield from commands(command, f"{path} {name}")


def _parameter(parameter: Any) -> str:
    default = parameter.default
    argument = not parameter.opts[0].startswith("-")
    argument_name = parameter.metavar or parameter.name.upper()
    shown = argument_name if argument else ", ".join([*parameter.opts, *parameter.secondary_opts])
    said = "" if callable(default) or default is False else _default(default)
    if default is None and not parameter.required:
        said = ""
    return _row(
        f"**`{shown}`**" if parameter.required else f"`{shown}`", f"`{said}`" if said else "", parameter.help or ""
    )


def command_line() -> Iterator[str]:
    yield "\n## Commands\n"
    yield "`kvtier --version` prints the version, `--help` behind any command what stands here.\n"
    for path, command in commands(typer.main.get_command(app)):
        if path == "kvtier":
            continue
        yield f"\n### {path}\n"
        yield re.sub(r"\s+", " ", (command.help or "").split("\f")[0].split("\n\n")[0]) + "\n"
        shown = [p for p in command.params if not p.hidden and p.name != "help"]
        if shown:
            yield from ("| option | default | |", "|---|---|---|")
            yield from map(_parameter, shown)


def page() -> str:
    return re.sub(r"\n{3,}", "\n\n", HEAD + "\n".join([*configuration(), *command_line()])) + "\n"


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
