"""``kvtier doctor`` beside the real engine."""

from __future__ import annotations

from kvtier.cli.doctor_engines import check_engines
from kvtier.cli.doctor_line import State


def test_doctor_finds_the_plugin() -> None:
    found = {finding.what: finding for finding in check_engines()}["SGLang"]
    assert found.state is State.GOOD, found
