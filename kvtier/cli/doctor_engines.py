"""``kvtier doctor``: a page's whole way with the codec that the block names, and the engines' plugins."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.abc.codec import Codec
from kvtier.build import open_codec
from kvtier.cli.doctor_line import Finding, bad, good, nothing, refused, warning
from kvtier.config import Config, TriAttentionConfig
from kvtier.errors import KVTierError
from kvtier.hot import HotLayout, HotPool
from kvtier.keys import Namespace
from kvtier.mover import PageMover, policy_of
from kvtier.spec import DType, PageSpec
from kvtier.storage_backends.host.tier import HostTier
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.store import TieredStore

_GROUP = "sglang.srt.plugins"
_LAYERS, _HEADS, _DIM, _TOKENS, _PAGES = 2, 2, 64, 64, 8
_WAIT_S = 30.0
_ERROR_MAX = 0.2
_NVIDIA = Path("/dev/nvidiactl")


def check_way(config: Config) -> Iterator[Finding]:
    """A page's whole way as every connector goes it: encoded, stored, found after a restart by a lookup, decoded,
    counted. In a temporary folder, with the block's own codec."""
    what = "codec and store"
    spec = PageSpec.mha(layers=_LAYERS, kv_heads=_HEADS, head_dim=_DIM, page_tokens=_TOKENS, dtype=DType.BF16)
    try:
        codec = open_codec(config, spec)
    except (KVTierError, ImportError) as error:
        yield refused(what, error)
        return
    values = np.random.default_rng(0).standard_normal((2 * _LAYERS, _PAGES * _TOKENS, _HEADS, _DIM)).astype(np.float32)
    with tempfile.TemporaryDirectory(prefix="kvtier-doctor-") as folder:
        try:
            back, hits = _there_and_back(spec, codec, values, Path(folder))
        except (KVTierError, TimeoutError) as error:
            yield bad(what, f"pages did not come back: {error}", "report this, with this output")
            return
    relative = float(np.linalg.norm(back - values) / np.linalg.norm(values))
    text = f"{hits} of {_PAGES} pages found again, relative error {relative:.3f}"
    if hits != _PAGES or not relative < _ERROR_MAX:
        yield bad(what, text, "report this, with this output")
    else:
        yield good(what, text)
    for method in config.kv_cache_compression_config:
        if isinstance(method, TriAttentionConfig) and not os.access(method.calibration_path, os.R_OK):
            yield bad(
                "triattention",
                f"calibration_path {method.calibration_path} cannot be read",
                "make one with kvtier calibrate, and give its path",
            )


def _there_and_back(
    spec: PageSpec, codec: Codec, values: npt.NDArray[np.float32], folder: Path
) -> tuple[npt.NDArray[np.float32], int]:
    """`values` ``[buffers, tokens, heads, dim]`` as they come back, and how many pages were counted as hits below."""
    hot = [_bf16(v) for v in values]
    out = [np.zeros_like(v) for v in hot]
    hashes = [b"doctor %d" % n for n in range(_PAGES)]
    namespace = Namespace.of(spec, policy_of(codec), model="doctor", weights="00", dtype=DType.BF16.value)
    host_bytes, nvme_bytes = 4 * _PAGES * spec.hot_page_bytes, 8 * _PAGES * spec.hot_page_bytes
    hits = 0
    for restarted in (False, True):
        store = TieredStore(HostTier(host_bytes), [NvmeTier(folder / "tier", nvme_bytes)], promote_deadline_s=_WAIT_S)
        mover = PageMover(store, spec, namespace, codec)
        try:
            if not restarted:
                mover.offload(HotPool.of(spec, hot, HotLayout.NHD), hashes, range(_PAGES)).result(_WAIT_S)
                store.flush(_WAIT_S)
                continue
            lookup = store.lookup("doctor", namespace.page_keys(hashes))
            ready = store.wait(lookup)
            mover.onboard(lookup, HotPool.of(spec, out, HotLayout.NHD), range(ready)).result(_WAIT_S)
            store.settle("doctor")
            hits = store.ledger.snapshot().hits["nvme"]
        finally:
            mover.close()
            store.close()
    return np.stack([(v.astype(np.uint32) << 16).view(np.float32) for v in out]), hits


def _bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounded towards zero."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def check_extras(config: Config) -> Iterator[Finding]:
    """Packages that only some options need. Where one is there, nothing is said."""
    for wanted, what, module in (
        (config.opentelemetry, "opentelemetry", "kvtier.telemetry"),
        (config.kv_events is not None, "kv_events", "kvtier.kv_events"),
    ):
        if wanted:
            try:
                importlib.import_module(module)
            except ImportError as error:
                yield refused(what, error)


def check_gpu() -> Finding:
    """What pages that lie on a GPU need. torch is only imported where there is one: it takes seconds."""
    what = "GPU"
    if not _NVIDIA.exists():
        return nothing(what, "no NVIDIA device here: pages come from host memory")
    if not _installed("torch"):
        return nothing(what, "torch is not installed in this environment, so that no engine runs here")
    torch = importlib.import_module("torch")
    text = f"torch {torch.__version__}"
    if not torch.cuda.is_available():
        return warning(
            what,
            f"{text} cannot use it (built for CUDA: {torch.version.cuda or 'no'})",
            "install a torch for CUDA that fits the driver, if an engine is to keep its pages there",
        )
    if not _installed("triton"):
        return warning(
            what,
            f"{text}, without triton: engines whose pages lie on it are refused at their start",
            "pip install 'kvtier[triton]'",
        )
    return good(what, f"{text} and triton; the kernels are untried on GPUs: make test-gpu checks them")


def check_engines() -> Iterator[Finding]:
    yield _sglang()
    yield _lmcache()


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _sglang() -> Finding:
    what = "SGLang"
    version = _version("sglang")
    if version is None:
        return nothing(what, "not installed in this environment")
    points = [p for p in importlib.metadata.entry_points(group=_GROUP) if p.value.startswith("kvtier.")]
    if not points:
        return bad(what, f"{version}: kvtier is not among its plugins", "pip install kvtier into SGLang's environment")
    wanted = os.environ.get("SGLANG_PLUGINS")
    if wanted is not None and not {p.name for p in points} & set(wanted.split(",")):
        return bad(what, f"{version}: SGLANG_PLUGINS={wanted} leaves kvtier out", "add kvtier to SGLANG_PLUGINS")
    try:
        hooks = importlib.import_module("kvtier.connectors.sglang.hooks")
        for point in points:
            point.load()
        hooks.check_engine()
    except KVTierError as error:
        return refused(what, error)
    except Exception as error:  # noqa: BLE001 - an engine that cannot be imported is what is to be told
        return bad(
            what, f"{version}: its plugin cannot be loaded: {error}", "start SGLang alone, to see whether it works"
        )
    return good(what, f"{version}, plugins {', '.join(sorted(p.name for p in points))}")


def _lmcache() -> Finding:
    what = "LMCache"
    version = _version("lmcache")
    if version is None:
        return nothing(what, "not installed in this environment")
    try:
        importlib.import_module("kvtier.connectors.lmcache.adapter")
    except KVTierError as error:
        return refused(what, error)
    except Exception as error:  # noqa: BLE001 - as above
        return bad(what, f"{version}: its plugin cannot be loaded: {error}", "install the LMCache that docs/ names")
    if _version("torch") is None:
        return warning(what, f"{version}, without torch", "pip install 'kvtier[torch]'")
    return good(what, f"{version}, adapter loads")
