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

from kvtier.config_mistakes import mistakes_of
from kvtier.errors import ConfigError
from kvtier.spec import GlobalScale

_UNITS = {"": 1, "B": 1}
_UNITS |= {unit + "B": 1000**i for i, unit in enumerate("KMGT", 1)}
_UNITS |= {unit + "IB": 1024**i for i, unit in enumerate("KMGT", 1)}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST_S = 3650 * 86400.0
"""Longer times, infinity among them, cannot be waited for: the clocks of locks end before."""


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
    if number > _LONGEST_S:
        raise ValueError("must be at most 3650d")
    return number


def parse_directory(value: object) -> object:
    """A path that names a directory somewhere; whether it can be used is seen when it is opened."""
    if isinstance(value, str) and (not value.strip() or "\0" in value):
        raise ValueError("must name a directory, such as /var/lib/kvtier")
    return value


def parse_directories(value: object) -> object:
    """One path, or a list of different ones."""
    if not isinstance(value, (list, tuple)):
        return parse_directories([value]) if isinstance(value, (str, Path)) else value
    if not value:
        raise ValueError("must name a directory, such as /var/lib/kvtier, or a list of them, one per device")
    paths = [Path(p) if isinstance(p, (str, Path)) else p for p in map(parse_directory, value)]
    if len(set(map(str, paths))) < len(paths):
        raise ValueError("names a directory twice; name each one once, one per device")
    return tuple(paths)


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ColdPageConfig(_Block):
    """How pages are encoded when they leave the device.

    quant: nvfp4; its forms for keys with a constant offset (nvfp4_offset, nvfp4_token, k8v4, 2fp4); lossless; none.
    auto is nvfp4_token for pages of a multiple of 16 tokens, else nvfp4, as it is with the options of nvfp4 alone.
    global_scale: checkpoint takes the scales from `scale_checkpoint_path`, a folder or file of safetensors.
    skip_rope_quantization keeps rotary columns as they are, `rope_quant` stores them finer, both with nvfp4 and where
    they are a part of the row. max_relative_error: pages whose relative error is larger are stored without compression.
    quality_sample: share of the pages whose error is measured for the metrics. quality_budget: a layer's K or V whose
    sampled error stays above is stored in the next precision from then on.
    """

    algorithm: Literal["quantization_for_cold_page"]
    quant: Literal["auto", "nvfp4", "nvfp4_offset", "nvfp4_token", "k8v4", "2fp4", "lossless", "none"] = "auto"
    global_scale: Annotated[GlobalScale, Field(strict=False)] = GlobalScale.PAGE
    scale_checkpoint_path: Annotated[Path | None, Field(strict=False)] = None
    skip_rope_quantization: bool = False
    rope_quant: Literal["nvfp4", "2fp4", "fp8"] = "nvfp4"
    max_relative_error: Annotated[float, Field(gt=0, lt=1, strict=False)] | None = None
    quality_sample: Annotated[float, Field(ge=0, le=1, strict=False)] = 0.0
    quality_budget: Annotated[float, Field(gt=0, lt=1, strict=False)] | None = None

    @model_validator(mode="after")
    def _combination(self) -> ColdPageConfig:
        if self.skip_rope_quantization and self.rope_quant != "nvfp4":
            raise ValueError(
                f"skip_rope_quantization and rope_quant = {self.rope_quant!r} exclude each other; give one"
            )
        if self.quant not in ("auto", "nvfp4") and self.plain_options:
            raise ValueError(f"{self.plain_options[0]} belongs to quant = 'nvfp4', not to {self.quant!r}; leave it out")
        if (self.global_scale is GlobalScale.CHECKPOINT) != (self.scale_checkpoint_path is not None):
            raise ValueError(
                "global_scale = 'checkpoint' and scale_checkpoint_path belong together: give the folder of the "
                "checkpoint whose scales are meant, or neither"
            )
        measured = {
            "max_relative_error": self.max_relative_error,
            "quality_sample": self.quality_sample or None,
            "quality_budget": self.quality_budget,
        }
        for option, value in measured.items():
            if value is not None and self.quant in ("lossless", "none"):
                raise ValueError(f"{option} = {value}: quant = {self.quant!r} has no error to measure; leave it out")
        if self.quality_budget is not None and not self.quality_sample:
            raise ValueError(
                f"quality_budget = {self.quality_budget} needs quality_sample, such as 0.001: nothing is measured "
                "without"
            )
        return self

    @property
    def plain_options(self) -> tuple[str, ...]:
        """Options of plain nvfp4 that are set."""
        unset = {
            "global_scale": self.global_scale is GlobalScale.PAGE,
            "skip_rope_quantization": not self.skip_rope_quantization,
            "rope_quant": self.rope_quant == "nvfp4",
        }
        return tuple(option for option, value in unset.items() if not value)


class TriAttentionConfig(_Block):
    """Which generated tokens stay in the live cache. `budget`, `beta` count generated tokens; prompts always stay."""

    algorithm: Literal["triattention"]
    budget: Annotated[int, Field(ge=1)] = 2048
    beta: Annotated[int, Field(ge=1)] = 128
    eviction_mode: Literal["union", "per_head", "per_layer_perhead"] = "union"
    normalize_scores: bool = True
    calibration_path: Annotated[Path, Field(strict=False)]


CompressionConfig = Annotated[ColdPageConfig | TriAttentionConfig, Field(discriminator="algorithm")]

EvictionPolicy = Literal["lru", "s3fifo"]
Priority = Literal["low", "normal", "high"]
PRIORITIES: dict[str, int] = {"low": -1, "normal": 0, "high": 1}
"""As a tier knows them (`kvtier.abc.tier.PageMeta`)."""


class BudgetConfig(_Block):
    """Memory that the processes of a node share: `path` names a file, the same for all, `capacity` is their sum."""

    path: Annotated[Path, Field(strict=False), BeforeValidator(parse_directory)]
    capacity: Bytes


class HostTierConfig(_Block):
    """Pages in this process's memory. `capacity` is per node; a rank takes its share. ttl: of pages that nobody uses.
    budget: takes that share out of one that other processes of the node take from as well. huge_pages: transparent, as
    the kernel gives them; reserved, those set aside for such use (vm.nr_hugepages), or the tier does not open."""

    type: Literal["host"]
    capacity: Bytes
    policy: EvictionPolicy = "lru"
    ttl: Seconds | None = None
    budget: BudgetConfig | None = None
    huge_pages: Literal["transparent", "reserved"] = "transparent"


class LowerTierConfig(_Block):
    """What a tier behind host memory is given (`docs/tiers.md`). write: through, at once; back, when a page is about to
    leave host memory; none. admission: always, or second_use. refresh: pages used in host memory stay longer here."""

    write: Literal["through", "back", "none"] = "through"
    admission: Literal["always", "second_use"] = "always"
    refresh: bool = True


class NvmeTierConfig(LowerTierConfig):
    """Pages in segment files in a directory of a local disk, or in one of each of several disks: `path` is a list then.
    `capacity` is per node, of all directories together, which hold equal shares; a rank takes its share."""

    type: Literal["nvme"]
    path: Annotated[tuple[Path, ...], Field(strict=False), BeforeValidator(parse_directories)]
    capacity: Bytes
    io_threads: Annotated[int, Field(ge=1, le=64)] = 8
    policy: EvictionPolicy = "lru"
    ttl: Seconds | None = None


class RedisTierConfig(LowerTierConfig):
    """Pages shared through Redis or Valkey (`docs/redis.md`). `capacity` is the server's own (its maxmemory).

    url: ``redis://``, ``rediss://`` (TLS) or ``unix://``, several hosts separated by commas, never with a password:
    that is in `password_file` or in the environment variable KVTIER_REDIS_PASSWORD. mode: auto asks the servers.
    service: the master's name, where the URL names sentinels. timeout: of one batch, connecting included.
    connections: per server.
    """

    type: Literal["redis"]
    url: str
    mode: Literal["auto", "standalone", "sentinel", "cluster"] = "auto"
    service: str = ""
    username: str = ""
    password_file: Annotated[Path | None, Field(strict=False)] = None
    sentinel_password_file: Annotated[Path | None, Field(strict=False)] = None
    tls_ca: Annotated[Path | None, Field(strict=False)] = None
    tls_cert: Annotated[Path | None, Field(strict=False)] = None
    tls_key: Annotated[Path | None, Field(strict=False)] = None
    tls_check_hostname: bool = True
    prefix: str = "kvtier:1:"
    ttl: Seconds | None = None
    timeout: Seconds = 1.0
    connections: Annotated[int, Field(ge=1, le=256)] = 8


TierConfig = Annotated[HostTierConfig | NvmeTierConfig | RedisTierConfig, Field(discriminator="type")]


class HttpConfig(_Block):
    """The port of /metrics, /livez and /readyz; rank r listens on ``port + r``, 0 means any free port. Anything but a
    loopback `host` needs `allow_remote` and a token, in `token_file` or in KVTIER_HTTP_TOKEN. names: by which it is
    asked for, beside localhost and `host`, where there is no token: those of a proxy on this machine."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    allow_remote: bool = False
    token_file: Annotated[Path | None, Field(strict=False)] = None
    names: tuple[str, ...] = Field(default=(), strict=False)


class ServerUserConfig(_Block):
    """A user of the cache server. prefixes: of the keys that it sees and can touch, none for all. quota: of the values
    under its keys. priority: of these values; low ones make room first."""

    name: Annotated[str, Field(min_length=1)]
    password_file: Annotated[Path, Field(strict=False)]
    prefixes: tuple[str, ...] = Field(default=(), strict=False)
    read_only: bool = False
    quota: Bytes | None = None
    priority: Priority = "normal"


class ServerConfig(_Block):
    """``kvtier serve`` (`docs/serve.md`). listen: ``unix:PATH``, ``tcp:HOST:PORT``, ``tls:HOST:PORT``. The default
    user's password is in `password_file` or in the environment variable KVTIER_SERVER_PASSWORD."""

    listen: tuple[str, ...] = Field(default=(), strict=False)
    password_file: Annotated[Path | None, Field(strict=False)] = None
    users: tuple[ServerUserConfig, ...] = Field(default=(), strict=False)
    tls_cert: Annotated[Path | None, Field(strict=False)] = None
    tls_key: Annotated[Path | None, Field(strict=False)] = None
    tls_client_ca: Annotated[Path | None, Field(strict=False)] = None
    max_connections: Annotated[int, Field(ge=1, le=65536)] = 256
    max_value: Bytes = 512 << 20
    client_timeout: Seconds = 30.0
    drain: Seconds = 10.0


class KvEventsConfig(_Block):
    """Events for routers that know prefixes (`docs/kv-events.md`). endpoint: where the publisher listens. allow_remote:
    must be set where that is not on this machine alone; ZeroMQ asks nobody for a password. queue: events that may
    wait; more are dropped and counted."""

    publisher: Literal["zmq"] = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    topic: str = ""
    queue: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    allow_remote: bool = False

    @model_validator(mode="after")
    def _exposure(self) -> KvEventsConfig:
        host = re.fullmatch(r"tcp://(\[[^]]*\]|[^:\[\]]+):(\*|\d+)", self.endpoint)
        if host is None and not re.fullmatch(r"ipc://.+", self.endpoint):
            raise ValueError(
                f"endpoint = {self.endpoint!r} must be like tcp://127.0.0.1:5557 or ipc:///run/kvtier/events"
            )
        if host is not None and host[1] not in ("127.0.0.1", "[::1]") and not self.allow_remote:
            raise ValueError(
                f"endpoint = {self.endpoint!r} can be read by other machines, without a password: use 127.0.0.1, or "
                "set allow_remote: true"
            )
        return self


class Config(_Block):
    """The whole block.

    promote_deadline: how long a waiting request may be held for pages on their way up. lease: how long a page that was
    looked up and not loaded stays pinned. offload_wait: how long an offload worker waits for room in the host tier.
    salt: separates tenants whose pages must never meet. priority: of this engine's pages where several share tiers;
    low ones make room first. break_even: pages that are sooner computed than loaded are left where they are;
    prefill_s_per_token is then taken as the cost of a prompt's token, instead of what the connector measures.
    compacted: files of ``kvtier compact`` that SGLang serves (`docs/compaction.md`).

    What is watched (`docs/metrics.md`): ghosts, hit rates of other sizes; explain_sample, the share of requests that
    ``kvtier explain`` knows; slow_restore, from where a restore is logged; record, a new file for lookups
    (`docs/replay.md`); opentelemetry, spans; kv_events, what routers are told; debug, whether the accounting is checked
    at run time.
    """

    kv_cache_compression_config: tuple[CompressionConfig, ...] = Field(
        default=(ColdPageConfig(algorithm="quantization_for_cold_page"),), strict=False
    )
    tiers: tuple[TierConfig, ...] = Field(strict=False)
    http: HttpConfig | None = None
    server: ServerConfig | None = None
    promote_deadline: Seconds = 2.0
    lease: Seconds = 30.0
    offload_wait: Seconds = 5.0
    workers: Annotated[int, Field(ge=1, le=64)] = 2
    salt: str = ""
    priority: Priority = "normal"
    break_even: bool = True
    prefill_s_per_token: Annotated[float, Field(gt=0, lt=60, strict=False)] | None = None
    compacted: Annotated[tuple[Annotated[Path, Field(strict=False)], ...], Field(strict=False)] = ()
    ghosts: bool = True
    explain_sample: Annotated[float, Field(ge=0, le=1, strict=False)] = 0.0
    slow_restore: Seconds | None = 1.0
    record: Annotated[Path | None, Field(strict=False)] = None
    opentelemetry: bool = False
    kv_events: KvEventsConfig | None = None
    debug: bool = False

    @model_validator(mode="after")
    def _combination(self) -> Config:
        kinds = [t.type for t in self.tiers]
        if kinds[:1] != ["host"] or "host" in kinds[1:]:
            raise ValueError(
                f"tiers = {kinds}: the first tier must be of type host, and only the first; "
                "put {type: host, capacity: ...} at the front"
            )
        if len(set(kinds)) != len(kinds):
            raise ValueError(f"tiers = {kinds}: each type may be given once; leave the second one out")
        _once(self.kv_cache_compression_config)
        return self

    @property
    def cold_page(self) -> ColdPageConfig | None:
        """The cold page's options, or None when pages are stored raw because the list is empty."""
        return next((c for c in self.kv_cache_compression_config if isinstance(c, ColdPageConfig)), None)

    @property
    def compression(self) -> CompressionOptions:
        """The part that acts on live caches."""
        return CompressionOptions(kv_cache_compression_config=self.kv_cache_compression_config, http=self.http)


class CompressionOptions(_Block):
    """The part of the block that acts on live caches, for those who have no tiers: methods, and where their metrics
    are."""

    kv_cache_compression_config: tuple[CompressionConfig, ...] = Field(strict=False)
    http: HttpConfig | None = None

    @model_validator(mode="after")
    def _combination(self) -> CompressionOptions:
        _once(self.kv_cache_compression_config)
        return self

    @property
    def live(self) -> tuple[TriAttentionConfig, ...]:
        """The methods that change which rows of a live cache stay."""
        return tuple(c for c in self.kv_cache_compression_config if isinstance(c, TriAttentionConfig))


def _once(methods: tuple[ColdPageConfig | TriAttentionConfig, ...]) -> None:
    names = [m.algorithm for m in methods]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"kv_cache_compression_config: {name} may be given once")


def parse_config(block: Mapping[str, Any]) -> Config:
    """Validate a block given as a mapping."""
    if not isinstance(block, Mapping):
        raise ConfigError(f"the configuration is {block!r}; give a mapping of options, with 'tiers' among them")
    try:
        return Config.model_validate(dict(block))
    except ValidationError as error:
        raise ConfigError("; ".join(m.text for m in mistakes_of(error, Config))) from None


def parse_compression(block: Mapping[str, Any]) -> tuple[ColdPageConfig | TriAttentionConfig, ...]:
    """Validate a block that names methods alone, or a whole one, and give its methods."""
    return parse_live(block).kv_cache_compression_config


def parse_live(block: Mapping[str, Any]) -> CompressionOptions:
    """Validate a block of methods alone, or a whole one, and give its part for live caches."""
    if not isinstance(block, Mapping):
        raise ConfigError(f"the configuration is {block!r}; give a mapping with 'kv_cache_compression_config'")
    if "tiers" in block:
        return parse_config(block).compression
    try:
        return CompressionOptions.model_validate(dict(block))
    except ValidationError as error:
        raise ConfigError("; ".join(m.text for m in mistakes_of(error, CompressionOptions))) from None


def load_config(path: str | Path) -> Config:
    """Read and validate a YAML (or JSON) file."""
    return parse_config(read_block(path, "tiers"))


def load_compression(path: str | Path) -> tuple[ColdPageConfig | TriAttentionConfig, ...]:
    """Read and validate the methods of a YAML (or JSON) file."""
    return load_live(path).kv_cache_compression_config


def load_live(path: str | Path) -> CompressionOptions:
    """Read a YAML (or JSON) file of methods alone, or a whole one."""
    return parse_live(read_block(path, "kv_cache_compression_config"))


def read_block(path: str | Path, option: str) -> dict[str, Any]:
    """The mapping in a YAML (or JSON) file, which should hold `option`. Raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"config file {str(path)!r} cannot be read: {error.strerror}; give a readable file, "
            "kvtier config init writes one"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {str(path)!r} is not text in UTF-8: {error}; give a YAML file") from None
    try:
        block = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {str(path)!r} is not YAML: {error}") from None
    if not isinstance(block, dict):
        raise ConfigError(
            f"config file {str(path)!r} must hold a mapping with the option {option!r}, got {type(block).__name__}"
        )
    return dict(block)
