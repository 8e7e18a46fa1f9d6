"""A budget of memory that processes share: its sum holds, whoever starts, ends or is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.build import open_store
from kvtier.config import parse_config
from kvtier.errors import ConfigError
from kvtier.storage_backends.host.budget import NodeBudget

MIB = 1 << 20
HOLD = """
import sys
from kvtier.storage_backends.host.budget import NodeBudget
budget = NodeBudget(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
print(budget.granted_bytes, flush=True)
sys.stdin.read()
"""


def holder(path: Path, capacity: int, wanted: int) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), str(capacity), str(wanted)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(30)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def test_stores_of_one_process_share_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = NodeBudget(tmp_path / "budget", 16 * MIB, 10 * MIB)
    second = NodeBudget(tmp_path / "budget", 16 * MIB, 10 * MIB)
    assert (first.granted_bytes, second.granted_bytes) == (10 * MIB, 6 * MIB)
    assert "6291456 bytes" in caplog.text
    with pytest.raises(ConfigError, match="nothing is left of the 16777216 bytes"):
        NodeBudget(tmp_path / "budget", 16 * MIB, MIB)
    first.close()
    first.close()
    third = NodeBudget(tmp_path / "budget", 16 * MIB, 16 * MIB)
    assert third.granted_bytes == 10 * MIB
    for budget in (second, third):
        budget.close()
    assert oct((tmp_path / "budget").stat().st_mode)[-3:] == "600"


def test_what_a_killed_process_had_is_free_at_once(tmp_path: Path) -> None:
    process, granted = holder(tmp_path / "budget", 16 * MIB, 12 * MIB)
    try:
        assert granted == 12 * MIB
        mine = NodeBudget(tmp_path / "budget", 16 * MIB, 12 * MIB)
        assert mine.granted_bytes == 4 * MIB
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        again = NodeBudget(tmp_path / "budget", 16 * MIB, 16 * MIB)
        assert again.granted_bytes == 12 * MIB
        mine.close()
        again.close()
    finally:
        end(process)


def test_processes_that_start_together_never_exceed_the_sum(tmp_path: Path) -> None:
    started = [holder(tmp_path / "budget", 16 * MIB, 5 * MIB) for _ in range(3)]
    try:
        assert sum(granted for _, granted in started) == 15 * MIB
    finally:
        for process, _ in started:
            end(process)


def test_another_capacity_is_refused_while_the_file_is_in_use(tmp_path: Path) -> None:
    first = NodeBudget(tmp_path / "budget", 16 * MIB, MIB)
    with pytest.raises(ConfigError, match="capacity = 33554432, but processes that run have 16777216"):
        NodeBudget(tmp_path / "budget", 32 * MIB, MIB)
    first.close()
    second = NodeBudget(tmp_path / "budget", 32 * MIB, 32 * MIB)
    assert second.granted_bytes == 32 * MIB
    second.close()


def test_a_path_that_cannot_be_a_budget_is_named(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("something of value, which is not to be written over")
    with pytest.raises(ConfigError, match="is a file of something else"):
        NodeBudget(other, 16 * MIB, MIB)
    assert other.read_text().startswith("something of value")
    with pytest.raises(ConfigError, match="cannot be used"):
        NodeBudget(tmp_path / "missing" / "budget", 16 * MIB, MIB)
    with pytest.raises(ConfigError, match="less than 4096"):
        NodeBudget(tmp_path / "budget", 100, 100)


def test_a_host_tier_lives_in_its_budget_and_gives_it_back(tmp_path: Path) -> None:
    config = parse_config(
        {
            "tiers": [
                {
                    "type": "host",
                    "capacity": "12MiB",
                    "policy": "s3fifo",
                    "ttl": "1h",
                    "budget": {"path": str(tmp_path / "budget"), "capacity": "16MiB"},
                }
            ]
        }
    )
    stores = [open_store(config) for _ in range(2)]
    assert [s.host.usage().capacity_bytes for s in stores] == [12 * MIB, 4 * MIB]
    with pytest.raises(ConfigError, match="nothing is left"):
        open_store(config)
    stores[0].close()
    again = open_store(config)
    assert again.host.usage().capacity_bytes == 12 * MIB
    for store in (stores[1], again):
        store.close()
