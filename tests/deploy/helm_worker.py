"""Renders the chart for the tests, in a process of its own: Helm brings the Go runtime along, which does not belong
into a process that forks and takes signals.

A JSON object a line, ``{"values", "release", "namespace"}``, ``{"lint": values}`` or ``{"package": folder}``; the
answer is ``{"text"}`` or ``{"error"}``, ``{"messages"}``, ``{"files"}``. Its argument is the project's folder."""

from __future__ import annotations

import json
import sys
from typing import Any


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    from helm_python.chart import Chart, lint, package
    from helm_python.errors import HelmError

    from tools import render_k8s

    if "lint" in asked:
        return {"messages": lint(render_k8s.CHART, asked["lint"], strict=True, with_subcharts=True)["messages"]}
    if "package" in asked:
        with Chart.load(package(render_k8s.CHART, destination=asked["package"])) as packed:
            return {"files": packed.render({}, name="kvtier", namespace="kvtier")}
    try:
        return {"text": render_k8s.render(asked["values"], asked["release"], asked["namespace"])}
    except HelmError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
