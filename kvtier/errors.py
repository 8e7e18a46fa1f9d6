"""The errors kvtier raises. One root; each class is also the built-in error a caller would expect."""

from __future__ import annotations


class KVTierError(Exception):
    """Root of every error raised by kvtier."""


class ConfigError(KVTierError, ValueError):
    """An option has a value that cannot work. The message names the option, the value and the way out."""


class SpecError(KVTierError, ValueError):
    """A page's geometry cannot be described or does not match the buffers it is used with."""


class CodecError(KVTierError, ValueError):
    """Input that a codec cannot take."""


class ArtefactError(KVTierError, ValueError):
    """A file or object is not one that this version may use: damaged, of another version, or made for another model."""


class CapacityError(KVTierError, MemoryError):
    """A record does not fit, or memory for a tier could not be had."""


class TierPathError(KVTierError, OSError):
    """A tier's directory cannot be used: not writable, locked by another process, or of another format."""


class ClosedError(KVTierError, RuntimeError):
    """The object was closed."""


class EngineError(KVTierError, RuntimeError):
    """The installed engine is not one this connector knows how to serve."""


class FitError(KVTierError, ArithmeticError):
    """A fit that gave no finite numbers. The message names the layer and the head."""


class MissingExtraError(KVTierError, ImportError):
    """An optional dependency is missing. The message names the extra that brings it."""


def missing_extra(package: str, extra: str) -> MissingExtraError:
    """The error for a missing optional `package`, which `extra` would install."""
    return MissingExtraError(f"this needs the package {package!r}: pip install 'kvtier[{extra}]'")
