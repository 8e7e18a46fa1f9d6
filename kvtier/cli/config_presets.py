"""The files that ``kvtier config init`` writes. Options behind a # are there to be switched on: valid as they stand."""

from __future__ import annotations

from enum import Enum


class Preset(str, Enum):
    """What a file is for."""

    SINGLE_NODE = "single-node"
    SGLANG = "sglang"
    LMCACHE = "lmcache"
    SIDECAR = "sidecar"
    NODE = "node"
    CLIENT = "client"
    REDIS_CLUSTER = "redis-cluster"


SERVER_PORT = 9404
CLIENT_PORT = 9410
"""Of an engine beside a cache server, which has the other. Ranks of one engine take this port and those after it."""

_FOR = {
    Preset.SINGLE_NODE: (
        "kvtier for one engine with memory and a disk of its own.",
        "SGLang: sglang serve ... --kv-connector kvtier --kv-connector-config THIS_FILE",
    ),
    Preset.SGLANG: (
        "kvtier behind SGLang.",
        "Start: sglang serve ... --kv-connector kvtier --kv-connector-config THIS_FILE",
    ),
    Preset.LMCACHE: (
        "kvtier behind LMCache, and vLLM through it.",
        "Start: lmcache server ... --l2-adapter, with THIS_FILE as config in its adapter_params (docs/lmcache.md)",
    ),
    Preset.SIDECAR: (
        "kvtier serve beside one engine, in the same pod: it keeps its pages when the engine restarts.",
        "Start: kvtier serve --config THIS_FILE. The engine's own file: kvtier config init --preset client",
    ),
    Preset.NODE: (
        "kvtier serve for all engines of a machine.",
        "Start: kvtier serve --config THIS_FILE. The engines' own file: kvtier config init --preset client",
    ),
    Preset.CLIENT: (
        "kvtier for an engine beside kvtier serve (presets sidecar and node), which keeps most of its pages.",
        "SGLang: sglang serve ... --kv-connector kvtier --kv-connector-config THIS_FILE",
    ),
    Preset.REDIS_CLUSTER: (
        "kvtier for engines on several machines that share pages in a Redis or Valkey cluster.",
        "SGLang: sglang serve ... --kv-connector kvtier --kv-connector-config THIS_FILE",
    ),
}

_HOST = """\
  # Pages in this process's memory, per node. Pinned where there is an accelerator: leave room for the engine.
  - type: host
    capacity: {memory}
    # policy: s3fifo         # what is read once pushes nothing out
    # ttl: 1d                # pages that nobody used for so long go
"""
_NVME = """\
  # Pages on a local disk. They survive restarts, also kill -9. One directory per device: path may be a list.
  - type: nvme
    path: {path}
    capacity: {disk}
    write: {write}           # through: at once. back: when a page leaves memory, so that the tiers hold more together
    # admission: second_use  # spares the disk the pages that nobody asks for again
    # policy: s3fifo
    # ttl: 7d
"""
_REDIS = """\
  # Pages that engines on other machines find, too. Never a password in the URL.
  - type: redis
    url: "{url}"
    username: kvtier                         # an ACL user: docs/redis.md has its rights
    password_file: /run/secrets/redis        # or the environment variable KVTIER_REDIS_PASSWORD
    # tls_ca: /etc/kvtier/ca.pem             # where the system's authorities did not sign the server's certificate
    ttl: 1d
    timeout: 1s              # of one batch; past it its pages are misses
    # admission: second_use
"""
_SERVED = """\
  # The cache server on this machine: it has the disk, and keeps its pages when this engine restarts.
  - type: redis
    url: "unix://{socket}"
    timeout: 1s              # of one batch; past it its pages are misses
"""
_FORM = """\
# How pages are stored: auto is NVFP4 in the form that passes the accuracy gates (docs/precision.md). Engines share
# pages only if these options are the same.
kv_cache_compression_config:
  - algorithm: quantization_for_cold_page
    quant: auto              # k8v4, 2fp4: finer. lossless, none: the same bytes
    # max_relative_error: 0.2  # pages above it are stored without loss
    # quality_sample: 0.001    # share of pages whose error is measured for the metrics
"""
_ENGINE = """\
promote_deadline: 2s         # how long a request waits for pages on their way up
# salt: a-secret-of-yours    # separates tenants: others never find these pages. Then chmod 600 this file
# break_even: false          # load pages even where computing them again is faster
"""
_HTTP = """\
# /metrics, /livez, /readyz and the status page. Other machines only with allow_remote and a token (docs/metrics.md).
http:
  host: 127.0.0.1
  port: {http_port}
  # token_file: /run/secrets/kvtier-token
"""
_SERVER = """\
server:
  # Unix sockets have mode 0600. For other machines tls: with tls_cert, tls_key and a password (docs/serve.md).
  listen: ["unix:{socket}"]
  # password_file: /run/secrets/kvtier       # or the environment variable KVTIER_SERVER_PASSWORD
  max_connections: {connections}
  max_value: {max_value}
  drain: 10s                 # how long clients may finish at SIGTERM; what is not on disk yet is written then
"""


def text_of(preset: Preset, memory: str, disk: str, *, max_value: str, path: str, url: str, socket: str) -> str:
    """The whole file. max_value: the largest value of a cache server."""
    serves = preset in (Preset.SIDECAR, Preset.NODE)
    what, start = _FOR[preset]
    tiers = ["tiers:\n", _HOST]
    if preset is Preset.CLIENT:
        tiers.append(_SERVED)
    elif preset is Preset.REDIS_CLUSTER:
        tiers.append(_REDIS)
    else:
        tiers.append(_NVME)
    parts = [f"# {what}\n# {start}\n# Every option: docs/options.md. Check: kvtier doctor --config THIS_FILE\n"]
    parts += ["".join(tiers), _SERVER] if serves else [_FORM, "".join(tiers), _ENGINE]
    parts.append(_HTTP)
    return "\n".join(parts).format(
        memory=memory, disk=disk, max_value=max_value, path=path, url=url, socket=socket, write="through",
        connections=64 if preset is Preset.SIDECAR else 256,
        http_port=CLIENT_PORT if preset is Preset.CLIENT else SERVER_PORT,
    )  # fmt: skip
