"""What other projects do with the same values on one core, for `kvtier bench codec`: torchao's NVFP4, LMCache's FP8.

Each is there only where it is installed and can be imported. They take BF16 tensors that lie one behind the other;
paging is not asked of them."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

TORCHAO = "torchao nvfp4"
LMCACHE = "lmcache fp8"
DTYPE = "bf16"
"""What they take."""
_MODULES = {
    TORCHAO: "torchao.prototype.mx_formats.nvfp4_tensor",
    LMCACHE: "lmcache.v1.distributed.serde.fp8",
}
_WAYS = {
    "torch": "pip install torch",
    "torchao": "pip install torchao",
    "lmcache": "pip install lmcache==0.5.6, or use an environment that has it",
}
_TORCHAO_SHARE = 16
"""torchao is given this part of the values: it takes seconds for all."""


class Other(NamedTuple):
    """call: the work that is timed. cold_bytes: of what it makes, or reads. decoded: the values of the last decoding,
    BF16 bits."""

    call: Callable[[], None]
    input_bytes: int
    cold_bytes: int = 0
    decoded: Callable[[], npt.NDArray[np.uint16]] | None = None


def missing() -> dict[str, str]:
    """Of what cannot be measured here the name, and why not."""
    reasons = {name: _why_not(module) for name, module in _MODULES.items()}
    return {name: why for name, why in reasons.items() if why}


def _why_not(module: str) -> str:
    """Empty where it can be used."""
    package = module.partition(".")[0]
    for needed in ("torch", package):
        if importlib.util.find_spec(needed) is None:
            return f"{needed} is not installed here: {_WAYS[needed]}"
    try:
        _imported(module)
    except Exception as e:  # noqa: BLE001 - what a package raises that does not fit the others here may be anything
        return f"this {package} cannot be used, {_WAYS[package]}: {e!r}".splitlines()[0]
    return ""


def work(
    arrays: list[npt.NDArray[Any]], dtype: str, *, torchao_share: int = _TORCHAO_SHARE
) -> dict[tuple[str, str], Other]:
    """Calls by name and operation, of BF16 values; none for other types, and none of what is `missing`. torchao_share:
    the part of the first array's values that torchao is given."""
    here = _MODULES.keys() - missing().keys() if dtype == DTYPE else set()
    if not here:
        return {}
    import torch

    found: dict[tuple[str, str], Other] = {}
    if TORCHAO in here:
        found |= _torchao(torch, np.ascontiguousarray(arrays[0]).reshape(-1), torchao_share)
    if LMCACHE in here:
        found |= _lmcache(torch, np.concatenate([np.ascontiguousarray(a).reshape(-1) for a in arrays]))
    return {key: other._replace(call=_on_one_core(torch, other.call)) for key, other in found.items()}


def _imported(module: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


def _on_one_core(torch: Any, call: Callable[[], Any]) -> Callable[[], None]:
    def alone() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            call()
        finally:
            torch.set_num_threads(threads)

    return alone


def _bits(torch: Any, x: Any) -> npt.NDArray[np.uint16]:
    bits: npt.NDArray[np.uint16] = x.reshape(-1).view(torch.int16).numpy().view(np.uint16)
    return bits


def _torchao(torch: Any, bits: npt.NDArray[Any], share: int) -> dict[tuple[str, str], Other]:
    theirs = _imported(_MODULES[TORCHAO])
    x = torch.from_numpy(bits[: len(bits) // share].view(np.int16)).view(torch.bfloat16).reshape(-1, 128)
    stored = theirs.NVFP4Tensor.to_nvfp4(x, 16)
    cold_bytes = stored.qdata.nbytes + stored.scale.nbytes
    back = [x]

    def decode() -> None:
        back[0] = stored.dequantize(torch.bfloat16)

    return {
        (TORCHAO, "encode"): Other(lambda: theirs.nvfp4_quantize(x, 16, per_tensor_scale=None), x.nbytes, cold_bytes),
        (TORCHAO, "decode"): Other(decode, x.nbytes, cold_bytes, lambda: _bits(torch, back[0])),
    }


def _lmcache(torch: Any, bits: npt.NDArray[Any]) -> dict[tuple[str, str], Other]:
    theirs = _imported(_MODULES[LMCACHE])
    # Of its memory objects the serde reads the tensor only.
    hot = SimpleNamespace(tensor=torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16))
    back = SimpleNamespace(tensor=torch.ones_like(hot.tensor))
    stored = SimpleNamespace(tensor=torch.ones(len(bits), dtype=torch.uint8))
    serializer, deserializer = theirs.Fp8QuantizationSerializer(), theirs.Fp8QuantizationDeserializer()
    nbytes, cold_bytes = hot.tensor.nbytes, stored.tensor.nbytes
    return {
        (LMCACHE, "encode"): Other(lambda: serializer.serialize(hot, stored, None), nbytes, cold_bytes),
        (LMCACHE, "decode"): Other(
            lambda: deserializer.deserialize(stored, back, None), nbytes, cold_bytes, lambda: _bits(torch, back.tensor)
        ),
    }
