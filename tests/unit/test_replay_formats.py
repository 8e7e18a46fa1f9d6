"""Readers of traces, the compact form, and the recorder of lookups."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigError, TierPathError
from kvtier.replay.formats import TraceFormat, bundled_path, read_trace
from kvtier.replay.recorded import LookupRecorder
from kvtier.replay.trace import Trace


def blocks(trace: Trace) -> list[list[int]]:
    return [trace.blocks_of(r).tolist() for r in range(trace.requests)]


def same_pattern(a: list[list[int]], b: list[list[Any]]) -> bool:
    """Whether two lists of blocks are equal up to the names of the blocks."""
    names: dict[Any, int] = {}
    back: dict[int, Any] = {}
    if [len(x) for x in a] != [len(x) for x in b]:
        return False
    return all(
        names.setdefault(y, x) == x and back.setdefault(x, y) == y
        for p, q in zip(a, b, strict=True)
        for x, y in zip(p, q, strict=True)
    )


def lines(path: Path, *entries: Any) -> str:
    path.write_text("".join(json.dumps(e) + "\n" for e in entries))
    return str(path)


# -- mooncake ----------------------------------------------------------------------------------------------------------

MOONCAKE = (
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 2500, "input_length": 1030, "output_length": 6, "hash_ids": [0, 1, 2]},
    {"timestamp": 2000, "input_length": 512, "output_length": 7, "hash_ids": [0]},
)


def test_mooncake(tmp_path: Path) -> None:
    trace = read_trace(lines(tmp_path / "t.jsonl", *MOONCAKE))
    assert trace.block_tokens == 512
    assert trace.times_s.tolist() == [0.0, 2.0, 2.5]  # sorted by arrival
    assert trace.input_tokens.tolist() == [1000, 512, 1030]
    assert trace.output_tokens.tolist() == [5, 7, 6]
    assert trace.sessions.tolist() == [0, 1, 2]
    assert blocks(trace) == [[0, 1], [0], [0, 1, 2]]
    assert trace.unique_blocks == 3


def test_the_head_of_a_trace(tmp_path: Path) -> None:
    head = read_trace(lines(tmp_path / "t.jsonl", *MOONCAKE, MOONCAKE[0])).head(3)
    assert (head.requests, head.unique_blocks) == (3, 2)
    assert blocks(head) == [[0, 1], [0, 1], [0]]
    assert head.head(9).requests == 3


def test_mooncake_with_other_blocks(tmp_path: Path) -> None:
    assert read_trace(lines(tmp_path / "t.jsonl", *MOONCAKE), block_tokens=16).block_tokens == 16


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"timestamp": 0, "output_length": 5, "hash_ids": []}, "'input_length' = None"),
        ({"timestamp": -1, "input_length": 1, "output_length": 5, "hash_ids": []}, "'timestamp' = -1"),
        ({"timestamp": 0, "input_length": "7", "output_length": 5, "hash_ids": []}, "'input_length' = '7'"),
        ({"timestamp": 0, "input_length": 1, "output_length": 5, "hash_ids": ["a"]}, "'hash_ids'"),
        ({"timestamp": 0, "input_length": 1, "output_length": 5, "hash_ids": [2**70]}, "'hash_ids'"),
        ([1], "JSON object"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, entry: Any, words: str) -> None:
    path = lines(tmp_path / "t.jsonl", MOONCAKE[0], entry)
    with pytest.raises(ConfigError, match="line 2: .*" + words.replace("[", r"\[")):
        read_trace(path, TraceFormat.MOONCAKE)


# -- weka --------------------------------------------------------------------------------------------------------------


def call(t: float, hash_ids: list[int], **fields: Any) -> dict[str, Any]:
    return {"t": t, "type": "s", "in": 64 * len(hash_ids) + 9, "out": 3, "hash_ids": hash_ids, **fields}


def session(*requests: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"id": "x", "models": ["m"], "block_size": 64, "requests": list(requests), **fields}


def weka_directory(path: Path, *sessions: dict[str, Any]) -> str:
    for i, entry in enumerate(sessions):
        (path / f"trace_{i:04}.json").write_text(json.dumps(entry))
    return str(path)


def test_ids_of_weka_sessions_are_their_own(tmp_path: Path) -> None:
    one = session(call(0, [1, 2]), call(10, [1, 2, 3]))
    two = session(call(5, [1, 2]))
    trace = read_trace(weka_directory(tmp_path, one, two))
    assert trace.block_tokens == 64
    assert trace.times_s.tolist() == [0, 5, 10]
    assert trace.sessions.tolist() == [0, 1, 0]
    assert same_pattern(blocks(trace), [["a1", "a2"], ["b1", "b2"], ["a1", "a2", "a3"]])


def test_global_weka_ids_are_shared(tmp_path: Path) -> None:
    sessions = [session(call(0, [1, 2]), hash_id_scope="global"), session(call(5, [1, 7]), hash_id_scope="global")]
    assert same_pattern(blocks(read_trace(weka_directory(tmp_path, *sessions))), [["1", "2"], ["1", "7"]])


def test_weka_pauses(tmp_path: Path) -> None:
    told = session(call(3, [1], api_time=2.0), call(10, [1], think_time=1.5, api_time=1.0), call(20, [1]))
    trace = read_trace(weka_directory(tmp_path, told))
    assert trace.think_s.tolist() == [0.0, 1.5, 20 - 10 - 1.0]


@pytest.mark.parametrize("inner", [(2.0, 4.0), (12.0, 14.0)])
def test_subagents_count_from_their_own_start_or_from_the_sessions(tmp_path: Path, inner: tuple[float, float]) -> None:
    agent = {"t": 10, "type": "subagent", "agent_id": "a", "requests": [call(t, [1, 9]) for t in inner]}
    trace = read_trace(weka_directory(tmp_path, session(call(0, [1]), agent, call(20, [1, 2]))))
    assert trace.times_s.tolist() == [0, 12, 14, 20]
    assert trace.sessions.tolist() == [0, 0, 0, 0]
    assert same_pattern(blocks(trace), [["1"], ["1", "9"], ["1", "9"], ["1", "2"]])


@pytest.mark.parametrize("form", ["object", "list", "lines"])
def test_weka_in_one_file(tmp_path: Path, form: str) -> None:
    path = tmp_path / "t.json"
    entry = session(call(0, [1, 2]))
    path.write_text(
        {
            "object": json.dumps(entry),
            "list": json.dumps([entry]),
            "lines": json.dumps(entry) + "\n" + json.dumps(entry),
        }[form]
    )
    assert read_trace(str(path)).requests == (2 if form == "lines" else 1)


def test_sessions_can_begin_one_after_the_other(tmp_path: Path) -> None:
    path = weka_directory(tmp_path, session(call(0, [1])), session(call(0, [1])))
    assert read_trace(path, session_gap_s=7.5).times_s.tolist() == [0, 7.5]


@pytest.mark.parametrize(
    ("sessions", "words"),
    [
        ([{"id": "x", "block_size": 64}], "list 'requests'"),
        ([session(call(0, [1]), hash_id_scope="both")], "hash_id_scope 'both'"),
        ([session(call(0, [1])), session(call(0, [1]), block_size=128)], "block_size 128"),
        ([session({"t": "now", "in": 3, "hash_ids": []})], "'t' = 'now'"),
    ],
)
def test_a_bad_session_is_named(tmp_path: Path, sessions: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        read_trace(weka_directory(tmp_path, *sessions))
    assert f"trace_{len(sessions) - 1:04}.json" in str(error.value)


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_prompts(tmp_path: Path) -> None:
    def turn(us: int, text: str, session: str = "a") -> dict[str, Any]:
        return {"timestamp": us, "session_id": session, "input": text, "output": "fivee"}

    first, second = "x" * 600, "x" * 600 + "y" * 200
    lines(tmp_path / "1.jsonl", turn(2_000_000, second), turn(1_000_000, first))
    lines(tmp_path / "2.jsonl", turn(3_000_000, "z" * 256 + "x" * 256, "b"))
    trace = read_trace(str(tmp_path))
    assert trace.block_tokens == 64
    assert trace.times_s.tolist() == [1, 2, 3]
    assert trace.sessions.tolist() == [0, 0, 1]
    assert trace.input_tokens.tolist() == [150, 200, 128]
    assert trace.output_tokens.tolist() == [2, 2, 2]
    # The third block of `first` is not full; the second one of the last prompt has another prefix.
    assert same_pattern(blocks(trace), [["x1", "x2", "x3"], ["x1", "x2", "xy3", "y4"], ["z1", "zx2"]])
    with pytest.raises(ConfigError, match="line 1: 'input' must be a text"):
        read_trace(lines(tmp_path / "3.jsonl", {"timestamp": 1, "session_id": "a", "input": 3}), TraceFormat.PROMPTS)


def test_agent_sessions_share_their_prefixes() -> None:
    trace = read_trace("agent-sessions")
    assert len(set(trace.sessions.tolist())) == 2
    assert trace.unique_blocks < len(trace.blocks) / 2


# -- recorded ----------------------------------------------------------------------------------------------------------


def key(page: tuple[int, ...]) -> bytes:
    return repr(page).encode().ljust(32, b".")[:32]


@st.composite
def prompts(draw: st.DrawFn) -> list[list[bytes]]:
    """Requests as the page keys of their prompts: a page is named by everything up to its end."""
    words = draw(st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=12))
    return [[key(tuple(w[: i + 1])) for i in range(len(w))] for w in words]


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(requests=prompts(), remember=st.sampled_from([1, 3, 1000]))
def test_recorded_lookups_read_back(tmp_path: Path, requests: list[list[bytes]], remember: int) -> None:
    path = tmp_path / "lookups.jsonl"
    path.unlink(missing_ok=True)
    ticks = iter(range(1000))
    with LookupRecorder(path, page_tokens=16, remember_pages=remember, clock=lambda: float(next(ticks))) as recorder:
        for i, keys in enumerate(requests):
            recorder.record(keys, input_tokens=16 * len(keys) + 1, output_tokens=i, session="s" if i % 2 else None)
    trace = read_trace(str(path))
    assert trace.block_tokens == 16
    assert trace.times_s.tolist() == [float(i + 1) for i in range(len(requests))]
    assert trace.input_tokens.tolist() == [16 * len(k) + 1 for k in requests]
    assert trace.output_tokens.tolist() == list(range(len(requests)))
    assert len({int(s) for i, s in enumerate(trace.sessions) if i % 2}) <= 1
    assert same_pattern(blocks(trace), requests)


def test_a_recording_says_nothing_of_the_keys(tmp_path: Path) -> None:
    keys = [os.urandom(32) for _ in range(4)]
    texts = []
    for name in ("a", "b"):
        with LookupRecorder(tmp_path / name, page_tokens=16) as recorder:
            recorder.record(keys, input_tokens=64)
        texts.append((tmp_path / name).read_text())
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
        assert not any(k.hex()[:16] in texts[-1] for k in keys)
    # Keyed per file: the same pages are other numbers elsewhere.
    assert json.loads(texts[0].splitlines()[1])["keys"] != json.loads(texts[1].splitlines()[1])["keys"]


def test_a_shared_prefix_is_named_by_its_last_page(tmp_path: Path) -> None:
    keys = [os.urandom(32) for _ in range(100)]
    with LookupRecorder(tmp_path / "r", page_tokens=16) as recorder:
        recorder.record(keys[:99], input_tokens=1)
        recorder.record(keys, input_tokens=1)
    first, second = map(json.loads, (tmp_path / "r").read_text().splitlines()[1:])
    assert second["after"] == first["keys"][-16:]
    assert len(second["keys"]) == 16


def test_recording_ends_at_its_largest_size(tmp_path: Path) -> None:
    with LookupRecorder(tmp_path / "r", page_tokens=16, max_bytes=400) as recorder:
        for _ in range(50):
            recorder.record([os.urandom(32)], input_tokens=16)
        assert "400 bytes" in recorder.stopped
        assert 0 < recorder.recorded_requests < 50
    assert (tmp_path / "r").stat().st_size <= 400
    assert read_trace(str(tmp_path / "r")).requests == recorder.recorded_requests


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path) -> None:
    recorder = LookupRecorder(tmp_path / "r", page_tokens=16)
    with Path("/dev/full").open("wb", buffering=0) as full:
        os.dup2(full.fileno(), recorder._file.fileno())
    for _ in range(10):
        recorder.record([os.urandom(32)] * 1000, input_tokens=16)
    assert "No space left" in recorder.stopped
    recorder.close()
    recorder.record([os.urandom(32)], input_tokens=16)


def test_a_recording_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("mine")
    with pytest.raises(TierPathError, match=r"record = .*new file"):
        LookupRecorder(tmp_path / "r", page_tokens=16)
    assert (tmp_path / "r").read_text() == "mine"


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "r"
    with LookupRecorder(path, page_tokens=16) as recorder:
        for _ in range(3):
            recorder.record([os.urandom(32)], input_tokens=16)
    path.write_bytes(path.read_bytes()[:-5])
    assert read_trace(str(path)).requests == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"format": "kvtier-lookups", "version": 9, "page_tokens": 16}\n', "version 9"),
        ('{"format": "other"}\n', "does not begin like"),
        ('{"format": "kvtier-lookups", "version": 1, "page_tokens": 16}\n{"t": 1}\n', "line 2"),
        (
            '{"format": "kvtier-lookups", "version": 1, "page_tokens": 16}\n'
            '{"t": 1, "s": 0, "in": 1, "out": 1, "after": "0123456789abcdef", "keys": ""}\n',
            "line 2",
        ),
    ],
)
def test_a_bad_recording_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "r").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_trace(str(tmp_path / "r"), TraceFormat.RECORDED)


# -- compact and bundled -----------------------------------------------------------------------------------------------


def test_the_compact_form_keeps_everything(tmp_path: Path) -> None:
    source = read_trace(
        weka_directory(
            tmp_path, session(call(0.25, [1, 2]), call(9, [1, 5, 3], think_time=0.125)), session(call(3, [4]))
        )
    )
    path = tmp_path / "t.npz"
    source.save(path)
    again = read_trace(str(path))
    for field in Trace.__dataclass_fields__:
        a, b = getattr(source, field), getattr(again, field)
        np.testing.assert_array_equal(a, b, err_msg=field)
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None), field


def test_a_damaged_compact_trace_is_refused(tmp_path: Path) -> None:
    whole = bundled_path("mooncake-synthetic").read_bytes()
    for cut in (whole[: len(whole) // 2], whole[:1000] + bytes(2000) + whole[3000:]):
        (tmp_path / "t.npz").write_bytes(cut)
        with pytest.raises(ConfigError, match="not a compact trace"):
            read_trace(str(tmp_path / "t.npz"))


@pytest.mark.parametrize("name", ["mooncake-conversation", "mooncake-synthetic"])
def test_bundled_traces_are_prefix_trees(name: str) -> None:
    trace = read_trace(name)
    parents: dict[int, int] = {}
    for request in blocks(trace):
        for parent, block in zip([-1, *request], request, strict=False):
            assert parents.setdefault(block, parent) == parent
    sizes = np.diff(trace.offsets)
    np.testing.assert_array_equal(sizes, -(-trace.input_tokens // 512))  # a partial last block counts as full


def test_a_file_wins_over_a_bundled_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "mooncake-synthetic", *MOONCAKE)
    assert read_trace("mooncake-synthetic").requests == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist.*mooncake-conversation"),
        (b"", "--format"),
        (b"\xff\xfe text\n", "--format"),
        (b"PK junk", "compact"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "t"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_trace(str(path))


def test_a_path_that_cannot_be_looked_at_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"File name too long|does not exist"):  # newer Pythons do not ask
        read_trace(str(tmp_path / ("t" * 300)))


@pytest.mark.parametrize("kind", [TraceFormat.MOONCAKE, TraceFormat.WEKA])
def test_a_trace_without_requests_is_refused(tmp_path: Path, kind: TraceFormat) -> None:
    path = tmp_path / "t"
    path.write_text("[]" if kind is TraceFormat.WEKA else "\n")
    with pytest.raises(ConfigError, match=f"no request.*{kind.value}"):
        read_trace(str(path), kind)
