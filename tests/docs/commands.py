"""Every command of the guide: run here, or why not, and what shows then that it works.

A new command in a page needs a line here. Patterns are matched against the whole command, as `pages.commands` has it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """Run in a scratch directory that holds the page's named Python blocks. says: a pattern in what it prints.
    instead: texts that are replaced first, so that it ends soon or stays in the directory. `HERE` in them is the
    directory."""

    pattern: str
    says: str
    instead: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Serve:
    """A server: run until it is ready, asked, and told to end. instead: as of `Run`."""

    pattern: str
    instead: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Not run here. test: the file that runs it, or what stands behind it; evidence: a text in there."""

    pattern: str
    reason: str
    test: str = ""
    evidence: str = ""


SERVER = (
    ("/run/kvtier/cache.sock", "HERE/cache.sock"),
    ("/run/kvtier/sock", "HERE/cache.sock"),
    ("tcp:127.0.0.1:6380", "tcp:127.0.0.1:0"),
    ("127.0.0.1:9404", "127.0.0.1:0"),
    ("4GiB", "64MiB"),
    ("64GiB", "64MiB"),
    ("/var/lib/kvtier:200GiB", "HERE/pages:256MiB"),
    ("/var/lib/kvtier:1TiB", "HERE/pages:256MiB"),
)

COMMANDS: tuple[Run | Serve | Elsewhere, ...] = (
    # ---- run here
    Run(r"kvtier size (mha|mla) .*", r"pages per GiB"),
    Run(r"kvtier replay mooncake-conversation --tier host:400GB", r"time to first token: p50"),
    Run(r"kvtier replay mooncake-conversation --sweep", r"Buy .* of host and store NVFP4"),
    Run(r"kvtier replay trace.jsonl .*", r'"hit_rate": \{"total": 0\.0'),
    Run(r"kvtier replay .* --live", r"largest difference: 0\.\d\d points", (("--live", "--live --requests 200"),)),
    Run(r"kvtier replay .* --placement write-back", r"time to first token: p50"),
    Run(r"kvtier torture --seconds 600", r"passed", (("--seconds 600", "--seconds 0 --only flips --folder HERE"),)),
    Run(r"python -m pytest test_\w+\.py", r"\d+ passed"),
    Serve(r"kvtier serve .*", SERVER),
    # ---- the project's own targets: the gate runs them, and that they are there is looked up here
    Elsewhere(r"make [a-z -]+( TORCH_INDEX=\S+)?", "what stands behind it is not for a test to start", "Makefile"),
    Elsewhere(r"bash \.ci/run", "it is the gate, which runs these tests", ".ci/run", "make"),
    Elsewhere(
        r"pip install 'kvtier\[[\w,]+\]'",
        "installs from an index; that the extras exist is looked up here",
        "tools/package_check.py",
    ),
    # ---- engines
    Elsewhere(
        r"sglang serve .* --kv-connector (kvtier|kvtier-hicache) .*",
        "needs SGLang",
        "tests/engines/sglang/test_launchers.py",
        'pytest.param("serve", "kvtier")',
    ),
    Elsewhere(
        r"sglang serve .* --kv-cache-compression-config .*",
        "needs SGLang",
        "tests/engines/sglang/test_triattention.py",
        "kv_cache_compression_config",
    ),
    Elsewhere(
        r"curl .*tool-call", "needs an engine that has served a request", "tests/engines/sglang/test_tool_calls.py",
        '"/tool-call"',
    ),
    Elsewhere(
        r"admin=.*|curl .*/hicache/storage-backend.*",
        "needs SGLang; what its handlers do is called",
        "tests/engines/sglang/engine_driver.py",
        "/hicache/storage-backend",
    ),
    Elsewhere(
        r"lmcache server .*KvtierL2Adapter.*kvtier\.yaml.*",
        "needs LMCache",
        "tests/engines/lmcache/server.py",
        "--l2-adapter",
    ),
    Elsewhere(
        r"lmcache server .*kvtier_nvfp4.*", "needs LMCache", "tests/engines/lmcache/test_server.py", "kvtier_nvfp4"
    ),
    Elsewhere(r"lmcache bench server .*", "needs LMCache", "tests/engines/lmcache/server.py", '"bench", "server"'),
    Elsewhere(
        r"LMCACHE_CONFIG_FILE=lmcache.yaml python -m lmcache.v1.basic_check .*",
        "needs LMCache",
        "tests/engines/lmcache/test_remote_layouts.py",
        '"lmcache.v1.basic_check", "--mode", "test_remote"',
    ),
    Elsewhere(r"lmcache bench l2 .*", "needs LMCache", "tests/engines/lmcache/test_server.py", '"bench", "l2"'),
    Elsewhere(
        r"vllm serve .*",
        "needs vLLM, whose environment takes 10 minutes; `make test-vllm` has the same configuration",
        "tests/engines/vllm/generate.py",
        "lmcache.mp.mp_transfer_mode",
    ),
    # ---- a model, or hours
    Elsewhere(
        r"kvtier compact( inspect)? .*", "needs a model", "tests/integration/test_compact_command.py", "inspect"
    ),
    Elsewhere(
        r"python compacted_client\.py .*",
        "needs an engine that serves the prefix",
        "tests/engines/sglang/test_launchers.py",
        "compacted_client.py",
    ),
    Elsewhere(r"kvtier calibrate .*", "needs a model", "tests/integration/test_calibration.py", "calibrate"),
    Elsewhere(
        r"kvtier eval compaction .*", "takes hours, or a minute",
        "tests/integration/test_compact_evaluation.py", "eval"
    ),
    Elsewhere(
        r"python tools/ghosts_accuracy\.py",
        "takes minutes; the same comparison on shorter traces is a test",
        "tests/unit/test_ghosts.py",
    ),
    # ---- what looks at a running engine
    Elsewhere(
        r"kvtier top .*", "run against a server with figures", "tests/integration/test_watching.py", '"top"'
    ),
    Elsewhere(
        r"kvtier explain .*",
        "needs a request that was sampled",
        "tests/integration/test_watching.py",
        '"explain"',
    ),
)  # fmt: skip

PYTHON: dict[str, tuple[str, ...]] = {
    "docs/quickstart.md": ("run",),
    "docs/sglang.md": (
        "tests/engines/sglang/engine_driver.py",  # sglang.Engine(...) with these keywords
        "tests/engines/sglang/test_tool_calls.py",
    ),
    "docs/gpu.md": ("tests/gpu",),
    "docs/compaction.md": ("run", "run"),
    "docs/writing-a-tier.md": ("run", "run", "run"),
    "docs/writing-a-codec.md": ("run", "run"),
    "docs/writing-a-method.md": ("tests/unit/test_compression.py", "run"),
}
"""Python blocks of each page in their order: run here, or what runs such code."""
