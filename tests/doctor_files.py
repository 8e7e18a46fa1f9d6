"""Configuration files for ``kvtier doctor``, and what it says of one thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kvtier.cli.doctor_line import Finding

HOST = {"type": "host", "capacity": "4MiB"}


def write(tmp_path: Path, *lower: dict[str, Any], **rest: Any) -> Path:
    path = tmp_path / "kvtier.yaml"
    path.write_text(yaml.safe_dump({"tiers": [HOST, *lower], **rest}))
    return path


def about(findings: list[Finding], what: str) -> list[Finding]:
    return [finding for finding in findings if finding.what.startswith(what)]
