"""The active methods in order, and the one place from which their hooks are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvtier.abc.compression import HOOKS, CompressionManager, LiveCache, LiveRequest, Platform
from kvtier.errors import ConfigError

Hook = Callable[..., None]

_DEFAULT = CompressionManager()


class CompressionPipeline:
    """Methods in the order of their registration. An adapter registers its own bookkeeping first and calls the pipeline
    last, so that every hook sees an updated cache.

    ``pipeline.hooks("on_generation_step_end")`` is empty unless a method overrides that hook: an adapter that finds
    it so installs nothing there, which makes an inactive pipeline free."""

    def __init__(self, managers: Sequence[CompressionManager], platform: Platform) -> None:
        """Raises ConfigError where a method refuses `platform`."""
        names = [m.algorithm for m in managers]
        twice = {n for n in names if names.count(n) > 1}
        if twice:
            raise ConfigError(f"kv_cache_compression_config: {sorted(twice)[0]} may be given once")
        for manager in managers:
            manager.check(platform)
        self.managers = tuple(managers)
        self.platform = platform
        self._hooks = {name: tuple(_overriding(managers, name)) for name in HOOKS}

    @property
    def active(self) -> bool:
        """Whether any method overrides any hook."""
        return any(self._hooks.values())

    def hooks(self, name: str) -> tuple[Hook, ...]:
        """The bound hooks of that name, in order; empty where no method has one."""
        return self._hooks[name]

    def call(self, name: str, requests: Sequence[LiveRequest], cache: LiveCache | None = None, **kwargs: Any) -> None:
        """Call the hook of every method that has it, unless there are no requests. `cache` as the hook wants it."""
        hooks = self._hooks[name]
        if not hooks or not requests:
            return
        arguments = (requests,) if cache is None else (requests, cache)
        for hook in hooks:
            hook(*arguments, **kwargs)

    def publishable_tokens(self, request: LiveRequest) -> int:
        """How many leading rows of `request` may enter a prefix cache: the smallest answer of all methods."""
        return min(manager.publishable_tokens(request) for manager in (_DEFAULT, *self.managers))


def _overriding(managers: Sequence[CompressionManager], name: str) -> list[Any]:
    base = getattr(CompressionManager, name)
    return [getattr(m, name) for m in managers if getattr(type(m), name) is not base]
