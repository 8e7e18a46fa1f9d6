"""The agent sessions that the demo serves: real prompts and outputs, turn by turn, as if their users came together."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any

from kvtier.errors import ConfigError

_FOLDER = "agent_sessions"


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. session: a short name. number: from 1. at_s: seconds since its session began. prompt: the whole
    prompt so far. output: what the agent's model answered; the demo feeds it back instead of sampling."""

    session: str
    number: int
    at_s: float
    prompt: str
    output: str


@dataclass(frozen=True, slots=True)
class Request:
    """A turn in tokens."""

    turn: Turn
    prompt: list[int]
    output: list[int]


def tokenized(turns: Iterable[Turn], tokenizer: Any) -> list[Request]:
    return [Request(turn, tokenizer(turn.prompt)["input_ids"], tokenizer(turn.output)["input_ids"]) for turn in turns]


def load_turns(sessions: int | None = None, turns: int | None = None) -> list[Turn]:
    """The first `sessions` of the shipped sessions, `turns` of each (None: all), in the order in which the requests
    would arrive if all sessions had begun at the same moment. Raises ConfigError for numbers that cannot be met."""
    folder = resources.files("kvtier.data").joinpath(_FOLDER)
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".jsonl")), key=lambda f: f.name)
    if sessions is not None and not 1 <= sessions <= len(files):
        raise ConfigError(f"--sessions {sessions}: give a number from 1 to {len(files)}")
    if turns is not None and turns < 1:
        raise ConfigError(f"--turns {turns}: give a number from 1 up")
    merged: list[Turn] = []
    for file in files[:sessions]:
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        merged += _of_session(records)[:turns]
    return sorted(merged, key=lambda turn: (turn.at_s, turn.session))


def _of_session(records: list[dict[str, Any]]) -> list[Turn]:
    ordered = sorted(records, key=lambda record: record["timestamp"])
    start = ordered[0]["timestamp"]
    return [
        Turn(r["session_id"][:6], number, (r["timestamp"] - start) / 1e6, r["input"], r["output"])
        for number, r in enumerate(ordered, 1)
    ]
