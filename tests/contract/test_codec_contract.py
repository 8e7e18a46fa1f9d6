"""Every codec that ships passes the suite that users get."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.abc.codec import Codec
from kvtier.codecs.checkpoint_scales import CheckpointScales
from kvtier.codecs.registry import codec
from kvtier.testing.codecs import CodecContract

NVFP4_LARGEST_ERROR = 0.18
"""Half of the widest step of e2m1 (4 to 6), when the scale was rounded down as far as it goes."""


class TestRaw(CodecContract):
    max_error = 0.0

    def make_codec(self) -> Codec:
        return codec("raw")


class TestLossless(CodecContract):
    max_error = 0.0

    def make_codec(self) -> Codec:
        pytest.importorskip("zstandard", reason="zstandard is not installed: pip install 'kvtier[lossless]'")
        return codec("lossless")


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


class TestNvfp4Checkpoint(CodecContract):
    max_error = NVFP4_LARGEST_ERROR
    refuses_nonfinite = True

    def make_codec(self) -> Codec:
        by_layer = {0: 1 / 0.0213, 1: 1 / 0.017}
        return codec("nvfp4", global_scale="checkpoint", scales=CheckpointScales(by_layer, by_layer))


class KeyFormContract(CodecContract):
    """The suite's own values have no offset and rows of very different size: the hardest case for these forms."""

    refuses_nonfinite = True
    page_tokens = 16
    stable = False


class TestNvfp4Offset(KeyFormContract):
    # The smaller squared error of 16 values is at most that of plain nvfp4; all of it may be in one value.
    max_error = 4 * NVFP4_LARGEST_ERROR

    def make_codec(self) -> Codec:
        return codec("nvfp4_offset")


class TestNvfp4Token(KeyFormContract):
    max_error = 2 * NVFP4_LARGEST_ERROR

    def make_codec(self) -> Codec:
        return codec("nvfp4_token")

    def bound(self, expected: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        # A group is 16 tokens of one channel, at most twice the largest magnitude apart.
        channels = self.max_error * np.abs(expected).max(axis=0, keepdims=True)
        return np.broadcast_to(channels, expected.shape)


class TestK8V4(KeyFormContract):
    max_error = NVFP4_LARGEST_ERROR

    def make_codec(self) -> Codec:
        return codec("k8v4")

    def bound(self, expected: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        # V as in nvfp4. K: half a step of e4m3 is 1/16; all of a row's squared error may be in one value.
        rows = np.abs(expected).max(axis=-1, keepdims=True) * np.sqrt(expected.shape[-1]) / 16
        largest: npt.NDArray[np.float64] = np.maximum(super().bound(expected), rows)
        return largest


class TestKey2Fp4(KeyFormContract):
    max_error = NVFP4_LARGEST_ERROR

    def make_codec(self) -> Codec:
        return codec("2fp4")
