"""``kvtier doctor``: the machine's limits that end in obscure errors later."""

from __future__ import annotations

import ctypes
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvtier.cli.doctor_line import Finding, bad, good, nothing, size, warning
from kvtier.cli.options import is_there
from kvtier.config import Config, HostTierConfig, NvmeTierConfig, RedisTierConfig

_SHM_LOW_BYTES = 1 << 30
_FILES_LOW = 1024
_HUGE_BYTES = 2 << 20
_HUGE_2MIB = "/sys/kernel/mm/hugepages/hugepages-2048kB"
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronized


def check_machine(config: Config) -> Iterator[Finding]:
    host = config.tiers[0] if isinstance(config.tiers[0], HostTierConfig) else None
    host_bytes = 0 if host is None else host.capacity
    reserved = host is not None and host.huge_pages == "reserved"
    yield _reserved_memory(host_bytes) if reserved else _memory(host_bytes)
    yield _memlock(host_bytes)
    yield _shared_memory()
    yield _huge_pages(reserved)
    if host is not None and host.budget is not None:
        yield _budget(host.budget.path.expanduser())
    yield _open_files(config)
    yield _clock(config)


def _memory(host_bytes: int) -> Finding:
    what = "memory"
    total, available = memory_bytes()
    text = f"host tier {size(host_bytes)}; {size(available)} of {size(total)} available"
    if not total:
        return nothing(what, "this system does not say how much memory there is")
    if host_bytes > total:
        return bad(what, text, f"set the host tier's capacity below {size(total)}, or raise the container's limit")
    if host_bytes > available:
        return warning(
            what,
            text,
            "lower the host tier's capacity, or stop what uses the memory (an engine that runs already does)",
        )
    return good(what, text)


def _reserved_memory(host_bytes: int) -> Finding:
    what = "memory"
    wanted = -(-host_bytes // _HUGE_BYTES)
    total, free = (int(_read(f"{_HUGE_2MIB}/{name}").strip() or 0) for name in ("nr_hugepages", "free_hugepages"))
    text = f"host tier {size(host_bytes)} in {wanted} huge pages of 2 MiB; {free} of {total} reserved ones free"
    if wanted > total:
        fix = f"sysctl vm.nr_hugepages={wanted}, in Kubernetes hugepages-2Mi; or leave huge_pages out"
        return bad(what, text, fix)
    if wanted > free:
        return warning(what, text, "see who uses them (an engine that runs already does), or reserve more")
    return good(what, text)


def memory_bytes() -> tuple[int, int]:
    """Of the machine, or of this container where that is less: total and available; zeros where unknown."""
    fields = {}
    for line in _read("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024
    total, available = fields.get("MemTotal", 0), fields.get("MemAvailable", 0)
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    if limit.isdigit() and int(limit) < total:
        used = _read("/sys/fs/cgroup/memory.current").strip()
        total = int(limit)
        available = min(available, total - int(used or 0))
    return total, available


def _memlock(host_bytes: int) -> Finding:
    what = "memlock"
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = f"limit {'unlimited' if soft == resource.RLIM_INFINITY else size(soft)}"
    if soft == resource.RLIM_INFINITY or soft >= host_bytes:
        return good(what, text)
    text += f", host tier {size(host_bytes)}"
    if not (Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()):
        return good(what, f"{text}: nothing is pinned on a machine without an accelerator")
    raise_it = "ulimit -l unlimited" if hard == resource.RLIM_INFINITY else "LimitMEMLOCK=infinity in its unit"
    return warning(
        what,
        f"{text}: registering it with the accelerator may fail",
        f"start the engine with {raise_it}; in Docker with --ulimit memlock=-1",
    )


def _shared_memory() -> Finding:
    what = "/dev/shm"
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        return warning(what, f"cannot be used: {error.strerror}", "mount a tmpfs there: engines' processes share it")
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    text = f"{size(free)} of {size(total)} free"
    if free < _SHM_LOW_BYTES:
        return warning(
            what,
            f"{text}: engines with several processes need more",
            "in Docker --shm-size=8g or --ipc=host; in Kubernetes an emptyDir with medium: Memory; else remount it",
        )
    return good(what, text)


def _huge_pages(used: bool) -> Finding:
    """used: whether the host tier takes reserved ones."""
    what = "huge pages"
    mode = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    reserved = [line for line in _read("/proc/meminfo").splitlines() if line.startswith("HugePages_Total")]
    idle = int(reserved[0].split()[1]) if reserved else 0
    if not mode:
        return nothing(what, "this kernel has no transparent huge pages")
    chosen = mode.partition("[")[2].partition("]")[0]
    text = f"transparent: {chosen}; reserved: {idle}"
    if chosen == "never":
        return warning(
            what,
            f"{text}: large host tiers start and copy more slowly",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    if idle and not used:
        return warning(
            what,
            f"{text}: their memory is lost to a host tier that does not use them",
            "set huge_pages: reserved for the host tier, or, if nobody else needs them, sysctl vm.nr_hugepages=0",
        )
    return good(what, text)


def _budget(path: Path) -> Finding:
    what = "budget"
    if is_there(path):
        if path.is_file() and os.access(path, os.R_OK | os.W_OK):
            return good(what, f"{path} is there")
        return bad(what, f"{path} cannot be used", "name a file that this user can write, or remove it")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            return good(what, f"{path} can be made")
    except OSError as error:
        return bad(what, f"{path} cannot be made: {error.strerror}", "name a file such as /dev/shm/kvtier-budget")


def _open_files(config: Config) -> Finding:
    what = "open files"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = "limit unlimited" if soft == resource.RLIM_INFINITY else f"limit {soft}"
    wanted = _FILES_LOW + (config.server.max_connections if config.server is not None else 0)
    wanted += 256 * sum(len(tier.path) for tier in config.tiers if isinstance(tier, NvmeTierConfig))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return good(what, text)
    return warning(
        what,
        f"{text}, up to {wanted} may be wanted",
        f"ulimit -n {wanted}" + ("" if hard == resource.RLIM_INFINITY or hard >= wanted else " (raise the hard limit)"),
    )


def _clock(config: Config) -> Finding:
    what = "clock"
    # struct timex is smaller than this on every architecture; all zeros only asks.
    buffer = ctypes.create_string_buffer(512)
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except (OSError, AttributeError):
        return nothing(what, "this system does not tell whether its clock is synchronized")
    if state == _TIME_ERROR:
        matters = any(isinstance(tier, RedisTierConfig) for tier in config.tiers) or config.server is not None
        text = "not synchronized by this kernel's account"
        if matters:
            return warning(
                what, f"{text}: times to live and certificates depend on it", "run chrony or systemd-timesyncd here"
            )
        return good(what, f"{text}; nothing configured depends on it")
    if state < 0:
        return nothing(what, "this system does not tell whether its clock is synchronized")
    return good(what, "synchronized")


def _read(path: str) -> str:
    """A file of the kernel's; empty where there is none."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
