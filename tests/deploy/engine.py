"""What an engine does with kvtier, without one: runs as the engine's container of the chart, with its rendered
configuration. Round after round it asks for every page of a set, in requests of a few, checks each byte, and offloads
what it missed. A line of JSON per round on standard output; ends at SIGTERM with exit status 0.

    python engine.py PAGES BYTES FIRST
"""

from __future__ import annotations

import json
import signal
import sys
import threading

from kvtier.abc.tier import Slot
from kvtier.build import open_store
from kvtier.config import load_config
from kvtier.testing.pages import belongs, item_of, key_of

REQUEST_PAGES = 8


def main() -> None:
    pages, nbytes, first = map(int, sys.argv[1:])
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    store = open_store(load_config("/etc/kvtier/engine.yaml"))
    number = wrong = unstored = 0
    while not stop.is_set():
        before = store.ledger.snapshot()
        for at in range(first, first + pages, REQUEST_PAGES):
            keys = [key_of(n) for n in range(at, at + REQUEST_PAGES)]
            request = f"{number}/{at}"
            lookup = store.lookup(request, keys)
            ready = store.wait(lookup)
            for key, (slot, meta) in zip(keys, lookup.ready_slots(ready), strict=False):
                wrong += not belongs(key, store.host.view(slot)[: meta.nbytes])
            store.settle(request)
            for key in keys[ready:]:  # computed anew
                item = item_of(key, nbytes)
                (slot_or_status,) = store.reserve([key], [nbytes], 60.0)
                if isinstance(slot_or_status, Slot):
                    store.host.view(slot_or_status)[:] = item.data
                    store.commit([key], [slot_or_status], [item.meta])
                else:
                    unstored += slot_or_status.value not in ("exists",)
        store.flush(60.0)
        after = store.ledger.snapshot()
        lookups = sum(after.hits.values()) + sum(after.misses.values())
        row = {
            "round": number, "wrong": wrong, "unstored": unstored, "errors": sum(after.errors.values()),
            "hits": {tier: after.hits[tier] - before.hits[tier] for tier in after.hits},
            "misses": {why: n for why in after.misses if (n := after.misses[why] - before.misses[why])},
            "spills": after.spills["redis"], "sound": after.lookups == lookups,
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        number += 1
        stop.wait(0.1)  # an engine computes meanwhile
    store.close()


if __name__ == "__main__":
    main()
