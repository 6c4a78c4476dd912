"""Tests that commands and `Llama` make equal plans from equal options on one machine.

Each of ROWS specifies a model, flags, environment variables and GPUs. `serve`, `run`,
`batch` and `estimate` get the flags, and `Llama` gets keywords. A command that lacks
one of the flags is skipped. `run` and `batch` plan for one sequence. `Llama` has the
defaults of llama-cpp-python, so tests pass the commands' defaults (COMMAND_DEFAULTS of
`moegguf.options`) to it. `bench` has the batch and pass sizes of llama-bench, so tests
compare `bench` with a `Llama` of these sizes.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main
from gguf_builder import U32, moe
from live.running import write_adapter

from moegguf.bench import measure
from moegguf.cli import bench as bench_command
from moegguf.cli import run as run_command
from moegguf.cli.app import app
from moegguf.cli.batch import batch as batch_command
from moegguf.cli.model_commands import estimate as estimate_command
from moegguf.engine import devices, llama, machine
from moegguf.engine.cost import Speeds
from moegguf.engine.llama import Llama
from moegguf.engine.load_spec import LoadSpec
from moegguf.engine.machine import DiskSpeed
from moegguf.engine.plan import Plan
from moegguf.engine.speeds import KnownSpeeds
from moegguf.errors import ModelFormatError, MoeggufError
from moegguf.gguf.reader import ggml_type
from moegguf.models.catalog import Catalog
from moegguf.options import OPTIONS
from moegguf.quantities import GIB, Link
from moegguf.server import serve as server
from moegguf.serving.memory_budget import LoadConfig
from moegguf.serving.model_manager import ModelManager
from moegguf.serving.worker import open_model
from moegguf.serving.worker_process import WorkerProcess
from moegguf.terminal import facts
from tools.models import write_projector

# `app` would build the parsers of all commands for each call.
PARSER = typer.main.get_command(app)
TIGHT = 700 << 20  # free memory in bytes, too little for the whole "large" model
TRAINED = 32768  # tokens of context
CONTEXT = 2048


@dataclass(frozen=True)
class Row:
    """Options of one load, and the machine on which the load is planned.

    `flags` are options of commands, and `keywords` are further options of `Llama`.
    `gpus` lists the free bytes of each GPU. `free_bytes` is the free RAM.
    """

    flags: dict[str, Any] = field(default_factory=dict)
    model: str = "moe"
    environment: dict[str, str] = field(default_factory=dict)
    keywords: dict[str, Any] = field(default_factory=dict)
    gpus: tuple[int, ...] = ()
    free_bytes: int = 20 * GIB


def row(model: str = "moe", **given: Any) -> Row:
    """Returns a row for `model`. A keyword that is not a field of Row becomes a
    flag."""
    fields = {
        name: given.pop(name)
        for name in list(given)
        if name in Row.__dataclass_fields__
    }
    return Row(given, model, **fields)


ONE, TWO = (3 * GIB,), (3 * GIB, 2 * GIB)
ROWS = {
    "nothing": row(),
    "context": row(n_ctx=CONTEXT),
    "the model's own context": row(n_ctx=0),
    "context of the environment": row(
        environment={"CONTEXT_LENGTH": "4096"}, keywords={"n_ctx": 4096}
    ),
    "a flag before the environment": row(
        n_ctx=CONTEXT, environment={"CONTEXT_LENGTH": "4096"}
    ),
    "quantised keys": row(type_k="q8_0", n_ctx=CONTEXT),
    "quantised values": row(type_v="q8_0", n_ctx=CONTEXT),
    "both quantised": row(type_k="q8_0", type_v="q4_0", n_ctx=CONTEXT),
    "wide values": row(type_v="f32", n_ctx=CONTEXT),
    "types of the environment": row(
        n_ctx=CONTEXT,
        environment={"KV_CACHE_TYPE": "q8_0"},
        keywords={"type_k": "q8_0", "type_v": "q8_0"},
    ),
    "keys of the environment, values of a flag": row(
        type_v="f16",
        n_ctx=CONTEXT,
        environment={"KV_CACHE_TYPE": "q8_0"},
        keywords={"type_k": "q8_0"},
    ),
    "flash attention": row(
        environment={"FLASH_ATTENTION": "1"}, keywords={"flash_attn": True}
    ),
    "no flash attention": row(
        environment={"FLASH_ATTENTION": "0"}, keywords={"flash_attn": False}
    ),
    "no flash attention, quantised values": row(
        type_v="q8_0",
        environment={"FLASH_ATTENTION": "0"},
        keywords={"flash_attn": True},
    ),
    "several at once": row(n_parallel=4, n_ctx=CONTEXT),
    "several of the environment": row(
        environment={"NUM_PARALLEL": "3"}, keywords={"n_seq_max": 3}
    ),
    "several with a KV cache": row(n_parallel=4, kv_tokens=5000, n_ctx=CONTEXT),
    "a KV cache of the environment": row(
        n_parallel=4,
        n_ctx=CONTEXT,
        environment={"KV_TOKENS": "5000"},
        keywords={"kv_tokens": 5000},
    ),
    "a budget in bytes": row(expert_cache="300KiB"),
    "a budget in percent": row(expert_cache="50%"),
    "a budget of the environment": row(environment={"EXPERT_CACHE": "25%"}),
    "budget auto": row(expert_cache="auto", n_ctx=CONTEXT),
    "little memory": row("large", free_bytes=TIGHT),
    "little memory and a budget": row("large", free_bytes=TIGHT, expert_cache="80%"),
    "little memory for several": row(
        "large", free_bytes=TIGHT, n_parallel=4, n_ctx=8192
    ),
    "drafts of the text": row(draft="ngram"),
    "drafts of heads": row("heads", draft="mtp"),
    "drafts of heads where bits allow": row("heads"),
    "no drafts": row("heads", draft="off"),
    "drafts of the environment": row("heads", environment={"DRAFT": "off"}),
    "a projector": row("images", n_ctx=CONTEXT),
    "an adapter": row("adapted", n_ctx=CONTEXT),
    "a strategy without overlap": row(strategy="none", expert_cache="10%"),
    "a strategy of the environment": row(
        expert_cache="10%", environment={"STRATEGY": "moe-infinity"}
    ),
    "embeddings": row("embeddings", n_ctx=CONTEXT),
    "embeddings, nothing said": row("embeddings"),
    "a dense model": row("dense"),
    "a dense model with a context": row("dense", n_ctx=CONTEXT, type_k="q8_0"),
    "a hybrid": row("hybrid"),
    "a hybrid for several": row("hybrid", n_parallel=4, n_ctx=CONTEXT),
    "a GPU": row(gpus=ONE, placement="auto"),
    "slots": row(gpus=ONE, placement="slots", vram_cache="40%", expert_cache="60%"),
    "whole layers": row(gpus=ONE, placement="layers", vram_cache="50%"),
    "no GPU": row(gpus=ONE, placement="cpu"),
    "a placement of the environment": row(
        gpus=ONE, environment={"PLACEMENT": "layers", "VRAM_CACHE": "30%"}
    ),
    "a GPU and a KV cache": row(
        gpus=ONE, placement="slots", n_parallel=4, n_ctx=CONTEXT, type_v="q8_0"
    ),
    "flags before a placement and budgets of the environment": row(
        gpus=ONE,
        n_gpu_layers=-1,
        placement="layers",
        vram_cache="40%",
        environment={"PLACEMENT": "cpu", "VRAM_CACHE": "30%,20%"},
    ),
    "every layer": row(gpus=ONE, n_gpu_layers=-1, placement="auto"),
    "some layers": row(gpus=ONE, n_gpu_layers=3, vram_cache="40%", placement="slots"),
    "no layer": row(gpus=ONE, n_gpu_layers=0),
    "a GPU and images": row("images", gpus=ONE, placement="slots", n_ctx=CONTEXT),
    "two GPUs": row(gpus=TWO, placement="slots"),
    "a budget of two GPUs": row(gpus=TWO, vram_cache="40%", placement="auto"),
    "two budgets": row(gpus=TWO, vram_cache="30%,20%", placement="slots"),
}
OF_COMMANDS: dict[str, Any] = {"n_ctx": None, "flash_attn": None, "embedding": None}
"""Keywords of `Llama` that commands leave open. The defaults of llama-cpp-python are
512, False and False."""
OF_BENCH: dict[str, Any] = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "draft": "off", "embedding": False
}  # fmt: skip
"""Keywords of a `Llama` with the sizes of llama-bench. The context is as long as the
longest test, 512 tokens."""
FLAGS_OF_BENCH = {
    "expert_cache",
    "vram_cache",
    "placement",
    "type_k",
    "type_v",
    "strategy",
    "n_gpu_layers",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("one-load")

    def model(
        name: str, n_layer: int = 6, arch: str = "qwen2moe", **options: Any
    ) -> Any:
        options.setdefault("skip_kv", ())
        left_out = {"skip_kv": (*options["skip_kv"], "context_length")}
        built = moe(arch, n_layer=n_layer, n_expert=16, n_used=4, **options | left_out)
        return built.add(f"{arch}.context_length", U32, TRAINED)

    dense = model("dense", skip_kv=("expert_count", "expert_used_count"))
    dense.tensors = [
        tensor for tensor in dense.tensors if "exps" not in str(tensor.name)
    ]
    hybrid = model("hybrid", arch="qwen35moe")
    for key, value in {
        "inner_size": 128,
        "state_size": 16,
        "conv_kernel": 4,
        "group_count": 1,
    }.items():
        hybrid.add(f"qwen35moe.ssm.{key}", U32, value)
    built = {
        "moe": model("moe"),
        "large": model("large", n_layer=8, n_embd=512, n_ff=512),
        "heads": heads(),
        "images": model("images"),
        "adapted": model("adapted"),
        "embeddings": model("embeddings").add("qwen2moe.pooling_type", U32, 1),
        "dense": dense,
        "hybrid": hybrid,
    }
    return {name: found.write(folder / f"{name}.gguf") for name, found in built.items()}


def heads() -> Any:
    """Returns a model of 7 layers, the last of them a layer for multi-token
    prediction."""
    arch = "glm4moe"
    found = moe(arch, n_layer=7, n_expert=16, n_used=4, skip_kv=("context_length",))
    found.add(f"{arch}.context_length", U32, TRAINED).add(
        f"{arch}.nextn_predict_layers", U32, 1
    )
    return found.tensor("blk.6.nextn.eh_proj.weight", 128, 64)


@pytest.fixture(scope="module")
def beside(models: dict[str, Path]) -> dict[str, dict[str, Path]]:
    """Returns {model: {keyword: a file that is loaded with the model}}."""
    folder = models["moe"].parent
    adapter = write_adapter(
        folder / "adapter.gguf", "qwen2moe", "blk.0.ffn_gate_exps.weight", (16, 32, 64)
    )
    images = write_projector(folder / "mmproj.gguf", "mlp", 64)
    return {"images": {"mmproj": images}, "adapted": {"lora_path": adapter}}


class FakeDevice:
    """A GPU as ggml lists it."""

    kind, backend, description, handle = "GPU", "CUDA", "a card", 0

    def __init__(self, index: int, free_bytes: int) -> None:
        self.name = f"GPU{index}"
        self.free_bytes = free_bytes

    def memory(self) -> tuple[int, int]:
        return self.free_bytes, 8 * GIB


class Process:
    """A stand-in for a worker process. `load` records the configuration and raises an
    error."""

    configs: list[LoadConfig]

    def __init__(self) -> None:
        self.exited: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def load(self, config: LoadConfig, *_: Any, **__: Any) -> Any:
        self.configs.append(config)
        raise ModelFormatError("this process loads nothing.")

    async def close(self, *_: Any) -> None:
        if not self.exited.done():
            self.exited.set_result(None)


@pytest.fixture
def given_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Row], None]:
    """Returns a function that sets the free memory, the GPUs, their speeds and the
    environment variables of a row."""
    speeds = Speeds.supposed(448e9, Link(24e9, 1e-5), 20e9, "put in")

    def set_up(row: Row) -> None:
        memory = SimpleNamespace(total=64 * GIB, available=row.free_bytes)
        there = [FakeDevice(index, free) for index, free in enumerate(row.gpus)]
        monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: memory)
        monkeypatch.setattr(machine, "cgroup_levels", lambda *_: iter(()))
        monkeypatch.setattr(machine, "_affinity", lambda: {0, 1})
        monkeypatch.setattr(devices, "all_devices", lambda: there)
        monkeypatch.setattr(KnownSpeeds, "known", lambda *_: speeds)
        # `estimate` prints these speeds, and makes its plan without them. Measuring
        # both takes 0.15 s.
        monkeypatch.setattr(machine, "memory_read_speed", lambda *_: 1e10)
        monkeypatch.setattr(
            facts, "expert_read_speed", lambda *_: DiskSpeed(1e9, direct=True)
        )
        listed = json.dumps([vars(device) for device in devices.gpus()]).encode()
        monkeypatch.setattr(
            devices.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=listed)
        )
        monkeypatch.delenv("MOEGGUF_PLACEMENT", raising=False)
        for name, value in row.environment.items():
            monkeypatch.setenv(f"MOEGGUF_{name}", value)

    return set_up


class LoadedError(MoeggufError):
    """Carries the plan of a `Llama` out of its constructor before anything is
    loaded."""

    def __init__(self, plan: Plan) -> None:
        super().__init__("a model would be loaded now.")
        self.plan = plan


@pytest.fixture(autouse=True)
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LoadConfig]]:
    """Keeps workers and models from loading. Returns a list that collects the
    configurations sent to workers."""
    configs = list[LoadConfig]()
    monkeypatch.setattr(Process, "configs", configs, raising=False)

    async def start(*_: Any, **__: Any) -> Process:
        return Process()

    def load(load_plan: Any, *_: Any) -> None:
        raise LoadedError(load_plan.plan)

    monkeypatch.setattr(WorkerProcess, "start", start)
    monkeypatch.setattr(llama, "Loader", load)
    return configs


def plan_of(call: Callable[[], Any]) -> Plan:
    """Returns the plan of the `Llama` that `call` would load."""
    with pytest.raises(LoadedError) as found:
        call()
    return found.value.plan


def plan_sent(configs: list[LoadConfig]) -> Plan:
    """Returns the plan most recently sent to a worker. Asserts that the worker's
    `Llama` would have an equal plan, and that the worker checks no options again."""
    config = configs[-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(LoadSpec, "of")
        has = plan_of(lambda: open_model(config, lambda _: None))
    assert config.plan == has, "a worker made a plan"
    return has


def takes(command: Callable[..., Any], row: Row, files: dict[str, Path]) -> bool:
    """Returns True if a command has options for all flags of a row and for these
    files."""
    return (
        row.flags.keys() | files.keys() <= inspect.signature(command).parameters.keys()
    )


def of_llama(path: Path, row: Row, files: dict[str, Path], **keywords: Any) -> Plan:
    options = (
        OF_COMMANDS
        | row.flags
        | row.keywords
        | {name: str(file) for name, file in files.items()}
        | keywords
    )
    if "n_parallel" in options:
        options["n_seq_max"] = options.pop("n_parallel")
    numbers = {
        name: ggml_type(options[name])
        for name in ("type_k", "type_v")
        if name in options
    }
    return plan_of(lambda: Llama(path, **options | numbers))


def call(command: str, *arguments: str, **flags: Any) -> Any:
    """Runs a command line."""
    words = [command, *arguments]
    for name, value in flags.items():
        words += [OPTIONS[name].flags[0], str(value)]
    return PARSER(words, standalone_mode=False)


def of_serve(
    path: Path,
    row: Row,
    files: dict[str, Path],
    patch: pytest.MonkeyPatch,
    configs: list[LoadConfig],
) -> Plan:
    def run(settings: Any, _listener: Any, _print: Any, entries: Any) -> int:
        async def load() -> None:
            async with ModelManager(Catalog(given=entries), settings) as manager:
                with pytest.raises(ModelFormatError, match="loads nothing"):
                    await manager.load(entries[0])

        asyncio.run(load())
        return 0

    patch.setattr(server, "listen", lambda host: socket.socket())
    patch.setattr(server, "run_server", run)
    call("serve", str(path), **row.flags, **files)
    return plan_sent(configs)


def of_run(
    path: Path,
    row: Row,
    files: dict[str, Path],
    patch: pytest.MonkeyPatch,
    configs: list[LoadConfig],
) -> Plan:
    patch.setattr(run_command, "_read_prompt", lambda words: "hi")
    with pytest.raises(MoeggufError, match="loads nothing"):
        call("run", "--local", str(path), "hi", **row.flags, **files)
    return plan_sent(configs)


def of_batch(path: Path, row: Row, tmp_path: Path, configs: list[LoadConfig]) -> Plan:
    url, body = (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}]},
    )
    if row.model == "embeddings":
        url, body = "/v1/embeddings", {"input": [{"text": "hi"}]}
    requests = tmp_path / "requests.jsonl"
    requests.write_text(
        json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body})
        + "\n"
    )
    assert (
        call("batch", "--local", "--model", str(path), str(requests), **row.flags) == 1
    )
    return plan_sent(configs)


def of_estimate(
    path: Path, row: Row, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    call("estimate", "--json", str(path), **row.flags, **files)
    return dict(json.loads(capsys.readouterr().out)["plan"])


def of_bench(path: Path, row: Row, patch: pytest.MonkeyPatch) -> Plan:
    specs = list[Any]()

    def measured(groups: Any, *_: Any) -> list[dict[str, Any]]:
        specs.extend(system.spec for group in groups for system in group)
        return []

    patch.setattr(bench_command, "_measure", measured)
    chosen = {
        name: value for name, value in row.flags.items() if name in FLAGS_OF_BENCH
    }
    call("bench", "-m", str(path), "-p", "512", "-n", "128", **chosen)
    return plan_of(lambda: measure.load(specs[0]))


def same(plan: Plan, printed: dict[str, Any]) -> None:
    """Asserts that the facts that `estimate` has printed are the facts of this plan."""
    assert json.loads(json.dumps(plan.facts())) == printed


@pytest.mark.parametrize("name", ROWS)
def test_commands_and_llama_make_the_same_plan(
    name: str,
    models: dict[str, Path],
    beside: dict[str, dict[str, Path]],
    given_machine: Callable[[Row], None],
    nothing_loads: list[LoadConfig],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = ROWS[name]
    path, files = models[row.model], beside.get(row.model, {})
    given_machine(row)
    expected = of_llama(path, row, files)
    assert of_serve(path, row, files, monkeypatch, nothing_loads) == expected, "serve"
    alone = of_llama(path, row, files, n_seq_max=1, kv_tokens=None)
    # `run` has only one user, so it plans for one sequence.
    if takes(run_command.run, row, files):
        assert of_run(path, row, files, monkeypatch, nothing_loads) == alone, "run"
    if takes(estimate_command, row, files):
        same(expected, of_estimate(path, row, files, capsys))
    if takes(batch_command, row, files):  # a single request needs only one sequence
        assert of_batch(path, row, tmp_path, nothing_loads) == alone, "batch"


@pytest.mark.parametrize(
    "given", [row(gpus=ONE), row(environment={"KERNELS": "upstream"})]
)
def test_auto_loads_no_heads_where_it_never_drafts(
    given: Row, models: dict[str, Path], given_machine: Callable[[Row], None]
) -> None:
    given_machine(given)
    auto, off = (
        of_llama(models["heads"], given, {}, draft=draft) for draft in ("auto", "off")
    )
    assert auto == off


# The rows that `bench` can repeat: rows without environment variables and without flags
# that it lacks. `bench` sets the context itself, so a row's context has no effect.
MEASURED = [
    name
    for name, row in ROWS.items()
    if row.flags.keys() <= FLAGS_OF_BENCH | {"n_ctx"} and not row.environment
]


@pytest.mark.parametrize("name", MEASURED)
def test_bench_makes_the_plan_of_a_llama_with_equal_sizes(
    name: str,
    models: dict[str, Path],
    given_machine: Callable[[Row], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = ROWS[name]
    given_machine(row)
    path = models[row.model]
    assert of_bench(path, row, monkeypatch) == of_llama(path, row, {}, **OF_BENCH)
