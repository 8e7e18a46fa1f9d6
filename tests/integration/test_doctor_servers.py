"""``kvtier doctor``: what it finds about Redis and Valkey, and about the cache server and the metrics port."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvtier.cli.app import app
from kvtier.cli.doctor import examine
from kvtier.cli.doctor_line import State
from kvtier.testing.redis_servers import RedisServer, ask, find_server, kept_port, wait_for
from tests.doctor_files import about, write


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    pytest.importorskip("redis", reason="redis-py is not installed: pip install 'kvtier[redis]'")
    if find_server() is None:
        pytest.skip("neither redis-server nor valkey-server is installed")
    server = RedisServer(tmp_path / "server")
    yield server
    server.stop()


def test_redis_is_tried_and_its_settings_are_told(tmp_path: Path, server: RedisServer) -> None:
    config = write(tmp_path, {"type": "redis", "url": server.url})
    findings = about(list(examine(config)), "redis")
    assert any(f.state is State.GOOD and "policy noeviction" in f.text and "version" in f.text for f in findings)
    warnings = {f.fix for f in findings if f.state is State.WARNING}
    assert warnings == {"set maxmemory-policy allkeys-lru", "set maxmemory"}
    assert any(f.text.startswith("put and got a page of 1.0 MiB") for f in findings)
    assert [f.text for f in about(findings, "redis clock")] == ["agrees with this machine's"]
    assert ask(server.port, "DBSIZE") == "0"
    ask(server.port, "CONFIG", "SET", "maxmemory", "64mb")
    ask(server.port, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    assert {f.state for f in about(list(examine(config)), "redis")} == {State.GOOD, State.NONE}
    server.stop()
    findings = about(list(examine(config)), "redis")
    assert findings[0].state is State.BAD and "check that the server runs at" in findings[0].fix
    assert CliRunner().invoke(app, ["doctor", "--config", str(config)]).exit_code == 1


def test_a_server_that_wants_a_password_fails(tmp_path: Path, server: RedisServer) -> None:
    ask(server.port, "CONFIG", "SET", "requirepass", "hunter2")
    config = write(tmp_path, {"type": "redis", "url": server.url})
    findings = about(list(examine(config)), "redis")
    assert findings[0].state is State.BAD and "hunter2" not in str(findings)


def test_a_database_that_is_not_there_is_named(tmp_path: Path, server: RedisServer) -> None:
    ask(server.port, "CONFIG", "SET", "maxmemory", "64mb")
    ask(server.port, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    config = write(tmp_path, {"type": "redis", "url": f"redis://127.0.0.1:{server.port}/99", "timeout": "60s"})
    (finding,) = [f for f in about(list(examine(config)), "redis") if f.state is State.BAD]
    assert "database 99" in finding.text and "the database in the url" in finding.fix


def test_a_mode_that_the_server_does_not_have_is_named(tmp_path: Path, server: RedisServer) -> None:
    tier = {"type": "redis", "url": server.url, "mode": "cluster", "timeout": "60s"}
    (finding,) = [f for f in about(list(examine(write(tmp_path, tier))), "redis") if f.state is State.BAD]
    assert finding.text == "mode = 'cluster', and the servers say standalone" and "leave mode out" in finding.fix
    tier |= {"mode": "sentinel", "service": "pages"}
    (finding,) = [f for f in about(list(examine(write(tmp_path, tier))), "redis") if f.state is State.BAD]
    assert finding.text.startswith("no sentinel tells where pages is") and "the url names sentinels" in finding.fix


def test_the_master_that_sentinels_watch_is_looked_at(tmp_path: Path, server: RedisServer) -> None:
    ask(server.port, "CONFIG", "SET", "maxmemory", "64mb")
    ask(server.port, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    (tmp_path / "sentinel.conf").write_text(f"sentinel monitor pages 127.0.0.1 {server.port} 1\n")
    binary, port = find_server(), kept_port()
    assert binary is not None
    command = [binary, str(tmp_path / "sentinel.conf"), "--sentinel", "--port", str(port), "--bind", "127.0.0.1"]
    with (tmp_path / "log").open("wb") as log:
        sentinel = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for(lambda: _listens(port), "the sentinel does not listen")
        tier = {"type": "redis", "url": f"redis://127.0.0.1:{port}", "service": "pages", "timeout": "60s"}
        for mode in ("auto", "sentinel"):
            findings = about(list(examine(write(tmp_path, tier | {"mode": mode}))), "redis")
            assert {f.state for f in findings} == {State.GOOD, State.NONE}, findings
            assert "policy allkeys-lru" in findings[0].text
        del tier["service"]
        (finding,) = [f for f in about(list(examine(write(tmp_path, tier))), "redis") if f.state is State.BAD]
        assert "is a sentinel" in finding.text and finding.fix.startswith("set service")
    finally:
        sentinel.kill()
        sentinel.wait()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 60).close()
    except OSError:
        return False
    return True


def test_redis_over_tls_has_its_certificate_looked_at(tmp_path: Path, server: RedisServer) -> None:
    del server  # only for its reasons to skip
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    cert, key, port = tmp_path / "cert.pem", tmp_path / "key.pem", kept_port()
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "3", "-subj", "/CN=redis"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    options = ["--tls-port", str(port), "--tls-cert-file", str(cert), "--tls-key-file", str(key)]
    options += ["--tls-ca-cert-file", str(cert), "--tls-auth-clients", "no"]
    try:
        with_tls = RedisServer(tmp_path / "tls", *options)
    except RuntimeError as error:
        if "TLS support" not in str(error):
            raise
        pytest.skip("this server was built without TLS")
    try:
        tier = {"type": "redis", "url": f"rediss://127.0.0.1:{port}", "tls_ca": str(cert)}
        (tls,) = about(list(examine(write(tmp_path, tier))), "redis TLS")
        assert tls.state is State.WARNING and "TLSv1" in tls.text and tls.fix == "renew the certificate"
        del tier["tls_ca"]
        findings = about(list(examine(write(tmp_path, tier))), "redis")
        assert State.BAD in {f.state for f in findings if f.what == "redis TLS"}
        plain = {"type": "redis", "url": f"redis://127.0.0.1:{port}"}
        (answer, *_) = about(list(examine(write(tmp_path, plain))), "redis")
        assert answer.state is State.BAD and "whether TLS is spoken there" in answer.fix
    finally:
        with_tls.stop()


# ---- the cache server and the metrics port


def test_the_cache_servers_certificate_and_sockets_are_told(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "3", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    block: dict[str, Any] = {"listen": ["tls:127.0.0.1:0", f"unix:{tmp_path}/k.sock", "unix:/proc/k.sock"]}
    block |= {"tls_cert": str(cert), "tls_key": str(key)}
    findings = about(list(examine(write(tmp_path, server=block))), "server")
    tls, *sockets = findings
    assert tls.state is State.WARNING and "expires in" in tls.text and tls.fix == "renew the certificate"
    assert [f.state for f in sockets] == [State.GOOD, State.GOOD, State.BAD]
    assert not (tmp_path / "k.sock").exists()
    (finding,) = about(list(examine(write(tmp_path, server={"listen": ["tls:127.0.0.1:0"]}))), "server")
    assert finding.state is State.BAD and "tls_cert" in finding.fix


def test_places_where_nobody_can_listen_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "password").write_text("x")
    listen = [f"unix:{tmp_path}/made/at/start/k.sock", f"unix:{tmp_path}/file", f"unix:{tmp_path}/file/k.sock"]
    block: dict[str, Any] = {"listen": [*listen, "tcp:192.0.2.1:0"]}
    block["password_file"] = str(tmp_path / "password")
    http = {"host": "192.0.2.1", "port": 0, "allow_remote": True, "token_file": str(tmp_path / "password")}
    findings = list(examine(write(tmp_path, server=block, http=http)))
    states = [f.state for f in about(findings, "server")]
    assert states == [State.GOOD, State.BAD, State.BAD, State.BAD]
    assert about(findings, "metrics")[0].state is State.BAD
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "kvtier.yaml", "password"]


def test_places_where_somebody_listens_are_told(tmp_path: Path) -> None:
    with (
        socket.socket(socket.AF_UNIX) as named,
        socket.create_server(("127.0.0.1", 0)) as numbered,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        named.bind(str(tmp_path / "k.sock"))
        named.listen()
        port = numbered.getsockname()[1]
        block = {"listen": [f"unix:{tmp_path}/k.sock", f"tcp:127.0.0.1:{port}", f"unix:{tmp_path}/free.sock"]}
        findings = list(examine(write(tmp_path, server=block, http={"port": other.getsockname()[1]})))
    states = [f.state for f in about(findings, "server")]
    assert states == [State.WARNING, State.WARNING, State.GOOD]
    assert [f.state for f in about(findings, "metrics")] == [State.WARNING]


def test_places_that_are_named_twice_are_told(tmp_path: Path) -> None:
    port = kept_port()
    for listen in (["unix:k.sock"] * 2, [f"tcp:127.0.0.1:{port}", f"tcp:127.0.0.1:{port}"]):
        (finding,) = about(list(examine(write(tmp_path, server={"listen": listen}))), "server")
        assert finding.state is State.BAD and "is there twice" in finding.text
    block = {"listen": [f"tcp:127.0.0.1:{port}"]}
    (finding,) = about(list(examine(write(tmp_path, server=block, http={"port": port}))), "metrics")
    assert finding.state is State.BAD and finding.fix == "choose another port for one"


def test_a_server_that_would_be_its_own_tier_is_told(tmp_path: Path) -> None:
    tier = {"type": "redis", "url": f"unix://{tmp_path}/k.sock"}
    findings = about(list(examine(write(tmp_path, tier, server={"listen": [f"unix:{tmp_path}/k.sock"]}))), "server")
    assert findings[0].state is State.BAD and "where this server listens itself" in findings[0].text
    assert findings[0].fix.startswith("leave the tier out")


def test_a_metrics_port_open_to_others_needs_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTIER_HTTP_TOKEN", raising=False)
    for http, state in (
        ({"port": 9404}, State.GOOD),
        ({"host": "0.0.0.0"}, State.BAD),
        ({"host": "0.0.0.0", "allow_remote": True}, State.BAD),
        ({"token_file": str(tmp_path / "nowhere")}, State.BAD),
        ({"token_file": str(tmp_path)}, State.BAD),
        ({"token_file": os.devnull}, State.BAD),
    ):
        assert about(list(examine(write(tmp_path, http=http))), "metrics")[0].state is state
