"""Quantization for cold pages, as a member of the framework: it acts when a page leaves the device, where the store's
codec encodes it, and so it needs no hook on the live cache."""

from __future__ import annotations

from kvtier.abc.compression import CompressionManager


class ColdPage(CompressionManager):
    """Says that the method is on. The codec of the same block does its work (`kvtier.build.open_codec`)."""

    algorithm = "quantization_for_cold_page"
