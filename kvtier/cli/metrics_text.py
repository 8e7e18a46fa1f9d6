"""What a kvtier process on this machine says on its metrics port, read without a library for it."""

from __future__ import annotations

import re
import urllib.request
from collections import defaultdict

_SAMPLE = re.compile(r"(kvtier_\w+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'\w+="([^"]*)"')


def samples(port: int) -> dict[str, dict[str, float]]:
    """Every sample of kvtier by its name, and by the values of its labels, joined by slashes."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line)
        if match is not None:
            found[match[1]]["/".join(_LABEL.findall(match[2] or ""))] = float(match[3])
    return found
