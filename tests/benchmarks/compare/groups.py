"""The parts' rows as groups: systems that may be compared, by columns of which lower or higher is better."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

AGAIN = ", again"
FLOOR = 1.05
"""Figures of times that differ by less than this are never called different, however alike the twins were."""

EXACT_FLOOR = 1.005
"""The same of sizes and errors, which have no noise."""

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Column:
    """exact: no time, so the same in every run."""

    title: str
    lower: bool = True
    digits: int = 2
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """values: by system and column, in the order in which they are shown. note: what the table needs to be understood.
    baseline: systems that are shown and not compared with. A system with `AGAIN` behind its name is the same, measured
    a second time. spread: noise where nothing ran twice, as a ratio by column."""

    title: str
    note: str
    columns: tuple[Column, ...]
    values: dict[str, dict[str, float]]
    baseline: tuple[str, ...] = ()
    spread: dict[str, float] | None = None

    def ours(self) -> list[str]:
        return [name for name in self._compared() if "kvtier" in name]

    def others(self) -> list[str]:
        return [name for name in self._compared() if "kvtier" not in name]

    def _compared(self) -> Iterator[str]:
        return (name for name in self.values if name not in self.baseline and not name.endswith(AGAIN))

    def noise(self, column: Column) -> float | None:
        """The largest ratio of two figures of the same system; None where nothing ran twice."""
        if column.exact:
            return None
        ratios = []
        for name, values in self.values.items():
            first, second = self.values.get(name.removesuffix(AGAIN), {}).get(column.title), values.get(column.title)
            if name.endswith(AGAIN) and first and second:
                ratios.append(max(first / second, second / first))
        if not ratios and self.spread is not None:
            return self.spread.get(column.title)
        return max(ratios, default=None)

    def threshold(self, column: Column) -> float:
        """The ratio from which on two figures are called different: the noise of their column, or of the group's worst
        where nothing in the column ran twice."""
        if column.exact:
            return EXACT_FLOOR
        noise = self.noise(column)
        return max(FLOOR, noise if noise is not None else max(self.noise(c) or FLOOR for c in self.columns))

    def advantage(self, column: Column, ours: str, other: str) -> float | None:
        """How many times better `ours` is; less than 1 where it is worse, None where either has no figure."""
        a, b = self.values[ours].get(column.title), self.values[other].get(column.title)
        if a is None or b is None:
            return None
        if a == b:
            return 1.0
        better, worse = (b, a) if column.lower else (a, b)
        return float("inf") if worse == 0 else better / worse


def groups(results: Sequence[dict[str, Any]]) -> list[Group]:
    """Of the parts that were measured, in the page's order."""
    made: dict[str, Callable[[Rows], list[Group]]] = {
        "codecs": _codecs, "lmcache": _lmcache, "hicache": _hicache, "redis": _redis, "ttft": _ttft, "kvzip": _kvzip,
    }  # fmt: skip
    rows = {result["part"]: result["rows"] for result in results}
    return [group for part, make in made.items() if part in rows for group in make(rows[part])]


AT_REST = Column("bytes at rest per hot byte", digits=3, exact=True)
ERROR = Column("relative error", digits=4, exact=True)


def _table(rows: Rows, figures: Sequence[tuple[Column, str, str]]) -> dict[str, dict[str, float]]:
    """By system and column. figures: columns, and the operation and field that each shows."""
    table: dict[str, dict[str, float]] = {}
    for row in rows:
        values = table.setdefault(row["system"], {})
        for column, op, name in figures:
            if row["op"] == op and name in row:
                values[column.title] = float(row[name])
        for column, name in ((AT_REST, "at_rest"), (ERROR, "relative_error")):
            if name in row:
                values[column.title] = float(row[name])
    return table


def _codecs(rows: Rows) -> list[Group]:
    figures = [
        (Column("encode, MB/s", lower=False, digits=0), "encode", "hot_mb_per_s"),
        (Column("decode, MB/s", lower=False, digits=0), "decode", "hot_mb_per_s"),
        (Column("encode, CPU s per GB"), "encode", "cpu_s_per_gb"),
        (Column("decode, CPU s per GB"), "decode", "cpu_s_per_gb"),
        (Column("encode a page, p99 ms", digits=3), "encode one", "p99_ms"),
        (Column("decode a page, p99 ms", digits=3), "decode one", "p99_ms"),
    ]
    table = _table(rows, figures)
    for row in rows:
        if row["op"] == "copy":
            titles = {column.title: name for column, op, name in figures if " " not in op}
            table[row["system"]] |= {title: float(row[name]) for title, name in titles.items()}
    columns = (*(column for column, _, _ in figures), AT_REST, ERROR)
    note = (
        "One thread, everything in memory. kvtier reads pages of 64 tokens where they lie in a pool and writes cold "
        "pages with a checksum; torchao and LMCache's serde get the same values one behind the other and write no "
        "checksum. memcpy copies as many bytes."
    )
    return [Group("The codec alone", note, columns, table, baseline=("memcpy",))]


_STORAGE = (
    (Column("store, MB/s", lower=False, digits=0), "store", "hot_mb_per_s"),
    (Column("load, MB/s", lower=False, digits=0), "load", "hot_mb_per_s"),
    (Column("store, CPU s per GB"), "store", "cpu_s_per_gb"),
    (Column("load, CPU s per GB"), "load", "cpu_s_per_gb"),
    (Column("store one, p99 ms", digits=1), "store one", "p99_ms"),
    (Column("load one, p99 ms", digits=1), "load one", "p99_ms"),
    (Column("restart-warm, ms", digits=0), "restart", "p50_ms"),
)


_SERVED = (
    *_STORAGE,
    (Column("store, CPU s per GB, Redis too"), "store", "both_cpu_s_per_gb"),
    (Column("load, CPU s per GB, Redis too"), "load", "both_cpu_s_per_gb"),
)


def _lmcache(rows: Rows) -> list[Group]:

    def uses_redis(system: str) -> bool:
        return "redis" in system or "resp" in system

    shared = (
        "LMCache's adapters and kvtier as one, through the interface of LMCache's controllers; chunks of 256 tokens. "
        "A store ends when everything is {end}. Before a load the adapter is opened anew{cold}. One: chunk by chunk, "
        "each waited for. Restart-warm: from opening the adapter on what a closed one left until everything is loaded; "
        "for kvtier this contains the memory of its host tier. CPU of LMCache's process."
    )
    disk = shared.format(end="on the disk", cold=" and files are dropped from the page cache; all use O_DIRECT")
    redis = shared.format(end="in Redis", cold="") + " Bytes at rest are Redis' own count, which rounds up."
    served = [
        {**row, "both_cpu_s_per_gb": float(row["cpu_s_per_gb"]) + float(row["server_cpu_s_per_gb"])}
        for row in rows
        if uses_redis(str(row["system"]))
    ]
    return [
        Group(title, note, (*(column for column, _, _ in figures), AT_REST, ERROR), _table(chosen, figures))
        for title, note, chosen, figures in (
            ("Behind LMCache, on a disk", disk, [r for r in rows if not uses_redis(r["system"])], _STORAGE),
            ("Behind LMCache, on Redis", redis, served, _SERVED),
        )
        if chosen
    ]


def _hicache(rows: Rows) -> list[Group]:
    note = (
        "Pages of 64 tokens in a host pool of SGLang's, through the calls that its controller makes of each storage. "
        "A store ends when everything is on the disk. Before a load the storage is opened anew and files are dropped "
        "from the page cache. One: page by page, each waited for. Restart-warm: from opening the storage until "
        "everything is loaded; for kvtier this contains the memory of its host tier."
    )
    columns = (*(column for column, _, _ in _STORAGE), AT_REST, ERROR)
    return [Group("Behind SGLang's hierarchical cache, on a disk", note, columns, _table(rows, _STORAGE))]


def _redis(rows: Rows) -> list[Group]:
    put, get = ("set", "put"), ("get",)
    figures = (
        (Column("set, MB/s", lower=False, digits=0), put, "mb_per_s"),
        (Column("get, MB/s", lower=False, digits=0), get, "mb_per_s"),
        (Column("set, CPU s per GB", digits=3), put, "cpu_s_per_gb"),
        (Column("get, CPU s per GB", digits=3), get, "cpu_s_per_gb"),
        (Column("set, p99 ms"), put, "p99_ms"),
        (Column("get, p99 ms"), get, "p99_ms"),
    )
    peer = {"mb_per_s": "peer_mb_per_s", "cpu_s_per_gb": "baseline", "p99_ms": "peer_p99_ms"}
    tables: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        if row.get("peer_mb_per_s") is None:  # of the server alone, or without a redis-server
            continue
        tier, _, transport = row["tier"].partition("-")
        own, other = {
            "server": ("kvtier serve", "redis-server"),
            "client": ("kvtier's client", "redis-py"),
            "redis": ("kvtier's Redis tier", "redis-py" + AGAIN),
        }[tier]
        table = tables.setdefault(transport, {})
        for column, ops, name in figures:
            # Calls of the tier are of several values.
            if row["op"] in ops and not (tier == "redis" and name == "p99_ms"):
                table.setdefault(own, {})[column.title] = float(row[name])
            if row["op"] in ops:
                table.setdefault(other, {})[column.title] = float(row[peer[name]])
    columns = tuple(column for column, _, _ in figures)
    server = "One connection over a unix socket; CPU of the server's process."
    client = (
        "On one redis-server, over {}; CPU of the client's process. The tier takes 8 values in a call and checks "
        "every byte of them twice."
    )
    names = {"": ("The cache server beside redis-server", server)} | {
        key: (f"Clients of Redis, {what}", client.format(what))
        for key, what in (("unix", "a unix socket"), ("tcp", "TCP on loopback"), ("tls", "TLS on loopback"))
    }
    return [Group(*names[key], columns, table) for key, table in tables.items()]


_PLACES = {
    "nvme": Column("from disk, s", digits=3),
    "file": Column("from disk, s", digits=3),
    "host": Column("from host memory, s", digits=3),
    "nothing": Column("nothing found, s", digits=3),
    "recompute": Column("nothing found, s", digits=3),
    "device": Column("from the device, s", digits=3),
}


def _ttft(rows: Rows) -> list[Group]:
    table: dict[str, dict[str, float]] = {}
    for row in rows:
        name = f"{row['system']}, {row['codec']}" if row.get("codec") else row["system"]
        title = _PLACES[row["served_from"]].title
        if title in table.get(name, {}):
            name += AGAIN  # SGLang alone runs beside each form
        table.setdefault(name, {})[title] = float(row["ttft_s"])
    note = (
        f"Median time to the first token in the real SGLang on CPUs, prompts of {rows[0]['prompt_tokens']:,} tokens of "
        "which all whole pages of 64 can be reused. Engines take turns with the same prompts. SGLang's attention for "
        "CPUs is replaced by one that pays for the new tokens of a prefill only, as an accelerator's does. "
        "`sglang` has no cache behind the device's; what it computes is in the column of nothing found."
    )
    columns = tuple(dict.fromkeys(_PLACES.values()))
    return [Group("Time to the first token behind SGLang", note, columns, table)]


def _kvzip(rows: Rows) -> list[Group]:
    seconds, cpu = Column("prefill and scoring, s", digits=2), Column("CPU, s", digits=2)
    table: dict[str, dict[str, float]] = {}
    for row in rows:
        table[f"{row['system']}, prefill alone" if row["op"] == "prefill" else row["system"]] = {
            seconds.title: float(row["seconds"]),
            cpu.title: float(row["cpu_s"]),
        }
    note = (
        f"SmolLM2-135M in float32 on CPUs, {rows[0]['tokens']:,} tokens, half of the pairs removed; median of "
        f"{rows[0]['samples']}. Both say the same of {100 * rows[0]['agreement']:.1f} % of the pairs of token and "
        "head behind the chat template's prefix, which kvtier keeps and kvpress removes first."
    )
    spread = {seconds.title: max(row["most_s"] / row["least_s"] for row in rows)}
    baseline = tuple(name for name in table if name.endswith("prefill alone"))
    return [Group("KVzip", note, (seconds, cpu), table, baseline, spread)]
