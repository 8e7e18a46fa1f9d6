"""From outside: the cache server's page, `kvtier top` and `kvtier explain` after real traffic; what the demo's way of
working leaves in explanations, spans and recorded lookups."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rich.console import Console

from kvtier.build import open_codec, open_store
from kvtier.cli import main
from kvtier.cli.top import Client, figures, screen
from kvtier.config import parse_config
from kvtier.hot import HotLayout, HotPool
from kvtier.keys import Namespace
from kvtier.mover import PageMover, policy_of
from kvtier.observe import Watch
from kvtier.replay.recorded import read_recorded
from kvtier.server.app import CacheServer
from kvtier.server.http import HttpExporter, HttpOptions
from kvtier.server.options import ServerOptions
from kvtier.server.page import StatusPage
from kvtier.spec import DType, PageSpec
from kvtier.telemetry import Spans

SPEC = PageSpec.mha(layers=2, kv_heads=2, head_dim=32, page_tokens=16, dtype=DType.BF16)
PAGES = 6
HASHES = [bytes([n]) * 32 for n in range(PAGES)]


class Redis:
    """As much of a client as these tests need."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(600)
        self.socket.connect(str(path))
        self.file = self.socket.makefile("rb")

    def call(self, *parts: bytes) -> bytes | None:
        lines = [b"*%d" % len(parts)]
        for part in parts:
            lines += [b"$%d" % len(part), part]
        self.socket.sendall(b"\r\n".join([*lines, b""]))
        line = self.file.readline().rstrip()
        if line[:1] != b"$":
            return line
        length = int(line[1:])
        return None if length < 0 else self.file.read(length + 2)[:-2]

    def close(self) -> None:
        self.file.close()
        self.socket.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    config = parse_config(
        {
            "tiers": [{"type": "host", "capacity": "1MiB"}],
            "server": {"listen": [f"unix:{tmp_path / 's'}"]},
            "salt": "hush",
            "debug": True,
        }
    )
    assert config.server is not None
    server = CacheServer(config, ServerOptions.of(config.server), HttpOptions(port=0))
    yield server
    server.stop(0.0)


def test_top_after_traffic(server: CacheServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert server.http is not None and server.http.page is not None
    server.http.page.history.sample()
    client = Redis(tmp_path / "s")
    for n in range(4):
        assert client.call(b"SET", b"key%d" % n, bytes(5000)) == b"+OK"
    assert client.call(b"SET", b"key0", bytes(6000)) == b"+OK"
    for n in (0, 1, 2, 7):
        client.call(b"GET", b"key%d" % n)
    client.close()
    server.http.page.history.sample()
    assert run("top", server.http.url, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["lookups"], shown["hit_rate"]) == (4, 0.75)
    assert shown["tiers"]["host"]["pages"] == 4
    assert shown["misses"]["absent"] == 1
    assert shown["config"]["salt"] == "***"
    ratios = dict(zip(shown["ghosts"]["sizes"], shown["ghosts"]["ratios"]["host"]["stored"], strict=True))
    assert ratios[1.0] == 0.75, "an overwritten value is still the same value"
    assert run("top", server.http.url, "--once") == 0
    printed = capsys.readouterr().out
    assert "Hit rate 75.0% of 4 pages" in printed
    assert "Errors: none" in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert server.store is not None
    assert server.store.ledger.violations == 0


def test_top_runs_until_it_is_interrupted(server: CacheServer) -> None:
    """In a terminal of its own size, and ends without a traceback."""
    assert server.http is not None
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "kvtier.cli", "top", server.http.url, "--interval", "0.2"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        while seen.count(b"Hit rate") < 3:
            seen += read(ours)
        process.send_signal(signal.SIGINT)
        while more := read(ours):
            seen += more
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(30)
        os.close(ours)
    assert b"Traceback" not in seen


def test_top_in_a_pipe_prints_one_look_below_the_other(server: CacheServer) -> None:
    """And ends with its reader."""
    assert server.http is not None
    command = [sys.executable, "-m", "kvtier.cli", "top", server.http.url, "--interval", "0.2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    try:
        seen = b""
        while seen.count(b"Hit rate") < 3:
            seen += read(process.stdout.fileno())
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
        process.wait(60)
    finally:
        process.kill()
        process.wait(30)
        process.stderr.close()


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_top_keeps_figures_whole_on_a_narrow_terminal(server: CacheServer, columns: int) -> None:
    assert server.http is not None and server.http.page is not None
    server.http.page.history.sample()
    shown = io.StringIO()
    figures_now = figures(Client(server.http.url).status())
    Console(file=shown, width=columns).print(screen(server.http.url, figures_now, columns))
    assert "host" in shown.getvalue() and "used" in shown.getvalue() and "…" not in shown.getvalue()
    assert ("out/s" in shown.getvalue()) is (columns >= 80)


def read(terminal: int) -> bytes:
    """What was printed meanwhile; nothing once the program has ended."""
    assert select.select([terminal], [], [], 60.0)[0], "nothing was printed for a minute"
    try:
        return os.read(terminal, 65536)
    except OSError:  # how a terminal says that nobody is there any more
        return b""


def test_a_request_is_explained_traced_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_config(
        {
            "promote_deadline": "120s",
            "tiers": [
                {"type": "host", "capacity": "1MiB"},
                {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "64MiB", "io_threads": 2},
            ],
            "explain_sample": 1.0,
            "record": str(tmp_path / "lookups.jsonl"),
            "opentelemetry": True,
            "debug": True,
            "prefill_s_per_token": 0.01,
            "break_even": False,
        }
    )
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    codec = open_codec(config, SPEC)
    namespace = Namespace.of(SPEC, policy_of(codec), model="m", weights="00", dtype="bf16")
    store = open_store(config)
    assert isinstance(store.observer, Watch)
    store.observer._spans = Spans(provider)
    mover = PageMover(store, SPEC, namespace, codec)
    rows = np.zeros((PAGES * 16, 2, 32), np.uint16) + 0x3F80
    pool = HotPool.of(SPEC, [rows.copy() for _ in SPEC.buffers], HotLayout.NHD)
    assert mover.offload(pool, HASHES[:5], range(5)).result(120.0).ok
    lookup = store.lookup("chat-1", namespace.page_keys(HASHES), hashes=HASHES)
    assert store.hold(lookup, 5)
    assert mover.onboard(lookup, pool, range(5)).result(120.0).ok
    store.settle("chat-1")

    page = StatusPage(store.ledger.registry, config, lambda: store.observer)
    with HttpExporter(store.ledger.registry, HttpOptions(port=0), page=page) as http:
        assert run("explain", http.url, "chat-1", "--json") == 0
        record: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert run("explain", http.url, "chat-1") == 0
        printed = capsys.readouterr().out
        assert run("explain", http.url, "chat 2") == 2
        assert "nothing is known of request 'chat 2': set explain_sample" in capsys.readouterr().err
    mover.close()
    store.close()

    assert [p["outcome"] for p in record["pages"]] == ["hit: host"] * 5 + ["miss: absent"]
    assert 0 < record["load_s"] < 600
    assert record["saved_s"] == pytest.approx(5 * 16 * 0.01)
    assert "5 of 6 pages found" in printed and "miss: absent" in printed
    restore = next(span for span in exporter.get_finished_spans() if span.name == "kvtier.restore")
    assert (restore.attributes or {})["kvtier.hits.host"] == 5
    names = [span.name for span in exporter.get_finished_spans()]
    assert sorted(names) == ["kvtier.load", "kvtier.offload", "kvtier.restore"]
    trace = read_recorded(tmp_path / "lookups.jsonl")
    assert (trace.requests, trace.block_tokens, trace.unique_blocks) == (1, 16, PAGES)
    assert store.ledger.violations == 0
    provider.shutdown()


def run(*arguments: str) -> int:
    """The exit status of a command."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)
