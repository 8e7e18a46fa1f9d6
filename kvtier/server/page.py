"""The status page, and the data behind it: what an operator looks at, and what ``kvtier top`` prints.

``/``              the page; its files lie in `static` and ask nobody else for anything
``/api/status``    everything that it shows, as JSON; ``?range=day``, ``?since=UNIX_TIME``
``/api/explain``   ``?request=ID``: what became of each page of a sampled request
``/api/namespaces``   what is stored, by namespace; POST: purge, pin, unpin one
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from functools import cache
from http import HTTPStatus
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry

from kvtier import __version__
from kvtier.config import Config
from kvtier.errors import ClosedError, ConfigError, KVTierError
from kvtier.ghosts import GhostCurves
from kvtier.inventory import Inventory
from kvtier.observe import Observer
from kvtier.server.history import History, Past, series_of

STATIC = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
NAMESPACES = "/api/namespaces"
_CLOSED = (
    "namespaces are not told yet, since it is starting, or not at all: where users of a server have passwords, its "
    "port needs a token (http.token_file)"
)
SECRET = "***"
_SECRETS = ("salt",)


@dataclass(frozen=True, slots=True)
class Answer:
    status: HTTPStatus
    body: bytes
    content_type: str


class StatusPage:
    """Answers for one process. Any thread may call it; the exporter that serves it starts and closes it.

    config: shown with its secrets masked. observer: the store's, once there is a store.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        config: Config | None = None,
        observer: Callable[[], Observer | None] = lambda: None,
    ) -> None:
        self._registry = registry
        self._config = None if config is None else masked(config)
        self._observer = observer
        self._started_s = time.time()
        self.history = History(registry)

    def start(self) -> None:
        self.history.start()

    def close(self) -> None:
        self.history.close()

    def answer(self, target: str) -> Answer | None:
        """The answer to a GET of `target`, a path with its query; None for a path that is not of the page."""
        url = urlsplit(target)
        if url.path in STATIC:
            name, content_type = STATIC[url.path]
            return Answer(HTTPStatus.OK, _static(name), content_type)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        if url.path == "/api/status":
            try:
                since_s = float(query.get("since", "0"))
            except ValueError:
                return _json({"error": f"since={query['since']} must be a unix time"}, HTTPStatus.BAD_REQUEST)
            if query.get("range", "hour") not in ("hour", "day"):
                return _json({"error": f"range={query['range']} must be hour or day"}, HTTPStatus.BAD_REQUEST)
            return _json(self.status(since_s, day=query.get("range") == "day"))
        if url.path == "/api/explain":
            request = query.get("request", "")
            observer = self._observer()
            record = None if observer is None else observer.explain(request)
            if record is None:
                text = (
                    f"nothing is known of request {request!r}: set explain_sample in the engine's configuration to the "
                    "share of requests to keep (0 by default, 1 for every one; the last 1,024 are kept)"
                )
                return _json({"error": text}, HTTPStatus.NOT_FOUND)
            return _json(record)
        if url.path == NAMESPACES:
            inventory = self._inventory()
            if inventory is None:
                return _json({"error": _CLOSED}, HTTPStatus.FORBIDDEN)
            try:
                return _json({"namespaces": inventory.rows(), "not_listed": inventory.shared_tiers()})
            except ClosedError as error:
                return _json({"error": str(error)}, HTTPStatus.SERVICE_UNAVAILABLE)
        return None

    def manage(self, body: bytes, headers: Message) -> tuple[HTTPStatus, bytes]:
        """A POST to ``/api/namespaces``: ``{"action": "purge", "namespace": NAME, "dry_run": false}``."""
        answer = self._manage(body)
        return answer.status, answer.body

    def _manage(self, body: bytes) -> Answer:
        inventory = self._inventory()
        if inventory is None:
            return _json({"error": _CLOSED}, HTTPStatus.FORBIDDEN)
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            asked = None
        actions = {"purge": inventory.purge, "pin": inventory.pin, "unpin": inventory.unpin}
        if (
            not isinstance(asked, dict)
            or not isinstance(asked.get("namespace"), str)
            or not isinstance(asked.get("dry_run", False), bool)
            or asked.get("action") not in actions
        ):
            text = f"give a JSON object with action (one of {', '.join(actions)}), namespace, and perhaps dry_run"
            return _json({"error": text}, HTTPStatus.BAD_REQUEST)
        try:
            return _json(actions[asked["action"]](asked["namespace"], dry_run=asked.get("dry_run", False)))
        except ConfigError as error:
            return _json({"error": str(error)}, HTTPStatus.NOT_FOUND)
        except KVTierError as error:  # some of it may be done, or the store is closing
            return _json({"error": str(error)}, HTTPStatus.SERVICE_UNAVAILABLE)

    def _inventory(self) -> Inventory | None:
        observer = self._observer()
        return None if observer is None else observer.inventory

    def status(self, since_s: float = 0.0, *, day: bool = False) -> dict[str, Any]:
        """What the page shows, for JSON."""
        observer = self._observer()
        past = self.history.coarse(since_s) if day else self.history.fine(since_s)
        return {
            "version": __version__,
            "now_s": time.time(),
            "started_s": self._started_s,
            "series": {name: _number(value) for name, value in series_of(self._registry).items()},
            "history": _past(past),
            "ghosts": _curves(None if observer is None else observer.curves()),
            "config": self._config,
        }


def masked(config: Config) -> dict[str, Any]:
    """The effective configuration, defaults included, for people to read: secrets are ``***``."""

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: masked_value(k, walk(v)) for k, v in value.items()}
        if isinstance(value, list):
            return [walk(inner) for inner in value]
        return value

    shown = walk(config.model_dump(mode="json"))
    return {name: value for name, value in shown.items() if value is not None}


def masked_value(option: str, value: Any) -> Any:
    """The value of one option, for people to read."""
    return SECRET if option in _SECRETS and value else _url(value) if option == "url" else value


def _url(url: Any) -> Any:
    """Without what might be a password in it."""
    if not isinstance(url, str) or "@" not in url:
        return url
    scheme, _, rest = url.rpartition("://")
    user = rest.rpartition("@")[0].partition(":")[0]
    return f"{scheme}://{user}:{SECRET}@{rest.rpartition('@')[2]}"


@cache
def _static(name: str) -> bytes:
    return (resources.files("kvtier.server") / "static" / name).read_bytes()


def _number(value: float) -> float | int | None:
    if not np.isfinite(value):
        return None
    return int(value) if value == int(value) else float(f"{value:.6g}")


def _numbers(values: npt.NDArray[np.float64]) -> list[float | int | None]:
    return [_number(value) for value in values.tolist()]


def _past(past: Past) -> dict[str, Any]:
    return {
        "step_s": past.step_s,
        "times_s": [round(t, 3) for t in past.times_s.tolist()],
        "series": {name: _numbers(values) for name, values in past.series.items()},
    }


def _curves(curves: GhostCurves | None) -> dict[str, Any] | None:
    if curves is None:
        return None
    ratios = {
        tier: {form.value: [round(r, 5) for r in line] for form, line in forms.items()}
        for tier, forms in curves.ratios.items()
    }
    return {"sizes": [round(s, 5) for s in curves.sizes], "lookups": curves.lookups, "ratios": ratios}


def _json(content: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> Answer:
    return Answer(status, json.dumps(content, separators=(",", ":")).encode(), "application/json")
