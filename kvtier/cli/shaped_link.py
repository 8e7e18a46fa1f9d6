"""A link of a chosen speed to measure over: this process's loopback, in a network namespace of its own."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess

from kvtier.errors import ConfigError, KVTierError

_CLONE_NEWNET = 0x40000000
_UNITS = {"mbit": 1e6, "gbit": 1e9}
_BURST_S = 1e-3
"""What may be sent at once, as time at the link's speed: enough for the largest segment that loopback takes."""
_QUEUE_BYTES = 64 << 20
"""Beyond what all connections' windows hold, so that nothing is dropped: a sender waits, as behind a full card."""


def parse_rate(option: str, text: str) -> float:
    """Bits per second of ``10gbit`` or ``500mbit``. Raises ConfigError for anything else, with `option`'s name."""
    found = re.fullmatch(r"([0-9]+(?:[.][0-9]+)?)(mbit|gbit)", text.strip().lower())
    if found is None or not 1e6 <= (rate := float(found[1]) * _UNITS[found[2]]) <= 1e12:
        raise ConfigError(f"{option} {text!r} is no speed of a link: write 10gbit or 500mbit")
    return rate


def enter(bits_per_s: float) -> None:
    """Move this thread, and the threads and processes that it starts from now on, into a network namespace whose
    loopback carries `bits_per_s`, both directions together. There is no way back, nor one to the outside.

    Raises KVTierError where that cannot be done: other systems than Linux, no right to (CAP_SYS_ADMIN), no `ip`, `tc`.
    """
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise KVTierError(f"a link of a chosen speed needs {' and '.join(missing)}: apt-get install iproute2")
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare") or libc.unshare(_CLONE_NEWNET):
        why = os.strerror(ctypes.get_errno()) if hasattr(libc, "unshare") else "this system has none"
        raise KVTierError(f"no network namespace for a link of a chosen speed: {why}; run it as root on Linux")
    burst = max(256 << 10, int(bits_per_s / 8 * _BURST_S))
    shape = f"root tbf rate {bits_per_s:.0f}bit burst {burst} limit {_QUEUE_BYTES}"
    for command in ("ip link set lo up", f"tc qdisc add dev lo {shape}"):
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise KVTierError(f"a link of a chosen speed: {command!r} failed: {done.stderr.strip()}")
