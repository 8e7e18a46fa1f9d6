"""The accuracy of cold pages on the real model, and controls that must fail, so that the gates can be trusted."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvtier[transformers]'")

from kvtier.build import default_quant
from kvtier.cli.eval_cold_page import PAGE_TOKENS, ColdPageEval
from kvtier.cli.eval_forms import Record
from kvtier.spec import DType, PageSpec

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

STORED_TOKENS = 768
DEFAULT = default_quant(PageSpec.mha(layers=1, kv_heads=3, head_dim=64, page_tokens=PAGE_TOKENS, dtype=DType.BF16))
"""What ``quant: auto`` means: the cheapest form that passes on this model and with an offset in its keys."""
CHEAPER = ("nvfp4", "nvfp4_offset")


@pytest.fixture(scope="module")
def records() -> dict[tuple[str, bool], Record]:
    """By form, and whether keys had an offset."""
    bench = ColdPageEval.load()
    texts, keys = bench.windows(3, STORED_TOKENS + 128), bench.key_texts(6, 512)
    forms = ("bf16", "fp8", "k8v4", "nvfp4", DEFAULT, "int2", "recency_50")
    cases = [*((form, False) for form in forms), *((form, True) for form in (*CHEAPER, DEFAULT))]
    return {(r.form, r.offset): r for r in bench.measure(texts, STORED_TOKENS, cases, keys=keys)}


@pytest.mark.parametrize(
    ("form", "largest"), [("bf16", 1e-4), ("fp8", 0.005), ("k8v4", 0.006), ("nvfp4", 0.02), (DEFAULT, 0.02)]
)
def test_divergence(records: dict[tuple[str, bool], Record], form: str, largest: float) -> None:
    record = records[form, False]
    assert record.kl < largest, record
    assert record.compressed == 1.0, record


@pytest.mark.parametrize("form", ["nvfp4", DEFAULT])
def test_agreement_and_pass_keys(records: dict[tuple[str, bool], Record], form: str) -> None:
    record, exact = records[form, False], records["bf16", False]
    assert record.top1 > 0.91, record
    assert record.key_nll is not None and exact.key_nll is not None
    assert record.key_nll < exact.key_nll + 0.15, record


def test_int2_fails(records: dict[tuple[str, bool], Record]) -> None:
    assert records["int2", False].kl > 0.06


def test_dropping_half_of_the_tokens_loses_the_pass_keys(records: dict[tuple[str, bool], Record]) -> None:
    """Which divergence alone would not show."""
    record = records["recency_50", False]
    assert record.key_nll is not None and record.key_nll > 1.0, record


def test_an_offset_in_the_keys_breaks_plain_nvfp4_and_not_the_default(records: dict[tuple[str, bool], Record]) -> None:
    assert records["nvfp4", True].kl > 0.1
    assert records[DEFAULT, True].kl < 0.02
    assert records[DEFAULT, True].compressed == 1.0


def test_no_cheaper_form_passes(records: dict[tuple[str, bool], Record]) -> None:
    """If one does, it is what the default should be."""
    for form in CHEAPER:
        assert records[form, True].bytes_per_value < records[DEFAULT, True].bytes_per_value
        assert records[form, True].kl > 0.02, records[form, True]
