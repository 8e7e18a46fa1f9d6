"""An SGLang engine in this process with kvtier behind it: what left the device is read back, not computed again.

python sglang_offline.py MODEL          on a GPU
python sglang_offline.py MODEL --cpu    without one: tools/env-engine.sh sglang makes the environment
"""

from __future__ import annotations

import os
import sys
import time

BLOCK = {
    "tiers": [{"type": "host", "capacity": "1GiB"}],
    "break_even": False,  # a tiny model may be sooner computed than loaded
}
ON_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "grammar_backend": "none",
    "max_total_tokens": 8192,
    "max_running_requests": 8,
    "mem_fraction_static": 0.5,  # of what is free; max_total_tokens is what counts
}


def main(model: str, on_cpu: bool) -> None:
    if on_cpu:
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    import sglang

    engine = sglang.Engine(
        model_path=model,
        kv_connector="kvtier",
        kv_connector_config=BLOCK,  # or the path of a file
        page_size=16,
        skip_tokenizer_init=True,  # token ids in, token ids out
        enable_cache_report=True,
        log_level="warning",
        **(ON_CPU if on_cpu else {}),
    )
    try:
        prompt = [5 + i * 7 % 400 for i in range(200)]
        for turn in ("computed", "from kvtier"):
            answer = engine.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 4})
            found = answer["meta_info"]["cached_tokens_details"] or {}
            print(f"{turn}: {found.get('host', 0)} of {len(prompt)} tokens; on the device: {found.get('device', 0)}")
            while not engine.flush_cache().success:  # the device forgets; refused until the request is put away
                time.sleep(0.1)
    finally:
        engine.shutdown()


if __name__ == "__main__":  # SGLang's workers import this file again
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(sys.argv[1], "--cpu" in sys.argv[2:])
