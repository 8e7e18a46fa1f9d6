"""``kvtier top``: the status page in a terminal."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from kvtier.errors import ConfigError, KVTierError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_TIMEOUT_S = 10.0
_SPARKS = " ▁▂▃▄▅▆▇█"
_SPARK_COLUMNS = 40
_TIER_COLUMNS = ("tier", "used", "capacity", "full", "pages", "hits", "in/s", "out/s", "evicted")
_SPARE = ("in/s", "out/s", "evicted", "capacity", "pages")
"""What a narrow terminal goes without, in this order."""
_OUT_OF_FIRST = ('kvtier_cold_bytes_total{direction="onboard"}', "kvtier_server_sent_bytes_total")
"""Bytes that leave the first tier: for the engine, or for clients of the server. Other tiers are read by the first."""

Series = Mapping[str, float]


def top(
    url: Annotated[str, typer.Argument(help="Of a connector's HTTP port, or of kvtier serve's.")] = (
        "http://127.0.0.1:9404"
    ),
    token_file: Annotated[Path | None, typer.Option(help="Holds the token, where one is needed.")] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.2, max=3600.0)] = 5.0,
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the figures once, as JSON.")] = False,
) -> None:
    """Show tiers, hit rate, misses and what other sizes would give, until Ctrl-C. Figures are of the last hour.

    The token may also be in the environment variable KVTIER_HTTP_TOKEN.
    """
    from rich.console import Console

    client = Client(url, token_of(token_file))
    console = Console()
    if json_output:
        typer.echo(json.dumps(figures(client.status())))
        return

    def look() -> RenderableType:
        return screen(client.url, figures(client.status()), console.width)

    shown = look()
    if once:
        console.print(shown)
        return
    try:
        _watch(console, shown, look, interval)
    except KeyboardInterrupt:
        return


def _watch(console: Console, shown: RenderableType, look: Callable[[], RenderableType], interval: float) -> None:
    """Until Ctrl-C: in a terminal one look in place of the other, in a file or a pipe one below the other."""
    from rich.live import Live

    if console.is_terminal:
        place: AbstractContextManager[Live | None] = Live(shown, console=console, auto_refresh=False, screen=True)
    else:
        console.print(shown)
        place = nullcontext()
    with place as live:
        while True:
            time.sleep(interval)
            try:
                shown = look()
            except KVTierError as error:
                shown = str(error)
            if live is None:
                console.print(shown)
            else:
                live.update(shown, refresh=True)


def token_of(file: Path | None) -> str:
    """The token in `file`, or in the environment; empty where there is none."""
    from kvtier.server.http import TOKEN_VARIABLE, HttpOptions

    if file is None:
        return os.environ.get(TOKEN_VARIABLE, "").strip()
    return (HttpOptions(token_file=file).token() or b"").decode()


class Client:
    """Asks one exporter. Raises ConfigError for a URL that cannot be one, KVTierError where no answer comes."""

    def __init__(self, url: str, token: str = "", *, timeout_s: float = _TIMEOUT_S) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} must be a URL such as http://127.0.0.1:9404")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._secure = parts.scheme == "https"
        self._host, self._port, self._path = parts.hostname, port, parts.path.rstrip("/")
        self._token = token
        self._timeout_s = timeout_s

    def status(self) -> dict[str, Any]:
        """What ``/api/status`` says."""
        status, body = self.get("/api/status")
        if status != 200 or not isinstance(body, dict):
            raise KVTierError(f"{self.url} answered with status {status}: is there a kvtier behind it?")
        return body

    def get(self, target: str) -> tuple[int, Any]:
        """Status and JSON content of a GET; content is None where the answer is no JSON."""
        return self._ask("GET", target, None)

    def post(self, target: str, content: Mapping[str, Any]) -> tuple[int, Any]:
        """As `get`, of a POST of JSON."""
        return self._ask("POST", target, json.dumps(content).encode())

    def _ask(self, method: str, target: str, body: bytes | None) -> tuple[int, Any]:
        connection: http.client.HTTPConnection
        if self._secure:
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=context)
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, self._path + target, body, headers)
            answer = connection.getresponse()
            status, text = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise KVTierError(f"{self.url} does not answer ({error}): is it running, and the port right?") from error
        finally:
            connection.close()
        if status == 401:
            raise KVTierError(f"{self.url} needs a token: give --token-file, or set KVTIER_HTTP_TOKEN")
        try:
            return status, json.loads(text)
        except ValueError:
            return status, None


@dataclass(frozen=True, slots=True)
class _Past:
    """Growth of counters over the rows that the server remembers."""

    times_s: list[float]
    series: Mapping[str, list[float | None]]

    @property
    def span_s(self) -> float:
        return self.times_s[-1] - self.times_s[0] if self.times_s else 0.0

    def grown(self, key: str, begin: int = 0, end: int = -1) -> float:
        values = self.series.get(key)
        return max(0.0, (values[end] or 0.0) - (values[begin] or 0.0)) if values else 0.0

    def per_second(self, key: str) -> float:
        return self.grown(key) / self.span_s if self.span_s else 0.0


def figures(status: Mapping[str, Any]) -> dict[str, Any]:
    """What is shown, from what ``/api/status`` said. Rates are ratios, bytes per second and seconds."""
    now: Series = {k: v for k, v in status["series"].items() if v is not None}
    past = _Past(status["history"]["times_s"], status["history"]["series"])
    lookups = past.grown("kvtier_lookups_total")
    hits = {tier: past.grown(key) for tier, key in _family(now, "kvtier_hits_total", "tier")}
    found = sum(hits.values())
    tiers: dict[str, dict[str, float]] = {}
    for tier, key in _family(now, "kvtier_tier_capacity_bytes", "tier"):
        label = f'{{tier="{tier}"}}'
        out = [f"kvtier_tier_get_bytes_total{label}", *(() if tiers else _OUT_OF_FIRST)]
        tiers[tier] = {
            "used_bytes": now[f"kvtier_tier_used_bytes{label}"],
            "capacity_bytes": now[key],
            "pages": now[f"kvtier_tier_resident_pages{label}"],
            "hit_share": hits.get(tier, 0.0) / found if found else 0.0,
            "in_bytes_per_s": past.per_second(f"kvtier_tier_put_bytes_total{label}"),
            "out_bytes_per_s": sum(map(past.per_second, out)),
            "evicted_pages": past.grown(f"kvtier_tier_evicted_pages_total{label}"),
        }
    codec = {}
    for op, key in _family(now, "kvtier_codec_seconds_count", "op"):
        calls = past.grown(key)
        spent = past.grown(f'kvtier_codec_seconds_sum{{op="{op}"}}')
        codec[op] = {"calls": calls, "mean_s": spent / calls if calls else 0.0}
    errors = {site: past.grown(key) for site, key in _family(now, "kvtier_errors_total", "site")}
    errors["load"] = errors.get("load", 0.0) + past.grown("kvtier_load_failures_total")
    return {
        "version": status["version"],
        "span_s": past.span_s,
        "lookups": lookups,
        "hit_rate": found / lookups if lookups else 0.0,
        "hit_rate_over_time": list(_hit_rates(past, [key for _, key in _family(now, "kvtier_hits_total", "tier")])),
        "ttft_saved_s": past.grown("kvtier_ttft_saved_seconds_total"),
        "tiers": tiers,
        "misses": {reason: past.grown(key) for reason, key in _family(now, "kvtier_misses_total", "reason")},
        "codec": codec,
        "quality": _quality(now),
        "errors": {site: n for site, n in errors.items() if n},
        "ghosts": status["ghosts"],
        "config": status["config"],
    }


def _family(now: Series, name: str, label: str) -> list[tuple[str, str]]:
    """Values of `label` and keys of every series called `name`."""
    prefix = f'{name}{{{label}="'
    return [(key[len(prefix) : -2], key) for key in now if key.startswith(prefix)]


def _hit_rates(past: _Past, hits: list[str]) -> Iterator[float | None]:
    rows = len(past.times_s)
    step = max(1, -(-(rows - 1) // _SPARK_COLUMNS))
    for begin in range(0, rows - 1, step):
        end = min(begin + step, rows - 1)
        lookups = past.grown("kvtier_lookups_total", begin, end)
        yield sum(past.grown(key, begin, end) for key in hits) / lookups if lookups else None


def _quality(now: Series) -> dict[str, dict[str, float]]:
    """Mean relative error of sampled pages by layer and role."""
    quality: dict[str, dict[str, float]] = {}
    prefix = "kvtier_relative_error_count{"
    for key, count in now.items():
        if key.startswith(prefix) and count:
            layer, role = (part.split('"')[1] for part in key[len(prefix) : -1].split(","))
            quality.setdefault(layer, {})[role] = now[key.replace("_count{", "_sum{")] / count
    return dict(sorted(quality.items(), key=lambda item: int(item[0])))


# ---- the screen


def screen(url: str, f: Mapping[str, Any], columns: int = 80) -> RenderableType:
    """Everything in one group of tables, for a terminal of so many columns."""
    from rich.console import Group
    from rich.text import Text

    sparks = "".join(" " if r is None else _SPARKS[max(1, round(r * 8))] for r in f["hit_rate_over_time"])
    saved = f", {f['ttft_saved_s']:.1f} s to first token saved" if f["ttft_saved_s"] else ""
    lines = [
        Text(f"kvtier {f['version']} at {url}, last {f['span_s'] / 60:.0f} min", style="bold"),
        Text(f"Hit rate {f['hit_rate']:.1%} of {f['lookups']:,.0f} pages{saved}  {sparks}"),
        _tier_table(f["tiers"], columns),
        _miss_table(f["misses"]),
        _codec_table(f["codec"]),
    ]
    if f["ghosts"] and f["ghosts"]["lookups"]:
        lines.append(_ghost_table(f["ghosts"]))
    if f["quality"]:
        layer, worst = max(f["quality"].items(), key=lambda item: max(item[1].values()))
        roles = ", ".join(f"{role} {error:.2%}" for role, error in worst.items())
        lines.append(Text(f"Relative error of sampled pages, worst layer {layer}: {roles}"))
    errors = ", ".join(f"{site} {n:,.0f}" for site, n in f["errors"].items())
    lines.append(Text(f"Errors: {errors}" if errors else "Errors: none", style="bold red" if errors else ""))
    return Group(*lines)


def _table(*columns: str) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _tier_table(tiers: Mapping[str, Any], columns: int) -> Any:
    """Figures stay whole: on a narrow terminal those that can be spared are left out."""
    rows = [_tier_row(name, t) for name, t in tiers.items()]
    shown = list(_TIER_COLUMNS)
    for spare in _SPARE:
        if sum(2 + max(len(name), *(len(row[name]) for row in rows)) for name in shown) <= columns:
            break
        shown.remove(spare)
    table = _table(*shown)
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    return table


def _tier_row(name: str, t: Mapping[str, float]) -> dict[str, str]:
    full = t["used_bytes"] / t["capacity_bytes"] if t["capacity_bytes"] else 0.0
    figures = (
        name,
        _size(t["used_bytes"]),
        _size(t["capacity_bytes"]),
        f"{full:.0%}",
        f"{t['pages']:,.0f}",
        f"{t['hit_share']:.0%}",
        _size(t["in_bytes_per_s"], 1000),
        _size(t["out_bytes_per_s"], 1000),
        f"{t['evicted_pages']:,.0f}",
    )
    return dict(zip(_TIER_COLUMNS, figures, strict=True))


def _miss_table(misses: Mapping[str, float]) -> Any:
    table = _table("missed because", "pages", "share")
    total = sum(misses.values())
    for reason, n in sorted(misses.items(), key=lambda item: -item[1]):
        if n:
            table.add_row(reason, f"{n:,.0f}", f"{n / total:.0%}")
    if not total:
        table.add_row("nothing", "0", "")
    return table


def _codec_table(codec: Mapping[str, Any]) -> Any:
    table = _table("codec", "calls", "mean")
    for op, c in codec.items():
        table.add_row(op, f"{c['calls']:,.0f}", f"{c['mean_s'] * 1e3:.2f} ms")
    return table


def _ghost_table(ghosts: Mapping[str, Any]) -> Any:
    wanted = [i for i, size in enumerate(ghosts["sizes"]) if size in (0.5, 1.0, 2.0, 4.0)]
    table = _table("would be found", "pages", *(f"{ghosts['sizes'][i]:g}x" for i in wanted))
    for tier, forms in ghosts["ratios"].items():
        for form, ratios in forms.items():
            table.add_row(tier, form, *(f"{ratios[i]:.1%}" for i in wanted))
    return table


def _size(nbytes: float, base: int = 1024) -> str:
    units = ("B", "kB", "MB", "GB", "TB") if base == 1000 else ("B", "KiB", "MiB", "GiB", "TiB")
    unit = 0
    while nbytes >= base and unit < len(units) - 1:
        nbytes /= base
        unit += 1
    return f"{nbytes:.1f} {units[unit]}" if unit else f"{nbytes:.0f} B"
