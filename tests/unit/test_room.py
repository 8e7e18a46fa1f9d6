"""Room: what waits for slots of the host tier, and what does not."""

from __future__ import annotations

from kvtier.abc.tier import PageMeta, PutStatus, Slot
from kvtier.keys import checksum
from kvtier.room import Room
from kvtier.storage_backends.host.tier import HostTier
from kvtier.testing.store_machine import page_bytes, page_key

SLOT = 4096
LONG_S = 60.0


def full_host() -> tuple[HostTier, Slot]:
    """One slot, whose page is still pinned by its writer."""
    host, key, data = HostTier(SLOT), page_key(0), page_bytes(0)
    (slot,) = host.reserve_many([key], [len(data)])
    assert isinstance(slot, Slot)
    host.view(slot)[:] = data
    host.commit_many([key], [slot], [PageMeta(len(data), 1, 0, checksum(data, key), bytes(16))])
    return host, slot


def test_room_that_came_while_hope_was_given_up_is_taken() -> None:
    host, slot = full_host()
    room = Room(host, lambda: None)

    def nothing_is_under_way_any_more() -> bool:
        host.unpin_many([slot.id])  # it has just ended
        return False

    (answer,) = room.reserve([page_key(1)], [SLOT], LONG_S, nothing_is_under_way_any_more)
    assert isinstance(answer, Slot)
    room.abort([page_key(1)], [answer])
    host.close()


def test_without_hope_nobody_waits() -> None:
    host, slot = full_host()
    asked: list[None] = []

    def hope() -> bool:
        asked.append(None)
        return False

    assert Room(host, lambda: None).reserve([page_key(1)], [SLOT], LONG_S, hope) == [PutStatus.FULL]
    assert len(asked) == 1
    host.unpin_many([slot.id])
    host.close()
