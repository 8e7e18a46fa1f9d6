"""What a store or a directory holds, by namespace: for ``kvtier ls``, ``purge`` and ``pin``.

A page does not say whose it is: its key is a keyed hash of the engine's. So whoever stores pages describes its
namespace, and a page is of a namespace if its origin gives its key there.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier.abc.tier import PROBE_PREFIX, PageMeta
from kvtier.errors import ConfigError, KVTierError
from kvtier.keys import Namespace, owners_of
from kvtier.pins import Pins

if TYPE_CHECKING:
    from kvtier.below import Deletion
    from kvtier.store import TieredStore

_log = logging.getLogger(__name__)

FORMAT_VERSION = 1
REMEMBERED = 256
"""Descriptions that are kept in a process and in a file; the oldest make room, those without pages first."""
DIGEST_BYTES = 32
_ID_CHARS = 12
_SHORTEST = 4
ALL = "all"
_PURGED_AT_ONCE = 256
"""Pages, so that nobody who looks pages up waits for long."""
_PURGE_WAIT_S = 60.0
_LOOKED_AT_ONCE = 1024
"""Pages, so that other threads run every millisecond."""

Page = tuple[bytes, PageMeta]


@dataclass(frozen=True, slots=True)
class Description:
    """A namespace as people see it. digest: hex. hot_page_bytes: of one page on the device. The salt is a secret, so
    that there is one is all that is told."""

    digest: str
    model: str
    weights: str
    dtype: str
    spec: str
    page_tokens: int
    codec: str
    shard: str
    generation: str
    lora: str
    salted: bool
    pruning: str
    hot_page_bytes: int

    @staticmethod
    def of(namespace: Namespace, hot_page_bytes: int) -> Description:
        n = namespace
        return Description(
            n.digest.hex(), n.model, n.weights, n.dtype, n.spec, n.page_tokens, n.codec, n.shard, n.generation, n.lora,
            bool(n.salt), n.pruning, hot_page_bytes,
        )  # fmt: skip

    @property
    def id(self) -> str:
        return self.digest[:_ID_CHARS]


def encode(described: Sequence[Description]) -> bytes:
    """The file ``namespaces.json`` of a directory (`docs/formats.md`)."""
    listed = [asdict(d) for d in described[-REMEMBERED:]]
    return json.dumps({"kvtier_namespaces": FORMAT_VERSION, "namespaces": listed}, indent=1).encode() + b"\n"


def decode(data: bytes) -> list[Description]:
    """Descriptions in a file, the oldest first; none of a file that is damaged or of another version: they only help
    people."""
    try:
        stated = json.loads(data)
        if stated["kvtier_namespaces"] != FORMAT_VERSION:
            raise ValueError(f"version {stated['kvtier_namespaces']!r}")
        return [_checked(Description(**one)) for one in stated["namespaces"][-REMEMBERED:]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        _log.warning("descriptions of namespaces are not readable and left out: %r", error)
        return []


def _checked(one: Description) -> Description:
    """Raises ValueError where a file says something else than a description."""
    for field in fields(Description):
        if type(getattr(one, field.name)).__name__ != field.type:
            raise ValueError(f"{field.name} is no {field.type}")
    if len(bytes.fromhex(one.digest)) != DIGEST_BYTES or one.hot_page_bytes < 0:
        raise ValueError(f"digest {one.digest[:80]!r} of pages with {one.hot_page_bytes} bytes")
    return one


class Group(NamedTuple):
    """Pages of one namespace. id: what it is named by. label: what is known where nobody described it."""

    id: str
    description: Description | None
    label: str
    pages: list[Page]


Label = Callable[[PageMeta], str]


def by_geometry(meta: PageMeta) -> str:
    """What a page says of itself."""
    return f"geometry {meta.spec.hex()[:8]}"


def group(pages: Iterable[Page], described: Sequence[Description], label: Label = by_geometry) -> list[Group]:
    """Pages by namespace: those that were described first, the latest before others, then the rest by what `label`
    says. Checks of readiness are left out."""
    listed = [page for page in pages if not page[0].startswith(PROBE_PREFIX)]
    owners = _owners(listed, described)
    mine: dict[str, list[Page]] = {one.digest: [] for one in reversed(described)}
    others: dict[str, list[Page]] = {}
    for page, owner in zip(listed, owners, strict=True):
        (others.setdefault(label(page[1]), []) if owner is None else mine[owner]).append(page)
    known = {one.digest: one for one in described}
    groups = [Group(known[digest].id, known[digest], "", found) for digest, found in mine.items() if found]
    return groups + [Group(name, None, name, found) for name, found in sorted(others.items())]


def _owners(pages: Sequence[Page], described: Sequence[Description]) -> list[str | None]:
    """For each page the digest of the namespace that was described and gives it its key."""
    owners: list[str | None] = [None] * len(pages)
    alike: dict[tuple[bytes, int], list[int]] = {}
    for i, (_, meta) in enumerate(pages):
        if meta.origin:
            alike.setdefault((meta.spec, len(meta.origin)), []).append(i)
    for (spec, _), places in alike.items():
        among = list(dict.fromkeys(one.digest for one in reversed(described) if one.spec in ("", spec.hex())))
        if not among:
            continue
        digests = [bytes.fromhex(digest) for digest in among]
        for at in range(0, len(places), _LOOKED_AT_ONCE):
            part = places[at : at + _LOOKED_AT_ONCE]
            found = owners_of(digests, [pages[i][0] for i in part], [pages[i][1].origin for i in part])
            for i, n in zip(part, found, strict=True):
                owners[i] = among[n] if n >= 0 else None
    return owners


def chosen(groups: Sequence[Group], name: str) -> list[Group]:
    """The groups that `name` means: one by its id or the beginning of it, those of ``model=NAME``, or ``all``. Raises
    ConfigError where it means none, or more than one by an id."""
    model = name.removeprefix("model=") if name.startswith("model=") else None
    if name == ALL:
        found = list(groups)
    elif model is not None:
        found = [g for g in groups if g.description is not None and g.description.model == model]
    else:
        found = [g for g in groups if g.id == name]
        if not found and len(name) >= _SHORTEST:
            found = [g for g in groups if g.id.startswith(name)]
            if len({g.id for g in found}) > 1:
                raise ConfigError(f"{name!r} is the beginning of several: {sorted({g.id for g in found})}; give one")
    if not found and name != ALL:
        known = ", ".join(sorted({g.id for g in groups})) or "none"
        raise ConfigError(
            f"no pages of {name!r} here: give the id of a namespace as kvtier ls prints it, model=NAME, or all (here: "
            f"{known})"
        )
    return found


def row(tier: str, group: Group, pinned: int = 0) -> dict[str, Any]:
    """What ``kvtier ls`` says of a group in a tier; bytes without what tiers round up to. hot_bytes: None where nobody
    said what a page weighs on the device."""
    d = group.description
    return {
        "tier": tier,
        "namespace": group.id,
        "label": group.label,
        "pages": len(group.pages),
        "cold_bytes": sum(meta.nbytes for _, meta in group.pages),
        "hot_bytes": len(group.pages) * d.hot_page_bytes if d is not None and d.hot_page_bytes else None,
        "pinned_pages": pinned,
        "description": None if d is None else asdict(d),
    }


class Inventory:
    """Of a running store. Every method may be called from any thread; they look at every page, so none belongs into an
    engine's own thread.

    delete: how pages are deleted; by default as the store does. label: as of `group`. wait_s: how long a purge waits
    for lower tiers.
    """

    def __init__(
        self,
        store: TieredStore,
        *,
        delete: Callable[[Sequence[Page]], Deletion] | None = None,
        label: Label = by_geometry,
        wait_s: float = _PURGE_WAIT_S,
    ) -> None:
        self._store = store
        self._delete = delete
        self._label = label
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._described: dict[str, Description] = {}
        """By digest, the oldest first."""
        self._with_pages: set[str] = set()
        """Digests that had pages when somebody last looked."""
        for tier in store.lower:
            for one in decode_all(tier.notes()):
                self._described.setdefault(one.digest, one)
        self._bound()
        self._pins = Pins(store)
        self.found_priority = 0
        """Of the pages that a restart found, where nobody said otherwise."""

    def describe(self, namespace: Namespace, hot_page_bytes: int, priority: int | None = None) -> None:
        """Pages of `namespace` are going to be stored. What outlives the process is told, too. priority: which those
        that a restart found are to have; None leaves them as they are."""
        one = Description.of(namespace, hot_page_bytes)
        if priority not in (None, self.found_priority):
            self._rank(one, priority)
        with self._lock:
            if self._described.get(one.digest) == one:
                return
            self._described.pop(one.digest, None)
            self._described[one.digest] = one
            self._bound()
            data = encode(list(self._described.values()))
            for tier in self._store.lower:
                tier.note(data)

    def _rank(self, one: Description, priority: int) -> None:
        for tier in self._store.lower:
            if not tier.usage().recovered_pages:
                continue
            pages = list(tier.scan())  # in the order in which they were used
            owners = _owners(pages, [one])
            mine = [key for (key, _), owner in zip(pages, owners, strict=True) if owner is not None]
            tier.rank_many(mine, priority)

    def rows(self) -> list[dict[str, Any]]:
        """As `row`, of every tier whose pages can be listed."""
        protected = self._store.protected()
        return [
            row(name, found, sum(key in protected for key, _ in found.pages))
            for name, groups in self._groups().items()
            for found in groups
        ]

    def shared_tiers(self) -> list[str]:
        """Tiers whose pages are not listed, since others store there as well."""
        return [tier.name for tier in self._store.lower if tier.capabilities.shared]

    def purge(self, name: str, *, dry_run: bool = False) -> dict[str, Any]:
        """Delete the pages of what `name` means (`chosen`) from the tiers that are listed and, those that are known
        from there, from shared ones. No longer found are all of them; pending_pages: those that a lower tier has not
        deleted when this returns. Raises KVTierError where some could not be deleted at all."""
        found = self._chosen(name)
        pages = {key: meta for group in found for key, meta in group.pages}
        try:
            pending = 0 if dry_run else self._delete_all(list(pages.items()))
        finally:
            self._pins.deleted()
        return {**_done(found, len(pages), sum(meta.nbytes for meta in pages.values())), "pending_pages": pending}

    def _delete_all(self, pages: list[Page]) -> int:
        """How many of them lower tiers still have."""
        give_up = time.monotonic() + self._wait_s
        under_way: list[tuple[int, Deletion]] = []
        for at in range(0, len(pages), _PURGED_AT_ONCE):
            part = pages[at : at + _PURGED_AT_ONCE]
            try:
                keys = [key for key, _ in part]
                deletion = self._store.delete(keys) if self._delete is None else self._delete(part)
            except KVTierError as error:
                raise KVTierError(f"{at} of {len(pages)} pages were deleted, then: {error}") from error
            if not deletion.wait(max(0.0, give_up - time.monotonic())):
                under_way.append((len(part), deletion))
        return sum(count for count, deletion in under_way if not deletion.wait(0.0))

    def pin(self, name: str, *, dry_run: bool = False) -> dict[str, Any]:
        """Keep the pages that `name` means from being evicted, as far as the limit of `TieredStore.protect` allows,
        until `unpin`; remembered_pages: those of them that are pinned after a restart, too. Pages that are stored later
        are not pinned."""
        found = self._chosen(name)
        pages = {key: meta for group in found for key, meta in group.pages}
        kept = _true(pages, self._pins.add(list(pages), dry_run=dry_run))
        return {
            **_done(found, len(kept), sum(pages[key].nbytes for key in kept)),
            "refused_pages": len(pages) - len(kept),
            "remembered_pages": self._pins.remembered(kept),
        }

    def unpin(self, name: str, *, dry_run: bool = False) -> dict[str, Any]:
        """End that."""
        found = self._chosen(name)
        protected = self._store.protected()
        pages = {key: meta for group in found for key, meta in group.pages if key in protected}
        if not dry_run:
            self._pins.end(list(pages))
        return _done(found, len(pages), sum(meta.nbytes for meta in pages.values()))

    def _groups(self) -> dict[str, list[Group]]:
        with self._lock:
            described = list(self._described.values())
        tiers = [t for t in (self._store.host, *self._store.lower) if not t.capabilities.shared]
        found = {tier.name: group(tier.scan(), described, self._label) for tier in tiers}
        with_pages = {one.description.digest for groups in found.values() for one in groups if one.description}
        with self._lock:
            self._with_pages = with_pages
        return found

    def _bound(self) -> None:
        """Of the older half the first that had no pages goes. The others may be about to get some: looking for them
        would take an engine's thread too long."""
        while len(self._described) > REMEMBERED:
            older = list(self._described)[: REMEMBERED // 2]
            del self._described[next((digest for digest in older if digest not in self._with_pages), older[0])]

    def _chosen(self, name: str) -> list[Group]:
        return chosen([one for groups in self._groups().values() for one in groups], name)


def decode_all(notes: Iterable[bytes]) -> list[Description]:
    """What several files say together."""
    return [one for data in notes for one in decode(data)]


def _true(pages: Mapping[bytes, PageMeta], answers: Sequence[bool]) -> list[bytes]:
    return [key for key, yes in zip(pages, answers, strict=True) if yes]


def _done(found: Sequence[Group], pages: int, nbytes: int) -> dict[str, Any]:
    return {"namespaces": sorted({g.id for g in found}), "pages": pages, "cold_bytes": nbytes}
