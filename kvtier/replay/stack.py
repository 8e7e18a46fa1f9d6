"""The tiers of a replay: their sizes, speeds and rules, and how they are written on the command line."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import IntEnum

from kvtier.config import parse_bytes, parse_seconds
from kvtier.errors import ConfigError

UNLIMITED = -1
"""Capacity of a tier that never evicts."""


class Policy(IntEnum):
    """Which page makes room. Numbers are shared with the native simulator.

    lru: the least recently used. fifo: the first stored. s3fifo: a small queue (a tenth) in front of a main queue, with
    a memory of what left the small one (Yang et al., SOSP 2023).
    """

    LRU = 0
    FIFO = 1
    S3FIFO = 2


class Placement(IntEnum):
    """Where pages go. Numbers are shared with the native simulator.

    write_through: a new page is stored in every tier, a hit below is copied into every tier above it; what one tier
    evicts stays in the others.
    write_back: a page is in one tier. New pages and hits go to the top, and what a tier evicts moves one tier down. The
    store keeps a copy below of what it promoted, first in line to make room: the same pages stay.
    """

    WRITE_THROUGH = 0
    WRITE_BACK = 1


@dataclass(frozen=True, slots=True)
class TierPlan:
    """capacity_bytes: decimal or binary as given, or UNLIMITED. bandwidth: bytes/s of a load, shared by all requests.
    latency_s: per request that loads from the tier. ttl_s: a page not used for this long is gone; infinite: never.
    second_use: a tier below the first takes only pages that were used again, or come back after they were evicted.
    refresh: a page that is found above counts as used here, too, where it is written through."""

    name: str
    capacity_bytes: int
    bandwidth: float
    latency_s: float
    ttl_s: float = math.inf
    policy: Policy = Policy.LRU
    second_use: bool = False
    refresh: bool = True

    def capacity_blocks(self, block_bytes: int) -> int:
        """Whole blocks that fit, or UNLIMITED."""
        if self.capacity_bytes == UNLIMITED:
            return UNLIMITED
        blocks = self.capacity_bytes // block_bytes
        if blocks < 1:
            raise ConfigError(
                f"--tier {self.name}: {self.capacity_bytes:,} bytes hold no block of {block_bytes:,}; give it more"
            )
        return blocks


SPEEDS = {
    "host": (25e9, 20e-6),
    "nvme": (6e9, 200e-6),
    "disk": (6e9, 200e-6),
    "redis": (3e9, 1e-3),
    "remote": (3e9, 1e-3),
}
"""Bandwidth (bytes/s) and latency (s) of well-known names where none is given: one PCIe 4.0 x16 link, one NVMe drive,
one 25 Gbit/s network port."""

_OPTIONS = ("bandwidth", "latency", "ttl", "policy", "admission", "refresh")


def parse_tier(text: str) -> TierPlan:
    """``NAME:SIZE[,bandwidth=6GB/s][,latency=200us][,ttl=1h][,policy=s3fifo][,admission=second_use]
    [,refresh=off]``; SIZE may be ``unlimited``.

    GB is decimal and GiB binary. Raises ConfigError for anything else."""
    head, *options = text.split(",")
    match = re.fullmatch(r"([A-Za-z][A-Za-z0-9_-]*):(.+)", head)
    if match is None:
        raise ConfigError(f"--tier {text}: give NAME:SIZE, such as host:64GiB or nvme:1TB,bandwidth=6GB/s")
    name, size = match.groups()
    if name == "total":
        raise ConfigError("--tier total: this name is taken by the sum of all tiers; choose another")
    given: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if key not in _OPTIONS or not equals or key in given:
            raise ConfigError(
                f"--tier {text}: {option!r} is not one of {', '.join(o + '=...' for o in _OPTIONS)}, once each"
            )
        given[key] = value
    known = SPEEDS.get(name)
    if known is None and "bandwidth" not in given:
        raise ConfigError(
            f"--tier {text}: nothing is known of how fast {name!r} is; add bandwidth=6GB/s, or call it one of "
            + ", ".join(SPEEDS)
        )
    bandwidth, latency = known if known is not None else (math.inf, 0.0)
    return TierPlan(
        name,
        UNLIMITED if size == "unlimited" else _bytes(text, size),
        _bandwidth(text, given["bandwidth"]) if "bandwidth" in given else bandwidth,
        _seconds(text, "latency", given["latency"]) if "latency" in given else latency,
        _seconds(text, "ttl", given["ttl"]) if "ttl" in given else math.inf,
        _policy(text, given.get("policy", "lru")),
        _choice(text, "admission", given.get("admission", "always"), ("always", "second_use")),
        _choice(text, "refresh", given.get("refresh", "on"), ("off", "on")),
    )


def check_stack(tiers: list[TierPlan]) -> tuple[TierPlan, ...]:
    """The stack, fastest first; without any tier, one that never evicts."""
    if not tiers:
        return (TierPlan("unlimited", UNLIMITED, *SPEEDS["host"]),)
    names = [t.name for t in tiers]
    if len(set(names)) != len(names):
        raise ConfigError(f"--tier: every tier needs a name of its own, got {', '.join(names)}")
    return tuple(tiers)


def _bytes(text: str, value: str) -> int:
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ConfigError(f"--tier {text}: size {value!r} {error}") from None


def _bandwidth(text: str, value: str) -> float:
    try:
        return float(parse_bytes(value.removesuffix("/s")))
    except ValueError:
        raise ConfigError(f"--tier {text}: bandwidth {value!r} must be bytes per second, such as 6GB/s") from None


def _seconds(text: str, option: str, value: str) -> float:
    scale = 1.0
    if value.endswith("us"):
        value, scale = value.removesuffix("us") + "s", 1e-6
    try:
        return parse_seconds(value) * scale
    except ValueError:
        raise ConfigError(f"--tier {text}: {option} {value!r} must be a time such as 200us, 5ms, 2s or 1d") from None


def _choice(text: str, option: str, value: str, choices: tuple[str, str]) -> bool:
    """Whether the second of two choices was made."""
    if value not in choices:
        raise ConfigError(f"--tier {text}: {option} {value!r} must be {' or '.join(choices)}")
    return value == choices[1]


def _policy(text: str, value: str) -> Policy:
    try:
        return Policy[value.upper()]
    except KeyError:
        raise ConfigError(
            f"--tier {text}: policy {value!r} must be one of {', '.join(p.name.lower() for p in Policy)}"
        ) from None
