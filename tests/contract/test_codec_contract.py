"""Every codec that ships passes the suite that users get."""

from __future__ import annotations

from kvtier.abc.codec import Codec
from kvtier.codecs.registry import codec
from kvtier.testing.codecs import CodecContract

NVFP4_LARGEST_ERROR = 0.18
"""Half of the widest step of e2m1 (4 to 6), when the scale was rounded down as far as it goes."""


class TestRaw(CodecContract):
    max_error = 0.0

    def make_codec(self) -> Codec:
        return codec("raw")


class TestNvfp4Page(CodecContract):
    max_error = NVFP4_LARGEST_ERROR
    refuses_nonfinite = True

    def make_codec(self) -> Codec:
        return codec("nvfp4")


class TestNvfp4Identity(CodecContract):
    max_error = NVFP4_LARGEST_ERROR
    refuses_nonfinite = True

    def make_codec(self) -> Codec:
        return codec("nvfp4", global_scale="identity")
