"""Keywords of `Llama`, and models that have no experts."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from running import Llama, Load, Reference, TinyModel, greedy_logits, hooks_off

from moegguf.errors import OptionError


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("n_gpu_layer", "'n_gpu_layers'"), ("expert_cashe", "'expert_cache'"), ("n_ctxx", "'n_ctx'"), ("zzzzzzz", "help")],
)
def test_an_unknown_keyword_names_the_nearest_or_where_they_are_listed(tiny: TinyModel, wrong: str, words: str) -> None:
    with pytest.raises(OptionError, match=f"'{wrong}'.*{words}"):
        Llama(tiny(), **{wrong: 1})


@pytest.mark.parametrize("number", [10, 15, 24, 99, -1])
def test_a_type_that_no_kv_cache_can_have_is_refused(tiny: TinyModel, number: int) -> None:
    with pytest.raises(OptionError, match=f"type_v is {number}"):
        Llama(tiny(), type_v=number, verbose=False)


def test_a_budget_not_given_is_the_environments(tiny: TinyModel, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGGUF_EXPERT_CACHE", "50%")
    assert load(tiny()).plan.n_slots == 32
    assert load(tiny(), expert_cache="25%").plan.n_slots == 16


def without_experts(source: Path, path: Path) -> Path:
    """A model without experts: the layers of a Mixtral with one expert's matrices in place of all."""
    reader, writer = GGUFReader(source), GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or "expert" in field.name or field.name == "general.architecture":
            continue
        sub_type = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        if "ffn_gate_inp" in tensor.name:
            continue
        data = tensor.data[0] if "_exps" in tensor.name else tensor.data
        writer.add_tensor(tensor.name.replace("_exps", ""), np.ascontiguousarray(data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
    assert stats.lookups == stats.n_slots == 0
    assert stats.eval_s > 0
    llm.set_expert_cache("25%")
    llm.cancel()
    llm.resume()


def test_with_the_hooks_off_the_interface_is_the_same(tiny: TinyModel, load: Load) -> None:
    with hooks_off():
        llm = load(tiny(), expert_cache="40%")
    assert llm.session is None
    llm.eval([1, 2])
    assert llm.stats().lookups == 0
    llm.set_expert_cache("25%")
