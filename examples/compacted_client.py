"""Ask an SGLang server about a context that was compacted, and that its `compacted` option names.

python compacted_client.py http://127.0.0.1:30000 MODEL context.safetensors "Who wrote it?"

The prompt is one placeholder for each row of the prefix, then what follows the context: here the question, and
whatever ends a user's turn in the model's chat template. docs/compaction.md makes a context that begins such a turn.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

import transformers

from kvtier.compression.compaction.artefact import CompactPrefix


def question_ids(tokenizer: transformers.PreTrainedTokenizerBase, question: str) -> list[int]:
    """The end of a user's turn that the context has begun."""
    text = f"{question}\n"
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": question}]
        whole = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
        text = whole[whole.rindex(question) :]
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def main(url: str, model: str, file: str, question: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    prefix = CompactPrefix.load(Path(file))
    rows = len(prefix.layers[0].kept[0])
    body = {
        "input_ids": [0] * rows + question_ids(tokenizer, question),
        "extra_key": prefix.key,
        "sampling_params": {"temperature": 0, "max_new_tokens": 64},
    }
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answered:
            answer = json.load(answered)
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{error.code}: {error.read().decode()}") from error
    print(f"{rows} rows stood for {prefix.tokens} tokens")
    print(answer.get("text") or tokenizer.decode(answer["output_ids"]))


if __name__ == "__main__":
    if len(sys.argv) != 5:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
