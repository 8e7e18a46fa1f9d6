"""Python and YAML of the pages: run, or run elsewhere by name; what they import and configure exists."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.config import parse_config, parse_live
from kvtier.errors import MissingExtraError
from tests.docs.commands import PYTHON
from tests.docs.pages import ALL, GUIDE, ROOT, blocks, name_of
from tests.docs.snippets import file_of, python_blocks, write_files

PATIENCE_S = 240.0


def test_every_block_is_listed() -> None:
    there = {name_of(page): len(python_blocks(page)) for page in GUIDE if python_blocks(page)}
    assert there == {page: len(listed) for page, listed in PYTHON.items()}, "tests/docs/commands.py"
    for listed in PYTHON.values():
        assert all(entry == "run" or (ROOT / entry).exists() for entry in listed), listed


IMPORT = re.compile(r"^\s*from (kvtier[\w.]*) import (\(?[\w, ]+)", re.M)


@pytest.mark.parametrize("page", GUIDE, ids=name_of)
def test_what_is_imported_exists(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            ast.parse(block.text)
        for module, names in IMPORT.findall(block.text):
            try:
                imported = importlib.import_module(module)
            except MissingExtraError:  # not in this environment; the package check imports them all
                continue
            except ModuleNotFoundError as error:
                if (error.name or "").startswith("kvtier"):
                    raise
                continue
            for name in re.findall(r"\w+", names):
                there = hasattr(imported, name) or importlib.util.find_spec(f"{module}.{name}") is not None
                assert there, f"{name_of(page)}: {module} has no {name}"


def is_configuration(content: Any) -> bool:
    return isinstance(content, dict) and bool({"tiers", "kv_cache_compression_config"} & set(content))


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_configurations_are_valid(page: Path) -> None:
    for block in blocks(page):
        if block.language == "yaml" or (
            block.language in ("", "text") and block.text.startswith(("tiers:", "# kvtier"))
        ):
            content = yaml.safe_load(block.text)
            if is_configuration(content):
                (parse_config if "tiers" in content else parse_live)(content)


def test_configurations_are_found() -> None:
    found = [b for page in GUIDE for b in blocks(page) if b.language == "yaml" and "tiers:" in b.text]
    assert len(found) > 5


# ---- pages whose Python is run


def in_one_process(page: Path, names: dict[str, Any], which: int = 0) -> dict[str, Any]:
    block = python_blocks(page)[which]
    exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
    return names


def test_a_store_uses_the_tier_of_the_page(tmp_path: Path) -> None:
    """The suite that the page runs on its tier is a command, and run as one."""
    page = ROOT / "docs" / "writing-a-tier.md"
    write_files(page, tmp_path)
    assert [file_of(block) for block in python_blocks(page)] == [
        "file_tier.py",
        "test_file_tier.py",
        "use_file_tier.py",
    ]
    done = subprocess.run(
        [sys.executable, "use_file_tier.py"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.stdout == "['host', 'files']\n", done.stderr


BREAKS: dict[str, tuple[str, Callable[[str], str]]] = {
    "tier": ("file_tier.py", lambda text: text.replace("or checksum(data, key) != meta.checksum", "")),
    "codec": ("int8_codec.py", lambda text: text.replace("np.rint(scaled)", "np.floor(scaled) + 2")),
}


@pytest.mark.parametrize("what", BREAKS)
def test_the_suites_of_the_pages_can_fail(what: str, tmp_path: Path) -> None:
    page = ROOT / "docs" / f"writing-a-{what}.md"
    write_files(page, tmp_path)
    name, damage = BREAKS[what]
    text = (tmp_path / name).read_text()
    assert damage(text) != text
    (tmp_path / name).write_text(damage(text))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"test_{name}",
         "-k", "flipped or decoded_page or pages_come_back"],
        cwd=tmp_path, text=True, capture_output=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout + done.stderr


def test_the_method_of_the_page_compacts() -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed: pip install 'kvtier[transformers]'")
    from tests.compact_models import context, tiny

    names = {"model": tiny("llama"), "context_ids": context(40), "question_ids": context(5, seed=1)}
    names = in_one_process(ROOT / "docs" / "writing-a-method.md", names, which=1)
    assert [len(kept) for layer in names["compaction"].layers for kept in layer.kept] == [20] * 8
    assert names["answer"].shape == (1, 5 + 8)


def test_a_context_is_written_compacted_and_answered_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of the page with its command between them, for a tiny model and a tokenizer of words."""
    pytest.importorskip("scipy", reason="scipy is not installed: pip install 'kvtier[compaction]'")
    import tokenizers
    import transformers
    from typer.testing import CliRunner

    from kvtier.cli.app import app
    from tests.compact_models import VOCABULARY, tiny

    monkeypatch.chdir(tmp_path)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    tokenizer.chat_template = "{% for m in messages %}w1 {{ m.content }} w2 {% endfor %}w3"
    tokenizer.save_pretrained("model")
    tiny("llama").save_pretrained("model")
    page, article = ROOT / "docs" / "compaction.md", " ".join(f"w{n}" for n in range(10, 90))
    names = in_one_process(page, {"tokenizer": tokenizer, "article": article, "question": "w7 w8"})
    assert Path("context.txt").read_text() == f"w1 {article}\n\n" and names["question_ids"] == [7, 8, 2, 3]
    command = "compact model context.txt --method kvzip --ratio 0.8 --out context.safetensors"
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, f"{done.output}{done.exception}"
    found = in_one_process(page, {**names, "path": "model"}, which=1)
    assert found["prefix"].tokens == 81 and 1 <= len(found["answer"]) <= 64


def test_the_program_of_the_quick_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    Path("kvtier.yaml").write_text(
        "tiers: [{type: host, capacity: 16MiB}, {type: nvme, path: pages, capacity: 16MiB}]\npromote_deadline: 60s\n"
    )
    page = ROOT / "docs" / "quickstart.md"
    names: dict[str, Any] = {"path": tmp_path / "model", "token_ids": list(range(1, 101))}
    found = in_one_process(page, dict(names))
    assert found["restored"].tokens == 0 and found["logits"].shape == (1, 100, 128)
    for _ in range(20):  # an end writes for a moment only: a slow disk may not have had the page by then
        found = in_one_process(page, dict(names))
        if found["restored"].tokens:
            break
    assert found["restored"].tokens == 64 and found["logits"].shape == (1, 36, 128)
