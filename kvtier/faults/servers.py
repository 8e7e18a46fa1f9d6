"""A Redis (or Valkey) server that freezes, is killed, comes back empty, and holds what nobody put there."""

from __future__ import annotations

import time

from kvtier.abc.tier import GetStatus, PutStatus, Tier
from kvtier.errors import MissingExtraError
from kvtier.faults.trial import PATIENCE_S, Trial, UnavailableError, expect
from kvtier.testing.pages import key_of
from kvtier.testing.redis_servers import RedisServer, ask, find_server, wait_for

PAGES = 12
PAGE_BYTES = 20_000
TIMEOUT_S = 0.5
_MARGIN_S = 30.0
"""What a busy machine may add to a deadline."""


def freeze_and_kill_redis(trial: Trial) -> None:
    """Promises: a frozen server costs misses, each call ends by its deadline; a killed one too; both come back by
    themselves; values that were swapped or changed on the server are misses."""
    if find_server() is None:
        raise UnavailableError("neither redis-server nor valkey-server is installed")
    server = RedisServer(trial.folder / "server")
    trial.outside.append(server.stop)
    try:
        tier = _tier(server.url)
        try:
            _try(trial, server, tier)
        finally:
            server.thaw()
            tier.close()
    finally:
        server.stop()


def _try(trial: Trial, server: RedisServer, tier: Tier) -> None:
    numbers = range(PAGES)
    expect(set(trial.put(tier, numbers, PAGE_BYTES)) == {PutStatus.STORED}, "a good server does not take pages")
    expect(set(trial.get(tier, numbers, PAGE_BYTES)) == {GetStatus.HIT}, "a good server does not give pages")

    changed = trial.rng.sample(numbers, 3)
    one, other, third = (f"kvtier:1:{key_of(n).hex()}" for n in changed)
    for source, target in ((one, "between"), (other, one), ("between", other)):
        ask(server.port, "RENAME", source, target)
    ask(server.port, "SETRANGE", third, str(200 + trial.rng.randrange(1000)), "kvtier torture")
    found = trial.get(tier, changed, PAGE_BYTES)
    expect(GetStatus.HIT not in found, f"changed values are answered with {found}")
    trial.seen["values changed"] += 3

    left = [n for n in numbers if n not in changed]
    server.freeze()
    trial.seen["freezes"] += 1
    for _ in range(3):
        _in_time(trial, tier, left)
    server.thaw()
    _until_hit(trial, tier, left)

    server.stop()
    trial.seen["kills"] += 1
    for _ in range(3):
        _in_time(trial, tier, left)
    server.start()  # empty
    wait_for(
        lambda: trial.put(tier, [1000], PAGE_BYTES) in ([PutStatus.STORED], [PutStatus.EXISTS]),
        "pages were not taken again by a server that came back",
        PATIENCE_S,
    )
    _until_hit(trial, tier, [1000])
    found = trial.get(tier, left, PAGE_BYTES)
    expect(set(found) == {GetStatus.ABSENT}, f"a server that came back empty answers {set(found)}")


def _in_time(trial: Trial, tier: Tier, numbers: list[int]) -> None:
    """A get and a put end by their deadline, with neither hit nor exception."""
    started = time.monotonic()
    found = trial.get(tier, numbers, PAGE_BYTES)
    put = trial.put(tier, [2000], PAGE_BYTES)
    took_s = time.monotonic() - started
    expect(GetStatus.HIT not in found and PutStatus.STORED not in put, "a dead server answered")
    expect(took_s < 2 * TIMEOUT_S + _MARGIN_S, f"calls to a dead server took {took_s:.1f} s")


def _until_hit(trial: Trial, tier: Tier, numbers: list[int]) -> None:
    wait_for(
        lambda: set(trial.get(tier, numbers, PAGE_BYTES)) == {GetStatus.HIT},
        "pages did not come back with their server",
        PATIENCE_S,
    )


def _tier(url: str) -> Tier:
    try:
        from kvtier.storage_backends.redis.options import RedisOptions
        from kvtier.storage_backends.redis.tier import RedisTier

        return RedisTier(RedisOptions.of(url, timeout_s=TIMEOUT_S))
    except MissingExtraError as error:
        raise UnavailableError(str(error)) from None
