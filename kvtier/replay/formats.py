"""Readers of trace files, and the traces that come with kvtier.

mooncake: JSON lines, one request each: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (one per block of
512 tokens; equal ids are equal prefixes everywhere in the file).

weka: the traces of kv-cache-tester, one JSON object per session, in a file, in JSON lines or in a directory of .json
files: `id`, `block_size` (64), `hash_id_scope` (``local``, the default: ids mean nothing outside their session; or
``global``), and `requests` with `t` (s since the session began), `in`, `out`, `hash_ids`, `think_time` and `api_time`
(s). An entry of type ``subagent`` holds `requests` of its own.

prompts: JSON lines in a file, or .jsonl files in a directory: `timestamp` (us), `session_id`, `input` (the whole
prompt), `output`. There is no tokenizer here: four characters count as one token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.replay.recorded import FORMAT as RECORDED_FORMAT
from kvtier.replay.recorded import read_recorded
from kvtier.replay.trace import Request, Trace

BUNDLED = {
    "mooncake-conversation": "traces/mooncake-conversation.npz",
    "mooncake-synthetic": "traces/mooncake-synthetic.npz",
    "agent-sessions": "agent_sessions",
}
"""Traces in the package, by the name that stands for their path."""

MOONCAKE_BLOCK_TOKENS = 512
WEKA_BLOCK_TOKENS = 64
PROMPTS_BLOCK_TOKENS = 64
CHARACTERS_PER_TOKEN = 4


class TraceFormat(str, Enum):
    AUTO = "auto"
    MOONCAKE = "mooncake"
    WEKA = "weka"
    PROMPTS = "prompts"
    RECORDED = "recorded"
    COMPACT = "compact"


def bundled_path(name: str) -> Path:
    return Path(__file__).parents[1] / "data" / BUNDLED[name]


def read_trace(
    source: str, kind: TraceFormat = TraceFormat.AUTO, *, block_tokens: int | None = None, session_gap_s: float = 0.0
) -> Trace:
    """Read a trace by path, or one of BUNDLED by name (a file of that name wins).

    block_tokens: where the format does not say it. session_gap_s: weka sessions have no common clock; session i begins
    at ``i * session_gap_s``.
    """
    path = Path(source).expanduser()
    try:
        if not path.exists() and source in BUNDLED:
            path, kind = bundled_path(source), TraceFormat.AUTO
        if not path.exists():
            raise ConfigError(
                f"trace {source!r} does not exist; give a file, a directory or one of {', '.join(BUNDLED)}"
            )
        if kind is TraceFormat.AUTO:
            kind = _detect(path)
        if kind is TraceFormat.COMPACT:
            return Trace.load(path)
        if kind is TraceFormat.RECORDED:
            return read_recorded(path)
        if kind is TraceFormat.WEKA:
            trace = _read_weka(path, session_gap_s)
        elif kind is TraceFormat.PROMPTS:
            trace = _read_prompts(path, block_tokens or PROMPTS_BLOCK_TOKENS)
        else:
            trace = _read_mooncake(path, block_tokens or MOONCAKE_BLOCK_TOKENS)
    except OSError as error:
        raise ConfigError(f"trace {source!r} cannot be read: {error.strerror}; give a readable file") from None
    if not trace.requests:
        raise ConfigError(f"trace {source!r} holds no request; is it of format {kind.value}?")
    return trace


def _detect(path: Path) -> TraceFormat:
    if path.is_dir():
        return TraceFormat.PROMPTS if any(path.glob("*.jsonl")) else TraceFormat.WEKA
    try:
        with path.open("rb") as file:
            head = file.read(1 << 16)
    except OSError as error:
        raise ConfigError(f"trace {str(path)!r} cannot be read: {error.strerror}; give a readable file") from None
    if head.startswith(b"PK"):
        return TraceFormat.COMPACT
    line = head.split(b"\n", 1)[0]
    if RECORDED_FORMAT.encode() in line:
        return TraceFormat.RECORDED
    if b'"timestamp"' in line and b'"requests"' not in line:
        return TraceFormat.PROMPTS if b'"input"' in line else TraceFormat.MOONCAKE
    if b'"requests"' in head:
        return TraceFormat.WEKA
    raise ConfigError(
        f"trace {str(path)!r}: its format cannot be told from its beginning; give --format, one of "
        + ", ".join(f.value for f in TraceFormat if f is not TraceFormat.AUTO)
    )


# -- mooncake --------------------------------------------------------------------------------------------------------


def _read_mooncake(path: Path, block_tokens: int) -> Trace:
    requests = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"trace {str(path)!r}, line {number}"
            entry = _object(line, where)
            requests.append(
                Request(
                    _number(entry, "timestamp", where) / 1000,
                    int(_number(entry, "input_length", where)),
                    int(_number(entry, "output_length", where)),
                    _ids(entry, where),
                    number,
                )
            )
    return Trace.of(requests, block_tokens)


# -- weka ------------------------------------------------------------------------------------------------------------


def _read_weka(path: Path, session_gap_s: float) -> Trace:
    requests: list[Request] = []
    block_ids: dict[tuple[int, int], int] = {}
    block_tokens: int | None = None
    for number, (where, session) in enumerate(_weka_sessions(path)):
        size = int(_number(session, "block_size", where, WEKA_BLOCK_TOKENS))
        if block_tokens not in (None, size):
            raise ConfigError(
                f"{where}: block_size {size}, but {block_tokens} in the sessions before it; replay them apart"
            )
        block_tokens = size
        scope = session.get("hash_id_scope", "local")
        if scope not in ("local", "global"):
            raise ConfigError(f"{where}: hash_id_scope {scope!r} must be local or global")
        space = number if scope == "local" else -1
        last_t, last_api_s = 0.0, 0.0
        for place, (t, entry) in enumerate(sorted(_weka_requests(session, where), key=lambda r: r[0])):
            api_s = _number(entry, "api_time", where, 0.0)
            think_s = _number(entry, "think_time", where, max(0.0, t - last_t - last_api_s)) if place else 0.0
            blocks = [block_ids.setdefault((space, b), len(block_ids)) for b in _ids(entry, where)]
            requests.append(
                Request(
                    number * session_gap_s + t,
                    int(_number(entry, "in", where)),
                    int(_number(entry, "out", where, 0)),
                    blocks,
                    number,
                    think_s,
                )
            )
            last_t, last_api_s = t, api_s
    return Trace.of(requests, block_tokens or WEKA_BLOCK_TOKENS)


def _weka_sessions(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    for file in files:
        text = file.read_bytes()
        where = f"trace {str(file)!r}"
        try:
            whole = json.loads(text)
        except ValueError as error:
            lines = text.splitlines()
            if path.is_dir() or len(lines) < 2:
                raise ConfigError(f"{where}: not JSON: {error}") from None
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{where}, line {number}", _object(line, f"{where}, line {number}")
            continue
        for session in whole if isinstance(whole, list) else [whole]:
            yield where, _a_dict(session, where)


def _weka_requests(session: dict[str, Any], where: str) -> Iterator[tuple[float, dict[str, Any]]]:
    for entry in _entries(session, where):
        t = _number(entry, "t", where)
        if "in" in entry:
            yield t, entry
        if "requests" not in entry:
            continue
        inner = list(_weka_requests(entry, where))
        # Recordings differ: times of a subagent count from its own start, or, like its own, from the session's.
        shift = t if inner and min(r[0] for r in inner) < t else 0.0
        for inner_t, request in inner:
            yield inner_t + shift, request


def _entries(session: dict[str, Any], where: str) -> list[dict[str, Any]]:
    entries = session.get("requests")
    if not isinstance(entries, list):
        raise ConfigError(f"{where}: a session must have a list 'requests', got {type(entries).__name__}")
    return [_a_dict(entry, where) for entry in entries]


# -- prompts ----------------------------------------------------------------------------------------------------------


def _read_prompts(path: Path, block_tokens: int) -> Trace:
    requests = []
    size = block_tokens * CHARACTERS_PER_TOKEN
    ids: dict[tuple[int, str], int] = {}
    sessions: dict[str, int] = {}
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        for number, line in enumerate(file.read_bytes().splitlines(), 1):
            where = f"trace {str(file)!r}, line {number}"
            entry = _object(line, where)
            text, output = _text(entry, "input", where), _text(entry, "output", where)
            chain = [-1]
            for at in range(0, len(text), size):
                chain.append(ids.setdefault((chain[-1], text[at : at + size]), len(ids)))
            session = _text(entry, "session_id", where)
            requests.append(
                Request(
                    _number(entry, "timestamp", where) / 1e6,
                    -(-len(text) // CHARACTERS_PER_TOKEN),
                    -(-len(output) // CHARACTERS_PER_TOKEN),
                    chain[1:],
                    sessions.setdefault(session, len(sessions)),
                )
            )
    return Trace.of(requests, block_tokens)


# -- fields ----------------------------------------------------------------------------------------------------------


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        return _a_dict(json.loads(line), where)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: not JSON: {error}") from None


def _a_dict(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: must be a JSON object, got {type(value).__name__}")
    return value


def _number(entry: dict[str, Any], field: str, where: str, default: float | None = None) -> float:
    value = entry.get(field)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**53:
        raise ConfigError(f"{where}: {field!r} = {value!r} must be a number from 0 up")
    return value


def _ids(entry: dict[str, Any], where: str) -> list[int]:
    values = entry.get("hash_ids", [])
    if not isinstance(values, list) or not all(isinstance(v, int) and -(2**63) <= v < 2**63 for v in values):
        raise ConfigError(f"{where}: 'hash_ids' must be a list of integers of at most 64 bits")
    return values


def _text(entry: dict[str, Any], field: str, where: str) -> str:
    value = entry.get(field)
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {field!r} must be a text, got {type(value).__name__}")
    return value
