"""Pages by namespace, against the obvious way: try the key of every page in every namespace that was described."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import pytest

from kvtier.abc.tier import PROBE_PREFIX, PageMeta
from kvtier.inventory import Description, Page, by_geometry, group
from kvtier.keys import Namespace

SPECS = [bytes([n]) * 16 for n in range(3)]


def described(number: int, spec: bytes | None) -> Description:
    codec = '["nvfp4",1,{}]'
    namespace = Namespace(
        f"model-{number}", "00", "bf16", "" if spec is None else spec.hex(), 16, codec, generation=f"{number:032x}"
    )
    return Description.of(namespace, 4096)


def in_the_obvious_way(pages: Sequence[Page], known: Sequence[Description]) -> list[tuple[str, list[Page]]]:
    groups: dict[str, list[Page]] = {one.id: [] for one in reversed(known)}
    others: dict[str, list[Page]] = {}
    for key, meta in pages:
        if key.startswith(PROBE_PREFIX):
            continue
        for one in reversed(known):
            digest = bytes.fromhex(one.digest)
            its_key = hashlib.blake2b(meta.origin, key=digest, digest_size=32).digest()
            if meta.origin and one.spec in ("", meta.spec.hex()) and its_key == key:
                groups[one.id].append((key, meta))
                break
        else:
            others.setdefault(by_geometry(meta), []).append((key, meta))
    return [(name, found) for name, found in [*groups.items(), *sorted(others.items())] if found]


@pytest.mark.parametrize("seed", range(4))
def test_pages_are_grouped_as_in_the_obvious_way(seed: int) -> None:
    chance = random.Random(seed)
    known = [described(n, chance.choice([*SPECS, None])) for n in range(9)]
    stranger = described(99, None)
    pages: list[Page] = []
    for _ in range(3000):
        spec = chance.choice(SPECS)
        owner = chance.choice([*known, stranger])
        origin = chance.randbytes(chance.choice([0, 1, 8, 32, 32, 32, 32, 200, 255]))
        key = hashlib.blake2b(origin, key=bytes.fromhex(owner.digest), digest_size=32).digest()
        pages.append((key, PageMeta(4096, 0, 16, bytes(16), spec, origin)))
    pages.insert(7, (PROBE_PREFIX + bytes(16), PageMeta(4096, 0, 16, bytes(16), SPECS[0], b"probe")))
    known.insert(3, known[-1])  # two directories say the same
    assert [(g.id, g.pages) for g in group(pages, known)] == in_the_obvious_way(pages, known)


def test_nothing_and_nobody() -> None:
    meta = PageMeta(1, 0, 1, bytes(16), SPECS[0], b"x")
    assert group([], [described(1, None)]) == []
    assert [(g.id, g.description, len(g.pages)) for g in group([(bytes(32), meta)], [])] == [
        ("geometry 00000000", None, 1)
    ]
