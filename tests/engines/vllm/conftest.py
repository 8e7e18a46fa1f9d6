"""Tests against the real vLLM and LMCache, in their own environment (make test-vllm); elsewhere they are not even
collected."""

from __future__ import annotations

import importlib.util
import os

os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("lmcache") is None:
    collect_ignore_glob = ["test_*.py"]
