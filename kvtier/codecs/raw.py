"""Raw: every buffer copied byte for byte, in [head, token, dim] order whatever the hot layout is."""

from __future__ import annotations

from typing import ClassVar

from kvtier.abc.codec import Form
from kvtier.codecs.native import NativeCodec
from kvtier.spec import ColdLayout, PageSpec


class RawCodec(NativeCodec):
    """Never refuses a page: NaN and infinity are bytes like any other."""

    id: ClassVar[str] = "raw"
    version: ClassVar[int] = 1

    def __init__(self) -> None:
        super().__init__()

    @property
    def form(self) -> Form:
        return Form.RAW

    @property
    def config(self) -> dict[str, str | int | float | bool]:
        return {}

    def finer_layout(self, spec: PageSpec, levels: tuple[int, ...]) -> ColdLayout:
        return ColdLayout.of(spec, quantize=False)
