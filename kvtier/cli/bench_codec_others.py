"""What other projects do with the same values on one core, for `kvtier bench codec`: torchao's NVFP4, LMCache's FP8.

Each is there only where it is installed. They take BF16 tensors that lie one behind the other; paging is not asked of
them."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

TORCHAO = "torchao nvfp4"
LMCACHE = "lmcache fp8"
_TORCHAO_SHARE = 16
"""torchao is given this part of the values: it takes seconds for all."""


class Other(NamedTuple):
    call: Callable[[], None]
    input_bytes: int


def work(arrays: list[npt.NDArray[Any]], dtype: str) -> dict[tuple[str, str], Other]:
    """Calls by name and operation, of BF16 values; none for other types."""
    if dtype != "bf16" or importlib.util.find_spec("torch") is None:
        return {}
    import torch

    found: dict[tuple[str, str], Other] = {}
    if importlib.util.find_spec("torchao") is not None:
        found |= _torchao(torch, np.ascontiguousarray(arrays[0]).reshape(-1))
    if importlib.util.find_spec("lmcache") is not None:
        found |= _lmcache(torch, np.concatenate([np.ascontiguousarray(a).reshape(-1) for a in arrays]))
    return {key: Other(_on_one_core(torch, other.call), other.input_bytes) for key, other in found.items()}


def _on_one_core(torch: Any, call: Callable[[], Any]) -> Callable[[], None]:
    def alone() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            call()
        finally:
            torch.set_num_threads(threads)

    return alone


def _torchao(torch: Any, bits: npt.NDArray[Any]) -> dict[tuple[str, str], Other]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    x = torch.from_numpy(bits[: len(bits) // _TORCHAO_SHARE].view(np.int16)).view(torch.bfloat16).reshape(-1, 128)
    return {(TORCHAO, "encode"): Other(lambda: nvfp4_quantize(x, 16, per_tensor_scale=None), x.nbytes)}


def _lmcache(torch: Any, bits: npt.NDArray[Any]) -> dict[tuple[str, str], Other]:
    from lmcache.v1.distributed.serde.fp8 import Fp8QuantizationDeserializer, Fp8QuantizationSerializer

    # Of its memory objects the serde reads the tensor only.
    hot = SimpleNamespace(tensor=torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16))
    back = SimpleNamespace(tensor=torch.ones_like(hot.tensor))
    stored = SimpleNamespace(tensor=torch.ones(len(bits), dtype=torch.uint8))
    serializer, deserializer = Fp8QuantizationSerializer(), Fp8QuantizationDeserializer()
    nbytes = hot.tensor.nbytes
    return {
        (LMCACHE, "encode"): Other(lambda: serializer.serialize(hot, stored, None), nbytes),
        (LMCACHE, "decode"): Other(lambda: deserializer.deserialize(stored, back, None), nbytes),
    }
