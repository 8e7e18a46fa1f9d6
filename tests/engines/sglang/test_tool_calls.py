"""Hints of tool calls: over HTTP and from Python; pages go down at once and come up before they are needed."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("engine_hooks")

TOKENS = list(range(5, 133))
PATIENCE_S = 60.0
"""For answers over HTTP: a machine may stall."""


def post(engine: Any, body: bytes, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", engine.linker._http.port, timeout=PATIENCE_S)
    try:
        connection.request("POST", "/tool-call", body, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def block(nvme: Path | None = None, **more: Any) -> dict[str, Any]:
    from .harness import config

    return config(nvme, http={"port": 0}, **more)


def ended(engine: Any, rid: str, tokens: list[int], **more: Any) -> None:
    """A request whose last tokens were generated has ended."""
    from types import SimpleNamespace

    from kvtier.connectors.sglang import hold

    req = engine.new_request(rid, tokens[:-20], **more)
    req.origin_input_ids.pop()  # the token that is still to be computed
    req.output_ids.extend(tokens[len(req.origin_input_ids) :])
    req.finished = lambda: True
    batch = SimpleNamespace(reqs=[req], forward_mode=SimpleNamespace(is_extend=lambda: False))
    hold.batch_done(None, SimpleNamespace(tree_cache=engine.cache), batch, None)


def test_an_announced_turn_finds_its_pages_in_host_memory(start: Any, tiny: Path, tmp_path: Path) -> None:
    from kvtier.connectors.sglang.tool_calls import ToolCalls

    from .harness import same, until

    first = start(tiny, block(tmp_path))
    computed = first.compute(TOKENS)
    first.close()

    engine = start(tiny, block(tmp_path))
    tools = ToolCalls(engine.linker._http.url, timeout_s=PATIENCE_S)
    with pytest.raises(KeyError, match="token_ids"):
        tools.on_tool_call_end("r")
    found = tools.on_tool_call_end(token_ids=[*TOKENS, 7, 7])
    assert (found.pages, found.host, found.below) == (8, 0, 8)
    host = engine.linker._store.host
    until(lambda: host.usage().resident_pages == 8)
    assert engine.linker._store.may_have(engine.linker._keys_of(_text(TOKENS))[0])[0] == [True] * 8
    assert engine.counts.lookups == 0  # nothing was asked for by a request
    found = tools.on_tool_call_end(token_ids=TOKENS)
    assert (found.pages, found.host, found.below) == (8, 8, 0)

    restored = engine.admit(engine.request("next", TOKENS))
    assert restored.loaded == len(TOKENS) and same(restored.forward(), computed, len(TOKENS)) and restored.finish()
    assert engine.counts.hits == {"host": 8, "nvme": 0}
    metrics = engine.linker.ledger.registry.get_sample_value
    assert metrics("kvtier_tool_calls_total", {"event": "end"}) == 2
    assert metrics("kvtier_tool_call_pages_total", {"found": "below"}) == 8
    _let_go(engine)
    engine.assert_nothing_held()


def test_a_request_that_ended_is_named_by_its_id(start: Any, tiny: Path) -> None:
    from kvtier.connectors.sglang.tool_calls import ToolCalls

    engine = start(tiny, block())
    engine.compute(TOKENS, extra_key="k", salt="s")
    ended(engine, "turn", TOKENS, extra_key="k", salt="s")
    tools = ToolCalls(engine.linker._http.url, timeout_s=PATIENCE_S)
    found = tools.on_tool_call_begin("turn")
    assert (found.pages, found.host) == (8, 8)
    assert tools.on_tool_call_end("turn").host == 8
    ended(engine, "other", TOKENS)
    assert tools.on_tool_call_end("other").host == 0  # another tenant's
    _let_go(engine)
    engine.assert_nothing_held()


def test_pages_that_are_written_back_go_down_when_the_tool_begins(start: Any, tiny: Path, tmp_path: Path) -> None:
    from kvtier.connectors.sglang.tool_calls import ToolCalls

    from .harness import until

    given = block(tmp_path)
    given["tiers"][1]["write"] = "back"
    engine = start(tiny, given)
    engine.compute(TOKENS)
    below = engine.linker._store.lower[0]
    assert below.usage().resident_pages == 0
    ended(engine, "turn", TOKENS)
    ToolCalls(engine.linker._http.url, timeout_s=PATIENCE_S).on_tool_call_begin("turn")
    until(lambda: below.usage().resident_pages == 8)


def test_pages_for_a_turn_that_never_comes_make_room_again(start: Any, tiny: Path) -> None:
    from kvtier.connectors.sglang.tool_calls import ToolCalls

    engine = start(tiny, block(lease="50ms"))
    engine.compute(TOKENS)
    tools = ToolCalls(engine.linker._http.url, timeout_s=PATIENCE_S)
    tools.on_tool_call_end(token_ids=TOKENS)
    assert len(engine.linker._store.open_requests()) == 1 and engine.linker._open_requests() == 0
    _let_go(engine)
    assert engine.linker._store.open_requests() == []
    for n in range(3):
        tools.on_tool_call_end(token_ids=TOKENS[: 32 * (n + 1)])
    engine.flush()
    engine.assert_nothing_held()


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, ""),
        (b"[1]", 400, "give"),
        (b'{"event": "middle", "rid": "r"}', 400, "give"),
        (b'{"event": "end"}', 400, "rid"),
        (b'{"event": "end", "rid": 3}', 400, "rid"),
        (b'{"event": "end", "rid": "unknown"}', 404, "token_ids"),
        (b'{"event": "end", "token_ids": [1, -2]}', 400, "token ids"),
        (b'{"event": "end", "token_ids": [1.5]}', 400, "token ids"),
        (b'{"event": "end", "token_ids": [true]}', 400, "token ids"),
        (b'{"event": "end", "token_ids": "text"}', 400, "list"),
        (b'{"event": "end", "token_ids": [1], "cache_salt": 1}', 400, "cache_salt"),
        (b'{"event": "end", "token_ids": [1], "model": "x"}', 400, "unknown: model"),
        (b'{"event": "end", "token_ids": []}', 200, ""),
        (b'{"event": "end", "token_ids": ' + b"[" * 100_000, 400, ""),
    ],
)
def test_what_is_no_hint_is_answered_in_words(start: Any, tiny: Path, body: bytes, status: int, words: str) -> None:
    engine = start(tiny, block())
    got, text = post(engine, body)
    assert got == status and words in text.decode()


def test_the_port_takes_hints_of_those_only_who_may_send_them(
    start: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_HTTP_TOKEN", "secret")
    hint = json.dumps({"event": "end", "token_ids": TOKENS}).encode()
    engine = start(tiny, block())
    assert post(engine, hint)[0] == 401
    assert post(engine, hint, Authorization="Bearer wrong")[0] == 401
    assert post(engine, hint, Authorization="Bearer secret")[0] == 200
    from kvtier.connectors.sglang.tool_calls import ToolCalls

    url = engine.linker._http.url
    assert ToolCalls(url, token="secret", timeout_s=PATIENCE_S).on_tool_call_end(token_ids=TOKENS).pages == 8
    with pytest.raises(OSError, match="401"):
        ToolCalls(url, timeout_s=PATIENCE_S).on_tool_call_end(token_ids=TOKENS)
    engine.close()
    monkeypatch.delenv("KVTIER_HTTP_TOKEN")
    engine = start(tiny, block())
    assert post(engine, hint, **{"Content-Type": "text/plain"})[0] == 415  # what a page of a browser may send
    assert post(engine, hint, Host="evil.example")[0] == 403
    assert post(engine, b"", **{"Content-Length": str(5 << 20)})[0] == 413  # before anything of it is read


def _text(tokens: list[int]) -> Any:
    from kvtier.connectors.sglang.tool_calls import Text

    return Text((tokens,))


def _let_go(engine: Any) -> None:
    """As after the lease."""
    hints = engine.linker._hints
    hints._kept = type(hints._kept)((name, (0.0, lookups)) for name, (_, lookups) in hints._kept.items())
    engine.linker.drop_all_but(())
