"""A cache server for tests, which they freeze, kill and start again."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from pathlib import Path

from kvtier.testing.redis_servers import kept_port

PATIENCE_S = 60.0


class Server:
    """``kvtier serve`` on a unix socket, over one directory."""

    def __init__(self, folder: Path, name: str = "s") -> None:
        self.folder = folder
        self.socket = folder / name
        self._http = f"127.0.0.1:{kept_port()}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        from .harness import until

        command = [sys.executable, "-m", "kvtier.cli", "serve", "--listen", f"unix:{self.socket}"]
        command += ["--host-capacity", "16MiB", "--nvme", f"{self.folder / 'nvme'}:64MiB", "--http", self._http]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        until(self._answers, PATIENCE_S)

    def _answers(self) -> bool:
        import socket

        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "server.log").read_text(errors="replace")[-2000:]
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(5.0)
            try:
                client.connect(str(self.socket))
                client.sendall(b"*1\r\n$4\r\nPING\r\n")
                return client.recv(16).startswith(b"+PONG")
            except OSError:
                return False

    def written(self, pages: int) -> None:
        """Wait until so many pages are on its disk, where they outlive it."""
        from .harness import until

        def there() -> bool:
            with urllib.request.urlopen(f"http://{self._http}/metrics", timeout=PATIENCE_S) as answer:
                found = re.search(r'^kvtier_tier_resident_pages\{tier="nvme"\} (\S+)$', answer.read().decode(), re.M)
            return found is not None and float(found[1]) >= pages

        until(there, PATIENCE_S)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_S)
            self._process = None
            self.socket.unlink(missing_ok=True)
