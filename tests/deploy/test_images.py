"""The Dockerfiles: their lint, and what an image has to be."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .chart import DEPLOY, ROOT

if TYPE_CHECKING:
    from tools import chroot_image
else:  # tools/ is no package of ours, and its folder does not belong on the path
    _spec = importlib.util.spec_from_file_location("chroot_image", ROOT / "tools" / "chroot_image.py")
    chroot_image = importlib.util.module_from_spec(_spec)
    sys.modules["chroot_image"] = chroot_image
    _spec.loader.exec_module(chroot_image)

SERVER, ENGINE = DEPLOY / "Dockerfile", DEPLOY / "Dockerfile.engine"
BOTH = pytest.mark.parametrize("path", [SERVER, ENGINE], ids=lambda p: p.name)


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    beside = Path(sys.executable).resolve().parent / "hadolint"
    if program is None and not beside.exists():
        pytest.skip("hadolint is not made for this platform")
    command = [program or str(beside), "--no-color", "--failure-threshold", "style", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def faults(text: str) -> list[str]:
    """What is wrong with a Dockerfile of ours, beyond what hadolint sees."""
    found = list(chroot_image.instructions(text))
    last = max(i for i, (word, _) in enumerate(found) if word == "FROM")
    wrong = []
    for word, rest in found:
        image = rest.partition(" AS ")[0]
        if word == "FROM" and image != "${ENGINE_IMAGE}" and not re.search(r":[^:/]*\d|@sha256:", image):
            wrong.append(f"FROM {image} is not pinned")
        if word in ("ARG", "ENV") and re.search(r"(?i)(passw|secret|token|api_?key)", rest):
            wrong.append(f"{word} {rest} is kept in the image")
    users = [rest for word, rest in found[last:] if word == "USER"]
    if not users or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]):
        wrong.append(f"ends as user {users[-1] if users else 'root'}, which is no number or root's")
    return wrong


@BOTH
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    done = hadolint(path)
    assert done.returncode == 0, done.stdout


def test_hadolint_finds_what_is_wrong(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM debian:latest\nRUN cd /tmp && sudo apt-get install g++\n")
    done = hadolint(bad)
    assert done.returncode != 0 and "DL3007" in done.stdout and "DL3004" in done.stdout


@BOTH
def test_images_are_pinned_and_not_roots(path: Path) -> None:
    assert faults(path.read_text()) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("FROM debian:13.8-slim\n", "FROM debian\n", "is not pinned"),
        ("FROM debian:13.8-slim\n", "FROM debian:latest\n", "is not pinned"),
        ("USER 10001:10001", "USER kvtier", "no number"),
        ("USER 10001:10001", "USER 0:0", "root's"),
        ("USER 10001:10001", "", "user root"),
        ("STOPSIGNAL", "ENV KVTIER_HTTP_TOKEN=x\nSTOPSIGNAL", "kept in the image"),
    ],
)
def test_faults_are_found(old: str, new: str, fault: str) -> None:
    text = SERVER.read_text()
    assert old in text
    assert any(fault in found for found in faults(text.replace(old, new)))


def test_the_engines_tag_has_a_default_that_is_pinned() -> None:
    (default,) = re.findall(r"(?m)^ARG ENGINE_IMAGE=(\S+)$", ENGINE.read_text())
    assert re.search(r":v\d+\.\d+\.\d+$", default)


def test_every_file_that_is_copied_is_there_and_not_ignored() -> None:
    for path in (SERVER, ENGINE):
        allowed = {
            line[1:] for line in path.with_name(f"{path.name}.dockerignore").read_text().split() if line[0] == "!"
        }
        for word, rest in chroot_image.instructions(path.read_text()):
            if word == "COPY" and not rest.startswith("--from"):
                for source in rest.split()[:-1]:
                    assert (ROOT / source).exists(), source
                    assert source in allowed, f"{source} is kept out by {path.name}.dockerignore"


def test_the_health_check_asks_the_products_own_probe() -> None:
    found = dict(chroot_image.instructions(SERVER.read_text()))
    assert found["HEALTHCHECK"].count("KVTIER_HEALTH_URL") == 1 and "/readyz" in found["ENV"]
    code = re.search(r'"-c", "(.*)"\]', found["HEALTHCHECK"])
    assert code is not None
    for status in (200, 503):
        with answering(status) as url:
            command = [sys.executable, "-I", "-c", code[1]]
            done = subprocess.run(
                command, env={"KVTIER_HEALTH_URL": url}, capture_output=True, text=True, timeout=600, check=False
            )
        assert (done.returncode == 0) is (status == 200), done.stderr


@contextmanager
def answering(status: int) -> Iterator[str]:
    """A server that gives everybody the same status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/readyz"
    finally:
        server.shutdown()
        thread.join(30)
        server.server_close()
