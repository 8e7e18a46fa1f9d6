"""One configuration block, parsed in one place: the same in YAML, in Python and inside an engine's own options.

Unknown options, wrong types and impossible combinations raise ConfigError with the option, the value and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from kvtier.errors import ConfigError
from kvtier.spec import GlobalScale

_UNITS = {"": 1, "B": 1}
_UNITS |= {unit + "B": 1000**i for i, unit in enumerate("KMGT", 1)}
_UNITS |= {unit + "IB": 1024**i for i, unit in enumerate("KMGT", 1)}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(value: object) -> int:
    """Bytes from an integer, or from text such as ``64GiB`` (binary) or ``400GB`` (decimal)."""
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    else:
        match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError("must be a size such as 64GiB or 400GB")
        number = int(float(match[1]) * _UNITS[match[2].upper()])
    if number <= 0:
        raise ValueError("must be larger than 0, such as 64GiB")
    return number


def parse_seconds(value: object) -> float:
    """Seconds from a number, or from text such as ``500ms``, ``2s`` or ``1d``."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*", value) if isinstance(value, str) else None
        if match is None:
            raise ValueError("must be a time such as 500ms, 2s or 1d")
        number = float(match[1]) * _SECONDS[match[2]]
    if not number > 0:
        raise ValueError("must be larger than 0, such as 2s")
    return number


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ColdPageConfig(_Block):
    """How pages are encoded when they leave the device."""

    algorithm: Literal["quantization_for_cold_page"]
    quant: Literal["nvfp4", "none"] = "nvfp4"
    global_scale: Annotated[GlobalScale, Field(strict=False)] = GlobalScale.PAGE


class HostTierConfig(_Block):
    """Pages in this process's memory. `capacity` is per node; a rank takes its share."""

    type: Literal["host"]
    capacity: Bytes


class NvmeTierConfig(_Block):
    """Pages in segment files in a directory of a local disk. `capacity` is per node; a rank takes its share."""

    type: Literal["nvme"]
    path: Annotated[Path, Field(strict=False)]
    capacity: Bytes
    io_threads: Annotated[int, Field(ge=1, le=64)] = 8


TierConfig = Annotated[HostTierConfig | NvmeTierConfig, Field(discriminator="type")]


class HttpConfig(_Block):
    """The port of /metrics, /livez and /readyz; rank r listens on ``port + r``, 0 means any free port."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0


class Config(_Block):
    """The whole block.

    promote_deadline: how long a waiting request may be held for pages on their way up. lease: how long a page that was
    looked up and not loaded stays pinned. offload_wait: how long an offload worker waits for room in the host tier.
    salt: separates tenants whose pages must never meet.
    """

    kv_cache_compression_config: tuple[ColdPageConfig, ...] = Field(
        default=(ColdPageConfig(algorithm="quantization_for_cold_page"),), strict=False
    )
    tiers: tuple[TierConfig, ...] = Field(strict=False)
    http: HttpConfig | None = None
    promote_deadline: Seconds = 2.0
    lease: Seconds = 30.0
    offload_wait: Seconds = 5.0
    workers: Annotated[int, Field(ge=1, le=64)] = 2
    salt: str = ""

    @model_validator(mode="after")
    def _combination(self) -> Config:
        kinds = [t.type for t in self.tiers]
        if kinds[:1] != ["host"] or "host" in kinds[1:]:
            raise ValueError(
                f"tiers = {kinds}: the first tier must be of type host, and only the first; "
                "put {type: host, capacity: ...} at the front"
            )
        if len(self.kv_cache_compression_config) > 1:
            raise ValueError("kv_cache_compression_config: quantization_for_cold_page may be given once")
        return self

    @property
    def cold_page(self) -> ColdPageConfig | None:
        """The cold page's options, or None when pages are stored raw because the list is empty."""
        return next(iter(self.kv_cache_compression_config), None)


def parse_config(block: Mapping[str, Any]) -> Config:
    """Validate a block given as a mapping."""
    try:
        return Config.model_validate(dict(block))
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(e) for e in error.errors())) from None


def load_config(path: str | Path) -> Config:
    """Read and validate a YAML (or JSON) file."""
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error.strerror}; give a readable file") from None
    try:
        block = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {str(path)!r} is not YAML: {error}") from None
    if not isinstance(block, dict):
        raise ConfigError(f"config file {str(path)!r} must hold a mapping with the option 'tiers', got {type(block).__name__}")
    return parse_config(block)


def _explain(error: Any) -> str:
    where = ""
    for part in error["loc"]:
        if isinstance(part, int):
            where += f"[{part}]"
        elif part not in ("host", "nvme") or not where.endswith("]"):
            where += f".{part}" if where else str(part)
    kind, value = error["type"], error["input"]
    if kind == "extra_forbidden":
        return f"unknown option {where!r} (value {value!r}); remove it or check its spelling"
    if kind == "missing":
        return f"option {where!r} is missing; give it a value"
    message = error["msg"].removeprefix("Value error, ")
    if kind == "value_error" and not where:
        return message
    return f"option {where!r} = {value!r}: {message}"
