"""The status page's data: what it holds, what it hides, who may see it, and that its past is bounded."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from kvtier.abc.tier import TierUsage
from kvtier.cli.top import Client, figures, token_of
from kvtier.config import parse_config
from kvtier.errors import ConfigError, KVTierError
from kvtier.ghosts import Ghosts
from kvtier.ledger import Ledger, MissReason
from kvtier.observe import Observer
from kvtier.server import history as history_module
from kvtier.server.history import COARSE_ROWS, FINE_ROWS, MAX_COLUMNS, History, series_of
from kvtier.server.http import TOKEN_VARIABLE, HttpExporter, HttpOptions
from kvtier.server.page import SECRET, STATIC, StatusPage, masked

STATIC_FILES = Path(history_module.__file__).parent / "static"


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


def get(port: int, path: str, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request("GET", path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        connection.close()


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def ledger_with_usage() -> Ledger:
    ledger = Ledger(["host"])
    ledger.watch("host", lambda: TierUsage(1000, 250, 5, 0, 9, 4, 0, 0, 900, 300))
    return ledger


# ---- the past


def test_history_is_fine_for_an_hour_coarse_for_a_day_and_no_larger() -> None:
    clock, ledger = Clock(), Ledger(["host"])
    history = History(ledger.registry, clock)
    for _ in range(25 * 720):  # 25 hours
        clock.now_s += 5.0
        if clock.now_s % 3600 < 5:
            ledger.settle({"host": 1}, {})
        history._fine.add(clock.now_s, {"a": clock.now_s})  # the registry itself is read below
        if clock.now_s - history._coarse.last_s >= 60:
            history._coarse.add(clock.now_s, {"a": clock.now_s})
    history.sample()
    fine, coarse = history.fine(), history.coarse()
    assert (len(fine.times_s), len(coarse.times_s)) == (FINE_ROWS, COARSE_ROWS)
    assert fine.times_s[-1] - fine.times_s[0] == pytest.approx(3600, abs=10)
    assert coarse.times_s[-1] - coarse.times_s[0] == pytest.approx(86400, abs=120)
    assert (fine.series["a"][:-1] == fine.times_s[:-1]).all(), "rows and times stay together when rows are reused"
    assert fine.series["kvtier_lookups_total"][-1] == 25
    later = history.fine(since_s=clock.now_s - 12)
    assert later.times_s.tolist() == [clock.now_s - 10, clock.now_s - 5, clock.now_s, clock.now_s]


def test_history_takes_no_more_series_than_it_may() -> None:
    registry = CollectorRegistry()
    gauge = Gauge("kvtier_many", "Many.", ["n"], registry=registry)
    for n in range(MAX_COLUMNS + 50):
        gauge.labels(str(n))
    history = History(registry, Clock())
    history.sample()
    assert len(history.fine().series) == MAX_COLUMNS
    assert history._fine._values.shape == (FINE_ROWS, MAX_COLUMNS)


def test_history_says_once_that_a_collector_fails_and_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "FINE_STEP_S", 0.01)
    tries = threading.Semaphore(0)

    def fail() -> float:
        tries.release()
        raise RuntimeError("broken")

    registry = CollectorRegistry()
    Gauge("kvtier_broken", "Broken.", registry=registry).set_function(fail)
    history = History(registry)
    history.start()
    for _ in range(3):
        assert tries.acquire(timeout=600), "the history stopped after a failure"
    history.close()
    assert [record.message for record in caplog.records] == [
        "the status page lacks samples: a collector failed: RuntimeError: broken"
    ]


def test_series_have_no_buckets() -> None:
    series = series_of(Ledger(["host"]).registry)
    assert 'kvtier_codec_seconds_count{op="encode"}' in series
    assert 'kvtier_tier_seconds_sum{op="get",tier="host"}' in series
    assert not [name for name in series if "_bucket" in name or "_created" in name]


# ---- what it says


def test_status_holds_everything_and_history_since(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = ledger_with_usage()
    ghosts, observer = Ghosts({"host": 1000}, lambda: 4.5), Observer()
    observer.curves = ghosts.curves  # type: ignore[method-assign]
    config = parse_config({"tiers": [{"type": "host", "capacity": 4096}]})
    page = StatusPage(ledger.registry, config, lambda: observer)
    page.history.sample()
    ledger.settle({"host": 3}, {MissReason.ABSENT: 1})
    ghosts.looked_up([bytes(32)])
    page.history.sample()
    status = page.status()
    assert status["series"]["kvtier_lookups_total"] == 4
    assert status["history"]["series"]['kvtier_hits_total{tier="host"}'] == [0, 3]
    assert len(status["history"]["times_s"]) == 2
    assert status["ghosts"]["lookups"] == 1
    assert set(status["ghosts"]["ratios"]["host"]) == {"stored", "raw", "fp8", "nvfp4"}
    assert status["config"]["tiers"][0]["capacity"] == 4096
    assert page.status(since_s=status["now_s"] + 1)["history"]["times_s"] == []
    json.dumps(status, allow_nan=False)


def test_secrets_are_masked() -> None:
    config = parse_config(
        {
            "salt": "tenant secret",
            "tiers": [
                {"type": "host", "capacity": 4096},
                {"type": "redis", "url": "redis://cache-user@cache:6379/0", "password_file": "/run/secrets/redis"},
            ],
        }
    )
    text = json.dumps(shown := masked(config))
    assert "tenant secret" not in text
    assert shown["salt"] == SECRET
    assert shown["tiers"][1]["url"] == f"redis://cache-user:{SECRET}@cache:6379/0"
    assert shown["tiers"][1]["password_file"] == "/run/secrets/redis"
    assert shown["promote_deadline"] == config.promote_deadline, "defaults are part of what is in effect"
    assert masked(parse_config({"tiers": [{"type": "host", "capacity": 4096}]}))["salt"] == ""


# ---- who may see it


@pytest.fixture
def server() -> Iterator[HttpExporter]:
    registry = ledger_with_usage().registry
    with HttpExporter(registry, HttpOptions(port=0), page=StatusPage(registry)) as server:
        yield server


def test_every_file_of_the_bundle_is_served_and_asks_nobody_else(server: HttpExporter) -> None:
    served = set()
    for path, (name, content_type) in STATIC.items():
        status, headers, body = get(server.port, path)
        assert (status, headers["content-type"]) == (200, content_type)
        assert body == (STATIC_FILES / name).read_bytes()
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        text = body.decode().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in text.replace("// ", "").replace("http://127.0.0.1", ""), f"{name} names another host"
        served.add(name)
    assert served == {path.name for path in STATIC_FILES.iterdir()}


def test_answers_are_compressed_where_the_client_can(server: HttpExporter) -> None:
    _, headers, body = get(server.port, "/page.js", {"Accept-Encoding": "gzip"})
    assert headers["content-encoding"] == "gzip"
    assert gzip.decompress(body) == (STATIC_FILES / "page.js").read_bytes()


def test_mistakes_are_told(server: HttpExporter) -> None:
    assert get(server.port, "/api/status?since=yesterday")[0] == 400
    assert get(server.port, "/api/status?range=year")[0] == 400
    status, _, body = get(server.port, "/api/explain?request=r1")
    assert (status, json.loads(body)["error"][:46]) == (404, "nothing is known of request 'r1': set explain_")
    status, _, body = get(server.port, "/page.html")
    assert (status, body[:14]) == (404, b"known paths: /")


def test_names_that_others_made_point_here_are_refused(server: HttpExporter) -> None:
    for host in ("evil.example", "192.0.2.1"):
        assert get(server.port, "/api/status", {"Host": host})[0] == 403, host
    for host in ("localhost:80", "[::1]:9404", "127.0.0.1"):
        assert get(server.port, "/api/status", {"Host": host})[0] == 200, host


def test_the_page_is_behind_the_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")
    registry = ledger_with_usage().registry
    with HttpExporter(registry, HttpOptions(port=0), page=StatusPage(registry)) as server:

        def basic(text: str) -> dict[str, str]:
            return {"Authorization": "Basic " + base64.b64encode(text.encode()).decode()}

        for path in (*STATIC, "/api/status", "/api/explain?request=1"):
            status, headers, _ = get(server.port, path)
            assert (status, headers["www-authenticate"]) == (401, 'Basic realm="kvtier"')
            assert get(server.port, path, basic("me:wrong"))[0] == 401
            assert get(server.port, path, basic("s3cret"))[0] == 401
        for headers in (basic("anybody:s3cret"), basic(":s3cret"), {"Authorization": "Bearer s3cret"}):
            assert get(server.port, "/api/status", headers | {"Host": "kvtier.example"})[0] == 200
        assert get(server.port, "/", {"Authorization": "Basic ?"})[0] == 401
        assert get(server.port, "/livez")[0] == 200
        monkeypatch.delenv(TOKEN_VARIABLE)
        (tmp_path / "token").write_text("s3cret\n")
        assert Client(server.url, token_of(tmp_path / "token")).status()["version"]
        with pytest.raises(KVTierError, match="needs a token"):
            Client(server.url, token_of(None)).status()


# ---- the terminal


def test_top_shows_the_same(server: HttpExporter) -> None:
    client = Client(server.url)
    shown = figures(client.status())
    assert shown["tiers"]["host"] == {
        "used_bytes": 250, "capacity_bytes": 1000, "pages": 5, "hit_share": 0.0, "in_bytes_per_s": 0.0,
        "out_bytes_per_s": 0.0, "evicted_pages": 0.0,
    }  # fmt: skip
    with pytest.raises(KVTierError, match="is there a kvtier behind it"):
        Client(server.url + "/nothing").status()
    with pytest.raises(ConfigError, match="must be a URL"):
        Client("ftp://x")


def test_top_reckons_over_what_the_server_remembers() -> None:
    status = {
        "version": "1", "ghosts": None, "config": None,
        "series": {
            "kvtier_lookups_total": 300, 'kvtier_hits_total{tier="host"}': 150, 'kvtier_hits_total{tier="nvme"}': 50,
            'kvtier_tier_capacity_bytes{tier="host"}': 100, 'kvtier_tier_used_bytes{tier="host"}': 40,
            'kvtier_tier_resident_pages{tier="host"}': 4, 'kvtier_tier_put_bytes_total{tier="host"}': 900,
            'kvtier_misses_total{reason="absent"}': 100, 'kvtier_codec_seconds_count{op="encode"}': 10,
            'kvtier_relative_error_count{layer="3",role="k"}': 4, 'kvtier_relative_error_sum{layer="3",role="k"}': 0.2,
            "kvtier_load_failures_total": 2, 'kvtier_errors_total{site="load"}': 1,
        },
        "history": {
            "step_s": 5, "times_s": [100, 105, 110],
            "series": {
                "kvtier_lookups_total": [200, 200, 300], 'kvtier_hits_total{tier="host"}': [120, 120, 150],
                'kvtier_hits_total{tier="nvme"}': [None, 40, 50], 'kvtier_misses_total{reason="absent"}': [80, 80, 100],
                'kvtier_tier_put_bytes_total{tier="host"}': [400, 400, 900],
                'kvtier_codec_seconds_count{op="encode"}': [0, 5, 10],
                'kvtier_codec_seconds_sum{op="encode"}': [0.0, 0.5, 1.0], "kvtier_load_failures_total": [0, 1, 2],
                'kvtier_errors_total{site="load"}': [0, 0, 1],
            },
        },
    }  # fmt: skip
    shown = figures(status)
    assert shown["span_s"] == 10
    assert shown["lookups"] == 100
    assert shown["hit_rate"] == 0.8
    assert shown["hit_rate_over_time"] == [None, 0.4]
    assert shown["tiers"]["host"]["in_bytes_per_s"] == 50.0
    assert shown["tiers"]["host"]["hit_share"] == pytest.approx(30 / 80)
    assert shown["misses"] == {"absent": 20}
    assert shown["codec"]["encode"] == {"calls": 10, "mean_s": 0.1}
    assert shown["quality"] == {"3": {"k": 0.05}}
    assert shown["errors"] == {"load": 3}
