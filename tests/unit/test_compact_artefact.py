"""The file of a compacted prefix: its bytes are frozen, safetensors reads it, and whatever is not exactly such a file
is refused without allocating what it claims."""

from __future__ import annotations

import hashlib
import json
import resource
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.compression.compaction.artefact import CompactPrefix, ModelIdentity
from kvtier.compression.compaction.baselines import choose
from kvtier.compression.compaction.manifest import METADATA_KEY, read_header
from kvtier.compression.compaction.prefix import Compaction, LayerSelection, Recipe, budget_tokens
from kvtier.errors import ArtefactError, ConfigError

GOLDEN = Path(__file__).parents[1] / "golden" / "compact_prefix-v1.safetensors"


def example() -> CompactPrefix:
    """Two layers of two heads: sets of their own and biases in the first, fitted values in the second."""
    kept = tuple(torch.tensor(k) for k in ([0, 1, 5, 9], [2, 11]))
    bias = tuple(torch.arange(n, dtype=torch.float32) / 8 - h for h, n in enumerate([4, 4, 2, 2]))
    values = tuple(torch.arange(2 * len(k), dtype=torch.float32).reshape(-1, 2) * 0.5 for k in kept)
    layers = (LayerSelection(kept, bias), LayerSelection(kept, None, values))
    compaction = Compaction(
        Recipe("am", 0.75, "omp", 7, "repeat", {"ridge": "1e-6"}),
        12,
        layers,
        {"mass_error": 0.125, "fit_s": 1.5},
        {"mass_error": (0.25, float("nan"))},
    )
    rows = [
        {
            role: tuple((torch.arange(2 * len(k)).reshape(-1, 2) + 10 * n).to(torch.bfloat16) for k in kept)
            for role in ("keys", "values")
        }
        for n in range(2)
    ]
    model = ModelIdentity("dense", "tiny", "ab" * 32, "cd" * 32)
    return CompactPrefix.of(model, range(100, 112), compaction, rows, original_bytes=12 * 2 * 2 * 2 * 2 * 2)


def test_golden_bytes() -> None:
    """These bytes change only together with the format's version."""
    raw = example().to_bytes()
    assert raw == GOLDEN.read_bytes()
    assert hashlib.sha256(raw).hexdigest() == "176326f657efbc90704bc3aa22ad8ca65ff8882debbf9e87a580fdcb0bada5e5"


def test_round_trip() -> None:
    one = example()
    two = CompactPrefix.from_bytes(one.to_bytes())
    assert two.manifest.encoded() == one.manifest.encoded()
    assert two.to_bytes() == one.to_bytes()
    for a, b in zip(one.layers, two.layers, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.kept, b.kept, strict=True))
        assert (a.bias is None) == (b.bias is None)
        for x, y in zip(a.bias or (), b.bias or (), strict=True):
            assert torch.equal(x, y)
        for role in a.rows:
            assert all(torch.equal(x, y) for x, y in zip(a.rows[role], b.rows[role], strict=True))
    assert two.layers[1].fitted
    assert two.layers[1].rows["values"][1].tolist() == [[0.0, 0.5], [1.0, 1.5]]


def test_what_it_says_of_bytes_and_tokens() -> None:
    manifest = example().manifest
    rows = 12
    assert manifest.rows == rows
    assert manifest.tokens_removed == 1 - rows / (4 * 12)
    values, positions, biases = rows * 2 * 2 * 2, rows * 4, 12 * 4
    assert manifest.compact_bytes == values + positions + biases
    assert manifest.bytes_removed == 1 - manifest.compact_bytes / manifest.original_bytes


def test_safetensors_itself_reads_it(tmp_path: Path) -> None:
    safetensors = pytest.importorskip(
        "safetensors", reason="safetensors is not installed: pip install 'kvtier[transformers]'"
    )
    path = tmp_path / "prefix.safetensors"
    example().save(path)
    with safetensors.safe_open(path, "pt") as file:
        assert json.loads(file.metadata()[METADATA_KEY])["manifest"]["version"] == 1
        assert file.get_tensor("0.kept").tolist() == [0, 1, 5, 9, 2, 11]
        assert file.get_tensor("1.values").dtype == torch.bfloat16
    assert [p.name for p in tmp_path.iterdir()] == ["prefix.safetensors"]


def edited(change: Any) -> bytes:
    """The example with its manifest changed by `change`, lengths made consistent again, checksum left as it is."""
    raw = example().to_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    packed = json.loads(header["__metadata__"][METADATA_KEY])
    change(packed, header)
    header["__metadata__"][METADATA_KEY] = json.dumps(packed)
    new = json.dumps(header).encode()
    return len(new).to_bytes(8, "little") + new + raw[end:]


def drop(name: str) -> Any:
    return lambda packed, _: packed["manifest"].pop(name)


def put(path: str, value: Any) -> Any:
    def change(packed: Any, _: Any) -> None:
        at = packed["manifest"]
        *outer, last = path.split(".")
        for part in outer:
            at = at[int(part)] if isinstance(at, list) else at[part]
        at[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("version", 2), "version 2 .* reads version 1"),
        (put("format", "x"), "not 'kvtier-compact-prefix'"),
        (put("family", "rnn"), "family 'rnn'"),
        (put("model.dtype", "F64"), "dtype 'F64'"),
        (put("context.tokens", 1 << 40), "tokens: not a whole number"),
        (put("context.tokens", True), "tokens: not a whole number"),
        (put("layers.0.kept", [1 << 30, 2]), "not a whole number from 1 to 12"),
        (put("layers.0.dims", {"keys": 1 << 60, "values": 2}), "keys: not a whole number"),
        (put("layers.0.dims", {"keys": 65536, "values": 65536}), "not as the manifest says"),
        (put("layers.0.dims", {"keys": 2}), "its rows hold"),
        (put("layers.0.bias_heads", 3), "biases of 3 query heads"),
        (put("layers.0.bias_heads", 4096), "not as the manifest says"),
        (put("layers", []), "layers: not a list"),
        (put("layers", [{}] * 5000), "layers: not a list"),
        (put("recipe.ratio", 1.0), "ratio = 1.0"),
        (put("recipe.ratio", 10**400), "recipe: int too large"),
        (put("figures", {"a": "b"}), "figure 'a'"),
        (put("layer_figures", {"a": [1.0]}), "one number per layer"),
        (put("figures", {"mass_error": 0.5}), "checksum"),
        (put("model.weights", "cd" * 32), "checksum"),
        (drop("recipe"), "recipe is missing"),
        (drop("context"), "context is missing"),
        (lambda _, header: header.pop("0.bias"), "are not those"),
        (lambda _, header: header.update({"extra": header["0.bias"]}), "are not those"),
        (lambda _, header: header["0.bias"].update(data_offsets=[0, 1 << 50]), "damaged"),
        (lambda packed, _: packed.pop("checksum"), "checksum"),
    ],
)
def test_hostile_manifests_are_refused(change: Any, message: str) -> None:
    with pytest.raises(ArtefactError, match=message):
        CompactPrefix.from_bytes(edited(change))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x01",
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 400000) + b"[" * 400000,
        struct.pack("<Q", 4) + b"\xff\xfe\x00\x01",
        struct.pack("<Q", 19) + b'{"__metadata__": {}}'[:19],
        b"PK\x03\x04" + b"\0" * 100,
    ],
)
def test_other_files_are_refused(raw: bytes) -> None:
    with pytest.raises(ArtefactError):
        CompactPrefix.from_bytes(raw)


def test_a_file_that_claims_much_allocates_little() -> None:
    """Its manifest and header agree on 4096 layers of gigabytes each; the file has none of them."""
    manifest = example().manifest.as_json()
    manifest["context"]["tokens"] = 1 << 30
    manifest["layers"] = [{"kept": [1 << 30], "dims": {"keys": 1024, "values": 1024}, "bias_heads": 0, "fitted": False}]
    manifest["layer_figures"] = {}
    at, header = 0, {}
    for name, dtype, shape, size in (
        ("0.kept", "I32", [1 << 30], 4 << 30),
        ("0.keys", "BF16", [1 << 30, 1024], 2 << 40),
        ("0.values", "BF16", [1 << 30, 1024], 2 << 40),
    ):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    header["__metadata__"] = {METADATA_KEY: json.dumps({"checksum": "0" * 32, "manifest": manifest})}
    raw = json.dumps(header).encode()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ArtefactError, match="tensors take"):
        CompactPrefix.from_bytes(len(raw).to_bytes(8, "little") + raw)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_damaged_byte_is_noticed(data: st.DataObject) -> None:
    raw = bytearray(example().to_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        prefix = CompactPrefix.from_bytes(bytes(raw))
    except ArtefactError:
        return
    # White space and the like: it says the same in other bytes.
    assert prefix.to_bytes() == example().to_bytes()


@pytest.mark.parametrize("cut", [0, 4, 8, 100, -1])
def test_files_cut_off_are_refused(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(example().to_bytes()[:cut])
    with pytest.raises(ArtefactError, match=r"x\.safetensors"):
        CompactPrefix.load(path)
    with pytest.raises(ArtefactError, match="cannot be read"):
        CompactPrefix.load(tmp_path / "none")


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([], "int64"),
        ([3, 3], "ascend"),
        ([4, 2], "ascend"),
        ([-1, 2], "ascend"),
        ([5, 12], "ascend"),
    ],
)
def test_sets_that_are_none_are_refused(kept: list[int], message: str) -> None:
    selection = LayerSelection((torch.tensor(kept, dtype=torch.int64),))
    with pytest.raises(ConfigError, match=message):
        Compaction(Recipe("random", 0.5), 12, (selection,)).check()


def test_rows_that_are_no_numbers_are_neither_written_nor_read() -> None:
    """A model in fp16 may compute them: they would answer nothing but nonsense, with a checksum that agrees."""
    good = example()
    (first, second), values = good.layers[0].rows["keys"], good.layers[0].rows["values"]
    for bad in (float("nan"), float("inf")):
        broken = first.clone()
        broken[1, 0] = bad
        rows = {"keys": (broken, second), "values": values}
        compaction = Compaction(good.manifest.recipe, 12, (good.layers[0].selection,))
        with pytest.raises(ConfigError, match=r"layer 0: keys are not all finite.*bf16 or fp32"):
            CompactPrefix.of(ModelIdentity("dense", "tiny", ""), range(12), compaction, [rows], original_bytes=96)
        damaged = CompactPrefix(good.manifest, (replace(good.layers[0], rows=rows), good.layers[1]))
        with pytest.raises(ArtefactError, match="layer 0: keys are not all finite"):
            CompactPrefix.from_bytes(damaged.to_bytes())


def test_a_prefix_knows_what_clients_call_it() -> None:
    described = read_header(GOLDEN.read_bytes(), GOLDEN.stat().st_size)
    assert example().key == described.key == "kvtier-compact:" + described.checksum


def test_baselines_keep_the_budget_and_the_first_tokens() -> None:
    for method in ("random", "recent"):
        for ratio in (0.0, 0.1, 0.5, 0.95, 0.999):
            one = choose(Recipe(method, ratio, seed=3), 200, [2, 1])
            one.check()
            kept = one.layers[0].kept[0]
            assert len(kept) == budget_tokens(200, ratio)
            assert kept[:4].tolist() == [0, 1, 2, 3][: len(kept)]
            assert torch.equal(kept, choose(Recipe(method, ratio, seed=3), 200, [1]).layers[0].kept[0])
    assert choose(Recipe("recent", 0.9), 200, [1]).layers[0].kept[0].tolist() == [0, 1, 2, 3, *range(184, 200)]
    assert not torch.equal(
        choose(Recipe("random", 0.9, seed=1), 200, [1]).layers[0].kept[0],
        choose(Recipe("random", 0.9, seed=2), 200, [1]).layers[0].kept[0],
    )


def test_the_manifest_is_read_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from kvtier.compression.compaction.manifest import read_header\n"
        f"raw = open({str(GOLDEN)!r}, 'rb').read()\n"
        "print(read_header(raw, len(raw)).manifest.recipe.selector)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "omp"), done.stderr
    assert read_header(GOLDEN.read_bytes(), GOLDEN.stat().st_size).manifest.tokens == 12
