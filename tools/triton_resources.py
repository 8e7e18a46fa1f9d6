"""Compile the Triton kernels for GPUs that need not be there, and say what each takes: registers, stack, local memory.

    python tools/triton_resources.py [--arch 80,90] [--only PATTERN] [--json]

A kernel that spills has a stack frame or local memory; one that fuses or flushes would change bytes. Both end in exit
status 1. Needs triton, no GPU. Run by `tests/unit/test_triton_compile.py`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvtier.kernels.nvfp4 import triton as pages
from kvtier.kernels.nvfp4 import triton_pages
from kvtier.kernels.rowpack import triton as rowpack
from kvtier.kernels.rowpack.triton_kernels import pack_kernel
from kvtier.kernels.triattention import triton as triattention
from kvtier.kernels.triattention import triton_kernels as steps
from kvtier.kernels.triattention.reference import MODES

ARCHITECTURES = (80, 89, 90, 100, 120)
_BF16, _FP16, _FP32, _FP8 = 0, 1, 2, 4
_CODINGS = {"nvfp4": 1, "2fp4": 2, "nvfp4_offset": 3, "nvfp4_token": 4, "fp8": 5, "fp8_mean": 6}
_TYPES = {"bf16": _BF16, "fp16": _FP16, "fp32": _FP32, "fp8_e4m3": _FP8}


@dataclass(frozen=True, slots=True)
class Kernel:
    """What is compiled. signature: Triton's types by argument; exact: whether its bytes must be those of the CPU."""

    name: str
    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Resources:
    kernel: str
    arch: int
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    fused: int
    """Instructions that round otherwise than the CPU: fused, or approximate."""
    flushed: int

    @property
    def good(self) -> bool:
        return not (self.stack_bytes or self.local_bytes or self.fused or self.flushed)


def page_kernels(name: str, kinds: tuple[int, ...], columns: int = 128, even: bool = True) -> Iterator[Kernel]:
    """Both directions for pages with parts of these kinds."""
    constants = {"KINDS": kinds, "EVEN": even, "COLUMNS": columns, "HOT_ALIGN": 16, "COLD_ALIGN": 16}
    encode = {"plan": "*i64", "pages": "*i64", "status": "*u8", "arena": "i64"}
    decode = {"plan": "*i64", "pages": "*i64", "arena": "i64"}
    counts = {"first_part": "i32", "parts": "i32", "splits": "i32"}
    options = pages.options_for(columns)
    yield Kernel(f"encode {name}", triton_pages.encode_kernel, {**encode, **counts}, constants, options)
    yield Kernel(
        f"decode {name}", triton_pages.decode_kernel, {**decode, **counts, "page_tokens": "i32"}, constants, options
    )


def eviction_kernels() -> Iterator[Kernel]:
    """TriAttention's, at head dim 128 with four query heads to a KV head, and row packing."""
    options, tokens = triattention.OPTIONS, {"TOKENS": 1024}
    counted = {"count": "i32"}

    def kernel(name: str, function: Any, signature: dict[str, str], constants: dict[str, Any]) -> Kernel:
        return Kernel(f"evict {name}", function, signature, constants, options, exact=False)

    means = {"real_mean": "*fp64", "imag_mean": "*fp64", "omega": "*fp64", "rows": "*fp32"}
    yield kernel(
        "phase rows", steps.rows_kernel, {**means, "position": "i32", "frequencies": "i32"}, {"OFFSETS": 17, "F": 64}
    )
    arrays = {"pools": "*i64", "table": "*i64", "real": "*i32", "imag": "*i32", "rows": "*fp32"}
    sizes = dict.fromkeys(("first", "count", "page_tokens", "frequencies", "heads"), "i32")
    strides = dict.fromkeys(("page_stride", "token_stride", "head_stride"), "i32")
    for name, dtype in (("bf16", tl.bfloat16), ("fp32", tl.float32)):
        constants = {"DTYPE": dtype, "F": 64, "GROUP": 4, "TOKENS": triattention.tile_tokens(64)}
        signature = {**arrays, "spread": "*fp32", "scores": "*fp32", **sizes, **strides}
        yield kernel(f"score {name}", steps.score_kernel, signature, constants)
    yield kernel(
        "statistics", steps.statistics_kernel, {"scores": "*fp32", "statistics": "*fp64", **counted},
        {"FLOOR": 1e-6, **tokens},
    )  # fmt: skip
    sizes = {**counted, "layers": "i32", "heads": "i32", "kv_heads": "i32"}
    for n, mode in enumerate(MODES):
        yield kernel(
            f"reduce {mode}", steps.reduce_kernel, {"scores": "*fp32", "statistics": "*fp64", "out": "*fp32", **sizes},
            {"MODE": n, "NORMALIZED": True, **tokens},
        )  # fmt: skip
    yield kernel("select", steps.select_kernel, {"scores": "*fp32", "kept": "*i64", **counted, "budget": "i32"}, tokens)
    arrays = {"pools": "*i64", "tables": "*i64", "sources": "*i64", "first": "*i64"}
    names = ("tensors", "heads", "table_pages", "page_tokens", "moved", "groups", "kept_heads", "dim")
    signature = {**arrays, **dict.fromkeys(names, "i32"), **strides}
    for size, units in ((1, 256), (2, 128), (8, 32)):
        constants = {"SIZE": size, "COLUMNS": units, "ROWS": rowpack.tile_rows(units)}
        yield kernel(f"pack by {size}", pack_kernel, signature, constants)


def kernels() -> Iterator[Kernel]:
    yield from eviction_kernels()
    for name, coding in _CODINGS.items():
        for dtype, number in _TYPES.items():
            yield from page_kernels(f"{name} {dtype}", (16 * coding + number,))
    for unit in (1, 8):
        yield from page_kernels(f"raw by {unit}", (unit,))
    # As pages are: K in one form, V in plain NVFP4, buffers that are copied. One of each is enough for every day.
    yield from page_kernels("page nvfp4 bf16", (16 * 1 + _BF16, 8))
    yield from page_kernels("page 2fp4 bf16", (16 * 2 + _BF16, 16 * 1 + _BF16, 1))
    yield from page_kernels("page nvfp4_offset bf16", (16 * 3 + _BF16, 16 * 1 + _BF16))
    yield from page_kernels("page nvfp4_token bf16", (16 * 4 + _BF16, 16 * 1 + _BF16))
    yield from page_kernels("page k8v4 bf16", (16 * 6 + _BF16, 16 * 1 + _BF16, 8))
    yield from page_kernels("page MLA fp8_e4m3, rope fp8", (16 * 1 + _FP8, 16 * 5 + _FP8, 8))
    yield from page_kernels("k8v4 of 24 tokens", (16 * 6,), even=False)
    yield from page_kernels("k8v4 wide rows", (16 * 6,), columns=512)


def compile_kernel(kernel: Kernel, arch: int, folder: Path) -> Resources:
    signature = {**kernel.signature, **dict.fromkeys(kernel.constants, "constexpr")}
    source = ASTSource(kernel.function, signature, kernel.constants)
    done = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=kernel.options)
    path = folder / "kernel.cubin"
    path.write_bytes(done.asm["cubin"])
    report = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", path], capture_output=True, text=True, check=True
    ).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", report)}
    if set(found) != {"REG", "STACK", "SHARED", "LOCAL"}:
        raise RuntimeError(f"cuobjdump says nothing of {kernel.name} for sm_{arch}:\n{report}")
    ptx = done.asm["ptx"]
    fused = len(re.findall(r"\bfma\.rn\.f(?:32|64)\b|\.approx\b|\bdiv\.full\b", ptx)) if kernel.exact else 0
    return Resources(
        kernel.name,
        arch,
        found["REG"],
        found["STACK"],
        found["LOCAL"],
        found["SHARED"],
        fused,
        len(re.findall(r"\.ftz\b", ptx)),
    )


def line(got: Resources) -> str:
    text = f"{got.kernel:32} sm_{got.arch:<4} {got.registers:4} registers {got.stack_bytes:4} stack"
    text += f" {got.local_bytes:4} local {got.shared_bytes:6} shared {got.fused:3} fused {got.flushed:3} flushed"
    return text if got.good else text + "  BAD"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", default=",".join(map(str, ARCHITECTURES)), help="compute capabilities, such as 80,90")
    parser.add_argument("--only", default="", help="kernels whose name this pattern matches")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory(prefix="kvtier-triton-") as folder:
        for kernel in kernels():
            if not re.search(options.only, kernel.name):
                continue
            for arch in map(int, options.arch.split(",")):
                got = compile_kernel(kernel, arch, Path(folder))
                bad += not got.good
                if options.json:
                    print(json.dumps({**asdict(got), "good": got.good}), flush=True)
                else:
                    print(line(got), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
