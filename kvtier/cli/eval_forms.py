"""The forms of the cold page that are evaluated, and what is measured of each."""

from __future__ import annotations

from dataclasses import dataclass

CODECS = ("nvfp4", "nvfp4_identity", "nvfp4_offset", "nvfp4_token", "k8v4", "2fp4", "lossless")
CONTROLS = ("bf16", "fp8", "int2", "recency_50")
FORMS = (*CONTROLS, *CODECS)


@dataclass(frozen=True, slots=True)
class Again:
    """What a second trip through the form gives, as in `Record`; older files have only the KL."""

    kl: float
    top1: float | None = None
    delta_nll: float | None = None
    key_nll: float | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One form at one length. kl: nats per token, mean over windows; kl_max: of the worst window. top1: share of tokens
    whose likeliest successor is the same. key_nll: nats per token of the pass keys.
    bytes_per_value: of the stored K and V. compressed: share of the restored pages that were stored in the form.
    again: after a second trip, if measured. offset: whether keys had one."""

    form: str
    context_tokens: int
    kl: float
    top1: float
    delta_nll: float
    key_nll: float | None
    bytes_per_value: float
    compressed: float
    kl_max: float
    offset: bool
    again: Again | None = None
