"""``kvtier doctor``: the host tier and the directories of the NVMe tier, each with a real put and get.

Pages are put into a tier of their own, in a temporary folder on the same device: those that are stored are not
touched, and a running engine keeps its lock.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from kvtier.abc.tier import SLOT_ALIGN, GetStatus, PutStatus, Tier
from kvtier.cli.doctor_line import Finding, bad, good, refused, size, warning
from kvtier.cli.options import is_there, nearest_there
from kvtier.config import Config, HostTierConfig, NvmeTierConfig
from kvtier.errors import KVTierError
from kvtier.storage_backends.host.tier import HostTier
from kvtier.storage_backends.nvme.directory import FORMAT_VERSION
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.testing.pages import aligned_buffer, belongs, item_of

_TRY_BYTES = 8 << 20
_PAGE_BYTES = 1 << 20
_PAGES = 4
_SHARE = 0.8
"""Of what is free: `kvtier config init` takes as much. Logs, and what a file system adds, take some."""
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "ceph", "lustre", "9p")


def check_host_tier(config: HostTierConfig) -> Iterator[Finding]:
    what = "host tier"
    capacity_bytes = min(config.capacity, _TRY_BYTES) // SLOT_ALIGN * SLOT_ALIGN
    try:
        tier = HostTier(capacity_bytes)
    except KVTierError as error:
        yield refused(what, error)
        return
    try:
        yield round_trip(what, tier, capacity_bytes, f"of {size(config.capacity)} in all")
    finally:
        tier.close()


def check_directories(config: NvmeTierConfig) -> Iterator[Finding]:
    paths = [path.expanduser() for path in config.path]
    if config.capacity // len(paths) < SLOT_ALIGN:
        yield bad(
            "nvme",
            f"capacity {size(config.capacity)} is too little for a page",
            f"set at least {SLOT_ALIGN * len(paths)} bytes",
        )
        return
    named = Counter(map(os.path.realpath, paths))
    if twice := [path for path, times in named.items() if times > 1]:
        yield bad("nvme", f"{twice[0]} is named twice, by different names", "name each directory once, one per device")
        return
    devices = Counter(_device(path) for path in paths)
    for path in paths:
        what = f"nvme {path}"
        try:
            yield from _check_directory(what, path, config.capacity // len(paths), devices[_device(path)])
        except OSError as error:
            yield bad(what, f"cannot be used: {error.strerror}", "name a directory that this user can write to")
    if max(devices.values()) > 1:
        yield warning(
            "nvme", f"{max(devices.values())} of its directories are on one device", "name one directory per device"
        )


def _check_directory(what: str, path: Path, capacity_bytes: int, sharing: int) -> Iterator[Finding]:
    """sharing: how many of the tier's directories are on this one's device."""
    for link in (path, *path.parents):
        if link.is_symlink() and not is_there(link):
            yield bad(what, f"{link} is a link to nothing", "make it point to a directory, or name another path")
            return
    existing = nearest_there(path)
    if not existing.is_dir():
        yield bad(what, f"{existing} is a file", "name a directory, it is made if missing")
        return
    free = os.statvfs(existing)
    if free.f_flag & os.ST_RDONLY:
        yield bad(what, f"{existing} is mounted read-only", "mount it to be written, or name another directory")
        return
    if not os.access(existing, os.W_OK | os.X_OK):
        yield bad(
            what,
            f"{existing} cannot be written by this user",
            f"as root: install -d -o {os.geteuid()} {path}; or name another directory",
        )
        return
    held, used = _tiers_below(path), _stored_bytes(path)
    yield from _formats(what, held)
    left = free.f_bavail * free.f_frsize
    room = f"capacity {size(capacity_bytes)}, of which {size(used)} are taken; {size(left)} free"
    if (capacity_bytes - used) * sharing > left:
        most = (left + used * sharing) / sharing
        yield bad(what, room, f"set the tier's capacity to {size(most * _SHARE)} per directory, or free some space")
    elif _page_bytes(held) > capacity_bytes:
        yield warning(
            what, f"{room}: what is over the capacity goes at the next start", "raise the capacity to keep it"
        )
    else:
        yield good(what, room)
    kind = _file_system(existing)
    if kind in _REMOTE:
        yield warning(what, f"is on {kind}", "name a directory of a local disk")
    users = [(folder, user) for folder in held if (user := _user(folder)) is not None]
    for folder, user in users:
        yield good(what, f"{folder.relative_to(path)} is in use by process {user}; its pages were left alone")
    if left < 2 * _TRY_BYTES:
        yield bad(what, f"{size(left)} free: too little for a put and a get", "free some space, or name another disk")
    else:
        yield _try_device(what, existing, kind)


def _try_device(what: str, folder: Path, kind: str) -> Finding:
    place = Path(tempfile.mkdtemp(prefix=".kvtier-doctor-", dir=folder))
    try:
        tier = NvmeTier(place / "tier", _TRY_BYTES)
        try:
            found = round_trip(what, tier, _TRY_BYTES, f"on {kind or 'this file system'}")
            if found.text.startswith("put") and not tier.direct:
                return warning(
                    what,
                    f"{found.text}; without O_DIRECT, which {kind or 'it'} refuses: through the page cache",
                    "use ext4 or xfs on a local disk, if this is not meant",
                )
            return found
        finally:
            tier.close()
    except KVTierError as error:
        return refused(what, error)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def round_trip(what: str, tier: Tier, capacity_bytes: int, where: str) -> Finding:
    """Put pages into an empty tier of this capacity, and get them back; the tier keeps them."""
    nbytes = min(_PAGE_BYTES, capacity_bytes)
    items = [item_of(os.urandom(32), nbytes) for _ in range(min(_PAGES, capacity_bytes // nbytes))]
    outs = [aligned_buffer(nbytes) for _ in items]
    started = time.perf_counter()
    put = tier.put_many(items)
    between = time.perf_counter()
    got = tier.get_many_into([item.key for item in items], outs)
    ended = time.perf_counter()
    if set(put) != {PutStatus.STORED}:
        return bad(what, f"a put answered {', '.join(sorted({s.value for s in put}))} {where}", "see the log above")
    right = all(belongs(item.key, out) for item, out in zip(items, outs, strict=True))
    if {result.status for result in got} != {GetStatus.HIT} or not right:
        answers = ", ".join(sorted({result.status.value for result in got}))
        return bad(
            what, f"a page that was put came back as {answers if right else 'other bytes'} {where}", "see to the device"
        )
    per_page = 1000 / len(items)
    return good(
        what,
        f"put and got {len(items)} pages of {size(nbytes)} in {(between - started) * per_page:.1f} and "
        f"{(ended - between) * per_page:.1f} ms each, {where}",
    )


def _device(path: Path) -> int:
    return nearest_there(path).stat().st_dev


def _tiers_below(path: Path) -> list[Path]:
    """Directories of tiers: ``<path>/<shard>/rank<r>``, or `path` itself."""
    return sorted(found.parent for found in [*path.glob("FORMAT"), *path.glob("*/rank*/FORMAT")])


def _formats(what: str, held: list[Path]) -> Iterator[Finding]:
    for folder in held:
        text = (folder / "FORMAT").read_bytes()
        try:
            version = json.loads(text)["kvtier_nvme_format"]
        except (ValueError, KeyError, TypeError):
            version = text[:32]
        if version != FORMAT_VERSION:
            yield bad(
                what,
                f"{folder} has format {version!r}, this kvtier reads {FORMAT_VERSION}",
                f"rm -r {folder} (it holds cached pages only), or name another directory",
            )


def _stored_bytes(path: Path) -> int:
    """What the tiers below have taken of their device."""
    files = [f for folder in _tiers_below(path) for f in [*folder.glob("segment-*"), *folder.glob("index.log*")]]
    return sum(file.stat().st_blocks * 512 for file in files)


def _page_bytes(held: list[Path]) -> int:
    """What pages have of that: the capacity holds neither for the tiers' logs nor for what a file system adds."""
    return sum(file.stat().st_size for folder in held for file in folder.glob("segment-*"))


def _user(folder: Path) -> str | None:
    """Who has a tier's directory open, by the kernel's list of locks; None for nobody. Takes no lock itself."""
    try:
        lock = (folder / "LOCK").stat()
        locks = Path("/proc/locks").read_text()
    except OSError:
        return None
    name = f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino}"
    for line in locks.splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == name:
            return fields[4]
    return None


def _file_system(path: Path) -> str:
    """Its type, by the longest mount point above `path`; empty where unknown."""
    best, kind = "", ""
    try:
        mounts = Path("/proc/self/mounts").read_text()
    except OSError:
        return ""
    for line in mounts.splitlines():
        _, point, found, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        inside = str(path.resolve()) == point or str(path.resolve()).startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, found
    return kind


def check_tiers(config: Config) -> Iterator[Finding]:
    for tier in config.tiers:
        if isinstance(tier, HostTierConfig):
            yield from check_host_tier(tier)
        elif isinstance(tier, NvmeTierConfig):
            yield from check_directories(tier)
