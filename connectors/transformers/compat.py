"""Where transformers 5.x changed under its users."""

from __future__ import annotations

import inspect
from typing import Any


def cache_argument(model: Any) -> str:
    """The name under which `model` takes its cache: ``cache``, or ``past_key_values`` before that."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
