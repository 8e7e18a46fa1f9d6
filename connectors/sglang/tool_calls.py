"""Tool calls: while a request's tool runs nobody reads its cache, and its next turn begins with it.

`begin` has the pages of a request that has ended written to the lower tiers at once; `end` brings what is in them up
into host memory again, before the turn that needs it is queued. Both come from whoever runs the tools, over HTTP
(`handle`, on the connector's own port, in that server's threads) or from Python (`ToolCalls`, which asks this port).
The engine is never waited for, and nothing is decided by a hint: one that is lost, late or wrong costs time.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from email.message import Message
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter

from kvtier.errors import ConfigError
from kvtier.store import TieredStore

PATH = "/tool-call"
EVENTS = ("begin", "end")
BODY_BYTES_MAX = 4 << 20
FORWARDED = "X-KVTier-Forwarded"
_TOKENS_MAX = 1 << 20  # of one hint
_REMEMBERED_TOKENS = 2 << 20  # of requests that ended: 16 MiB
_FORWARD_S = 2.0


@dataclass(frozen=True, slots=True)
class Found:
    """What a hint meant: the pages of its prefix, those in host memory, and those that only lower tiers may have."""

    pages: int
    host: int
    below: int


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens, in pieces, and what else SGLang's page hashes chain."""

    pieces: tuple[Sequence[int], ...]
    extra_key: str | None = None
    cache_salt: str | None = None

    def __len__(self) -> int:
        return sum(map(len, self.pieces))


def hash_text(text: Text, page_tokens: int) -> list[str]:
    """SGLang's hashes of the full pages of a text."""
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    tokens = array("q")
    for piece in text.pieces:
        tokens.extend(piece)
    del tokens[len(tokens) // page_tokens * page_tokens :]
    if not tokens:
        return []
    key = RadixKey(token_ids=tokens, extra_key=text.extra_key, cache_salt=text.cache_salt)
    hashes: list[str] = get_storage_hash_str(key, None, page_size=page_tokens)
    return hashes


class Hints:
    """What this rank does with hints. `ended` and `expire` are for the scheduler's thread, the rest for any.

    keys_of: the page keys, in every pool, of a text. lease_s: how long pages are kept for a turn that was announced.
    others: ports of the ranks of this node that are to hear of what this one is told.
    """

    def __init__(
        self,
        store: TieredStore,
        keys_of: Callable[[Text], list[list[bytes]]],
        registry: CollectorRegistry,
        *,
        lease_s: float,
        others: Sequence[int] = (),
    ) -> None:
        self._store = store
        self._keys_of = keys_of
        self._lease_s = lease_s
        self._others = tuple(others)
        self._lock = threading.Lock()
        self._ended: OrderedDict[str, Text] = OrderedDict()
        self._tokens = 0
        self._kept: OrderedDict[str, tuple[float, int]] = OrderedDict()  # until when, and lookups
        self._numbers = 0
        self._events = Counter("kvtier_tool_calls", "Hints of tool calls", ["event"], registry=registry)
        self._pages = Counter(
            "kvtier_tool_call_pages", "Pages of announced turns by where they were", ["found"], registry=registry
        )
        for event in EVENTS:
            self._events.labels(event)
        for found in ("host", "below", "absent"):
            self._pages.labels(found)

    def ended(self, rid: str, text: Text) -> None:
        """A request has ended: hints may name it from now on."""
        with self._lock:
            old = self._ended.pop(rid, None)
            self._ended[rid] = text
            self._tokens += len(text) - (0 if old is None else len(old))
            while self._tokens > _REMEMBERED_TOKENS and len(self._ended) > 1:
                self._tokens -= len(self._ended.popitem(last=False)[1])

    def expire(self) -> None:
        """Let go of pages whose turn has not come. Called at each scheduling step."""
        if not self._kept:
            return
        now = time.monotonic()
        while True:
            with self._lock:
                name = next(iter(self._kept), None)
                if name is None or self._kept[name][0] > now:
                    return
                _, lookups = self._kept.pop(name)
            self._let_go(name, lookups)

    def begin(self, text: Text) -> Found:
        """Its tool runs: its pages are written below, so that host memory need not be kept for them."""
        pools = self._keys_of(text)
        for keys in pools:
            self._store.write_down(keys)
        self._events.labels("begin").inc()
        here, anywhere = self._store.may_have(pools[0])
        return Found(len(here), sum(here), sum(anywhere) - sum(here))

    def end(self, text: Text) -> Found:
        """Its next turn is about to come: its pages come up, and stay for a while."""
        pools = self._keys_of(text)
        with self._lock:
            self._numbers += 1
            name = f"tool-call\0{self._numbers}"
        here = below = 0
        for n, keys in enumerate(pools):
            lookup = self._store.lookup(f"{name}.{n}", keys, sparse=n > 0, counted=False)
            if n == 0:
                below = len(lookup.loading)
                here = lookup.ready_pages
        with self._lock:
            self._kept[name] = (time.monotonic() + self._lease_s, len(pools))
        self._events.labels("end").inc()
        pages = len(pools[0])
        for label, count in (("host", here), ("below", below), ("absent", pages - here - below)):
            self._pages.labels(label).inc(max(0, count))
        return Found(pages, here, below)

    def _let_go(self, name: str, lookups: int) -> None:
        for n in range(lookups):
            self._store.settle(f"{name}.{n}", loaded=False)

    def handle(self, body: bytes, headers: Message) -> tuple[HTTPStatus, bytes]:
        """Answer one POST; a thread of the HTTP server's."""
        try:
            asked = json.loads(body)
            event, text = self._parse(asked)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            return HTTPStatus.BAD_REQUEST, f"{error}\n".encode()
        if text is None:
            reason = "no request of this rid has ended here lately: give its token_ids\n"
            return HTTPStatus.NOT_FOUND, reason.encode()
        found = self.begin(text) if event == "begin" else self.end(text)
        if FORWARDED not in headers:
            for port in self._others:
                arguments = (port, body, headers.get("Authorization"))
                threading.Thread(target=_forward, args=arguments, daemon=True).start()
        return HTTPStatus.OK, json.dumps(asdict(found)).encode()

    def _parse(self, asked: Any) -> tuple[str, Text | None]:
        if not isinstance(asked, dict) or asked.get("event") not in EVENTS:
            raise ValueError('give {"event": "begin" or "end", "rid": ...}, or "token_ids" in place of "rid"')
        if unknown := sorted(set(asked) - {"event", "rid", "token_ids", "extra_key", "cache_salt"}):
            raise ValueError(f"unknown: {', '.join(unknown)}")
        if not isinstance(extra := asked.get("extra_key"), str | None):
            raise ValueError("extra_key must be text")
        if not isinstance(salt := asked.get("cache_salt"), str | None):
            raise ValueError("cache_salt must be text")
        if "token_ids" in asked:
            ids = asked["token_ids"]
            if not isinstance(ids, list) or len(ids) > _TOKENS_MAX:
                raise ValueError(f"token_ids must be a list of at most {_TOKENS_MAX} integers")
            if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1 << 31 for i in ids):
                raise ValueError("token_ids must be token ids")
            return asked["event"], Text((array("q", ids),), extra, salt)
        if not isinstance(asked.get("rid"), str):
            raise ValueError("rid must be text")
        with self._lock:
            return asked["event"], self._ended.get(asked["rid"])


def _forward(port: int, body: bytes, authorization: str | None) -> None:
    """Best effort: a rank that does not hear of it brings the pages up when they are asked for."""
    headers = {"Content-Type": "application/json", FORWARDED: "1"}
    if authorization is not None:
        headers["Authorization"] = authorization
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_FORWARD_S)
    try:
        connection.request("POST", PATH, body, headers)
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return
    finally:
        connection.close()


class ToolCalls:
    """For the program that runs the tools: tells the connector at `url`, such as ``http://127.0.0.1:9404`` (the first
    rank's port), what its requests wait for. `token`: where the port needs one. Calls take milliseconds and raise
    OSError where nobody answers, KeyError for a request that is not known there."""

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 2.0) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ConfigError(f"url = {url!r}: give the port of the http block, such as http://127.0.0.1:9404")
        self._address = parts.hostname, parts.port or 80
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout_s = timeout_s

    def on_tool_call_begin(self, rid: str) -> Found:
        """The request `rid` has ended in a tool call."""
        return self._tell(event="begin", rid=rid)

    def on_tool_call_end(self, rid: str | None = None, token_ids: Iterable[int] | None = None, **more: str) -> Found:
        """The next turn of `rid`, or one that begins with `token_ids`, is about to be sent. more: its extra_key and
        cache_salt, with token ids."""
        if (rid is None) == (token_ids is None):
            raise ConfigError("give rid or token_ids, one of the two")
        named: dict[str, Any] = {"rid": rid} if token_ids is None else {"token_ids": list(token_ids), **more}
        return self._tell(event="end", **named)

    def _tell(self, **asked: Any) -> Found:
        connection = http.client.HTTPConnection(*self._address, timeout=self._timeout_s)
        try:
            connection.request("POST", PATH, json.dumps(asked), self._headers)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status == HTTPStatus.NOT_FOUND:
            raise KeyError(body.decode(errors="replace").strip())
        if answer.status != HTTPStatus.OK:
            raise OSError(f"HTTP {answer.status}: {body.decode(errors='replace').strip()}")
        return Found(**json.loads(body))
