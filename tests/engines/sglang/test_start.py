"""What is refused before anything starts, and what the flags become."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("engine_hooks")


def parse(*arguments: str) -> Any:
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args(["--model-path", "some/model", "--device", "cpu", *arguments])


def test_the_flag_becomes_the_engines_own_options(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.yaml"
    file.write_text("tiers: [{type: host, capacity: 1GiB}]\n")
    args = parse("--kv-connector", "kvtier", "--kv-connector-config", str(file))
    assert args.page_size == 64
    assert args.enable_unified_cache_external_linker
    assert args.unified_cache_external_linker_config == {
        "linker": "KVTierLinker",
        "linker_module_path": "kvtier.connectors.sglang.linker",
        "linker_extra_config": {"config_file": str(file)},  # the path only: the file may hold passwords
    }
    assert parse("--kv-connector", "kvtier", "--page-size", "16").page_size == 16
    assert parse("--kv-connector", "kvtier", "--page-size", "1").page_size == 1
    assert parse("--kv-connector", "kvtier", "--kv-cache-dtype", "fp8_e4m3").kv_cache_dtype == "fp8_e4m3"


def test_a_mistake_on_the_command_line_ends_with_one_line() -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--kv-connector", "kvtier", "--dp-size", "2")
    assert str(caught.value).startswith("error: --dp-size = 2 cannot") and "\n" not in str(caught.value)


def test_without_the_flag_nothing_changes() -> None:
    args = parse()
    assert args.page_size is None and not args.enable_unified_cache_external_linker


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--enable-hierarchical-cache",), "--enable-hierarchical-cache = True"),
        (("--disable-radix-cache",), "--disable-radix-cache = True"),
        (("--dp-size", "2"), "--dp-size = 2"),
        (("--kv-cache-dtype", "fp8_e5m2"), "--kv-cache-dtype = 'fp8_e5m2'"),
        (("--speculative-algorithm", "EAGLE"), "--speculative-algorithm = 'EAGLE'"),
        (("--enable-lmcache",), "--enable-lmcache = True"),
        (("--kv-connector-config", "/does/not/exist"), "/does/not/exist"),
    ],
)
def test_excluded_options_are_refused_by_name(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(SystemExit, match=words.replace("(", r"\(")):
        parse("--kv-connector", "kvtier", *arguments)


def test_every_excluded_option_exists_in_the_engine() -> None:
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.server_args import ServerArgs

    from kvtier.connectors.sglang.options import EXCLUDED, TAKEN

    fields = {field.name for field in record_fields(ServerArgs)}
    assert {e.option for e in (*EXCLUDED, *TAKEN)} <= fields


def test_a_config_without_the_connector_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="without --kv-connector"):
        parse("--kv-connector-config", str(tmp_path))


def test_a_mistake_in_the_config_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.yaml"
    file.write_text("tiers: [{type: host, capacity: -1GiB}]\n")
    with pytest.raises(SystemExit, match="capacity"):
        parse("--kv-connector", "kvtier", "--kv-connector-config", str(file))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tiers: [{type: host, capacity: 1GiB}]\npromote_dedline: 2s\n", "promote_dedline.*promote_deadline"),
        ("tiers: [{type: hots, capacity: 1GiB}]\n", "hots.*host"),
        ("tiers: [{type: host}]\n", "capacity"),
        ("promote_deadline: 2s\n", "tiers"),
        ("", "'tiers'"),
        ("tiers: [\n", "not YAML"),
    ],
)
def test_what_is_wrong_in_the_config_file_is_one_line_with_the_way_out(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "kvtier.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit, match=rf"(?s)^error: .*{words}") as caught:
        parse("--kv-connector", "kvtier", "--kv-connector-config", str(file))
    assert "[type=" not in str(caught.value)  # what pydantic says to programmers


@pytest.mark.parametrize("given", ['{"tiers": []}', "~nobody-of-that-name/kvtier.yaml", "nul\0byte", ""])
def test_a_config_that_is_no_file_is_refused_by_name(given: str) -> None:
    with pytest.raises(SystemExit, match=r"^error: "):
        parse("--kv-connector", "kvtier", "--kv-connector-config", given)


def test_the_config_file_is_found_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves the ~ in ``--kv-connector-config=~/kvtier.yaml`` alone, and Python in a keyword argument."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "kvtier.yaml").write_text("tiers: [{type: host, capacity: 1GiB}]\n")
    args = parse("--kv-connector", "kvtier", "--kv-connector-config=~/kvtier.yaml")
    told = args.unified_cache_external_linker_config["linker_extra_config"]
    assert told == {"config_file": str(tmp_path / "kvtier.yaml")}


@pytest.mark.parametrize("connector", ["kvtier", "kvtier-hicache"])
def test_what_the_machine_cannot_give_is_told_before_the_model_is_loaded(
    tmp_path: Path, connector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os
    import socket

    from kvtier.connectors.sglang import preflight
    from kvtier.testing.redis_servers import kept_port

    def asked(block: str, *arguments: str) -> str:
        file = tmp_path / "kvtier.yaml"
        file.write_text(f"tiers: [{{type: host, capacity: 1GiB}}]\n{block}\n")
        with pytest.raises(SystemExit) as caught:
            parse("--kv-connector", connector, "--kv-connector-config", str(file), *arguments)
        return str(caught.value)

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        told = asked(f"http: {{port: {port}}}", "--port", "1")
        assert told.startswith(f"error: http port {port} on '127.0.0.1'") and "choose another port" in told, told
    port = kept_port()
    told = asked(f"http: {{port: {port}}}", "--port", str(port))
    assert f"http port {port} is SGLang's own (--port {port})" in told, told
    if connector == "kvtier":
        told = asked(f"http: {{port: {port}}}", "--port", str(port + 1), "--tp-size", "2")
        assert f"http port {port} + rank 1 is SGLang's own" in told, told

    (tmp_path / "file").write_text("")
    for path, words in (("file", "is a file"), ("file/below", "lies below")):
        nvme = f"{{type: nvme, path: {tmp_path / path}, capacity: 1GiB}}"
        (tmp_path / "kvtier.yaml").write_text(f"tiers: [{{type: host, capacity: 1GiB}}, {nvme}]\n")
        with pytest.raises(SystemExit, match=rf"^error: nvme tier: path = .*{words}.*name a directory"):
            parse("--kv-connector", connector, "--kv-connector-config", str(tmp_path / "kvtier.yaml"))
    nvme = f"{{type: nvme, path: {tmp_path / 'new'}, capacity: 1GiB}}"
    (tmp_path / "kvtier.yaml").write_text(f"tiers: [{{type: host, capacity: 1GiB}}, {nvme}]\n")
    arguments = ("--kv-connector", connector, "--kv-connector-config", str(tmp_path / "kvtier.yaml"))
    assert parse(*arguments).page_size == 64
    refusing = SimpleNamespace(access=lambda *_: False, geteuid=os.geteuid, W_OK=os.W_OK, X_OK=os.X_OK)
    monkeypatch.setattr(preflight, "os", refusing)  # root may write everywhere
    with pytest.raises(SystemExit, match=r"^error: nvme tier: path = .*cannot write to .*install -d"):
        parse(*arguments)
    assert not (tmp_path / "new").exists()  # nothing is made


@pytest.mark.parametrize("quant", ["nvfp4_offset", "nvfp4_token", "k8v4"])
def test_a_form_that_cannot_hold_the_engines_pages_is_refused_by_name(quant: str, tmp_path: Path) -> None:
    file = tmp_path / "kvtier.yaml"
    method = f"kv_cache_compression_config: [{{algorithm: quantization_for_cold_page, quant: {quant}}}]"
    file.write_text(f"tiers: [{{type: host, capacity: 1GiB}}]\n{method}\n")
    arguments = ("--kv-connector", "kvtier", "--kv-connector-config", str(file))
    with pytest.raises(SystemExit, match=rf"error: --page-size = 8: quant = {quant} needs pages of .*; use nvfp4"):
        parse(*arguments, "--page-size", "8")
    assert parse(*arguments, "--page-size", "16").page_size == 16
    assert parse(*arguments).page_size == 64


def test_requests_may_not_be_held_longer_than_the_engine_lets_them_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", "1.5")
    with pytest.raises(SystemExit, match=r"promote_deadline = 2\.0 s"):
        parse("--kv-connector", "kvtier")


def test_every_hook_was_applied() -> None:
    from kvtier.connectors.sglang import hooks

    hooks.check_engine()
    hooks.verify_installed((*hooks.argument_hooks(), *hooks.scheduler_hooks()))


def test_a_hook_that_was_not_applied_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from kvtier.connectors.sglang import hooks
    from kvtier.errors import EngineError

    target = hooks.scheduler_hooks()[0].target
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {target})
    with pytest.raises(EngineError, match=rf"{target} was not hooked.*kvtier: 0\.5\.23"):
        hooks.verify_installed(hooks.scheduler_hooks())


def test_a_hook_of_another_plugin_is_not_taken_for_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kvtier.connectors.sglang import hooks
    from kvtier.errors import EngineError

    target = hooks.scheduler_hooks()[0].target
    monkeypatch.setitem(HookRegistry._hooks, target, [(HookType.AFTER, lambda *_: None, None)])
    with pytest.raises(EngineError, match=f"{target} was not hooked"):
        hooks.verify_installed(hooks.scheduler_hooks())


def test_another_version_or_signature_is_refused_and_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry

    from kvtier.connectors.sglang import hooks
    from kvtier.errors import EngineError

    monkeypatch.setattr(hooks, "installed", lambda: "0.6.0")
    with pytest.raises(EngineError, match=r"SGLang 0\.6\.0 is installed.*0\.5\.23"):
        hooks.check_engine()
    monkeypatch.undo()

    def other(self: Any, request: Any) -> None: ...

    monkeypatch.setattr(Scheduler, "_prefetch_kvcache", other)
    before = {target: len(found) for target, found in HookRegistry._hooks.items()}
    with pytest.raises(EngineError, match="_prefetch_kvcache takes"):
        hooks.install(hooks.scheduler_hooks())
    assert before == {target: len(found) for target, found in HookRegistry._hooks.items()}


def test_keyword_arguments_of_the_engine() -> None:
    from sglang.srt.entrypoints.engine import Engine

    block = {"tiers": [{"type": "host", "capacity": "1GiB"}]}
    args = Engine.server_args_class(model_path="m", device="cpu", kv_connector="kvtier", kv_connector_config=block)
    assert args.page_size == 64
    assert args.unified_cache_external_linker_config["linker_extra_config"] == {"config": block}


def test_an_engine_in_a_child_process_takes_the_keywords(monkeypatch: pytest.MonkeyPatch) -> None:
    import multiprocessing

    import sglang.srt.entrypoints.engine  # noqa: F401

    from kvtier.connectors.sglang import hooks, plugin

    installed: list[str] = []
    monkeypatch.setattr(hooks, "install", lambda found: installed.extend(hook.target for hook in found))
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: multiprocessing.current_process())
    plugin.register()
    assert {hook.target for hook in hooks.argument_hooks()} <= set(installed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_cache_layout": "vectorized_5d"}, "layout 'vectorized_5d'"),
        ({"page_size": 32}, "pages of 32 tokens"),
        ({"dtype": "float8_e5m2"}, "dtype float8_e5m2"),
    ],
)
def test_pools_that_cannot_be_served_are_named(change: dict[str, Any], words: str) -> None:
    import torch

    from kvtier.connectors.sglang.pools import DevicePool
    from kvtier.errors import EngineError

    buffer = torch.zeros(32, 2, 16)
    plain = {
        "kv_cache_layout": "nhd",
        "page_size": 16,
        "dtype": torch.float32,
        "store_dtype": torch.float32,
        "k_buffer": [buffer],
        "v_buffer": [buffer],
    }
    kind = type("MHATokenToKVPool", (SimpleNamespace,), {})
    assert DevicePool.of(kind(**plain), 16).layers == 1
    with pytest.raises(EngineError, match=words):
        DevicePool.of(kind(**{**plain, **change}), 16)
    with pytest.raises(EngineError, match="KV pool is a MLATokenToKVPoolFP4"):
        DevicePool.of(type("MLATokenToKVPoolFP4", (SimpleNamespace,), {})(**plain), 16)


def test_slots_that_are_not_whole_pages_are_refused() -> None:
    import torch

    from kvtier.connectors.sglang.pools import DevicePool
    from kvtier.errors import EngineError

    buffer = torch.zeros(64, 2, 16)
    kind = type("MHATokenToKVPool", (SimpleNamespace,), {})
    pool = DevicePool.of(
        kind(
            kv_cache_layout="nhd",
            page_size=4,
            dtype=torch.float32,
            store_dtype=torch.float32,
            k_buffer=[buffer],
            v_buffer=[buffer],
        ),
        4,
    )
    assert pool.page_ids(torch.tensor([8, 9, 10, 11, 4, 5, 6, 7]), 2).tolist() == [2, 1]
    for slots in ([9, 10, 11, 12], [8, 9, 11, 10], [8, 9, 10]):
        with pytest.raises(EngineError):
            pool.page_ids(torch.tensor(slots), 1)


def test_the_queue_keeps_its_order_around_held_requests() -> None:
    from kvtier.connectors.sglang import hold

    class Linker:
        started: list[str] = []  # noqa: RUF012

        def waits(self, rid: str) -> bool:
            return rid in ("b", "d")

        def request_started(self, rid: str) -> None:
            self.started.append(rid)

        def drop_all_but(self, waiting: Any) -> None:
            self.kept = list(waiting)

        def has_new(self) -> bool:
            return False

        def look_on(self) -> None:
            self.steps.append("looked on")

        staged = looks_up = False
        steps: list[str] = []  # noqa: RUF012
        budget = SimpleNamespace(begin=lambda: Linker.steps.append("began"), end=lambda: Linker.steps.append("ended"))
        compacted = SimpleNamespace(started=lambda reqs, chunked, abort: None)

        def agree(self, waiting: Any) -> None:
            self.asked = list(waiting)

        ledger = SimpleNamespace(time_engine=lambda call, seconds: None)

    linker = Linker()
    requests = {rid: SimpleNamespace(rid=rid) for rid in "abcdef"}
    scheduler = SimpleNamespace(
        tree_cache=SimpleNamespace(linker=SimpleNamespace(cache_linker=linker)),
        waiting_queue=[requests[rid] for rid in "abcd"],
        chunked_req=None,
    )

    def original(scheduler: Any, delayer: Any, running: Any) -> Any:
        assert [r.rid for r in scheduler.waiting_queue] == ["a", "c"]
        scheduler.waiting_queue = [requests["c"], requests["e"]]  # `a` was admitted, `e` arrived
        return SimpleNamespace(reqs=[requests["a"]]), running

    hold.build_batch(original, scheduler, None, None)
    assert [r.rid for r in scheduler.waiting_queue] == ["b", "c", "d", "e"] == linker.kept
    assert linker.started == ["a"] and linker.steps == ["began", "looked on", "ended"]

    def failing(*_: Any) -> Any:
        raise RuntimeError("the engine's own")

    with pytest.raises(RuntimeError):
        hold.build_batch(failing, scheduler, None, None)
    assert [r.rid for r in scheduler.waiting_queue] == ["b", "c", "d", "e"] and linker.steps[3:] == linker.steps[:3]


def test_a_request_that_is_found_waiting_when_it_would_be_added_stays_in_the_queue() -> None:
    from kvtier.connectors.sglang import hold

    class Adder:
        tree_cache = SimpleNamespace(
            linker=SimpleNamespace(
                cache_linker=SimpleNamespace(request_started=None, waits=lambda rid: rid == "held"),
            )
        )

        def budget_state(self) -> str:
            return "budget"

    def original(adder: Any, req: Any, *rest: Any) -> Any:
        assert rest == (False, None)
        return f"added {req.rid}"

    assert hold.admit(original, Adder(), SimpleNamespace(rid="held"), False, None) == "budget"
    assert hold.admit(original, Adder(), SimpleNamespace(rid="free"), False, None) == "added free"
    other = SimpleNamespace(tree_cache=SimpleNamespace())
    assert hold.admit(original, other, SimpleNamespace(rid="held"), False, None) == "added held"


@pytest.mark.parametrize("name", ["kvtier", "kvtier-hicache"])
def test_an_installation_without_its_native_library_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from kvtier.connectors.sglang import hooks

    def missing() -> None:
        raise ImportError("cannot import name '_native'")

    monkeypatch.setattr(hooks, "check_engine", missing)
    with pytest.raises(SystemExit) as caught:
        parse("--kv-connector", name)
    assert str(caught.value).startswith(f"error: --kv-connector {name}: kvtier is not installed completely (cannot")
    assert "start without the option" in str(caught.value) and "\n" not in str(caught.value)
    assert parse().page_size is None, "who does not ask for it is not affected"


def test_flags_that_cannot_be_handled_are_refused_and_not_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    import argparse

    from kvtier.connectors.sglang import compression_hooks, compression_plugin, hooks, plugin

    def missing() -> None:
        raise ImportError("cannot import name '_native'")

    installed: list[Any] = []
    for module in (hooks, compression_hooks):
        monkeypatch.setattr(module, "argument_hooks", missing)
    monkeypatch.setattr(hooks, "install", lambda some: installed.extend(some))
    monkeypatch.setattr(hooks, "has_scheduler", lambda: False)
    plugin.register()
    compression_plugin.register()
    assert [hook.kind for hook in installed] == ["AFTER", "AROUND"] * 2
    hooks.check_hooks(installed)
    parser = argparse.ArgumentParser()
    for hook in installed[::2]:
        hook.function(None, parser)

    def from_cli_args(cls: Any, args: argparse.Namespace) -> dict[str, Any]:
        return vars(args)

    def started_with(*arguments: str) -> Any:
        args = parser.parse_args(arguments)
        for hook in installed[1::2]:
            args = argparse.Namespace(**hook.function(from_cli_args, object, args))
        return vars(args)

    assert started_with() == {}
    for flag in ("--kv-connector", "--kv-connector-config", "--kv-cache-compression-config"):
        with pytest.raises(SystemExit, match=f"error: {flag}: kvtier is not installed completely"):
            started_with(flag, "x")
