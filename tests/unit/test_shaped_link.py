from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from kvtier.cli import shaped_link
from kvtier.errors import ConfigError, KVTierError


@pytest.mark.parametrize(("text", "bits_per_s"), [("10gbit", 10e9), (" 2.5Gbit", 2.5e9), ("500mbit", 500e6)])
def test_speeds(text: str, bits_per_s: float) -> None:
    assert shaped_link.parse_rate("--link", text) == bits_per_s


@pytest.mark.parametrize("text", ["", "10", "10GB", "-1gbit", "0gbit", "gbit", "1e3gbit", "9999999gbit"])
def test_what_is_no_speed(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--link '{text}' is no speed of a link: write 10gbit"):
        shaped_link.parse_rate("--link", text)


def test_tools_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(KVTierError, match="ip and tc: apt-get install iproute2"):
        shaped_link.enter(1e9)


# Sends at twice what the link takes in a second, and says how long it took and what loopback looked like before.
SENDER = """
import json, socket, threading, time
from kvtier.cli import shaped_link
outside = {name for _, name in socket.if_nameindex()}
try:
    shaped_link.enter(200e6)
except shaped_link.KVTierError as error:
    print(json.dumps({"refused": str(error)}))
    raise SystemExit
listener = socket.create_server(("127.0.0.1", 0))
sender = socket.create_connection(listener.getsockname())
receiver, _ = listener.accept()
thread = threading.Thread(target=sender.sendall, args=(bytes(50_000_000),))
start = time.monotonic()
thread.start()
left = 50_000_000
while left:
    left -= len(receiver.recv(1 << 20))
took = time.monotonic() - start
thread.join()
print(json.dumps({"took_s": took, "devices": sorted(name for _, name in socket.if_nameindex())}))
"""


def test_a_link_carries_what_it_is_said_to() -> None:
    done = subprocess.run([sys.executable, "-c", SENDER], capture_output=True, text=True, timeout=300, check=True)
    seen = json.loads(done.stdout)
    if "refused" in seen:
        assert "as root on Linux" in seen["refused"] or "iproute2" in seen["refused"] or "failed" in seen["refused"]
        pytest.skip(f"this machine gives no shaped link: {seen['refused']}")
    assert "lo" in seen["devices"]
    assert seen["took_s"] > 1.5, "50 MB are 2 s at 200 Mbit/s, less what may be sent at once"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up a right")
def test_without_the_right_it_is_refused() -> None:
    program = SENDER.replace("outside =", "import os; os.setuid(65534); outside =")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip("the interpreter's own files are not readable to others here")
    assert "run it as root on Linux" in json.loads(done.stdout)["refused"] or shutil.which("tc") is None
