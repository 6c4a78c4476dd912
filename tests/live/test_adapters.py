"""LoRA adapters and draft models by a model's name: from Modelfiles, of a server, and what does not fit."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from live.running import write_adapter

from moegguf.engine.llama import Llama
from moegguf.errors import ModelFormatError, ModelNotFoundError, OptionError
from moegguf.gguf.adapter import read_adapter
from moegguf.gguf.experts import read_layout
from moegguf.models.catalog import Catalog
from moegguf.models.recipe import Recipe, parse
from moegguf.serving.events import LoadOverrides
from moegguf.serving.lease import process_key
from moegguf.serving.memory_budget import measure
from moegguf.settings import read_settings

TinyModel = Callable[..., Path]
Load = Callable[..., Llama]
PROMPT = "An expert is"
WIDTH = 64  # of tiny-qwen2moe


@pytest.fixture
def tuned(tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A catalog with "tuned", made from a Modelfile."""
    monkeypatch.setenv("MOEGGUF_HOME", str(tmp_path / "home"))
    path = tiny("tiny-qwen2moe")
    adapter = write_adapter(tmp_path / "my adapter.gguf", "qwen2moe", "blk.1.ffn_gate_exps.weight", (16, 64, 128))
    Catalog().create("tuned", parse(f"FROM {path}\nADAPTER {adapter}\nDRAFT {path}\n"))
    return SimpleNamespace(path=path, adapter=adapter, catalog=Catalog(), entry=Catalog().find("tuned"))


def test_a_name_has_its_adapter_and_its_draft_model(tuned: SimpleNamespace) -> None:
    entry, plain = tuned.entry, tuned.catalog.find(str(tuned.path))
    assert (entry.adapter, entry.draft) == (tuned.adapter, tuned.path)
    assert entry.weights != plain.weights and entry.digest != plain.digest
    assert process_key(entry, LoadOverrides()) != process_key(plain, LoadOverrides())
    again = parse(tuned.catalog.modelfile(entry))
    assert (again.adapter, again.draft) == (str(tuned.adapter), str(tuned.path))
    assert tuned.catalog.copy("tuned", "copied").adapter == tuned.adapter


def test_a_worker_loads_both_within_the_plan(tuned: SimpleNamespace) -> None:
    plain = tuned.catalog.find(str(tuned.path))
    sizes = [measure(entry, LoadOverrides(), read_settings(), 1 << 32) for entry in (tuned.entry, plain)]
    config = sizes[0].load_config(sizes[0].plan_within(sizes[0].wanted_bytes, 0))
    assert (config.options["lora_path"], config.options["draft"]) == (str(tuned.adapter), str(tuned.path))
    assert sizes[0].wanted_bytes - sizes[1].wanted_bytes == read_adapter(tuned.adapter).n_bytes
    asked = measure(tuned.entry, LoadOverrides(draft="off"), read_settings(), 1 << 32)
    assert asked.load_config(asked.plan_within(asked.wanted_bytes, 0)).options["draft"] == "off"


def test_the_answer_is_that_of_the_adapter(tuned: SimpleNamespace, load: Load) -> None:
    def text(**options: object) -> str:
        llm = load(tuned.path, n_ctx=256, **options)
        return str(llm(PROMPT, max_tokens=16, temperature=0)["choices"][0]["text"])

    assert text(lora_path=tuned.adapter) == text(lora_path=str(tuned.adapter)) != text()
    assert text(lora_path=tuned.adapter, lora_scale=0.0) == text()


def test_an_adapter_that_is_gone_is_missed_by_name(tuned: SimpleNamespace) -> None:
    tuned.adapter.unlink()
    with pytest.raises(ModelNotFoundError, match=r"my adapter\.gguf"):
        tuned.catalog.find("tuned")


def test_what_is_no_adapter_of_the_model_is_refused(tuned: SimpleNamespace, tmp_path: Path, load: Load) -> None:
    other = write_adapter(tmp_path / "other.gguf", "llama", "blk.1.attn_q.weight", (WIDTH, WIDTH))
    for adapter, words in ((other, "for the architecture 'llama'"), (tuned.path, "is not a LoRA adapter")):
        with pytest.raises(ModelFormatError, match=words):
            tuned.catalog.create("bad", Recipe(from_=str(tuned.path), adapter=str(adapter)))
        with pytest.raises(ModelFormatError, match=words):
            load(tuned.path, lora_path=str(adapter))
    with pytest.raises(OptionError, match="as a blob"):
        Catalog(paths=False).create("bad", Recipe(from_="demo", adapter=str(tuned.adapter)))


def test_an_adapter_of_another_shape_ends_no_process(
    tiny: TinyModel, tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny("tiny-qwen2moe")
    wrong = write_adapter(tmp_path / "wrong.gguf", read_layout(path).arch, "blk.1.ffn_gate_exps.weight", (16, 64, 64))
    for trial in ("again", "0"):
        monkeypatch.setenv("MOEGGUF_TRIAL_LOAD", trial)
        with pytest.raises(ModelFormatError, match="does not fit this model"):
            load(path, lora_path=str(wrong))
