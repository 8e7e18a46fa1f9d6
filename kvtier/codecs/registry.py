"""Codecs by name and by the form of a stored page. A codec's module is imported when it is first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from kvtier.abc.codec import FINER, Codec, Form
from kvtier.errors import ConfigError


def _raw(**options: Any) -> Codec:
    from kvtier.codecs.raw import RawCodec

    return RawCodec(**options)


def _nvfp4(**options: Any) -> Codec:
    from kvtier.codecs.nvfp4 import Nvfp4Codec

    return Nvfp4Codec(**options)


def _in_module(name: str, module: str = "kvtier.codecs.nvfp4") -> Callable[..., Codec]:
    def make(**options: Any) -> Codec:
        which: Callable[..., Codec] = getattr(importlib.import_module(module), name)
        return which(**options)

    return make


_offset, _token = _in_module("Nvfp4OffsetCodec"), _in_module("Nvfp4TokenCodec")
_k8v4, _2fp4 = _in_module("K8V4Codec"), _in_module("Key2Fp4Codec")
_lossless = _in_module("LosslessCodec", "kvtier.codecs.lossless")
_BUDGET = frozenset({"max_relative_error", "quality_sample", "quality_budget"})
_CODECS: dict[str, tuple[Callable[..., Codec], frozenset[str]]] = {
    "raw": (_raw, frozenset()),
    "nvfp4": (_nvfp4, _BUDGET | {"global_scale", "rope", "scales"}),
    "nvfp4_offset": (_offset, _BUDGET),
    "nvfp4_token": (_token, _BUDGET),
    "k8v4": (_k8v4, _BUDGET),
    "2fp4": (_2fp4, _BUDGET),
    "lossless": (_lossless, frozenset()),
}
_FORMS: dict[Form, Callable[[], Codec]] = {
    Form.RAW: _raw,
    Form.NVFP4: lambda: _nvfp4(global_scale="page"),
    Form.NVFP4_IDENTITY: lambda: _nvfp4(global_scale="identity"),
    Form.LOSSLESS: _lossless,
    Form.NVFP4_OFFSET: _offset,
    Form.NVFP4_TOKEN: _token,
    Form.K8V4: _k8v4,
    Form.K_2FP4: _2fp4,
    Form.NVFP4_ROPE_2FP4: lambda: _nvfp4(rope="2fp4"),
    Form.NVFP4_ROPE_FP8: lambda: _nvfp4(rope="fp8"),
    Form.NVFP4_ROPE_KEPT: lambda: _nvfp4(rope="keep"),
    Form.IDENTITY_ROPE_2FP4: lambda: _nvfp4(global_scale="identity", rope="2fp4"),
    Form.IDENTITY_ROPE_FP8: lambda: _nvfp4(global_scale="identity", rope="fp8"),
    Form.IDENTITY_ROPE_KEPT: lambda: _nvfp4(global_scale="identity", rope="keep"),
    Form.NVFP4_CHECKPOINT: lambda: _nvfp4(global_scale="checkpoint"),
    Form.CHECKPOINT_ROPE_2FP4: lambda: _nvfp4(global_scale="checkpoint", rope="2fp4"),
    Form.CHECKPOINT_ROPE_FP8: lambda: _nvfp4(global_scale="checkpoint", rope="fp8"),
    Form.CHECKPOINT_ROPE_KEPT: lambda: _nvfp4(global_scale="checkpoint", rope="keep"),
}


def codec_names() -> tuple[str, ...]:
    return tuple(_CODECS)


def codec(name: str, **options: Any) -> Codec:
    """The codec called `name`. Raises ConfigError for an unknown name or option."""
    if name not in _CODECS:
        raise ConfigError(f"codec = {name!r}: use one of {', '.join(_CODECS)}")
    make, known = _CODECS[name]
    unknown = sorted(options.keys() - known)
    if unknown:
        takes = ", ".join(sorted(known)) or "no options"
        raise ConfigError(f"codec {name!r} has no option {unknown[0]!r} (= {options[unknown[0]]!r}); it takes {takes}")
    return make(**options)


def codec_for_form(form: Form | int) -> Codec:
    """The codec that reads pages stored in `form`, with buffers stored finer (`FINER`) or without. Raises ConfigError
    for a form of another version of kvtier."""
    return _reader(int(form & ~FINER))


@lru_cache(maxsize=len(_FORMS))
def _reader(form: int) -> Codec:
    """One for all who read such pages: it is asked for several times for each of them."""
    try:
        return _FORMS[Form(form)]()
    except ValueError:
        raise ConfigError(f"form = {form}: not a form that this version of kvtier reads") from None
