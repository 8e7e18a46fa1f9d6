"""What a subscriber of the events sees, decoded as routers do: with msgpack alone."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvtier.abc.tier import PageMeta, Removal, Slot
from kvtier.build import open_store
from kvtier.config import parse_config
from kvtier.errors import ConfigError
from kvtier.keys import checksum
from kvtier.kv_events import BlockRemoved, BlockStored, EventOptions, KVEventBatch, KvEvents, Publisher, block_hash
from kvtier.observe import Watch
from kvtier.server.app import CacheServer
from kvtier.server.options import ServerOptions
from kvtier.store import TieredStore

PATIENCE_S = 60.0
NBYTES = 4096
SPEC = bytes(range(16))
HELLO = BlockRemoved([1 << 40], "hello")


class Subscriber:
    """Connected, and known to be heard, once `meet` returned."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.linger = 0
        self.socket.subscribe(b"")
        self.socket.connect(endpoint)
        self.numbers: list[int] = []
        self.batches: list[Any] = []
        self._waiting: list[dict[str, Any]] = []

    def meet(self, publisher: Publisher) -> None:
        for _ in range(int(PATIENCE_S / 0.05)):
            publisher.publish(HELLO)
            if self.socket.poll(50):
                return
        raise AssertionError(f"nothing of {publisher.endpoint} arrived in {PATIENCE_S} s")

    def receive(self) -> tuple[bytes, int, Any]:
        assert self.socket.poll(int(PATIENCE_S * 1000)), f"no event in {PATIENCE_S} s, after {self.batches}"
        topic, number, payload = self.socket.recv_multipart()
        return topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)

    def events(self, count: int) -> list[dict[str, Any]]:
        """The next `count`, greetings aside."""
        while len(self._waiting) < count:
            _, number, batch = self.receive()
            self.numbers.append(number)
            self.batches.append(batch)
            self._waiting += [event for event in batch[1] if event.get("medium") != "hello"]
        found, self._waiting = self._waiting[:count], self._waiting[count:]
        return found

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher(EventOptions("tcp://127.0.0.1:*", topic="kv"))
    yield publisher
    publisher.close()


@pytest.fixture
def subscriber(publisher: Publisher) -> Iterator[Subscriber]:
    subscriber = Subscriber(publisher.endpoint)
    subscriber.meet(publisher)
    yield subscriber
    subscriber.close()


def test_batches_have_the_form_that_routers_read(publisher: Publisher, subscriber: Subscriber) -> None:
    publisher.publish(BlockStored([-5, 7], None, [], 16, None, "DISK"))
    publisher.publish(BlockRemoved([7], "DISK"))
    assert subscriber.events(2) == [
        {
            "type": "BlockStored", "block_hashes": [-5, 7], "parent_block_hash": None, "token_ids": [],
            "block_size": 16, "lora_id": None, "medium": "DISK",
        },
        {"type": "BlockRemoved", "block_hashes": [7], "medium": "DISK"},
    ]  # fmt: skip
    assert all(isinstance(batch[0], float) and batch[2] is None for batch in subscriber.batches)
    publisher.publish(HELLO)
    assert subscriber.receive()[0] == b"kv"


def test_the_encoding_is_frozen() -> None:
    batch = KVEventBatch(1.5, [BlockStored([-1], None, [], 64, None, "CPU_PINNED"), BlockRemoved([2], "DISK")])
    assert msgspec.msgpack.encode(batch).hex() == (
        "93cb3ff80000000000009287a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391ffb1706172656e745f626c6f"
        "636b5f68617368c0a9746f6b656e5f69647390aa626c6f636b5f73697a6540a76c6f72615f6964c0a66d656469756daa4350555f50494e"
        "4e454483a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739102a66d656469756da44449534bc0"
    )
    assert block_hash(bytes.fromhex("ff" * 7 + "fe" + "00" * 24)) == -2
    assert block_hash(bytes.fromhex("7f" + "00" * 31)) == 0x7F << 56


def test_numbers_go_on_and_skip_one_where_events_were_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    may_send = threading.Event()
    publisher = Publisher(EventOptions("tcp://127.0.0.1:*", queue=4))
    subscriber = Subscriber(publisher.endpoint)
    try:
        subscriber.meet(publisher)
        publisher.publish(BlockRemoved([1], "DISK"))
        subscriber.events(1)
        before = subscriber.numbers[-1]
        assert subscriber.numbers == list(range(subscriber.numbers[0], before + 1))
        monkeypatch.setattr(publisher, "_socket", _Stuck(publisher._socket, may_send))
        for n in range(10):  # one is being sent, with up to four more; four wait; the rest is lost
            publisher.publish(BlockRemoved([n], "DISK"))
        (dropped,) = [m for m in publisher.collect() if m.name == "kvtier_kv_events_dropped"]
        assert dropped.samples[0].value >= 1
        may_send.set()
        while not any(b - a > 1 for a, b in pairwise(subscriber.numbers)):  # else nothing comes, which is told
            subscriber.numbers.append(subscriber.receive()[1])
    finally:
        may_send.set()
        publisher.close()
        subscriber.close()


def test_a_gap_lies_where_events_were_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    may_send = threading.Event()
    publisher = Publisher(EventOptions("tcp://127.0.0.1:*", queue=4))
    subscriber = Subscriber(publisher.endpoint)
    try:
        subscriber.meet(publisher)
        publisher.publish(BlockRemoved([1], "DISK"))
        subscriber.events(1)  # and no greeting is on its way
        stuck = _Stuck(publisher._socket, may_send)
        monkeypatch.setattr(publisher, "_socket", stuck)
        publisher.publish(BlockRemoved([0], "DISK"))
        assert stuck.entered.wait(PATIENCE_S), "nothing is being sent"
        for n in range(1, 11):
            publisher.publish(BlockRemoved([n], "DISK"))
        (dropped,) = [m for m in publisher.collect() if m.name == "kvtier_kv_events_dropped"]
        assert dropped.samples[0].value == 6
        may_send.set()
        assert [event["block_hashes"] for event in subscriber.events(5)] == [[n] for n in range(5)]
        assert {b - a for a, b in pairwise(subscriber.numbers)} <= {1}, subscriber.numbers
        _, number, batch = subscriber.receive()  # behind all that came before the loss, although nothing follows
        assert number == subscriber.numbers[-1] + 2 and batch[1] == []
        publisher.publish(BlockRemoved([99], "DISK"))
        assert subscriber.events(1)[0]["block_hashes"] == [99] and subscriber.numbers[-1] == number + 1
    finally:
        may_send.set()
        publisher.close()
        subscriber.close()


def test_closing_sends_what_was_told_last(publisher: Publisher, subscriber: Subscriber) -> None:
    subscriber.socket.set_hwm(0)
    for n in range(300):
        publisher.publish(BlockRemoved(list(range(n * 4096, n * 4096 + 4096)), "DISK"))
    publisher.close()
    seen = subscriber.events(300)
    assert [event["block_hashes"][0] for event in seen] == [n * 4096 for n in range(300)]


def test_a_message_is_bounded_and_so_is_what_waits_for_one_who_does_not_read(
    publisher: Publisher, subscriber: Subscriber
) -> None:
    events = KvEvents(publisher)
    events.page_holds(16, SPEC)
    keys = [n.to_bytes(32, "big") for n in range(50_000)]
    metas = [PageMeta(NBYTES, 0, 16, bytes(16), SPEC, key) for key in keys]
    events.stored("host", keys, metas)
    events.removed("host", keys)
    seen = 0
    while seen < 100_000:
        _, _, batch = subscriber.receive()
        hashes = [len(event["block_hashes"]) for event in batch[1] if event.get("medium") != "hello"]
        assert sum(hashes) <= 8192
        seen += sum(hashes)
    assert seen == 100_000
    assert publisher._socket.get_hwm() <= 1000


def test_news_in_another_order_than_they_happened() -> None:
    publisher = _Told()
    here: set[bytes] = set()
    events = KvEvents(publisher, {"host": lambda keys: [key in here for key in keys]})  # type: ignore[arg-type]
    events.page_holds(16, SPEC)
    key, meta = bytes(32), PageMeta(NBYTES, 0, 16, bytes(16), SPEC, bytes(32))
    events.removed("host", [key])  # it came and left, and the news of its leaving are first
    events.stored("host", [key], [meta])
    assert publisher.held() == set()
    here.add(key)  # it came, left, and came again
    events.stored("host", [key], [meta])
    events.stored("host", [key], [meta])
    events.removed("host", [key])
    assert publisher.held() == {("CPU_PINNED", 0)}
    here.clear()
    events.removed("host", [key])
    assert publisher.held() == set()


class _Told:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[BlockStored | BlockRemoved] = []

    def publish(self, event: BlockStored | BlockRemoved) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass

    def held(self) -> set[tuple[str, int]]:
        """What who followed all events believes."""
        held: set[tuple[str, int]] = set()
        for event in self.events:
            for name in event.block_hashes:
                page = (str(event.medium), name)
                assert (page in held) == isinstance(event, BlockRemoved), event
                held.symmetric_difference_update([page])
        return held


@pytest.mark.parametrize("seed", range(3))
def test_who_follows_all_events_knows_what_the_tiers_have(tmp_path: Path, seed: int) -> None:
    told = _Told()
    store = store_with_events(tmp_path)
    try:
        assert isinstance(store.observer, Watch) and store.observer._events is not None
        publisher, store.observer._events.publisher = publisher_of(store), told  # type: ignore[assignment]
        store.observer.page_holds(16, SPEC)
        origins = {checksum(o, bytes(32)) * 2: o for o in (n.to_bytes(32, "little") for n in range(700))}
        keys = list(origins)

        def work(own: int) -> None:
            chance = random.Random(f"{seed} {own}")
            for turn in range(60):
                some = chance.sample(keys, 12)
                match chance.choice(["put", "put", "put", "look", "delete", "purge", "bad"]):
                    case "put":
                        slots = store.reserve(some, [NBYTES] * len(some), PATIENCE_S)
                        found = [(k, s) for k, s in zip(some, slots, strict=True) if isinstance(s, Slot)]
                        metas = [
                            PageMeta(NBYTES, 0, 16, checksum(store.host.view(s), k), SPEC, origins[k]) for k, s in found
                        ]
                        store.commit([k for k, _ in found], [s for _, s in found], metas)
                    case "look":
                        store.wait(store.lookup(f"{own} {turn}", some, sparse=True), PATIENCE_S)
                        store.settle(f"{own} {turn}")
                    case "delete":
                        store.delete(some[:4])
                    case "purge":
                        store.host.delete_many(some)
                    case "bad":
                        store.lower[0].delete_many(some[:2], Removal.QUARANTINED)

        threads = [threading.Thread(target=work, args=(own,)) for own in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), f"still at work after {PATIENCE_S} s"
        assert store.drain(PATIENCE_S)
        have = {
            (medium, block_hash(meta.origin))
            for medium, tier in (("CPU_PINNED", store.host), ("DISK", store.lower[0]))
            for _, meta in tier.scan()
        }
        assert len(have) > 300 and told.held() == have
        publisher.close()
    finally:
        store.close()
    assert told.held() == set()


def test_endpoints_of_others_are_not_taken_over(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    publisher = Publisher(EventOptions(endpoint))
    try:
        with pytest.raises(ConfigError, match="another process listens there"):
            Publisher(EventOptions(endpoint))
        subscriber = Subscriber(endpoint)
        subscriber.meet(publisher)
        subscriber.close()
    finally:
        publisher.close()
    (tmp_path / "events").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as dead:  # left by a process that was killed
        dead.bind(f"{tmp_path}/events")
    Publisher(EventOptions(endpoint)).close()
    with pytest.raises(ConfigError, match="no port"):
        Publisher(EventOptions("tcp://127.0.0.1:99999"))


def test_the_loopback_address_of_version_6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    publisher = Publisher(EventOptions("tcp://[::1]:*"))
    assert publisher.endpoint.startswith("tcp://[::1]:")
    publisher.close()


class _Stuck:
    """A socket that sends nothing before `may_send`."""

    def __init__(self, socket: Any, may_send: threading.Event) -> None:
        self._socket, self._may_send = socket, may_send
        self.entered = threading.Event()

    def send_multipart(self, frames: list[bytes]) -> None:
        self.entered.set()
        assert self._may_send.wait(PATIENCE_S)
        self._socket.send_multipart(frames)

    def close(self, linger: int = 0) -> None:
        self._socket.close(linger=linger)


# ---- a store


def store_with_events(folder: Path) -> TieredStore:
    return open_store(
        parse_config(
            {
                "tiers": [
                    {"type": "host", "capacity": "1MiB"},
                    {"type": "nvme", "path": str(folder), "capacity": "8MiB"},
                ],
                "kv_events": {"endpoint": "tcp://127.0.0.1:*"},
            }
        )
    )


def publisher_of(store: TieredStore) -> Publisher:
    assert isinstance(store.observer, Watch) and store.observer._events is not None
    return store.observer._events.publisher


def put(store: TieredStore, origins: list[bytes], spec: bytes = SPEC) -> list[bytes]:
    keys = [checksum(origin, bytes(32)) * 2 for origin in origins]
    slots = [slot for slot in store.reserve(keys, [NBYTES] * len(keys), PATIENCE_S) if isinstance(slot, Slot)]
    assert len(slots) == len(keys)
    metas = [
        PageMeta(NBYTES, 0, 16, checksum(store.host.view(slot), key), spec, origin)
        for key, slot, origin in zip(keys, slots, origins, strict=True)
    ]
    store.commit(keys, slots, metas)
    return keys


def test_a_store_tells_what_came_to_which_tier_and_what_left(tmp_path: Path) -> None:
    store = store_with_events(tmp_path)
    subscriber = Subscriber(publisher_of(store).endpoint)
    try:
        subscriber.meet(publisher_of(store))
        store.observer.page_holds(16, SPEC)
        origins = [bytes([n]) * 32 for n in (1, 2, 200)]
        hashes = [block_hash(origin) for origin in origins]
        keys = put(store, origins)
        put(store, [b"\x09" * 32], spec=bytes(16))  # a pool beside the main one
        put(store, [b""])  # not an engine's
        assert store.flush(PATIENCE_S)
        seen = subscriber.events(2)
        assert {(e["type"], e["medium"]) for e in seen} == {("BlockStored", "CPU_PINNED"), ("BlockStored", "DISK")}
        assert all(e["block_hashes"] == hashes and e["block_size"] == 16 and e["token_ids"] == [] for e in seen)
        store.delete(keys[:1])
        assert store.flush(PATIENCE_S)
        gone = subscriber.events(2)
        assert {(e["type"], e["medium"], *e["block_hashes"]) for e in gone} == {
            ("BlockRemoved", "CPU_PINNED", hashes[0]), ("BlockRemoved", "DISK", hashes[0]),
        }  # fmt: skip
        put(store, [n.to_bytes(32, "little") for n in range(1, 256)])  # all of the host tier
        left: set[int] = set()
        while not left >= set(hashes[1:]):
            (event,) = subscriber.events(1)
            if event["type"] == "BlockRemoved":
                assert event["medium"] == "CPU_PINNED"
                left.update(event["block_hashes"])
        lookup = store.lookup("r", keys[1:])
        assert store.wait(lookup) == 2
        while (event := subscriber.events(1)[0]) and not (
            event["type"] == "BlockStored" and event["medium"] == "CPU_PINNED" and hashes[1] in event["block_hashes"]
        ):
            pass
        store.settle("r")
        assert store.flush(PATIENCE_S)
        store.close()
        left = set()
        while not left >= set(hashes[1:]):
            (event,) = subscriber.events(1)
            if event["type"] == "BlockRemoved" and event["medium"] == "DISK":
                left.update(event["block_hashes"])
    finally:
        store.close()
        subscriber.close()


def test_off_by_default() -> None:
    store = open_store(parse_config({"tiers": [{"type": "host", "capacity": "1MiB"}]}))
    try:
        assert isinstance(store.observer, Watch) and store.observer._events is None
        assert not [t for t in threading.enumerate() if t.name == "kvtier-kv-events"]
    finally:
        store.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"endpoint": "tcp://*:5557"}, "allow_remote"),
        ({"endpoint": "tcp://10.0.0.1:5557"}, "allow_remote"),
        ({"endpoint": "http://127.0.0.1:5557"}, "must be like tcp://"),
        ({"publisher": "null"}, "zmq"),
        ({"queue": 0}, "queue"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_config({"tiers": [{"type": "host", "capacity": "1MiB"}], "kv_events": options})


def test_a_taken_endpoint_is_named(publisher: Publisher) -> None:
    with pytest.raises(ConfigError, match=r"endpoint = .* cannot be bound"):
        Publisher(EventOptions(publisher.endpoint))


def test_a_cache_server_refuses_what_it_cannot_know() -> None:
    config = parse_config({"tiers": [{"type": "host", "capacity": "1MiB"}], "kv_events": {}, "server": {}})
    with pytest.raises(ConfigError, match="kv_events"):
        CacheServer(config, ServerOptions(()))
