"""The HTTP exporter: its three answers, who may reach it, and that it never holds anybody up."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Metric

from kvtier.config import HttpConfig, parse_config
from kvtier.errors import ConfigError
from kvtier.server import http as exporter_module
from kvtier.server import readiness
from kvtier.server.http import MAX_CONNECTIONS, TOKEN_VARIABLE, HttpExporter, HttpOptions, Post
from kvtier.testing.redis_servers import wait_for

ANY = HttpOptions(port=0)
PATIENCE_S = 60.0
"""How long is waited for what must happen: long, since it says nothing about speed."""
HOST = {"type": "host", "capacity": 4096}


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("kvtier_pages", "Pages.", registry=registry).inc(3)
    return registry


@pytest.fixture
def server(registry: CollectorRegistry) -> Iterator[HttpExporter]:
    with HttpExporter(registry, ANY) as server:
        yield server


def ask(
    server: HttpExporter,
    path: str,
    headers: dict[str, str] | None = None,
    method: str = "GET",
    body: bytes | None = None,
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    try:
        connection.request(method, path, body=body, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), {k.lower(): v for k, v in answer.getheaders()}
    finally:
        connection.close()


def test_metrics_in_both_formats(server: HttpExporter) -> None:
    status, body, headers = ask(server, "/metrics")
    assert status == 200
    assert "kvtier_pages_total 3.0\n" in body
    assert headers["content-type"].startswith("text/plain")
    assert "# EOF" not in body
    status, body, headers = ask(server, "/metrics?x=1", {"Accept": "application/openmetrics-text; version=1.0.0"})
    assert status == 200
    assert body.endswith("# EOF\n")
    assert headers["content-type"].startswith("application/openmetrics-text")


def test_liveness_and_unknown_paths(server: HttpExporter) -> None:
    assert ask(server, "/livez")[:2] == (200, "ok\n")
    assert ask(server, "/readyz")[:2] == (200, "ok\n")
    assert ask(server, "/livez", method="HEAD")[:2] == (200, "")
    assert ask(server, "/nothing")[0] == 404
    assert ask(server, "/metrics", method="POST")[0] == 404


def test_readiness_tells_why(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "READY_CACHE_S", 0.0)
    answers: list[str | Exception | None] = [None, "host tier: put answered FULL", OSError("disk gone"), None]

    def check() -> str | None:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with HttpExporter(registry, ANY, ready=check) as server:
        assert ask(server, "/readyz")[:2] == (200, "ok\n")
        assert ask(server, "/readyz")[:2] == (503, "host tier: put answered FULL\n")
        assert ask(server, "/readyz")[:2] == (503, "OSError: disk gone\n")
        assert ask(server, "/readyz")[0] == 200
    assert answers == []


FOREIGN = ("evil.example:9404", "192.0.2.1", "localhost.evil.example", "[::", "", "127.0.0.1.evil.example")


@pytest.mark.parametrize("host", FOREIGN)
def test_a_name_that_somebody_made_point_here_reads_nothing(registry: CollectorRegistry, host: str) -> None:
    """DNS rebinding: the visitor's browser sends the attacker's name, and would let his page read the answer."""
    with HttpExporter(registry, ANY, ready=lambda: "nvme tier: /secret/path") as server:
        status, body, _ = ask(server, "/metrics", {"Host": host})
        assert status == 403
        assert "kvtier_" not in body and "http.names" in body
        assert ask(server, "/readyz", {"Host": host})[:2] == (503, "not ready\n")
        assert ask(server, "/livez", {"Host": host})[0] == 200, "probes come under any name"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:9404", "127.8.9.1", "[::1]:1", "proxy.lan"])
def test_its_own_names_and_configured_ones_are_answered(registry: CollectorRegistry, host: str) -> None:
    options = HttpOptions.of(parse_config({"tiers": [HOST], "http": {"names": ["Proxy.lan"]}}).http or HttpConfig())
    with HttpExporter(registry, options, ready=lambda: "the reason") as server:
        assert ask(server, "/metrics", {"Host": host})[0] == 200
        assert ask(server, "/readyz", {"Host": host})[:2] == (503, "the reason\n")


def test_a_client_without_host_header_is_no_browser(server: HttpExporter) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert connection.makefile("rb").readline().split()[1] == b"200"


def test_behind_a_token_any_name_will_do(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")
    with HttpExporter(registry, ANY) as server:
        headers = {"Host": "kvtier.example"}
        assert ask(server, "/metrics", headers)[0] == 401
        assert ask(server, "/metrics", headers | {"Authorization": "Bearer s3cret"})[0] == 200


def test_readiness_is_not_run_for_every_probe(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "READY_CACHE_S", 10 * PATIENCE_S)
    calls: list[float] = []

    def check() -> None:
        calls.append(time.monotonic())

    with HttpExporter(registry, ANY, ready=check) as server:
        assert [ask(server, "/readyz")[0] for _ in range(5)] == [200] * 5
    assert len(calls) == 1


def test_a_hung_check_is_a_reason_and_runs_once(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "READY_TIMEOUT_S", 0.1)
    release, calls = threading.Event(), []

    def check() -> None:
        calls.append(1)
        release.wait(10 * PATIENCE_S)

    with HttpExporter(registry, ANY, ready=check) as server:
        for _ in range(3):
            status, body, _headers = ask(server, "/readyz")
            assert status == 503
            assert "has not ended" in body
        assert ask(server, "/livez")[0] == 200
        release.set()
    assert len(calls) == 1


def test_a_taken_port_names_the_way_out(server: HttpExporter, registry: CollectorRegistry) -> None:
    with pytest.raises(ConfigError, match=rf"http port {server.port} .* is taken by another process: choose another"):
        HttpExporter(registry, HttpOptions(port=server.port))


def test_port_rule_of_ranks(server: HttpExporter, registry: CollectorRegistry) -> None:
    assert [HttpOptions(port=9000).port_of(rank) for rank in (0, 3)] == [9000, 9003]
    assert HttpOptions(port=0).port_of(7) == 0
    with pytest.raises(ConfigError, match="65535 \\+ rank 1"):
        HttpOptions(port=65535).port_of(1)
    with pytest.raises(ConfigError, match="-5"):
        HttpOptions(port=-5).port_of(0)
    with pytest.raises(ConfigError, match=rf"port {server.port} \(port \+ rank 2\)"):
        HttpExporter(registry, HttpOptions(port=server.port - 2), rank=2)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "some-name"])
def test_other_machines_are_refused_unless_allowed(registry: CollectorRegistry, host: str) -> None:
    with pytest.raises(ConfigError, match=f"{host}.*allow_remote"):
        HttpExporter(registry, HttpOptions(host=host, port=0))
    with pytest.raises(ConfigError, match=f"{host}.*token_file.*{TOKEN_VARIABLE}"):
        HttpExporter(registry, HttpOptions(host=host, port=0, allow_remote=True))


def test_the_token_guards_what_tells_something(registry: CollectorRegistry, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("s3cret\n")
    options = HttpOptions(host="0.0.0.0", port=0, allow_remote=True, token_file=token_file)
    with HttpExporter(registry, options, ready=lambda: "/secret/path is full") as server:
        status, _body, headers = ask(server, "/metrics")
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        for wrong in ("Bearer s3cre", "Bearer s3crett", "Basic s3cret", "Bearer \xff", "s3cret"):
            assert ask(server, "/metrics", {"Authorization": wrong})[0] == 401
        assert ask(server, "/metrics", {"Authorization": "Bearer s3cret"})[0] == 200
        assert ask(server, "/livez")[0] == 200
        assert ask(server, "/readyz")[:2] == (503, "not ready\n")
        assert ask(server, "/readyz", {"Authorization": "bearer s3cret"})[:2] == (503, "/secret/path is full\n")


def test_the_token_from_the_environment(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "from-env")
    with HttpExporter(registry, HttpOptions(host="0.0.0.0", port=0, allow_remote=True)) as server:
        assert ask(server, "/metrics")[0] == 401
        assert ask(server, "/metrics", {"Authorization": "Bearer from-env"})[0] == 200


def test_options_from_the_configuration_block(tmp_path: Path) -> None:
    block = {"host": "0.0.0.0", "port": 9404, "allow_remote": True, "token_file": str(tmp_path / "token")}
    config = parse_config({"tiers": [{"type": "host", "capacity": "1MiB"}], "http": block}).http
    assert config is not None
    assert HttpOptions.of(config) == HttpOptions("0.0.0.0", 9404, True, tmp_path / "token")


def test_unusable_token_files_are_named(registry: CollectorRegistry, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"token_file '.*/none' cannot be read"):
        HttpExporter(registry, HttpOptions(port=0, token_file=tmp_path / "none"))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match=r"token_file '.*/empty' is empty"):
        HttpExporter(registry, HttpOptions(port=0, token_file=tmp_path / "empty"))


def test_requests_are_bounded(server: HttpExporter) -> None:
    assert ask(server, "/livez", body=b"x" * 100)[0] == 413
    assert ask(server, "/" + "x" * 70_000)[0] == 414
    assert ask(server, "/livez", {f"h{n}": "x" for n in range(200)})[0] == 431
    assert ask(server, "/livez")[0] == 200


def answered(server: HttpExporter) -> int:
    """The status of a liveness probe; 0 where the connection was cut, as one too many may be before it is answered."""
    try:
        return ask(server, "/livez")[0]
    except ConnectionError:
        return 0


def test_connections_are_bounded_and_close_does_not_wait_for_them(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter_module._Handler, "timeout", 10 * PATIENCE_S)  # idle ones stay
    server = HttpExporter(registry, ANY)
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(MAX_CONNECTIONS)]
    try:
        # The idle ones are accepted in turn.
        wait_for(lambda: answered(server) == 503, "connections are not bounded")
        idle.pop().close()
        wait_for(lambda: answered(server) == 200, "a place that is free is not given")
        start = time.monotonic()
        server.close()
        server.close()
        assert time.monotonic() - start < PATIENCE_S / 2, "closing is to take 2 s, and waited for the idle ones"
        wait_for(lambda: not [t for t in threading.enumerate() if t.name.startswith("kvtier-http")], "threads stay")
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
    finally:
        server.close()
        for connection in idle:
            connection.close()


def test_nothing_is_logged(server: HttpExporter, capfd: pytest.CaptureFixture[str]) -> None:
    ask(server, "/livez")
    ask(server, "/nothing")
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"not http at all\r\n\r\n")
        connection.recv(1000)
    assert capfd.readouterr() == ("", "")


def test_a_failing_collector_is_an_answer(capfd: pytest.CaptureFixture[str]) -> None:
    class Broken:
        def describe(self) -> list[Metric]:
            return []

        def collect(self) -> list[Metric]:
            raise RuntimeError("tier closed")

    registry = CollectorRegistry()
    registry.register(Broken())
    with HttpExporter(registry, ANY) as server:
        status, body, _headers = ask(server, "/metrics")
    assert (status, body) == (500, "a collector failed: RuntimeError: tier closed\n")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "begin",
    [b"GET /livez HT", b"GET /livez HTTP/1.1\r\nX-", b"POST /echo HTTP/1.1\r\nContent-Type: application/json\r\n"
     b"Content-Length: 4000\r\n\r\n"],
    ids=["line", "header", "body"],
)  # fmt: skip
def test_requests_that_come_byte_by_byte_keep_nobody_out(monkeypatch: pytest.MonkeyPatch, begin: bytes) -> None:
    monkeypatch.setattr(exporter_module, "RECEIVE_DEADLINE_S", 0.5)
    monkeypatch.setattr(exporter_module, "MAX_CONNECTIONS", 2)
    posts = {"/echo": Post(lambda body, _: (HTTPStatus.OK, body), 4096)}
    with HttpExporter(CollectorRegistry(), HttpOptions(), posts=posts) as server:
        drips = [socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) for _ in range(2)]
        try:
            for drip in drips:
                drip.sendall(begin)

            def drip_and_ask() -> bool:
                for drip in drips:
                    with contextlib.suppress(OSError):  # given up, as it should be
                        drip.send(b"x")
                return answered(server) == 200

            wait_for(drip_and_ask, "nobody else is answered")
        finally:
            for drip in drips:
                drip.close()
