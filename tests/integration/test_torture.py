"""``kvtier torture``: the short form passes, a broken tier fails it, and nothing stays behind."""

from __future__ import annotations

import json
import logging
import random
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kvtier.cli import main
from kvtier.cli.app import app
from kvtier.errors import ConfigError
from kvtier.faults import sheet
from kvtier.faults.selfcheck import UnverifiedTier
from kvtier.faults.sheet import CHECKS, Check, Outcome, torture
from kvtier.faults.trial import Trial, UnavailableError, expect
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.testing.pages import item_of, key_of
from kvtier.testing.redis_servers import find_server


def test_every_check_passes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short form: one trial of everything. In a folder that is named from where one is, as people do: a disk that
    is mounted there must be the one that the pages lie on."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["torture", "--seconds", "0", "--seed", "7", "--json", "--folder", "here"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["passed"], found
    assert [line["check"] for line in found["checks"]] == [check.name for check in CHECKS]
    assert found["seed"] == 7 and found["seconds"] > 0
    assert logging.getLogger("kvtier").level == logging.NOTSET, "quiet only for as long as it runs"
    for line in found["checks"]:
        expected = "skipped" if line["check"] == "redis" and find_server() is None else "passed"
        assert (line["outcome"], line["trials"]) == (expected, 1), line
    seen = {line["check"]: line["seen"] for line in found["checks"]}
    assert seen["kill"]["kills"] == 2 and seen["kill"]["hits"] > 10
    assert seen["self-check"] == {"UnverifiedTier caught": 1, "ForgetfulTier caught": 1}
    assert not list((tmp_path / "here").iterdir())


def test_a_tier_that_does_not_verify_fails_torture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NvmeTier, "_get", UnverifiedTier._get)
    arguments = ["torture", "--seconds", "0", "--trials", "8", "--seed", "7", "--folder", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--only", "flips", "--only", "files"])
    assert result.exit_code == 1
    assert "FAILED" in result.stdout and "wrong bytes were served as page" in result.stdout
    assert "again with --seed 7" in result.stdout
    assert not list(tmp_path.iterdir())


def test_wrong_bytes_and_wrong_pages_are_seen(tmp_path: Path) -> None:
    """What every check reads pages with, against a tier that mixes them up."""

    class Mixed(NvmeTier):
        def get_many_into(self, keys, outs, deadline_s=None):  # type: ignore[no-untyped-def]
            return super().get_many_into(list(keys)[::-1], outs, deadline_s)

    trial = Trial(tmp_path, random.Random(0))
    tier = Mixed(tmp_path / "a", 1 << 20)
    tier.put_many([item_of(key_of(n), 5000) for n in range(2)])
    with pytest.raises(Exception, match="wrong bytes were served"):
        trial.get(tier, [0, 1], 5000)
    tier.close()


def test_a_failed_check_is_told_and_not_run_again(tmp_path: Path) -> None:
    runs = []

    def fails(trial: Trial) -> None:
        runs.append("fails")
        expect(False, "nothing holds")

    def raises(trial: Trial) -> None:
        runs.append("raises")
        raise KeyError("what is this")

    def cannot(trial: Trial) -> None:
        raise UnavailableError("not here")

    def holds(trial: Trial) -> None:
        runs.append("holds")
        assert trial.folder.is_dir() and not list(trial.folder.iterdir())
        trial.seen["rounds"] += 1

    checks = [Check(f.__name__, "", f) for f in (fails, raises, cannot, holds)]
    lines = torture(tmp_path, 0.05, 1, checks=checks, trials=3)
    outcomes = {line.check.name: (line.outcome, line.detail) for line in lines}
    assert outcomes["fails"] == (Outcome.FAILED, "trial 0: nothing holds")
    assert outcomes["raises"][0] is Outcome.FAILED and "what is this" in outcomes["raises"][1]
    assert outcomes["cannot"] == (Outcome.SKIPPED, "not here")
    assert outcomes["holds"] == (Outcome.PASSED, "")
    assert runs.count("fails") == runs.count("raises") == 1 and runs.count("holds") >= 3
    assert lines[3].seen["rounds"] == lines[3].trials == runs.count("holds")
    assert not list(tmp_path.iterdir())


def test_a_check_that_hangs_is_a_failed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(sheet, "TRIAL_LIMIT_S", 0.1)
    (line,) = torture(tmp_path, 0, 1, checks=[Check("hangs", "", lambda trial: expect(go_on.wait(60), ""))])
    go_on.set()
    assert line.outcome is Outcome.FAILED and "has not ended" in line.detail


@pytest.mark.parametrize(("told", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_trial_that_is_broken_off_leaves_nothing(
    told: signal.Signals, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its files, nor what it has outside its folder."""
    here, ended, left = threading.main_thread().ident, threading.Event(), []

    def waits(trial: Trial) -> None:
        (trial.folder / "page").write_bytes(b"bytes")
        trial.outside.append(ended.set)
        assert here is not None
        signal.pthread_kill(here, told)
        left.append(ended.wait(60))

    monkeypatch.setattr(sheet, "CHECKS", [Check("waits", "", waits)])
    # A shell without a terminal starts what is in its background with this one ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    before_term = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ending:
            main(["torture", "--folder", str(tmp_path)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert ending.value.code == status and left == [True]
    assert signal.getsignal(signal.SIGTERM) is before_term, "only for as long as the command runs"
    assert not list(tmp_path.iterdir())


def test_the_same_seed_does_the_same(tmp_path: Path) -> None:
    def draws(trial: Trial) -> None:
        trial.seen[str(trial.rng.random())] += 1

    checks = [Check("draws", "", draws)]
    one, same, other = (torture(tmp_path, 0, seed, checks=checks, trials=3)[0].seen for seed in (1, 1, 2))
    assert one == same != other and len(one) == 3


def test_a_folder_without_room_is_told_before_anything_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = SimpleNamespace(free=100 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: little)
    result = CliRunner().invoke(app, ["torture", "--folder", str(tmp_path)])
    assert isinstance(result.exception, ConfigError)
    assert "100.0 MiB free, and the checks may take 544.0 MiB: name one on another disk" in str(result.exception)
    result = CliRunner().invoke(app, ["torture", "--folder", str(tmp_path), "--seconds", "0", "--only", "flips"])
    assert result.exit_code == 0, result.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "everything"], "there is no such check; give one of self-check, kill"),
        (["--trials", "0"], "--trials 0: give a number from 1 up"),
        (["--seconds", "-1"], "give a time from 0"),
        (["--seconds", "nan"], "give a time from 0"),
        (["--folder", "/proc/nowhere"], "--folder '/proc/nowhere' cannot be used"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["torture", *arguments])
    assert isinstance(result.exception, (ConfigError, OSError)) and message in str(result.exception)
