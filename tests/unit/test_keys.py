"""Identity: what must be equal for two pages to be interchangeable, and nothing else, decides a page's key."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.kernels import _native
from kvtier.keys import CodecPolicy, Namespace, checksum, fingerprint_weights, owners_of, page_hashes, seed_of, seeds_of
from kvtier.spec import DType, PageSpec

SPEC = PageSpec.mha(layers=2, kv_heads=3, head_dim=64, page_tokens=64, dtype=DType.BF16)
POLICY = CodecPolicy("nvfp4", 1, {"global_scale": "page"})
NAMESPACE = Namespace.of(SPEC, POLICY, model="m", weights="ab" * 32, dtype="bf16")
GOLDEN = Path(__file__).parent.parent / "golden" / "keys.json"
HASHES = [bytes(32), bytes(range(32)), b"any length will do", b""]


def vectors() -> dict[str, object]:
    """What the golden file freezes. ``python tests/unit/test_keys.py`` writes it: only with a new FORMAT_VERSION."""
    return {
        "spec_fingerprint": SPEC.fingerprint.hex(),
        "encoded": NAMESPACE.encoded().hex(),
        "digest": NAMESPACE.digest.hex(),
        "keys": [k.hex() for k in NAMESPACE.page_keys(HASHES)],
        "seeds": [seed_of(k) for k in NAMESPACE.page_keys(HASHES)],
        "checksums": [checksum(bytes(range(256)) * 5, k).hex() for k in NAMESPACE.page_keys(HASHES)],
        "page_hashes": [h.hex() for h in page_hashes(list(range(200)), 64)],
        "weights": fingerprint_weights({"layers": 2}, [("b", (2, 3), "F32", bytes(24)), ("a", (1,), "BF16", b"\1\2")]),
    }


def test_golden_keys() -> None:
    assert json.loads(GOLDEN.read_text()) == vectors()


def test_keys_are_equal_in_every_process() -> None:
    code = "import json, runpy, sys; print(json.dumps(runpy.run_path(sys.argv[1])['vectors']()))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code, __file__],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }  # fmt: skip
    assert len(seen) == 1
    assert json.loads(seen.pop()) == vectors()


@pytest.mark.parametrize("field", [f.name for f in fields(Namespace)])
def test_every_field_separates(field: str) -> None:
    changed: Any = 65 if field == "page_tokens" else getattr(NAMESPACE, field) + "x"
    other = replace(NAMESPACE, **{field: changed})
    assert set(NAMESPACE.page_keys(HASHES)).isdisjoint(other.page_keys(HASHES))


@given(st.lists(st.text(max_size=6), min_size=4, max_size=4), st.lists(st.text(max_size=6), min_size=4, max_size=4))
def test_encoding_is_injective(a: list[str], b: list[str]) -> None:
    names = ("model", "generation", "lora", "salt")
    changes: list[dict[str, Any]] = [dict(zip(names, values, strict=True)) for values in (a, b)]
    one, two = (replace(NAMESPACE, **change) for change in changes)
    assert (one.encoded() == two.encoded()) == (a == b)


def test_neighbouring_fields_do_not_alias() -> None:
    ab_c = replace(NAMESPACE, lora="ab", salt="c")
    a_bc = replace(NAMESPACE, lora="a", salt="bc")
    x_lora, x_salt = replace(NAMESPACE, lora="X"), replace(NAMESPACE, salt="X")
    assert len({n.digest for n in (ab_c, a_bc, x_lora, x_salt)}) == 4


def test_spec_fingerprint_sees_every_dimension() -> None:
    base: dict[str, Any] = {"layers": 2, "kv_heads": 3, "head_dim": 64, "page_tokens": 64, "dtype": DType.BF16}
    changes = {"layers": 3, "kv_heads": 4, "head_dim": 32, "page_tokens": 32, "dtype": DType.FP16}
    others = [base, *({**base, field: value} for field, value in changes.items())]
    assert len({PageSpec.mha(**b).fingerprint for b in others}) == len(others)


@pytest.mark.parametrize("nbytes", [1, 20, 32, 127, 128, 129, 255, 256, 257])
def test_owners_are_those_that_the_standard_library_finds(nbytes: int) -> None:
    chance = random.Random(nbytes)
    namespaces = [replace(NAMESPACE, lora=str(n)) for n in range(5)]
    stored = [(chance.randrange(6), chance.randbytes(nbytes)) for _ in range(200)]  # 5: in none of them
    digests = [*(namespace.digest for namespace in namespaces), bytes(32)]
    keys = [hashlib.blake2b(h, key=digests[owner], digest_size=32).digest() for owner, h in stored]
    hashes = [h for _, h in stored]
    assert owners_of(digests[:5], keys, hashes) == [owner if owner < 5 else -1 for owner, _ in stored]
    assert owners_of([], keys, hashes) == [-1] * 200 and owners_of(digests, [], []) == []


def test_owners_of_what_is_no_list_of_pages_are_refused() -> None:
    for arguments in ((bytes(31), b"", b"", 1), (b"", bytes(33), b"", 1), (b"", bytes(32), bytes(8), 9)):
        with pytest.raises(ValueError, match="bytes are not"):
            _native.page_owners(*arguments)
    with pytest.raises(ValueError, match="hashes of 0 bytes"):
        _native.page_owners(bytes(32), bytes(32), b"", 0)


def test_checksum_is_bound_to_the_key() -> None:
    a, b = NAMESPACE.page_keys([b"a", b"b"])
    data = bytes(range(256)) * 3
    assert checksum(data, a) != checksum(data, b)
    assert checksum(data, a) == xxhash.xxh3_128_digest(data, int.from_bytes(a[:8], "little"))


def test_page_hashes_chain_over_full_pages() -> None:
    tokens = list(range(150))
    hashes = page_hashes(tokens, 64)
    assert len(hashes) == 2
    assert hashes == page_hashes([*tokens[:128], 7, 7, 7], 64)[:2]
    assert page_hashes([1, *tokens[1:]], 64)[1] != hashes[1]
    assert page_hashes(tokens[64:], 64, parent=hashes[0]) == hashes[1:]
    with pytest.raises(ConfigError, match="page_tokens = 0"):
        page_hashes(tokens, 0)


def test_page_hashes_take_arrays_of_token_ids() -> None:
    tokens = list(range(150))
    for kind in (np.int32, np.int64, np.uint32):
        assert page_hashes(np.array(tokens, kind), 64) == page_hashes(tokens, 64)  # type: ignore[arg-type]
    assert page_hashes([], 64) == []


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([0.5] * 64, "float64: give one sequence of integers"),
        ([list(range(64))], r"shape \(1, 64\).*without a batch axis"),
        ([-1] * 64, "from -1 to -1: they must be from 0"),
        ([1 << 32] * 64, "to 4294967296: they must be from 0 to 4294967295"),
    ],
)
def test_what_is_no_sequence_of_token_ids_is_named(tokens: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        page_hashes(tokens, 64)


def test_weights_fingerprint_sees_bytes_and_not_order() -> None:
    tensors = [("a", (2,), "F32", b"\0" * 8), ("b", (2,), "F32", b"\1" * 8)]
    base = fingerprint_weights({"x": 1, "y": 2}, tensors)
    assert fingerprint_weights({"y": 2, "x": 1}, reversed(tensors)) == base
    for other in (
        [("a", (2,), "F32", b"\2" * 8), tensors[1]],
        [("a", (1, 2), "F32", b"\0" * 8), tensors[1]],
        [("a", (2,), "I32", b"\0" * 8), tensors[1]],
        tensors[:1],
    ):
        assert fingerprint_weights({"x": 1, "y": 2}, other) != base


def test_the_seeds_of_many_pages_are_those_of_each() -> None:
    keys = NAMESPACE.page_keys(HASHES)
    assert seeds_of(keys).tolist() == [seed_of(key) for key in keys]
    assert seeds_of([]).shape == (0,)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(vectors(), indent=1) + "\n")


@pytest.mark.parametrize("lengths", [[32] * 5, [1, 32, 200], [0, 1], []])
def test_names_of_hashes_in_hexadecimal(lengths: list[int]) -> None:
    """Of equal lengths natively, of others by the standard library: the same."""
    hashes = [bytes([n + 1]) * length for n, length in enumerate(lengths)]
    expected = [hashlib.blake2b(h, key=NAMESPACE.digest, digest_size=32).digest() for h in hashes]
    assert NAMESPACE.page_names([h.hex() for h in hashes]) == (hashes, expected)
    assert NAMESPACE.page_keys(hashes) == NAMESPACE.page_keys(iter(hashes)) == expected


def test_a_hash_that_is_not_hexadecimal_is_told() -> None:
    with pytest.raises(ValueError, match="non-hexadecimal"):
        NAMESPACE.page_names(["0g"])
