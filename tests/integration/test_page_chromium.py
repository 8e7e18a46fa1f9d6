"""The status page in a real browser: what it shows, that it keeps up by itself, and that everybody can read it.

Chromium is driven over its debugging pipe, without a library in between.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.abc.tier import TierUsage
from kvtier.config import parse_config
from kvtier.ghosts import GhostCurves, Ghosts
from kvtier.ledger import Direction, Ledger, MissReason
from kvtier.observe import Observer
from kvtier.server.http import TOKEN_VARIABLE, HttpExporter, HttpOptions
from kvtier.server.page import StatusPage
from kvtier.testing.redis_servers import kept_port

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WAIT_S = 240.0

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium here: apt-get install chromium")

# Fds 3 and 4 are where Chromium looks for its pipe; the parent's may have any numbers.
LAUNCH = """
import fcntl, os, sys
r, w = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(r, 3), os.dup2(w, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """A headless Chromium with one tab. Every wait is bounded by WAIT_S."""

    def __init__(self, profile: Path) -> None:
        assert BROWSER is not None
        ours, theirs = os.pipe(), os.pipe()
        options = [
            "--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--no-proxy-server",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        if os.geteuid() == 0:  # its sandbox does not run as root
            options.insert(0, "--no-sandbox")
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(theirs[0]), str(ours[1]), BROWSER, *options],
            pass_fds=(theirs[0], ours[1]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(profile), "DBUS_SESSION_BUS_ADDRESS": "unix:path=/dev/null"},
        )
        for fd in (theirs[0], ours[1]):
            os.close(fd)
        self._in, self._out = ours[0], theirs[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._in, selectors.EVENT_READ)
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.events: list[dict[str, Any]] = []
        self.credentials: tuple[str, str] | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "DOM", "Accessibility"):
            self.call(f"{domain}.enable")

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert self._selector.select(max(0.0, deadline - time.monotonic())), "the browser says nothing"
            more = os.read(self._in, 1 << 20)
            assert more, f"the browser ended, status {self.process.poll()}"
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed

    def _send(self, method: str, params: dict[str, Any]) -> int:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        return self._number

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number, deadline = self._send(method, params), time.monotonic() + WAIT_S
        while True:
            message = self._read(deadline)
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message.get('error')}"
                result: dict[str, Any] = message["result"]
                return result
            self._heard(message)

    def _heard(self, message: dict[str, Any]) -> None:
        self.events.append(message)
        method, params = message.get("method"), message.get("params", {})
        if method == "Fetch.requestPaused":
            self._send("Fetch.continueRequest", {"requestId": params["requestId"]})
        elif method == "Fetch.authRequired":
            assert self.credentials is not None
            answer = {"response": "ProvideCredentials"} | dict(
                zip(("username", "password"), self.credentials, strict=True)
            )
            self._send("Fetch.continueWithAuth", {"requestId": params["requestId"], "authChallengeResponse": answer})

    def js(self, expression: str) -> Any:
        """The value of an expression on the page; promises are waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression is true, and return it."""
        deadline = time.monotonic() + WAIT_S
        while not (value := self.js(expression)):
            assert time.monotonic() < deadline, (
                f"never true: {expression}; the page says {self.js('document.body.innerText')}"
            )
            time.sleep(0.1)
        return value

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def key(self, key: str) -> None:
        code = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def heard(self, method: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.events if event.get("method") == method]

    def close(self) -> None:
        try:
            self._session = ""
            self._send("Browser.close", {})
            self.process.wait(WAIT_S)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        finally:
            self._selector.close()
            for fd in (self._in, self._out):
                os.close(fd)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    try:
        yield browser
    finally:
        browser.close()


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    """The one browser, as new: a blank page of an ordinary size."""
    chromium.call("Page.navigate", url="about:blank")
    chromium.call("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
    chromium.call("Emulation.setEmulatedMedia", features=[])
    chromium.events.clear()
    return chromium


class Load(Observer):
    """A ledger with a past, two tiers and something to say in every section."""

    def __init__(self) -> None:
        self.ledger = Ledger(["host", "nvme"])
        usage = TierUsage(64 << 30, 32 << 30, 12_345, 0, 12_400, 55, 0, 0, 10 << 30, 3 << 30)
        for tier in ("host", "nvme"):
            self.ledger.watch(tier, lambda: usage)
        self.ghosts = Ghosts({"host": 64 << 30, "nvme": 64 << 30}, lambda: 4.5)
        self.ledger.registry.register(self.ghosts)
        self.now_s = time.time() - 600
        config = parse_config({"tiers": [{"type": "host", "capacity": "64GiB"}], "salt": "tenant-7"})
        self.page = StatusPage(self.ledger.registry, config, lambda: self)
        self.page.history._clock = lambda: self.now_s
        for step in range(60):
            keys = [bytes([n]) * 32 for n in range(step % 50)]
            self.ghosts.looked_up(keys)
            self.ghosts.stored(keys, [1 << 20] * len(keys))
            self.ledger.settle({"host": 6, "nvme": 2}, {MissReason.ABSENT: 1, MissReason.EVICTED: 1})
            self.ledger.time_codec("encode", 0.004)
            self.ledger.time_codec("decode", 0.002)
            self.ledger.sampled(step % 4, "k", 0.09)
            self.ledger.moved(Direction.OFFLOAD, hot=32 << 20, hot_16bit=32 << 20, cold=9 << 20)
            self.now_s += 5.0
            self.page.history.sample()
        self.page.history._clock = time.time

    def curves(self) -> GhostCurves:
        return self.ghosts.curves()

    def explain(self, request_id: str) -> dict[str, Any] | None:
        page = {"index": 0, "key": "00ff", "outcome": "hit host", "bytes": 1 << 20, "ready_s": 0.0}
        return {"summary": "1 page", "pages": [page]} if request_id == "r1" else None


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    return Load()


@pytest.fixture
def server(load: Load) -> Iterator[HttpExporter]:
    with HttpExporter(load.ledger.registry, HttpOptions(port=0), page=load.page) as server:
        yield server


LOW_CONTRAST = """(() => {
  const channel = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).map((v) => channel(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (!color.endsWith(", 0)")) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const low = [];
  for (const node of document.querySelectorAll("body *")) {
    const style = getComputedStyle(node), kind = node.getAttribute("class") || "";
    const drawn = /^f\\d$/.test(kind) ? style.fill : /^s\\d$/.test(kind) ? style.stroke : null;
    if (drawn && contrast(drawn, behind(node)) < 3) low.push([kind, drawn, behind(node)]);
    if (node.tagName === "NOSCRIPT") continue;
    if ([...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim())) {
      const color = node.namespaceURI.endsWith("svg") ? style.fill : style.color;
      if (contrast(color, behind(node)) < 4.5) low.push([node.textContent.slice(0, 30), color, behind(node)]);
    }
  }
  return low;
})()"""
"""Texts below a contrast of 4.5, and what is drawn below 3 (WCAG 2 AA)."""

CONNECTED = "document.getElementById('state').textContent === 'Connected'"


def text_of(browser: Browser, selector: str) -> str:
    return str(browser.js(f"document.querySelector({json.dumps(selector)}).textContent"))


def test_it_shows_everything_and_asks_nobody_else(browser: Browser, server: HttpExporter) -> None:
    browser.open(server.url)
    browser.until(CONNECTED)
    assert "80.0 %" in text_of(browser, "#summary"), "8 of 10 pages are found"
    assert "3.56\N{MULTIPLICATION SIGN}" in text_of(browser, "#summary")
    for expected in ("host", "nvme", "32.0 GiB (50.0 %)", "12,345", "75.0 %"):
        assert expected in text_of(browser, "#tiers"), expected
    assert text_of(browser, "#misses tbody tr:first-child th") in ("absent", "evicted")
    assert "encode 4.00 ms" in text_of(browser, "#codec caption")
    assert "the largest is 9.00 %" in text_of(browser, "#quality caption")
    assert browser.js("document.querySelectorAll('#ghosts figure').length") == 2
    assert "at its own size" in text_of(browser, "#ghosts caption")
    assert "salt" in text_of(browser, "#config")
    assert "tenant-7" not in browser.js("document.documentElement.outerHTML")
    assert browser.js("document.querySelectorAll('#hits svg rect').length") > 50
    hosts = {request["request"]["url"].split("/")[2] for request in browser.heard("Network.requestWillBeSent")}
    assert hosts == {server.url.removeprefix("http://")}
    assert browser.heard("Runtime.exceptionThrown") == []
    assert [entry["entry"]["text"] for entry in browser.heard("Log.entryAdded")] == [], "also what a CSP forbids"


def test_it_keeps_up_by_itself_until_it_is_told_not_to(browser: Browser, server: HttpExporter, load: Load) -> None:
    browser.open(server.url)
    browser.until(CONNECTED)
    load.ledger.error("promote")
    browser.until("document.querySelector('#summary div.bad') !== null")
    browser.js("document.getElementById('auto').click()")
    asked = [len(browser.heard("Network.requestWillBeSent"))]
    while len(asked) < 5 and (len(asked) == 1 or asked[-1] > asked[-2]):  # one that was under way may be heard of late
        browser.js("new Promise((done) => setTimeout(done, 6000))")
        asked.append(len(browser.heard("Network.requestWillBeSent")))
    assert asked[-1] == asked[-2], f"it asks on: {asked}"


def test_the_past_survives_a_reload(browser: Browser, server: HttpExporter) -> None:
    browser.open(server.url)
    browser.until(CONNECTED)
    before = browser.js("document.querySelectorAll('#hits tbody tr').length")
    browser.call("Page.reload")
    browser.until(f"document.readyState === 'complete' && {CONNECTED}")
    after = browser.js("document.querySelectorAll('#hits tbody tr').length")
    assert before >= 50
    assert after >= before - 1


def test_it_says_when_the_server_is_gone_and_when_it_is_back(browser: Browser, load: Load) -> None:
    port = kept_port()
    with HttpExporter(load.ledger.registry, HttpOptions(port=port), page=load.page) as first:
        browser.open(first.url)
        browser.until(CONNECTED)
    browser.until("document.getElementById('state').textContent.startsWith('Not connected')")
    registry = load.ledger.registry
    with HttpExporter(registry, HttpOptions(port=port), page=StatusPage(registry)):
        browser.until(CONNECTED)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out(browser: Browser, server: HttpExporter, scheme: str) -> None:
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.open(server.url)
    browser.until(CONNECTED)
    low = browser.js(LOW_CONTRAST)
    assert low == []
    browser.js("document.documentElement.style.setProperty('--soft', 'var(--line)')")
    assert browser.js(LOW_CONTRAST), "the check itself must see what cannot be read"
    back = browser.js("getComputedStyle(document.body).backgroundColor")
    assert (int(back.split("(")[1].split(",")[0]) > 128) == (scheme == "light")


@pytest.mark.parametrize("width", [320, 390, 768])
def test_it_fits_a_phone(browser: Browser, server: HttpExporter, width: int) -> None:
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=2, mobile=True)
    browser.open(server.url)
    browser.until(CONNECTED)
    assert browser.js("window.innerWidth") == width
    assert browser.js("document.documentElement.scrollWidth") <= width, "nothing scrolls sideways but the tables"
    assert (
        browser.js(
            "Math.max(...[...document.querySelectorAll('.plot svg')].map((s) => s.getBoundingClientRect().right))"
        )
        <= width
    )


def test_the_keyboard_reaches_everything(browser: Browser, server: HttpExporter) -> None:
    browser.open(server.url)
    browser.until(CONNECTED)
    reached = []
    for _ in range(60):
        browser.key("Tab")
        name = browser.js(
            "(() => { const a = document.activeElement; return a === document.body ? '' : "
            "(a.id || a.className || a.tagName) + '/' + (a.closest('figure, section, header') || {id: ''}).id; })()"
        )
        if not name:
            break
        assert browser.js("document.activeElement.matches(':focus-visible')"), (
            f"{name} does not show that it is focused"
        )
        reached.append(name)
    assert reached[0].startswith("skip/")
    for wanted in ("range/", "auto/", "tiers/", "plot/hits", "SUMMARY/hits", "misses/", "explain-id/", "config/"):
        assert any(name.startswith(wanted) for name in reached), f"{wanted} is not among {reached}"
    browser.js("document.querySelector('#hits .plot').focus()")
    there = ""
    for _ in range(40):  # as far as the past is by now
        browser.key("ArrowLeft")
        there = text_of(browser, "#hits output")
        if "host 60.0 %, nvme 20.0 %" in there:
            break
    assert "host 60.0 %, nvme 20.0 %" in there
    browser.key("ArrowRight")
    assert text_of(browser, "#hits output") not in ("", there)
    browser.js("document.querySelector('#hits summary').focus()")
    browser.key("Enter")
    # A refresh neither takes the focus away nor closes what was opened.
    browser.until("document.querySelector('#hits details').open")
    seen, give_up = len(browser.heard("Network.responseReceived")), time.monotonic() + WAIT_S
    while len(browser.heard("Network.responseReceived")) == seen:
        assert time.monotonic() < give_up, "it does not refresh any more"
        browser.js("new Promise((done) => setTimeout(done, 200))")
    assert browser.js("document.querySelector('#hits details').open && document.activeElement.tagName") == "SUMMARY"


def test_a_screen_reader_has_words_for_everything(browser: Browser, server: HttpExporter) -> None:
    browser.open(server.url)
    browser.until(CONNECTED)
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    seen = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"]]
    headings = [name for role, name in seen if role == "heading"]
    assert headings[:4] == ["kvtier", "Summary", "Tiers", "Hit rate over time"]
    for wanted in ("image", "combobox", "checkbox", "textbox", "button", "region", "link", "table"):
        names = [name for role, name in seen if role == wanted]
        assert names and all(names), f"a {wanted} without a name: {names}"
    assert any("80.0 % overall" in name for role, name in seen if role == "image")
    assert browser.js("document.documentElement.lang") == "en"
    assert browser.js("[...document.querySelectorAll('tbody tr')].every((row) => row.querySelector('th[scope=row]'))")
    assert browser.js("new Set([...document.querySelectorAll('[id]')].map((n) => n.id)).size") == browser.js(
        "document.querySelectorAll('[id]').length"
    )


def test_one_request_is_explained(browser: Browser, server: HttpExporter) -> None:
    browser.open(server.url)
    browser.until(CONNECTED)
    for request, said in (("r1", "hit host"), ("r2", "nothing is known of request")):
        browser.js(f"document.getElementById('explain-id').value = '{request}'")
        browser.js("document.querySelector('#explain-form button').click()")
        browser.until(f"document.getElementById('explain').innerText.includes('{said}')")


def test_a_browser_asks_for_the_token(browser: Browser, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")
    with HttpExporter(load.ledger.registry, HttpOptions(port=0), page=load.page) as server:
        browser.credentials = ("anybody", "s3cret")
        browser.call("Fetch.enable", handleAuthRequests=True)
        try:
            browser.open(server.url)
            browser.until(CONNECTED)
        finally:
            browser.call("Fetch.disable")
    assert len(browser.heard("Fetch.authRequired")) == 1, "the browser keeps what it was given"
    assert "80.0 %" in text_of(browser, "#summary")
