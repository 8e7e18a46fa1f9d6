"""The size command against the golden sizes of the cold page, and its bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier import __version__
from kvtier.cli import main
from tests.refusals import assert_refused


def size(capsys: pytest.CaptureFixture[str], args: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as done:
        main(["size", *args.split(), "--json"])
    assert done.value.code in (0, None)
    got: dict[str, Any] = json.loads(capsys.readouterr().out)
    return got


_QWEN3_8B = "mha --layers 36 --kv-heads 8 --head-dim 128 --tokens 32"
GOLDEN = [
    ("mha --layers 1 --kv-heads 1 --head-dim 32 --tokens 5", 640, 192),
    ("mha --layers 1 --kv-heads 4 --head-dim 128 --tokens 5", 10_240, 2_880),
    ("mha --layers 1 --kv-heads 1 --head-dim 16 --tokens 64", 4_096, 1_152),
    ("mha --layers 36 --kv-heads 8 --head-dim 128 --tokens 32 --dtype bf16", 4_718_592, 1_327_104),
    ("mha --layers 36 --kv-heads 8 --head-dim 128 --tokens 32 --dtype fp8_e4m3", 2_359_296, 1_327_104),
    ("mha --layers 16 --kv-heads 2 --head-dim 256 --tokens 64 --dtype fp8_e4m3", 1_048_576, 589_824),
    ("mla --layers 1 --tokens 64 --index-buffers 1 --index-page-bytes 8448", 82_176, 29_184),
    ("mla --layers 1 --latent-dim 32 --rope-dim 0 --tokens 5 --lossless-bytes 68 --lossless-bytes 7", 395, 176),
    ("mla --layers 79 --dtype fp8_e4m3 --index-buffers 22 --index-page-bytes 8448", 3_098_112, 1_824_000),
    ("mla --layers 61 --dtype fp8_e4m3 --index-buffers 61", 2_764_032, 1_780_224),
]


@pytest.mark.parametrize(("args", "hot", "cold"), GOLDEN)
def test_golden_sizes(capsys: pytest.CaptureFixture[str], args: str, hot: int, cold: int) -> None:
    got = size(capsys, f"{args} --codec nvfp4 --global-scale identity")
    assert (got["hot_page_bytes"], got["cold_page_bytes"]) == (hot, cold)
    assert got["ratio"] == round(hot / cold, 4)


def test_the_default_scale_costs_one_byte_per_buffer(capsys: pytest.CaptureFixture[str]) -> None:
    got = size(capsys, f"{_QWEN3_8B} --codec nvfp4")
    assert got["cold_page_bytes"] == 1_327_104 + 80
    assert got["slot_bytes"] == 1_327_104 + 4096


def test_scales_of_a_checkpoint_cost_four_bytes_per_buffer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = f"{_QWEN3_8B} --codec nvfp4 --global-scale checkpoint"
    assert size(capsys, args)["cold_page_bytes"] == 1_327_104 + 4 * 72
    assert size(capsys, "mla --layers 61 --global-scale checkpoint --dtype fp8_e4m3")["codec"] == "nvfp4"
    empty = tmp_path / "model.safetensors"
    empty.write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(SystemExit) as done:
        main(["size", *args.split(), "--scale-checkpoint-path", str(empty)])
    assert done.value.code == 2
    assert "holds no scales" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "codec", "cold"),
    [
        (_QWEN3_8B, "nvfp4_token", 1_474_560 + 80),
        (_QWEN3_8B.replace("32", "24"), "nvfp4", 995_328 + 80),
        (f"{_QWEN3_8B} --global-scale identity", "nvfp4", 1_327_104),
        ("mla --layers 61 --dtype fp8_e4m3 --index-buffers 61", "nvfp4", 1_780_224 + 64),
    ],
)
def test_the_default_is_the_default_of_the_configuration(
    capsys: pytest.CaptureFixture[str], args: str, codec: str, cold: int
) -> None:
    got = size(capsys, args)
    assert (got["codec"], got["cold_page_bytes"]) == (codec, cold)


_GQA = "mha --layers 1 --kv-heads 4 --head-dim 64 --tokens 64"


@pytest.mark.parametrize(
    ("args", "bytes_per_value"),
    [
        (f"{_GQA} --codec nvfp4 --global-scale identity", 0.5625),
        (f"{_GQA} --codec nvfp4_offset", 0.578),
        (f"{_GQA} --codec nvfp4_token", 0.625),
        (f"{_GQA} --codec k8v4", 0.798),
        (f"{_GQA} --codec 2fp4", 0.844),
    ],
)
def test_forms_for_k_cost_what_they_say(capsys: pytest.CaptureFixture[str], args: str, bytes_per_value: float) -> None:
    assert size(capsys, args)["bytes_per_value"] == pytest.approx(bytes_per_value, abs=0.001)


@pytest.mark.parametrize(
    ("args", "row_bytes"),
    [
        ("mla --layers 1 --tokens 64 --rope nvfp4", 324),
        ("mla --layers 1 --tokens 64 --rope 2fp4", 360),
        ("mla --layers 1 --tokens 64 --rope fp8", 352),
        ("mla --layers 1 --tokens 64 --rope keep", 416),
        ("mla --layers 1 --latent-dim 448 --tokens 64 --rope nvfp4", 288),
        ("mla --layers 1 --latent-dim 448 --tokens 64 --rope 2fp4", 324),
        ("mla --layers 1 --latent-dim 448 --tokens 64 --rope fp8", 316),
        ("mla --layers 1 --latent-dim 448 --tokens 64 --rope keep", 380),
        # K of 256 with 64 rotary columns, and V of 256 in 144 bytes.
        ("mha --layers 1 --kv-heads 1 --head-dim 256 --rotary-dim 64 --rope nvfp4", 144 + 144),
        ("mha --layers 1 --kv-heads 1 --head-dim 256 --rotary-dim 64 --rope 2fp4", 180 + 144),
        ("mha --layers 1 --kv-heads 1 --head-dim 256 --rotary-dim 64 --rope fp8", 172 + 144),
        ("mha --layers 1 --kv-heads 1 --head-dim 256 --rotary-dim 64 --rope keep", 236 + 144),
    ],
)
def test_rows_with_a_rotary_part(capsys: pytest.CaptureFixture[str], args: str, row_bytes: int) -> None:
    assert size(capsys, f"{args} --global-scale identity")["cold_page_bytes"] == 64 * row_bytes


def test_raw_keeps_every_byte(capsys: pytest.CaptureFixture[str]) -> None:
    got = size(capsys, "mha --layers 2 --kv-heads 2 --head-dim 64 --tokens 16 --dtype fp32 --codec raw")
    assert got["cold_page_bytes"] == got["hot_page_bytes"] == 2 * 2 * 2 * 64 * 16 * 4
    assert (got["ratio"], got["ratio_16bit"]) == (1.0, 0.5)


def test_lossless_pages_take_at_most_the_raw_ones_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("zstandard", reason="zstandard is not installed: pip install 'kvtier[lossless]'")
    got = size(capsys, "mha --layers 2 --kv-heads 2 --head-dim 64 --tokens 16 --codec lossless")
    assert got["at_most"] is True
    # One u32 for each of two planes of four buffers, padded.
    assert got["cold_page_bytes"] == got["hot_page_bytes"] + 32


def test_the_table_shows_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    args = "size mha --layers 36 --kv-heads 8 --head-dim 128 --tokens 32 --global-scale identity"
    with pytest.raises(SystemExit):
        main(args.split())
    out = capsys.readouterr().out
    for figure in ("4,718,592 B", "1,327,104 B", "3.5556", "147,456.0", "41,472.0", "809"):
        assert figure in out


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("mha --layers 0 --kv-heads 1 --head-dim 16", ("--layers", "0", "from 1 up")),
        ("mha --layers 1 --kv-heads 1 --head-dim -16", ("--head-dim", "-16", "from 1 up")),
        ("mha --layers 1 --kv-heads 1 --head-dim 16 --codec k8v4 --rope fp8", ("--rope", "k8v4", "leave")),
        ("mha --layers 1 --kv-heads 1 --head-dim 16 --codec raw --rope fp8", ("--rope", "raw", "leave")),
        ("mha --layers 100001 --kv-heads 1 --head-dim 16", ("--layers 100001", "up to 100000")),
        ("mha --layers 1 --kv-heads 1 --head-dim 16 --rope keep", ("rotary", "leave")),
        ("mha --layers 1 --kv-heads 1 --head-dim 16 --tokens 8 --codec nvfp4_token", ("nvfp4_token", "16", "8")),
        ("mha --layers 1 --kv-heads 1 --head-dim 16 --tokens 8 --codec nvfp4_offset", ("nvfp4_offset", "16", "8")),
        ("mha --layers 1 --kv-heads 1 --head-dim 64 --rotary-dim 24 --rope fp8", ("rotary", "24", "multiple of 16")),
        ("mla --layers 2 --index-buffers 3", ("--index-buffers 3", "--layers 2")),
        ("mha --layers 1 --kv-heads 1 --head-dim 16 --lossless-bytes 0", ("--lossless-bytes 0", "from 1 up")),
    ],
)
def test_bad_values_are_one_line(capsys: pytest.CaptureFixture[str], args: str, named: tuple[str, ...]) -> None:
    assert_refused(capsys, f"size {args}", named)


@pytest.mark.parametrize(
    ("args", "named"), [("size mha --layer 3", "--layer"), ("sise", "sise"), ("--bogus", "--bogus")]
)
def test_unknown_words_are_named(capsys: pytest.CaptureFixture[str], args: str, named: str) -> None:
    with pytest.raises(SystemExit) as done:
        main(args.split())
    assert done.value.code == 2
    assert named in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code in (0, None)
    assert capsys.readouterr().out.strip() == f"kvtier {__version__}"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom kvtier.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stderr.strip().splitlines()[-1] == "[]"
