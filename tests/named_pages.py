"""A small store with pages of described namespaces, and the commands that look at them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from kvtier.abc.tier import PageMeta, Slot
from kvtier.cli.app import app
from kvtier.keys import Namespace, checksum
from kvtier.observe import Observer
from kvtier.storage_backends.host.tier import HostTier
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.store import TieredStore

PATIENCE_S = 60.0
NBYTES = 4096
HOT_BYTES = 12288
SPECS = {"llama": bytes(range(16)), "qwen": bytes(range(16, 32))}


def namespace(model: str, **more: str) -> Namespace:
    codec = '["nvfp4",1,{}]'
    return Namespace(model, weights="00", dtype="bf16", spec=SPECS[model].hex(), page_tokens=16, codec=codec, **more)


def put(store: TieredStore, of: Namespace, pages: range, *, describe: bool = True) -> list[bytes]:
    if describe:
        store.inventory.describe(of, HOT_BYTES)
    hashes = [n.to_bytes(32, "big") for n in pages]
    keys = of.page_keys(hashes)
    slots = [slot for slot in store.reserve(keys, [NBYTES] * len(keys), PATIENCE_S) if isinstance(slot, Slot)]
    assert len(slots) == len(keys)
    metas = []
    for key, page_hash, slot in zip(keys, hashes, slots, strict=True):
        view = store.host.view(slot)
        view[:] = page_hash * (NBYTES // 32)
        metas.append(PageMeta(NBYTES, 0, 16, checksum(view, key), bytes.fromhex(of.spec), page_hash))
    store.commit(keys, slots, metas)
    return keys


def open_store(folder: Path) -> TieredStore:
    lower = [NvmeTier(folder, 8 << 20)]
    return TieredStore(HostTier(1 << 20), lower, observer=Observer())


def cli(*words: str) -> Any:
    answer = CliRunner().invoke(app, list(words))
    if answer.exception is not None and not isinstance(answer.exception, SystemExit):
        raise answer.exception
    return answer


def listed(where: str | Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Rows by namespace's model (or label) and the last part of the tier's name."""
    rows = json.loads(cli("ls", str(where), "--json").stdout)["namespaces"]
    return {
        ((row["description"] or {"model": row["label"]})["model"], row["tier"].rpartition("/")[2]): row for row in rows
    }


def there(store: TieredStore, keys: Sequence[bytes]) -> list[bool]:
    assert store.flush(PATIENCE_S)
    return [a or b for a, b in zip(store.host.contains_many(keys), store.known_below(keys), strict=True)]
