"""How long it may take to find the servers, where some of them hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvtier.abc.tier import GetStatus, PutStatus

pytest.importorskip("redis", reason="redis-py is not installed: pip install 'kvtier[redis]'")

from kvtier.storage_backends.redis import discovery, topology
from kvtier.storage_backends.redis.discovery import SLOTS, DiscoveryError, ServerFacts, SlotRange
from kvtier.storage_backends.redis.options import Address, RedisMode, RedisOptions
from kvtier.storage_backends.redis.tier import RedisTier
from kvtier.storage_backends.redis.topology import Topology
from tests.redis_pages import PATIENCE_S, get, put
from tests.scripted_redis import Link, ScriptedServer

SEEDS = [Address(name, 1) for name in "abcd"]


class Asked:
    """Servers by a clock of their own: all of them hang but `alive`. asked: whom, and how long that one was given."""

    def __init__(self, patch: pytest.MonkeyPatch, alive: str = "") -> None:
        self.alive = alive
        self.now = 1000.0
        self.asked: list[tuple[str, float]] = []
        for module in (discovery, topology):
            patch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now

    def answering(self, reply: Any) -> Callable[..., Any]:
        def ask(address: Address, options: RedisOptions, timeout_s: float) -> Any:
            self.asked.append((address.host, timeout_s))
            if address.host in self.alive:
                return reply
            self.now += timeout_s
            raise DiscoveryError(f"{address}: no answer")

        return ask


def picture(mode: str) -> Topology:
    return Topology(RedisOptions.of("redis://" + ",".join(map(str, SEEDS)), mode=mode, service="s"))


def test_servers_that_hang_take_no_longer_than_the_call_has(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Asked(monkeypatch)
    monkeypatch.setattr(topology, "ask_slots", servers.answering([]))
    with pytest.raises(DiscoveryError, match="a:1: no answer; b:1: no answer; c:1: no answer; d:1: no answer"):
        picture("cluster").refresh(2.0)
    assert servers.now == pytest.approx(1002.0)
    assert [host for host, _ in servers.asked] == ["a", "b", "c", "d"]


def test_a_call_in_a_hurry_gives_one_server_a_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Asked(monkeypatch)
    monkeypatch.setattr(topology, "ask_slots", servers.answering([]))
    Topology.refresh_if_due(picture("cluster"), 1000.15)
    assert [(host, round(share_s, 3)) for host, share_s in servers.asked] == [("a", 0.1), ("b", 0.05)]
    with pytest.raises(DiscoveryError, match="no time left"):
        picture("cluster").refresh(0.0)


def test_the_last_server_is_found_behind_those_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mode first, and then its slots: what was not needed for the one is there for the other."""
    servers = Asked(monkeypatch, alive="d")
    facts = ServerFacts("7.0", RedisMode.CLUSTER, "master", 0, "", 0)
    monkeypatch.setattr(topology, "ask_facts", servers.answering(facts))
    monkeypatch.setattr(topology, "ask_slots", servers.answering([SlotRange(0, SLOTS - 1, SEEDS[3])]))
    found = picture("auto")
    found.refresh(2.0)
    assert [node.address.host for node in found.nodes()] == ["d"]
    assert [host for host, _ in servers.asked] == ["a", "b", "c", "d"] * 2
    assert servers.now < 1002.0


def test_sentinels_share_the_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Asked(monkeypatch)
    ask = servers.answering(None)
    monkeypatch.setattr(discovery, "_client", lambda *arguments, sentinel: ask(*arguments))
    with pytest.raises(DiscoveryError, match="d:1: no answer"):
        picture("sentinel").refresh(2.0)
    assert servers.now == pytest.approx(1002.0)


NONSENSE = {
    "ok": b"+OK\r\n",
    "number": b":5\r\n",
    "nothing": b"$-1\r\n",
    "no rows": b"*0\r\n",
    "a row that is none": b"*1\r\n:1\r\n",
    "text": b"$3\r\nabc\r\n",
    "no list": b"*-1\r\n",
    "slots without numbers": b"*1\r\n*3\r\n:0\r\n+x\r\n*2\r\n+a\r\n:7000\r\n",
    "too many slots": b"*1\r\n*3\r\n:0\r\n:99999\r\n*2\r\n+a\r\n:7000\r\n",
    "no such port": b"*1\r\n*3\r\n:0\r\n:5\r\n*2\r\n+a\r\n:70000\r\n",
    "no name": b"*1\r\n*3\r\n:0\r\n:5\r\n*2\r\n$1\r\n\xff\r\n:7000\r\n",
    "unknown mode": b"$16\r\nredis_mode:weird\r\n",
    "address without port": b"*1\r\n+a\r\n",
    "port without number": b"*2\r\n+a\r\n+x\r\n",
    "lists in lists": b"*1\r\n" * 3000,
    "a length beyond all": b"$999999999999999999999999999\r\n",
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "error": b"-ERR no\r\n",
}


@pytest.mark.parametrize("reply", NONSENSE.values(), ids=NONSENSE)
@pytest.mark.parametrize("mode", ["auto", "cluster", "sentinel", "standalone"])
def test_a_server_that_answers_nonsense_is_a_miss(mode: str, reply: bytes) -> None:
    """Whatever it is asked: nothing is raised, nothing is found."""

    def script(link: Link) -> None:
        while link.next():
            link.send(reply)

    server = ScriptedServer(*[script] * 60)
    tier = RedisTier(RedisOptions.of(server.url, mode=mode, service="s", timeout_s=PATIENCE_S))
    for _ in range(2):
        assert set(put(tier, range(3))) <= {PutStatus.FAILED, PutStatus.EXISTS, PutStatus.STORED}
        assert GetStatus.HIT not in get(tier, range(3))
        assert not any(tier.contains_many([bytes(32)]))
    tier.close()
    assert tier.counters().open_connections == 0
    server.close()


def test_names_that_are_none_are_not_found() -> None:
    tier = RedisTier(RedisOptions.of("redis://a..b:1", timeout_s=PATIENCE_S))
    assert get(tier, range(1)) == [GetStatus.FAILED]
    tier.close()
    tier = RedisTier(RedisOptions.of("redis://a..b:1", mode="standalone", timeout_s=PATIENCE_S))
    assert put(tier, range(1)) == [PutStatus.FAILED]
    tier.close()
