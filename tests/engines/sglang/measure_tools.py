"""Time to the first token of the turn after a tool call, announced and not. From the root of a checkout:

    env=$(tools/env-engine.sh sglang | tail -n 1)
    $env/bin/python -m tests.engines.sglang.measure_tools [disk] [server] [link]

The shipped agent sessions through the real engine and SmolLM2-135M. While a session's tool runs, other requests push
its pages out of the device and out of host memory, so that only a lower tier has them: this machine's disk, `kvtier
serve` on this machine, or the same behind a link of 1 Gbit/s, which this program plays. Then its next turn comes,
announced a second before (`ToolCalls.on_tool_call_end`) or not. What the same turn takes with its prefix on the device
is the least that any announcement could make of it. The three take turns. Prints medians and the range.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE_TOKENS = 64
TURN_TOKENS = 1500  # of the longest prompt that is replayed: the CPU computes 300 in a second
ROUNDS = int(os.environ.get("KVTIER_MEASURE_ROUNDS", "5"))
AHEAD_S = 1.0
LINK_BYTES_PER_S = 125e6
PLACES = ("disk", "server", "link")
KINDS = ("on the device", "announced", "not announced")


def main() -> None:
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    places = sys.argv[1:] or PLACES
    if unknown := set(places) - set(PLACES):
        raise SystemExit(f"{', '.join(unknown)}: choose of {', '.join(PLACES)}")
    for place in places:
        with tempfile.TemporaryDirectory(prefix="kvm-") as folder, lower_tier(place, Path(folder)) as tier:
            measure(place, tier, Path(folder))


class Link:
    """Forwards connections to a unix socket, both ways at so many bytes in a second over all of them."""

    def __init__(self, target: Path, bytes_per_s: float) -> None:
        self._target = str(target)
        self._rate = bytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        there, back = _Lane(self._rate), _Lane(self._rate)
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._target)
            for source, sink, lane in ((client, server, there), (server, client, back)):
                threading.Thread(target=lane.forward, args=(source, sink), daemon=True).start()


class _Lane:
    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 18):
                with self._lock:
                    self._free_at_s = max(time.monotonic(), self._free_at_s) + len(data) / self._rate
                    until_s = self._free_at_s
                time.sleep(max(0.0, until_s - time.monotonic()))
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def lower_tier(place: str, folder: Path) -> Iterator[dict[str, Any]]:
    """The tier below host memory, as kvtier's configuration names it."""
    if place == "disk":
        yield {"type": "nvme", "path": str(folder / "kv"), "capacity": "2GiB"}
        return
    path = folder / "s"
    command = [sys.executable, "-m", "kvtier.cli", "serve", "--listen", f"unix:{path}", "--host-capacity", "1GiB"]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    link: Link | None = None
    try:
        give_up = time.monotonic() + 60.0
        while not path.exists():
            if server.poll() is not None or time.monotonic() > give_up:
                raise SystemExit((folder / "server.log").read_text())
            time.sleep(0.05)
        url = f"unix://{path}"
        if place == "link":
            link = Link(path, LINK_BYTES_PER_S)
            url = f"redis://127.0.0.1:{link.port}"
        yield {"type": "redis", "url": url, "timeout": "30s"}
    finally:
        if link is not None:
            link.close()
        server.terminate()
        server.wait(30)


def prefixes(encode: Any) -> list[list[int]]:
    """Of each session the longest prompt of at most TURN_TOKENS, or the beginning of its first."""
    from kvtier.cli.sessions import load_turns

    found: dict[str, list[int]] = {}
    for turn in load_turns():
        ids = encode(turn.prompt)
        if turn.session not in found or len(ids) <= TURN_TOKENS:
            found[turn.session] = ids[:TURN_TOKENS]
    return list(found.values())


def measure(place: str, tier: dict[str, Any], folder: Path) -> None:
    from kvtier.cli.demo_model import ensure_model
    from kvtier.connectors.sglang.tool_calls import ToolCalls

    from .engine_process import EngineProcess

    block = {
        "kv_cache_compression_config": [{"algorithm": "quantization_for_cold_page", "quant": "none"}],
        # Room for little more than one session: the pages of the others push its own out.
        "tiers": [{"type": "host", "capacity": "90MiB"}, tier],
        "promote_deadline": "60s",
        "break_even": False,
    }
    options: dict[str, Any] = {
        "dtype": "float32",
        "page_size": PAGE_TOKENS,
        "max_total_tokens": 6000,
        "mem_fraction_static": 0.5,  # of what is free, which others may be taking
    }
    engine = EngineProcess(ensure_model(), block, folder / "run", skip_tokenizer_init=False, **options)
    try:
        sessions = prefixes(engine.encode)
        tools = ToolCalls(f"http://127.0.0.1:{engine.port}", timeout_s=30.0)
        filler = [(i * 7919) % 40_000 + 100 for i in range(TURN_TOKENS)]
        engine.one("filler", filler, tokens=1)
        for n, ids in enumerate(sessions):
            engine.one(f"turn-{n}", ids, tokens=1)
            tools.on_tool_call_begin(f"turn-{n}")
        took: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for n in range(ROUNDS):
            for which, ids in enumerate(sessions):
                others = [filler, *(s for s in sessions if s is not ids)]
                for kind in KINDS[n % 3 :] + KINDS[: n % 3]:
                    if (seconds := next_turn(engine, tools, ids, others, tier["type"], kind, f"{n}-{which}")) is None:
                        continue
                    took[kind].append(seconds)
        pages = [len(ids) // PAGE_TOKENS for ids in sessions]
        print(f"{place}: {len(sessions)} sessions, prefixes of {pages} pages of {PAGE_TOKENS} tokens")
        for kind, times in took.items():
            if not times:
                raise SystemExit(f"{kind}: no turn began with pages from where they were meant to be")
            print(
                f"  next turn {kind:<14} time to first token, median {statistics.median(times):.3f} s "
                f"({min(times):.3f} to {max(times):.3f}, n = {len(times)})",
                flush=True,
            )
    finally:
        engine.kill()


def next_turn(
    engine: Any, tools: Any, ids: list[int], others: list[list[int]], tier: str, kind: str, name: str
) -> float | None:
    """Seconds to its first token; None where its pages were not where they were meant to be."""
    for other in others:
        engine.flush()
        engine.one(f"push {kind} {name} {len(other)}", other, tokens=1)
    engine.flush()
    if kind == "on the device":
        engine.one(f"before {name}", ids, tokens=1)
    before = engine.metrics()
    if kind == "announced":
        tools.on_tool_call_end(token_ids=ids)
    time.sleep(AHEAD_S)
    answer = engine.one(f"next {kind} {name}", [*ids, 11, 12, 13], tokens=1)
    pages = len(ids) // PAGE_TOKENS
    if answer["cached"] < (pages - 1) * PAGE_TOKENS:
        return None
    after = engine.metrics()
    if kind != "on the device":
        found = f'kvtier_hits_total{{tier="{"host" if kind == "announced" else tier}"}}'
        if after[found] - before[found] < pages - 2:
            return None
    seconds: float = answer["ttft_s"]
    return seconds


if __name__ == "__main__":
    main()
