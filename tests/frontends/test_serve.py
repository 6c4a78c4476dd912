"""Tests `moegguf serve`: options that reach the workers, preloaded models, and the log.

Also tests stored contexts: after an unload, after a kill, and in `moegguf run`.
"""

import inspect
import json
import os
import re
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import psutil
import pytest
from live.running import write_adapter
from servers import Command, Server, TinyModel, serving
from waiting import until

from moegguf.cli.options import loading_options
from moegguf.cli.serve import serve, serve_settings
from moegguf.engine import load, load_spec
from moegguf.engine.load_spec import LoadSpec
from moegguf.engine.machine import Memory
from moegguf.errors import ModelFormatError, OptionError
from moegguf.gguf.experts import read_layout
from moegguf.models.catalog import Catalog
from moegguf.models.entry import ModelEntry
from moegguf.models.sources import demo_models
from moegguf.options import OPTIONS
from moegguf.server import serve as server
from moegguf.serving.memory_budget import LoadConfig, measure
from moegguf.settings import Settings, n_parallel
from tools.models import write_projector


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Replaces the function that runs a server. Returns a list to which each call to
    `serve` appends its settings."""
    found: list[Settings] = []

    def run(settings: Settings, *_: Any) -> int:
        found.append(settings)
        return 0

    monkeypatch.setattr(server, "listen", lambda host: socket.socket())
    monkeypatch.setattr(server, "run_server", run)
    return found


def test_flags_of_serve_reach_the_workers_and_wrong_names_are_refused(
    started: list[Settings], tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(os.environ)
    assert (
        serve()
        == serve(strategy="promoe", warm_start=False, policy="lru", expert_cache="25%")
        == 0
    )
    assert dict(os.environ) == before
    plain, chosen = (size_of(tiny(), settings) for settings in started)
    # Options without a flag are not sent: the worker reads them from its environment.
    assert plain.options.keys().isdisjoint(("strategy", "warm_start", "policy"))
    assert [chosen.options[name] for name in ("strategy", "warm_start", "policy")] == [
        "promoe",
        False,
        "lru",
    ]
    assert chosen.plan and plain.plan and chosen.plan.n_slots * 4 == plain.plan.n_slots
    for wrong in ({"strategy": "promo"}, {"policy": "promo"}):
        with pytest.raises(OptionError, match="promo"):
            serve(**wrong)
    monkeypatch.setenv("MOEGGUF_STRATEGY", "promo")
    with pytest.raises(OptionError, match="no strategy 'promo'"):
        serve()
    assert len(started) == 2


def size_of(model: Path | ModelEntry, settings: Settings) -> LoadConfig:
    """Returns the load configuration that a server with these settings and 4 GiB of
    memory sends to a worker."""
    entry = (
        model if isinstance(model, ModelEntry) else Catalog(paths=True).find(str(model))
    )
    size = measure(
        entry, {"n_ctx": 256}, settings, Memory(1 << 32, 1 << 32, "a test", 0)
    )
    return size.load_config(size.plan_within({"RAM": 1 << 32}))


def test_an_environment_placement_without_a_gpu_adds_a_reason_to_the_plan(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (load, load_spec):
        monkeypatch.setattr(module, "has_gpu", lambda: False)
    monkeypatch.setenv("MOEGGUF_PLACEMENT", "slots")
    layout = read_layout(tiny())
    assert (
        "sees no GPU: the CPU computes every layer"
        in load.plan_here(layout, LoadSpec.of({})).reasons[-1]
    )
    monkeypatch.setenv("MOEGGUF_PLACEMENT", "auto")
    assert not any(
        "sees no GPU" in reason
        for reason in load.plan_here(layout, LoadSpec.of({})).reasons
    )


def test_flags_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "TRUST_NETWORK": "10.0.0.0/8",
        "API_KEY": "k",
        "NUM_PARALLEL": "3",
        "MEMORY": "1GiB",
    }.items():
        monkeypatch.setenv(f"MOEGGUF_{name}", value)
    found = serve_settings(1, {"trusted": (), "api_keys": (), "memory_bytes": 5})
    assert (found.trusted, found.api_keys, found.memory_bytes) == ((), ("k",), 5)
    assert (
        loading_options({"n_parallel": 0}, ["n_parallel"]) == {} and n_parallel() == 3
    )
    assert found.host.port == 1


def test_load_options_of_serve_reach_the_workers(
    started: list[Settings], tiny: TinyModel
) -> None:
    serve(
        n_ctx=512,
        n_threads=3,
        type_k="q8_0",
        predictor="skip",
        prefetch=True,
        log_level="debug",
    )
    (settings,) = started
    found = size_of(tiny(), settings)
    spec = found.spec
    assert (settings.loading["n_ctx"], settings.debug) == (512, True)
    assert (spec.n_threads, spec.type_k, spec.type_v) == (3, 8, 1)
    assert spec.flash_attn is None
    assert found.options == {"verbose": True, "predictor": "skip", "prefetch": True}


def test_serve_has_every_load_option_of_run() -> None:
    load = [
        name
        for name, option in OPTIONS.items()
        if option.flags and option.scope == "load"
    ]
    assert set(load) <= inspect.signature(serve).parameters.keys()


def test_serve_applies_mmproj_and_adapter_to_its_one_model(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[ModelEntry] = []
    monkeypatch.setattr(server, "listen", lambda host: socket.socket())
    monkeypatch.setattr(
        server,
        "run_server",
        lambda _settings, _listener, _start, models: given.extend(models) or 0,
    )
    path = tiny("tiny-qwen2moe")
    adapter = write_adapter(
        tmp_path / "a.gguf", "qwen2moe", "blk.1.ffn_gate_exps.weight", (16, 64, 128)
    )
    projector = write_projector(tmp_path / "p.gguf", "mlp", 64)
    serve(
        models=[str(path)],
        mmproj=str(projector),
        lora_path=str(adapter),
        lora_scale=0.5,
    )
    (entry,) = given
    assert (entry.mmproj, entry.adapter) == (projector, adapter)
    assert entry.weights != Catalog().find(str(path)).weights
    found = size_of(entry, Settings(loading={"lora_scale": 0.5}))
    assert found.spec.projector and found.spec.projector.path == projector
    assert found.spec.lora_path == str(adapter)
    assert (found.options["mmproj"], found.options["lora_scale"]) == (
        str(projector),
        0.5,
    )
    assert (
        "lora_scale" not in size_of(path, Settings(loading={"lora_scale": 0.5})).options
    )
    catalog = Catalog(paths=False, given=given)
    assert catalog.find(entry.name) is entry
    write_adapter(
        tmp_path / "b.gguf", "qwen2moe", "blk.0.ffn_gate_exps.weight", (16, 64, 128)
    ).rename(adapter)
    assert catalog.find(entry.name).weights != entry.weights
    adapter.rename(tmp_path / "gone.gguf")
    # The entry remains, although its adapter's file is gone.
    assert catalog.find(entry.name) is entry
    (tmp_path / "gone.gguf").rename(adapter)
    for models in (None, [str(path), "demo"]):
        with pytest.raises(
            OptionError, match="with --mmproj, exactly one model must be named"
        ):
            serve(models=models, mmproj=str(projector))
    with pytest.raises(ModelFormatError, match="is not a LoRA adapter"):
        serve(models=[str(path)], lora_path=str(projector))
    with pytest.raises(OptionError, match="placement 'cpu' uses no GPU"):
        serve(placement="cpu", n_gpu_layers=-1)


def test_catalog_finds_a_given_model_before_the_demo() -> None:
    given = replace(next(demo_models()), system="given")
    assert Catalog(paths=False, given=[given]).find("demo") is given


@pytest.mark.parametrize("form", ["text", "json"])
def test_serve_preloads_models_and_logs_each_request(
    tmp_path: Path, tiny: TinyModel, form: str
) -> None:
    file = tmp_path / "my model.gguf"
    file.symlink_to(tiny())
    arguments = (
        "demo",
        str(file),
        "--log-level",
        "info",
        "--log-format",
        form,
        "--ctx",
        "256",
    )
    with serving(tmp_path, *arguments) as served:
        loaded = until(lambda: len(found := served.loaded()) == 2 and found)
        assert loaded["my-model:latest"]["context_length"] == 256
        assert loaded["demo:latest"]["moe"]["expert_share"] == 1.0
        assert served.call("/budget?model=demo").json["n_slots"] > 0
        assert served.call("/nowhere").status == 404
        assert (
            served.call(
                "/api/generate", {"model": "demo", "prompt": "a", "raw": True}
            ).status
            == 200
        )
        kept = {model["expires_at"] for model in served.loaded().values()}
        # Neither model expires, not even after a request without keep_alive.
        assert len(kept) == 1
    lines = served.log().splitlines()
    assert any("loaded my-model:latest" in line for line in lines)
    (line,) = (line for line in lines if "GET /nowhere 404" in line)
    if form == "json":
        found = json.loads(line)
        assert (found["level"], found["path"], found["status"]) == (
            "info",
            "/nowhere",
            404,
        ) and found["seconds"] >= 0


TEXT = "The history of the mill beside the river is long. " * 12
ASKED = {
    "model": "demo",
    "raw": True,
    "stream": False,
    "options": {"num_thread": 1, "temperature": 0, "num_predict": 9},
}


def generate(server: Server, text: str = TEXT, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = server.call(
        "/api/generate", {**ASKED, "prompt": text, "logprobs": True, **more}
    ).json
    return found


def counts(answer: dict[str, Any]) -> tuple[int, int]:
    n_cached = answer.get("prompt_cached_count", 0)
    return answer["prompt_eval_count"] - n_cached, n_cached


def kill(server: Server) -> None:
    workers = psutil.Process(server.pid).children(recursive=True)
    os.kill(server.pid, signal.SIGKILL)
    for worker in workers:
        worker.kill()
    psutil.wait_procs(workers)
    server.process.wait()


def test_stored_contexts_survive_an_unload_and_a_kill(tmp_path: Path) -> None:
    store = {"MOEGGUF_CONTEXT_STORE": "100MiB"}
    with serving(tmp_path, **store) as server:
        first = generate(server)
        n_prompt, n_cached = counts(first)
        assert n_prompt > 128 and n_cached == 0
        generate(server, "", keep_alive=0)
        again = generate(server)
        n_kept = n_prompt - 1
        assert counts(again) == (n_prompt - n_kept, n_kept)
        assert (again["response"], again["logprobs"]) == (
            first["response"],
            first["logprobs"],
        )
        kill(server)
    with serving(tmp_path, **store) as server:
        again = generate(server)
        assert counts(again) == (n_prompt - n_kept, n_kept)
        assert (again["response"], again["logprobs"]) == (
            first["response"],
            first["logprobs"],
        )
        generate(server)
        (loaded,) = server.call("/api/ps").json["models"]
        memory, computed = n_prompt - 1, n_prompt - n_kept + 1
        assert loaded["moe"]["prompt_tokens"] == {
            "computed": computed,
            "memory": memory,
            "disk": n_kept,
        }
        metrics = server.call("/metrics").text
        assert (
            f'moegguf_prompt_tokens_disk_total{{model="demo:latest"}} {n_kept}.0'
            in metrics
        )
        assert (
            f'moegguf_prompt_tokens_cached_total{{model="demo:latest"}} {n_kept + memory}.0'
            in metrics
        )


@pytest.fixture
def mine(here: Command, tmp_path: Path) -> Callable[..., CompletedProcess[str]]:
    own = {"MOEGGUF_HOME": str(tmp_path / "home"), "MOEGGUF_HOST": "127.0.0.1:9"}
    return lambda *arguments: here(*arguments, **own)


def test_run_reuses_stored_contexts_that_contexts_lists_and_clears(
    mine: Callable[..., CompletedProcess[str]],
) -> None:
    assert mine("contexts").stdout.split() == [
        "MODEL",
        "TOKENS",
        "LONGEST",
        "SIZE",
        "USED",
    ]
    run = (
        "run",
        "demo",
        "--verbose",
        "--temperature",
        "0",
        "-n",
        "5",
        "--context-store",
        "100MiB",
        TEXT,
    )
    first, second = mine(*run), mine(*run)
    assert first.stdout == second.stdout
    assert "prompt cached" not in first.stderr
    found = re.search(
        r"prompt cached: +(\d+) token\(s\), \1 from disk\n", second.stderr
    )
    assert found and int(found[1]) >= 128
    (listed,) = json.loads(mine("contexts", "--json").stdout)
    assert listed["longest_tokens"] > int(found[1])
    row = rf"\n{listed['model']} +{listed['tokens']} +{listed['longest_tokens']} +\d.* [KM]B +.* ago\n"
    assert re.search(row, mine("contexts").stdout)
    missing = mine("contexts", "clear", "unknown")
    assert (
        missing.returncode == 1
        and "`moegguf contexts` lists the models" in missing.stderr
    )
    assert re.fullmatch(
        r"deleted \d.* [KM]B of contexts\n",
        mine("contexts", "clear", listed["model"]).stdout,
    )
    assert json.loads(mine("contexts", "--json").stdout) == []
    assert mine("contexts", "clear", "--all").stdout == "deleted 0 B of contexts\n"


def test_an_unusable_context_folder_prints_one_warning(
    mine: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "home" / "cache").mkdir(parents=True)
    (tmp_path / "home" / "cache" / "contexts").write_text("not a folder")
    run = ("run", "demo", "--temperature", "0", "-n", "5", "--context-store")
    without, done = mine(*run, "0", TEXT), mine(*run, "auto", TEXT)
    assert done.stdout == without.stdout
    assert done.returncode == 0
    assert done.stderr.count("not kept on disk") == 1
