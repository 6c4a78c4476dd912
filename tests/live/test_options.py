"""Tests keywords of `Llama`: refused values, context and budget, LoRA adapters, and
models without experts."""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from answering import Load, TinyModel, endless, reply
from gguf import GGUFReader, GGUFWriter
from running import (
    N_NEW,
    Llama,
    Reference,
    greedy_logits,
    hooks_off,
    random_prompt,
    share_for,
    write_adapter,
    written,
)
from terminal import moegguf_command

from moegguf.engine.machine import Memory, read_memory
from moegguf.engine.memory import kv_bytes
from moegguf.errors import (
    AllocationError,
    BudgetError,
    ModelFormatError,
    ModelNotFoundError,
    OptionError,
)
from moegguf.gguf.adapter import read_adapter
from moegguf.gguf.experts import read_layout
from moegguf.models.catalog import Catalog
from moegguf.models.recipe import Recipe, parse
from moegguf.native.store import StoreOptions
from moegguf.serving.managed_model import process_key
from moegguf.serving.memory_budget import measure
from moegguf.settings import read_settings


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"n_gpu_layer": 1}, "'n_gpu_layer'.*'n_gpu_layers'"), ({"expert_cashe": 1}, "'expert_cashe'.*'expert_cache'"),
        ({"n_ctxx": 1}, "'n_ctxx'.*'n_ctx'"), ({"zzzzzzz": 1}, "'zzzzzzz'.*help"),
        *(({"type_v": number}, f"type_v is {number}") for number in (10, 15, 24, 99, -1)),
    ],
    ids=str,
)  # fmt: skip
def test_unknown_keywords_and_invalid_types_are_refused(
    tiny: TinyModel, wrong: dict[str, int], words: str
) -> None:
    """The error for an unknown keyword names the most similar keyword, or refers to
    help() if none is similar."""
    with pytest.raises(OptionError, match=words):
        Llama(tiny(), verbose=False, **wrong)


def test_expert_cache_defaults_to_the_environment(
    tiny: TinyModel, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEGGUF_EXPERT_CACHE", "50%")
    assert load(tiny()).plan.n_slots == 32
    assert load(tiny(), expert_cache="25%").plan.n_slots == 16


def without_experts(source: Path, path: Path) -> Path:
    """Writes a model without experts: a Mixtral whose layers have only the matrices of
    expert 0. Returns its path."""
    reader, writer = GGUFReader(source), GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if (
            field.name.startswith("GGUF.")
            or "expert" in field.name
            or field.name == "general.architecture"
        ):
            continue
        sub_type = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        if "ffn_gate_inp" in tensor.name:
            continue
        data = tensor.data[0] if "_exps" in tensor.name else tensor.data
        writer.add_tensor(
            tensor.name.replace("_exps", ""),
            np.ascontiguousarray(data),
            raw_dtype=tensor.tensor_type,
        )
    return written(writer, path)


def test_a_model_without_experts_runs_as_plain_llama_cpp(
    tiny: TinyModel, tmp_path: Path, load: Load, reference: Reference
) -> None:
    dense = without_experts(tiny("tiny-mixtral", "q8_0"), tmp_path / "dense.gguf")
    llm = load(dense, expert_cache="50%")
    assert llm.session is None
    assert not llm.layout.is_moe
    assert np.array_equal(greedy_logits(llm), reference(dense))
    assert llm("some text", max_tokens=4)["choices"][0]["text"]
    stats = llm.stats()
    assert stats.lookups == stats.n_slots == 0 and stats.tokens > 4
    ask = moegguf_command(
        "run", dense, "some text", "-n", 2, "-c", 256, "-t", 1, "--expert-cache"
    )
    done = subprocess.run([*ask, "50%"], capture_output=True, text=True, check=True)
    assert (
        done.stderr
        == "warning: this model has no experts, so a budget for experts has no effect\n"
    )
    assert stats.eval_s > 0
    llm.set_budget(expert_cache="25%")
    llm.cancel()
    llm.resume()


def test_the_interface_is_unchanged_with_hooks_off(tiny: TinyModel, load: Load) -> None:
    with hooks_off():
        llm = load(tiny(), expert_cache="40%")
    assert llm.session is None
    llm.eval([1, 2])
    assert llm.stats().lookups == 0
    llm.set_budget(expert_cache="25%")


def test_absurd_context_lengths_are_refused(tiny: TinyModel) -> None:
    path: Path = tiny()
    n_ctx = 2 * read_memory().total_bytes // (kv_bytes(read_layout(path), 256) // 256)
    for n in (n_ctx, 1 << 30):
        with pytest.raises((AllocationError, OptionError)):
            Llama(path, n_ctx=n, verbose=False)
    with pytest.raises(OptionError):
        Llama(path, n_ctx=-5, verbose=False)


@pytest.mark.parametrize("n_ctx", [300, 1, 0])
def test_a_context_of_any_size_is_filled_to_its_end(
    tiny: TinyModel, load: Load, n_ctx: int
) -> None:
    llm = load(tiny("tiny-mix"), n_ctx=n_ctx, logits_all=False)
    assert llm.n_ctx() % 256 == 0
    assert len(llm.input_ids) == llm.n_ctx() == llm.context_params.n_ctx
    if n_ctx:
        _, timing = reply(llm, prompt="hello", logit_bias=endless(llm), shift=False)
        assert timing.finish == "length"
        assert len(timing.context) == llm.n_ctx()


N_BEFORE = 6  # new tokens before the budget changes


@pytest.mark.parametrize("switch", [True, False], ids=["repacked", "plain"])
@pytest.mark.parametrize("first", ["100%", "60%"])
@pytest.mark.parametrize("second", ["one layer", "40%"])
def test_shrinking_the_budget_during_an_answer_changes_no_logit(
    tiny: TinyModel,
    load: Load,
    reference: Reference,
    first: str,
    second: str,
    switch: bool,
) -> None:
    path = tiny()
    n_slots = {"one layer": 16, "40%": 25}[second]
    llm = load(path, expert_cache=first, store=StoreOptions(repack=switch))
    expected = reference(path, repack=switch)
    llm.eval(random_prompt(llm))
    before = llm.stats()
    for n in range(N_NEW):
        if n == N_BEFORE:
            assert llm.stats().slots_used > n_slots
            llm.set_budget(expert_cache=share_for(path, n_slots))
        llm.eval([int(np.argmax(llm.scores[llm.n_tokens - 1]))])
        if n >= N_BEFORE:
            stats = llm.stats()
            assert stats.slots_used <= n_slots, (
                "the budget has to be met within one token"
            )
            assert stats.n_slots == n_slots
            assert stats.pool_bytes == share_for(path, n_slots)
    assert np.array_equal(llm.scores[: llm.n_tokens], expected)
    assert (llm.stats() - before).evictions > 0
    llm.set_budget(expert_cache=first)
    assert np.array_equal(greedy_logits(llm), expected)
    assert llm.stats().slots_used > n_slots


def test_shrinking_the_budget_returns_memory(tiny: TinyModel, load: Load) -> None:
    path = tiny("tiny-mix", "q8_0")
    llm = load(path, expert_cache="100%")
    greedy_logits(llm, n_new=1)
    llm.session.store.drain()
    full = psutil.Process().memory_info().rss
    llm.set_budget(expert_cache="25%")
    assert full - psutil.Process().memory_info().rss > llm.plan.budget_bytes // 2


def test_shrinking_below_the_slots_of_a_pass_is_refused(
    tiny: TinyModel, load: Load
) -> None:
    path = tiny()
    # The model cannot stream experts, and no prefetch fills a slot while slots are
    # being counted.
    llm = load(
        path, expert_cache="40%", store=StoreOptions(overlap=False), prefetch=False
    )
    with pytest.raises(BudgetError, match="at least") as caught:
        llm.set_budget(expert_cache=share_for(path, 8))
    stated = re.search(r"at least '([^']+)'", str(caught.value))
    assert stated
    llm.set_budget(expert_cache=stated[1])
    with pytest.raises(BudgetError):
        llm.set_budget(expert_cache=1)
    greedy_logits(llm)
    assert 16 <= llm.stats().slots_used == llm.stats().n_slots < llm.plan.n_slots


WIDTH = 64  # rows and columns of the matrix in an adapter for another architecture


@pytest.fixture
def tuned(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> SimpleNamespace:
    """Creates the model "tuned" from a Modelfile with an adapter and a draft model.

    Returns the base model's path, the adapter's path, the catalog, and the entry of
    "tuned".
    """
    monkeypatch.setenv("MOEGGUF_HOME", str(tmp_path / "home"))
    path = tiny("tiny-qwen2moe")
    adapter = write_adapter(
        tmp_path / "my adapter.gguf",
        "qwen2moe",
        "blk.1.ffn_gate_exps.weight",
        (16, 64, 128),
    )
    Catalog().create("tuned", parse(f"FROM {path}\nADAPTER {adapter}\nDRAFT {path}\n"))
    return SimpleNamespace(
        path=path, adapter=adapter, catalog=Catalog(), entry=Catalog().find("tuned")
    )


def test_a_created_model_has_its_adapter_and_draft_model(
    tuned: SimpleNamespace,
) -> None:
    entry, plain = tuned.entry, tuned.catalog.find(str(tuned.path))
    assert (entry.adapter, entry.draft) == (tuned.adapter, tuned.path)
    assert entry.weights != plain.weights and entry.digest != plain.digest
    assert process_key(entry, {}) != process_key(plain, {})
    again = parse(tuned.catalog.modelfile(entry))
    assert (again.adapter, again.draft) == (str(tuned.adapter), str(tuned.path))
    assert tuned.catalog.copy("tuned", "copied").adapter == tuned.adapter


def test_a_load_config_has_adapter_and_draft_within_the_plan(
    tuned: SimpleNamespace,
) -> None:
    plain = tuned.catalog.find(str(tuned.path))
    memory = Memory(1 << 32, 1 << 32, "a test", 0)
    sizes = [
        measure(entry, {}, read_settings(), memory) for entry in (tuned.entry, plain)
    ]
    config = sizes[0].load_config(sizes[0].plan_within(sizes[0].wanted))
    assert (config.spec.lora_path, config.spec.draft) == (
        str(tuned.adapter),
        str(tuned.path),
    )
    assert (
        sizes[0].wanted["RAM"] - sizes[1].wanted["RAM"]
        == read_adapter(tuned.adapter).n_bytes
    )
    asked = measure(tuned.entry, {"draft": "off"}, read_settings(), memory)
    assert asked.load_config(asked.plan_within(asked.wanted)).spec.draft == "off"


def test_a_deleted_adapter_is_named_in_the_error(tuned: SimpleNamespace) -> None:
    tuned.adapter.unlink()
    with pytest.raises(ModelNotFoundError, match=r"my adapter\.gguf"):
        tuned.catalog.find("tuned")


def test_foreign_files_as_adapters_are_refused(
    tuned: SimpleNamespace, tmp_path: Path, load: Load
) -> None:
    other = write_adapter(
        tmp_path / "other.gguf", "llama", "blk.1.attn_q.weight", (WIDTH, WIDTH)
    )
    for adapter, words in (
        (other, "for the architecture 'llama'"),
        (tuned.path, "is not a LoRA adapter"),
    ):
        with pytest.raises(ModelFormatError, match=words):
            tuned.catalog.create(
                "bad", Recipe(from_=str(tuned.path), adapter=str(adapter))
            )
        with pytest.raises(ModelFormatError, match=words):
            load(tuned.path, lora_path=str(adapter))
    with pytest.raises(OptionError, match="as a blob"):
        Catalog(paths=False).create(
            "bad", Recipe(from_="demo", adapter=str(tuned.adapter))
        )


def test_an_adapter_of_another_shape_raises_model_format_error(
    tiny: TinyModel, tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny("tiny-qwen2moe")
    wrong = write_adapter(
        tmp_path / "wrong.gguf",
        read_layout(path).arch,
        "blk.1.ffn_gate_exps.weight",
        (16, 64, 64),
    )
    for trial in ("again", "0"):
        monkeypatch.setenv("MOEGGUF_TRIAL_LOAD", trial)
        with pytest.raises(ModelFormatError, match="does not fit this model"):
            load(path, lora_path=str(wrong))
