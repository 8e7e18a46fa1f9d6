"""The process that is killed: puts and deletes pages, and says on its output what it was told to be done.

``python -m kvtier.faults.writer CAPACITY START DELETED_EVERY SIZES DIRECTORY...``: ``+n`` for a page that was stored,
``-n`` for one that was stored and deleted. Runs until it is killed.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from kvtier.abc.tier import PutStatus
from kvtier.storage_backends.nvme import log
from kvtier.storage_backends.nvme.striped import open_nvme
from kvtier.testing.pages import item_of, key_of

_BATCH = 4


def main(arguments: list[str]) -> None:
    capacity_bytes, start, every = map(int, arguments[:3])
    sizes = [int(size) for size in arguments[3].split(",")]
    log._COMPACT_SLACK_BYTES = 8192  # the log is rewritten all the time
    options = {} if len(arguments) > 5 else {"segment_bytes": 1 << 20}
    tier = open_nvme([Path(path) for path in arguments[4:]], capacity_bytes, **options)
    say = threading.Lock()

    def write(number: int) -> None:
        while True:
            batch = [number + 2 * i for i in range(_BATCH)]
            number += 2 * _BATCH
            statuses = tier.put_many([item_of(key_of(n), sizes[n % len(sizes)]) for n in batch])
            if any(status is not PutStatus.STORED for status in statuses):
                print("failed", statuses, flush=True)
                return
            gone = {n for n in batch if n % every == 0}
            tier.delete_many([key_of(n) for n in gone])
            with say:
                sys.stdout.write("".join(f"{'-' if n in gone else '+'}{n}\n" for n in batch))
                sys.stdout.flush()

    threads = [threading.Thread(target=write, args=(start + i,)) for i in range(2)]
    print("open", flush=True)
    for thread in threads:
        thread.start()


if __name__ == "__main__":
    main(sys.argv[1:])
