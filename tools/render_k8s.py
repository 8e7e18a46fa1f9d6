"""Render the Helm chart: deploy/k8s/NAME.yaml for each of its examples, and its copies of files of deploy/grafana.

    python tools/render_k8s.py            write what has changed
    python tools/render_k8s.py --check    change nothing; exit status 1 where something would be written

Needs helm-python-sdk (``tools/venv.sh deploy``). Nothing is fetched and no cluster is asked.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml
from helm_python.chart import Chart

DEPLOY = Path(__file__).parent.parent / "deploy"
CHART = DEPLOY / "helm" / "kvtier"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
COPIED = ("kvtier-alerts.yaml", "kvtier-dashboard.json")
"""Files of deploy/grafana that the chart carries: it cannot read outside of its folder."""


def render(values: dict[str, Any], release: str = "kvtier", namespace: str = "kvtier") -> str:
    """What ``helm template`` prints. Raises HelmError with the chart's message for values that it refuses."""
    with Chart.load(CHART) as chart:
        files = chart.render(values, name=release, namespace=namespace, is_install=True)
    texts = [text.strip() for name, text in sorted(files.items()) if not name.endswith("NOTES.txt")]
    return "".join(f"---\n{text.removeprefix('---').strip()}\n" for text in texts if text)


def objects(text: str) -> list[dict[str, Any]]:
    """The objects of a rendered text."""
    return [found for found in yaml.safe_load_all(text) if found]


def wanted() -> dict[Path, str]:
    """Every generated file with what it should hold."""
    files = {CHART / "files" / name: (DEPLOY / "grafana" / name).read_text() for name in COPIED}
    for example in EXAMPLES:
        head = (
            "# helm template kvtier deploy/helm/kvtier --namespace kvtier --values deploy/helm/kvtier/examples/"
            f"{example.name}\n"
            "# Written by tools/render_k8s.py: change the chart or the example instead.\n"
        )
        files[DEPLOY / "k8s" / example.name] = head + render(yaml.safe_load(example.read_text()))
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    if not check:  # what the templates read comes first
        for name in COPIED:
            _write(CHART / "files" / name, (DEPLOY / "grafana" / name).read_text())
    stale = 0
    for path, text in wanted().items():
        if path.exists() and path.read_text() == text:
            continue
        stale += 1
        print(path.relative_to(DEPLOY.parent), "differs" if check else "written")
        if not check:
            _write(path, text)
    return 1 if check and stale else 0


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
