"""A process of its own that generates greedily with vLLM on the CPU, once. The only line that starts with a brace says
what came out: ``{"tokens", "cached_tokens", "metrics"}``. Its argument: ``{"model", "prompt", "max_tokens",
"lmcache_port"}``."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

BLOCK_TOKENS = 32

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "LMCACHE_TRACK_USAGE": "false"}


def main(asked: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": asked["lmcache_port"],
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
        },
    }
    llm = LLM(
        model=asked["model"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=2048,
        block_size=BLOCK_TOKENS,
        max_num_seqs=4,
        seed=0,
        disable_log_stats=False,
        kv_transfer_config=connector,
    )
    sampling = SamplingParams(max_tokens=asked["max_tokens"], temperature=0.0, detokenize=False, ignore_eos=True)
    (done,) = llm.generate([{"prompt_token_ids": asked["prompt"]}], sampling)
    metrics = {m.name: m.value for m in llm.get_metrics() if "prefix_cache" in m.name}
    found = {
        "tokens": list(done.outputs[0].token_ids),
        "cached_tokens": done.num_cached_tokens,
        "metrics": metrics,
    }
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
