"""How the cache server is reached: the tools of Redis, sockets and ports, TLS, its command line."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.keys import checksum
from kvtier.server.app import CacheServer
from kvtier.server.keyspace import Reservation
from kvtier.server.options import Listen
from kvtier.testing.redis_servers import wait_for
from tests.cache_servers import MIB, PATIENCE_S, client_of, http_status, run_serve, start

redis = pytest.importorskip("redis", reason="redis-py is not installed: pip install 'kvtier[redis]'")


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="no redis-cli: apt-get install redis-tools")
def test_redis_cli_and_redis_benchmark_work_unchanged(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cret")
    process, lines = run_serve(
        tmp_path, "--listen", "tcp:127.0.0.1:0", "--host-capacity", "64MiB", "--password-file", str(tmp_path / "secret")
    )
    port = lines[0].rpartition(":")[2]
    environment = {**os.environ, "REDISCLI_AUTH": "s3cret"}

    def cli(*arguments: str) -> str:
        done = subprocess.run(
            ["redis-cli", "-p", port, *arguments],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env=environment,
            check=True,
        )
        return done.stdout.strip()

    try:
        assert cli("set", "a", "1") == "OK"
        assert cli("-3", "get", "a") == "1"
        assert cli("--scan") == "a"
        assert "redis_version" in cli("info")
        assert cli("lpush", "a", "1").startswith("ERR unknown command")
        done = subprocess.run(
            ["redis-benchmark", "-p", port, "-a", "s3cret", "-t", "ping,set,get,mset", "-n", "500", "-c", "8",
             "-P", "4", "-d", "5000", "--csv"],
            capture_output=True, text=True, timeout=600, check=True,
        )  # fmt: skip
        measured = [line.split(",")[0] for line in done.stdout.splitlines()[1:]]
        assert {'"SET"', '"GET"', '"MSET (10 keys)"'} <= set(measured), done.stdout + done.stderr
        assert "Error" not in done.stderr
        command_line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert b"s3cret" not in command_line
    finally:
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--host-capacity is missing"),
        (["--host-capacity", "4GiB", "--listen", "tcp:0.0.0.0:0"], "reachable from other machines"),
        (["--host-capacity", "lots"], "must be a size"),
        (["--host-capacity", "4GiB", "--nvme", "200GiB"], "must be DIR:SIZE"),
        (["--host-capacity", "4GiB", "--nvme", "a:1GiB", "--nvme", "b:2GiB"], "give all the same size"),
        (["--host-capacity", "4GiB", "--nvme", "a:1GiB", "--nvme", "a:1GiB"], "names a directory twice"),
        (["--host-capacity", "4GiB", "--nvme", "a:some"], "--nvme a:some: the size must be a size"),
        (["--host-capacity", "4GiB", "--http", "9404"], "must be HOST:PORT"),
        (["--host-capacity", "4GiB", "--password-file", "/nowhere"], "cannot be read: No such file or directory; name"),
        (["--config", "/nowhere", "--nvme", "a:1GiB"], "already says everything"),
        (["--config", "/nowhere", "--max-connections", "0"], "already says everything"),
        (["--host-capacity", "4GiB", "--max-connections", "0"], "greater than or equal to 1"),
        (["--host-capacity", "4GiB", "--tls-client-ca", "/nowhere"], "asks nobody for a certificate"),
    ],
)
def test_wrong_options_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from kvtier.cli import main

    with pytest.raises(SystemExit) as exit_:
        main(["serve", *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("method", ["POST", "PUT", "GET"])
def test_what_a_web_page_makes_a_browser_send_is_not_done(server: CacheServer, method: str) -> None:
    client = client_of(server)
    client.set("kept", "value")
    body = b"FLUSHDB\r\n*3\r\n$3\r\nSET\r\n$4\r\nkept\r\n$5\r\nwrong\r\n"
    head = f"{method} /SET HTTP/1.1\r\nHost: 127.0.0.1:6380\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.listening[1].port), PATIENCE_S) as browser:
        browser.sendall(head.encode() + body)
        answer = b""
        with contextlib.suppress(ConnectionResetError):  # what it sent was not read to its end
            while received := browser.recv(4096):
                answer += received
    assert b"+OK" not in answer and b"Protocol error: this is a request of HTTP" in answer
    assert client.get("kept") == b"value"


def test_a_unix_socket_is_for_its_owner_and_for_one_server(server: CacheServer, tmp_path: Path) -> None:
    path = server.listening[0].path
    assert path is not None and path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="another process listens there"):
        start(tmp_path, listen=[f"unix:{path}"])
    assert client_of(server).ping()


def test_a_path_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "k.sock").write_text("mine")
    with pytest.raises(ConfigError, match="no socket; choose another path"):
        start(tmp_path)
    assert (tmp_path / "k.sock").read_text() == "mine"


def test_clients_that_come_all_at_once_need_not_come_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as Redis' clients are used to wait in line, also where they do not wait for their own connecting."""
    if int(Path("/proc/sys/net/core/somaxconn").read_text()) < 1024:
        pytest.skip("this kernel lets fewer connections wait: sysctl net.core.somaxconn")
    server = start(tmp_path)
    busy, go_on = threading.Event(), threading.Event()

    def wait(self: Any, connected: socket.socket, *_: Any) -> None:
        busy.set()
        go_on.wait(PATIENCE_S)
        connected.close()

    monkeypatch.setattr("kvtier.server.listener.Clients.take", wait)
    with contextlib.ExitStack() as stack:
        for _ in range(500):
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.setblocking(False)
            one.connect(str(tmp_path / "k.sock"))
        assert busy.wait(PATIENCE_S)
        go_on.set()
    server.stop()


def test_a_key_with_a_passphrase_asks_nobody_for_it(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl: apt-get install openssl")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-passout", "pass:x", "-keyout", "key.pem", "-out"]
    subprocess.run([*command, "cert.pem", "-subj", "/CN=x"], cwd=tmp_path, check=True, capture_output=True)
    files: dict[str, Any] = {"tls_cert": str(tmp_path / "cert.pem"), "tls_key": str(tmp_path / "key.pem")}
    with pytest.raises(ConfigError, match="without a passphrase"):
        start(tmp_path, listen=["tls:127.0.0.1:0"], **files)


def test_a_socket_left_behind_is_replaced(tmp_path: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "k.sock"))
    left.close()
    server = start(tmp_path)
    with client_of(server) as client:
        assert client.ping()
    assert Listen.parse(f"unix:{tmp_path}/k.sock") == server.listening[0]
    server.stop()
    assert not (tmp_path / "k.sock").exists()


def certificate(folder: Path) -> tuple[str, str]:
    """Of this machine, signed by itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl: apt-get install openssl")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", "key.pem", "-out",
         "cert.pem", "-subj", "/CN=kvtier", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return str(folder / "cert.pem"), str(folder / "key.pem")


def test_tls(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    server = start(tmp_path, listen=["tls:127.0.0.1:0"], tls_cert=cert, tls_key=key)
    value = os.urandom(3 * MIB)
    with client_of(server, ssl=True, ssl_ca_certs=cert) as client:
        assert client.set("k", value) and client.get("k") == value
        with client.pipeline(transaction=False) as pipeline:
            for n in range(500):
                pipeline.set(f"k{n}", b"x" * n)
                pipeline.strlen(f"k{n}")
            assert pipeline.execute()[1::2] == list(range(500))
    with client_of(server) as plain, pytest.raises(redis.ConnectionError):
        plain.ping()
    with client_of(server, ssl=True, ssl_ca_certs=cert) as client:
        assert client.get("k499") == b"x" * 499, "a client that does not speak TLS harms nobody"
    server.stop()


def test_tls_clients_that_stall_are_cut_off(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    server = start(tmp_path, listen=["tls:127.0.0.1:0"], tls_cert=cert, tls_key=key, client_timeout="1s")
    context = ssl.create_default_context(cafile=cert)
    large = server.keyspace.reserve(0, b"large", 24 * MIB)  # not sent: a busy machine may need longer for that
    assert isinstance(large, Reservation) and large.view is not None
    large.view[:] = bytes(24 * MIB)
    large.checksum = checksum(large.view, large.page)
    assert server.keyspace.commit(0, b"large", large)

    def connected() -> ssl.SSLSocket:
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)  # so that little of a reply is on its way
        plain.settimeout(PATIENCE_S)
        plain.connect(("127.0.0.1", server.listening[0].port))
        return context.wrap_socket(plain, server_hostname="127.0.0.1")

    with client_of(server, ssl=True, ssl_ca_certs=cert) as client, connected() as half, connected() as deaf:
        assert client.ping()
        half.sendall(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000\r\nxxxx")
        deaf.sendall(b"*2\r\n$3\r\nGET\r\n$5\r\nlarge\r\n")
        wait_for(lambda: server.stats.totals()["connections"] == 3, "they are not served", PATIENCE_S)
        wait_for(lambda: server.stats.connections == 1, "clients that stall are not cut off", PATIENCE_S)
        assert client.ping(), "one that is idle is not in the middle of anything"
    server.stop()


def test_everything_on_one_command_line(tmp_path: Path) -> None:
    """Both kinds of listeners, HTTP, host and NVMe; drained by SIGTERM; a second start finds the values."""
    arguments = (
        "--listen", f"unix:{tmp_path}/k.sock", "--listen", "tcp:127.0.0.1:0", "--http", "127.0.0.1:0",
        "--host-capacity", "32MiB", "--nvme", f"{tmp_path}/nvme:256MiB",
    )  # fmt: skip
    value = os.urandom(3 * MIB)
    for turn in range(2):
        process, lines = run_serve(tmp_path, *arguments)
        assert process.stdout is not None
        try:
            where = process.stdout.readline().decode().split()[-1]
            for path in ("/livez", "/readyz", "/metrics"):
                wait_for(lambda url=where + path: http_status(url) == 200, path)  # type: ignore[misc]
            with (
                redis.Redis(unix_socket_path=f"{tmp_path}/k.sock") as one,
                redis.Redis(port=int(lines[1].rpartition(":")[2]), protocol=3) as two,
            ):
                if turn == 0:
                    assert all(one.set(f"k{n}", value[n:]) for n in range(15))
                assert two.dbsize() == 15
                for n in range(15):  # some of them only NVMe has, which may be slow once
                    wait_for(lambda n=n: two.get(f"k{n}") == value[n:], f"value {n} is lost")  # type: ignore[misc]
        finally:
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
            process.stdout.close()


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="no redis-cli: apt-get install redis-tools")
def test_a_configuration_file_with_tenants_and_redis_cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    from kvtier.cli import main

    for name in ("alice", "bob"):
        (tmp_path / name).write_text(f"{name}-secret\n")
    config = tmp_path / "server.yaml"
    users: list[dict[str, Any]] = [
        {"name": n, "password_file": str(tmp_path / n), "prefixes": [f"{n[0]}:"]} for n in ("alice", "bob")
    ]
    users[0]["quota"] = "2MiB"
    block: dict[str, Any] = {
        "tiers": [{"type": "host", "capacity": "32MiB"}],
        "http": {"port": 0},
        "server": {"listen": ["tcp:0.0.0.0:0"], "users": users},
    }
    config.write_text(yaml.safe_dump(block))
    command = [sys.executable, "-m", "kvtier.cli", "serve", "--config", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        port = process.stdout.readline().decode().strip().rpartition(":")[2]

        def cli(user: str, *arguments: str) -> str:
            done = subprocess.run(
                ["redis-cli", "-p", port, "--user", user, "--no-auth-warning", *arguments], capture_output=True,
                text=True, timeout=600, env={**os.environ, "REDISCLI_AUTH": f"{user}-secret"}, check=True,
            )  # fmt: skip
            return done.stdout.strip()

        assert cli("alice", "mset", "a:1", "x", "a:2", "y") == "OK"
        assert cli("bob", "-3", "set", "b:1", "z") == "OK"
        assert cli("bob", "get", "a:1").startswith("NOPERM")
        assert sorted(cli("alice", "--scan").split()) == ["a:1", "a:2"]
        assert (cli("alice", "dbsize"), cli("bob", "dbsize")) == ("2", "1")
        assert cli("bob", "flushdb") == "OK"
        assert (cli("alice", "dbsize"), cli("bob", "dbsize")) == ("2", "0")
        assert cli("alice", "set", "a:3", "x" * 100_000) == "OK"
        big = tmp_path / "big"
        big.write_bytes(bytes(3 * MIB))
        with big.open() as value:
            refusal = subprocess.run(
                ["redis-cli", "-p", port, "--user", "alice", "--no-auth-warning", "-x", "set", "a:4"], stdin=value,
                capture_output=True, text=True, timeout=600, env={**os.environ, "REDISCLI_AUTH": "alice-secret"},
            )  # fmt: skip
        assert refusal.stdout.startswith("QUOTA")
        assert b"secret" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    finally:
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        process.stdout.close()
    block["tiers"].append({"type": "redis", "url": "redis://me:hunter2@somewhere:6379"})
    config.write_text(yaml.safe_dump(block))
    with pytest.raises(SystemExit) as exit_:
        main(["config", "show", "--config", str(config)])
    shown = capsys.readouterr().out
    assert exit_.value.code in (0, None)
    assert "hunter2" not in shown and "-secret" not in shown and "***" in shown
    assert yaml.safe_load(shown)["server"]["users"][0]["name"] == "alice"


def test_a_client_without_the_certificate_that_is_asked_for_is_turned_away(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl: apt-get install openssl")
    for name in ("server", "client"):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", f"{name}.key",
             "-out", f"{name}.pem", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"],
            cwd=tmp_path, check=True, capture_output=True,
        )  # fmt: skip
    files: dict[str, Any] = {"tls_cert": str(tmp_path / "server.pem"), "tls_key": str(tmp_path / "server.key")}
    server = start(tmp_path, listen=["tls:127.0.0.1:0"], tls_client_ca=str(tmp_path / "client.pem"), **files)
    trusted: dict[str, Any] = {"ssl": True, "ssl_ca_certs": files["tls_cert"]}
    with client_of(server, **trusted) as stranger, pytest.raises(redis.ConnectionError):
        stranger.ping()
    own = {"ssl_certfile": str(tmp_path / "client.pem"), "ssl_keyfile": str(tmp_path / "client.key")}
    with client_of(server, **trusted, **own) as client:
        assert client.ping()
    server.stop()
