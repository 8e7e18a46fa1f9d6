"""The connectors as users start them: `sglang serve` and `python -m sglang.launch_server`, over HTTP, each ended by a
signal to the process that was started. What they refuse ends that process, with the reason in its output."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.redis_servers import kept_port

START_S = 420.0  # half a minute on two idle cores
END_S = 180.0  # SGLang looks for the signal every 5 s, then gives its workers a minute
PAGE, PAGES = 16, 12
ROWS = 80
TOKENS = [(i * 13) % 500 + 5 for i in range(PAGE * PAGES + 8)]

long = pytest.mark.skipif(
    os.environ.get("KVTIER_TEST_LONG") != "1", reason="takes minutes: make test-sglang-long runs it"
)


def command(launcher: str, folder: Path) -> list[str]:
    """A launcher's command. SGLang's console script as an installer writes it, for the environment of the tests."""
    if launcher == "launch_server":
        return [sys.executable, "-m", "sglang.launch_server"]
    (script,) = entry_points(group="console_scripts", name="sglang")
    path = folder / "sglang"
    module, function = script.value.split(":")
    path.write_text(
        f"import sys\nfrom {module} import {function}\nif __name__ == '__main__':\n    sys.exit({function}())\n"
    )
    return [sys.executable, str(path), "serve"]


class Server:
    """SGLang's HTTP server in a process of its own."""

    def __init__(self, launcher: str, folder: Path, model: Path, *flags: str, **environment: str) -> None:
        self.port = kept_port()
        self.log = folder / "server.log"
        given = [
            *("--model-path", str(model), "--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu"),
            *("--attention-backend", "torch_native", "--skip-tokenizer-init", "--grammar-backend", "none"),
            *("--mem-fraction-static", "0.5", "--max-total-tokens", "4096", "--max-running-requests", "4"),
            *("--page-size", str(PAGE), "--enable-cache-report", *flags),
        ]
        told = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_WAIT_POLICY": "passive", "PYTHONWARNINGS": "ignore", **environment}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command(launcher, folder), *given],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **told},
                cwd=folder,
                start_new_session=True,
            )

    def until_ready(self) -> None:
        """Wait until it serves."""

        def ready() -> bool:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}: {self.tail()}"
            with contextlib.suppress(OSError):
                return self.ask("GET", "/health")[0] == 200
            return False

        self._until(ready, START_S, "did not serve")

    def ended(self, limit_s: float) -> int:
        """The exit status, once every process of the server has gone."""
        self._until(lambda: self.process.poll() is not None, limit_s, "did not end")
        self._until(lambda: not _alive(self.process.pid), limit_s, "left processes behind")
        return int(self.process.returncode)

    def ask(self, method: str, path: str, body: Any = None, port: int | None = None) -> tuple[int, str]:
        """Status and text of one request."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{port or self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return int(answer.status), answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def generate(self, rid: str) -> dict[str, Any]:
        parameters = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        status, text = self.ask("POST", "/generate", {"rid": rid, "input_ids": TOKENS, "sampling_params": parameters})
        assert status == 200, f"{text}\n{self.tail()}"
        answer: dict[str, Any] = json.loads(text)
        return answer

    def flush(self) -> None:
        """Forget the device's cache; SGLang refuses while a request is being wound up."""
        self._until(lambda: self.ask("POST", "/flush_cache")[0] == 200, 60.0, "did not flush its cache")

    def stored(self, port: int, pages: int) -> None:
        """Wait until so many pages, those of the prompt among them, are in kvtier's disk."""
        name = 'kvtier_tier_resident_pages{tier="nvme"}'
        self._until(lambda: metrics(self, port).get(name, 0) >= pages, 60.0, "did not store its pages")

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def _until(self, condition: Callable[[], bool], limit_s: float, otherwise: str) -> None:
        give_up = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < give_up, f"the server {otherwise} within {limit_s} s: {self.tail()}"
            time.sleep(0.1)


def metrics(server: Server, port: int) -> dict[str, float]:
    lines = server.ask("GET", "/metrics", port=port)[1].splitlines()
    return {m[1]: float(m[2]) for line in lines if (m := re.fullmatch(r"([^#\s]\S*(?:\{.*\})?) (\S+)", line))}


def _alive(group: int) -> list[str]:
    """Processes of a group that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            described, _, rest = path.read_text().rpartition(")")
            state, _parent, of = rest.split()[:3]
            if int(of) == group and state != "Z":
                found.append(described)
    return found


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Any]:
    running: list[Server] = []

    def start(launcher: str, model: Path, *flags: str, **environment: str) -> Server:
        running.append(Server(launcher, tmp_path, model, *flags, **environment))
        return running[-1]

    yield start
    for server in running:
        server.kill()


def config(folder: Path, **more: Any) -> tuple[str, ...]:
    """The option with a configuration of raw pages in host memory and on disk."""
    raw = {"algorithm": "quantization_for_cold_page", "quant": "none"}
    tiers = [
        {"type": "host", "capacity": "16MiB"},
        {"type": "nvme", "path": str(folder / "kv"), "capacity": "64MiB"},
    ]
    block = {"kv_cache_compression_config": [raw], "tiers": tiers, "promote_deadline": "60s", "break_even": False}
    path = folder / "kvtier.json"
    path.write_text(json.dumps(block | more))
    return "--kv-connector-config", str(path)


def host_memory_on_a_cpu(folder: Path) -> str:
    """SGLang's host pools need a CUDA device. A plugin of SGLang's, found by its entry point in this folder, puts plain
    copies in the place of their kernels, in each of its processes."""
    installed = folder / "plugins" / "host_pools_on_cpu-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: host-pools-on-cpu\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nhost_pools_on_cpu = kvtier.cli.sglang_on_cpu:allow_host_pools\n"
    )
    return os.pathsep.join([str(installed.parent), *filter(None, [os.environ.get("PYTHONPATH")])])


def compacted(folder: Path, model: Path) -> Path:
    """A prefix for `model` of `ROWS` rows, and beside it a tokenizer of words ``w0``, ``w1`` and so on."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    from .compact_examples import compact, drawn

    compact(model, folder / "prefix.safetensors", [drawn(n, ROWS, 2) for n in range(4)])
    vocabulary = {"none": 0} | {f"w{n}": n for n in range(1, 512)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="none"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="none").save_pretrained(folder / "words")
    return folder / "prefix.safetensors"


def ask_about(prefix: Path, server: Server, folder: Path, model: Path) -> None:
    """The example's client asks about `prefix`; the answer begins as that of transformers."""
    from kvtier.compression.compaction.artefact import CompactPrefix
    from kvtier.connectors.transformers.compact_serving import CompactServing

    from .compact_examples import model_of

    words = [f"w{17 + 5 * n}" for n in range(20)]
    asked = [f"http://127.0.0.1:{server.port}", str(folder / "words"), str(prefix), " ".join(words)]
    client = Path(__file__).parents[3] / "examples" / "compacted_client.py"
    done = subprocess.run([sys.executable, str(client), *asked], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stderr}\n{server.tail()}"
    first, answer = done.stdout.splitlines()
    assert first == f"{ROWS} rows stood for 200 tokens"
    with CompactServing(model_of(model), CompactPrefix.load(prefix), model_name="tiny") as serving:
        expected = serving.generate([[int(w[1:]) for w in words]], do_sample=False, min_new_tokens=8, max_new_tokens=8)
    assert answer.split()[:8] == [f"w{n}" for n in expected[0, len(words) :].tolist()]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("launcher", "connector"),
    [
        pytest.param("serve", "kvtier"),
        pytest.param("launch_server", "kvtier", marks=long),
        pytest.param("launch_server", "kvtier-hicache", marks=long),
        pytest.param("serve", "kvtier-hicache", marks=long),
    ],
)
def test_a_prefix_comes_back_over_http(launch: Any, tiny: Path, tmp_path: Path, launcher: str, connector: str) -> None:
    port = kept_port()
    more: dict[str, Any] = {"http": {"port": port}}
    prefix = compacted(tmp_path, tiny) if connector == "kvtier" and launcher == "serve" else None
    if prefix is not None:
        more["compacted"] = [str(prefix)]
    flags = ["--kv-connector", connector, "--dtype", "float32", *config(tmp_path, **more)]
    environment: dict[str, str] = {}
    if connector == "kvtier-hicache":
        flags += ["--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"]
        environment["PYTHONPATH"] = host_memory_on_a_cpu(tmp_path)
    server = launch(launcher, tiny, *flags, **environment)
    server.until_ready()
    first = server.generate("first")
    assert first["meta_info"]["cached_tokens"] == 0
    server.stored(port, PAGES + (0 if prefix is None else ROWS // PAGE))
    server.flush()
    again = server.generate("again")
    assert again["output_ids"] == first["output_ids"]
    where = "host" if connector == "kvtier" else "storage"
    details = again["meta_info"]["cached_tokens_details"]
    assert again["meta_info"]["cached_tokens"] == details[where] == PAGE * PAGES, again["meta_info"]
    told = metrics(server, port)
    assert sum(n for name, n in told.items() if name.startswith("kvtier_hits_total")) == PAGES
    assert told['kvtier_errors_total{site="engine"}'] == 0
    if prefix is not None:
        ask_about(prefix, server, tmp_path, tiny)

    server.process.send_signal(signal.SIGTERM)
    server.ended(END_S)
    assert not _listens(server.port) and not _listens(port)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", ["serve", "launch_server"])
def test_an_option_that_is_refused_ends_the_launcher(launch: Any, tiny: Path, tmp_path: Path, launcher: str) -> None:
    server = launch(launcher, tiny, "--kv-connector", "kvtier", *config(tmp_path), "--kv-cache-dtype", "fp8_e5m2")
    assert server.ended(START_S) == 1
    (line,) = [line for line in server.log.read_text().splitlines() if "fp8_e5m2" in line]
    assert line.startswith("error: --kv-cache-dtype = 'fp8_e5m2' cannot be combined with --kv-connector kvtier")
    assert "Traceback" not in server.log.read_text()


@pytest.mark.timeout(900)
@long
@pytest.mark.parametrize("launcher", ["serve", "launch_server"])
def test_what_a_worker_refuses_ends_the_launcher(launch: Any, tiny: Path, tmp_path: Path, launcher: str) -> None:
    """Here a compacted prefix that is not there: read when the engine's pages are known."""
    flags = config(tmp_path, compacted=[str(tmp_path / "nowhere")])
    server = launch(launcher, tiny, "--kv-connector", "kvtier", *flags)
    assert server.ended(START_S) != 0
    told = server.log.read_text()
    assert re.search(rf"kvtier\.errors\.\w+: compacted: .*{re.escape(str(tmp_path / 'nowhere'))}", told)
    assert not _listens(server.port)
