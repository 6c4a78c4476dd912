"""Tests `moegguf.Llama` as a replacement for `llama_cpp.Llama`.

Tests cover loading by name, from_pretrained, pickling, type hints, and faults of
llama_cpp that moegguf does not have.
"""

import inspect
import multiprocessing
import pickle
import pydoc
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering import DEMO, QUESTION, Load, TinyModel, reply
from fake_hub import hub_in_use

import moegguf
from moegguf.engine.llama import Llama
from moegguf.engine.plan import Plan
from moegguf.engine.upstream import LlamaCppOptions, UpstreamLlama
from moegguf.errors import CapabilityError, ModelNotFoundError, OptionError
from moegguf.native import library
from tools import api_page

CHILD_TIMEOUT_S = 60
GREEDY = {"temperature": 0.0, "max_tokens": 12}


def test_a_model_is_opened_by_name(
    tiny: TinyModel, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Path(load("demo").model_path) == DEMO
    monkeypatch.setenv("MOEGGUF_MODELS", str(tiny().parent))
    assert load(tiny().stem).layout.shards[0].path == tiny()
    with pytest.raises(ModelNotFoundError, match="dem"):
        load("dmeo")


def test_shards_with_upper_case_names_are_loaded(
    tiny: TinyModel, load: Load, tmp_path: Path
) -> None:
    known = tiny(n_split=2)
    second = known.with_name(known.name.replace("00001-of", "00002-of"))
    path = tmp_path / "MODEL-00001-of-00002.GGUF"
    path.symlink_to(known)
    (tmp_path / "model-00002-OF-00002.gguf").symlink_to(second)
    llm = load(path, draft=path, flash_attn=None, expert_cache="50%")
    assert llm.model_path == str(path)
    assert llm.create_completion("a", max_tokens=2, temperature=0) is not None


VOCABULARIES = sorted(
    (Path(__file__).parents[2] / "build/vendor/llama.cpp/models").glob(
        "ggml-vocab-*.gguf"
    )
)


@pytest.mark.parametrize("path", VOCABULARIES, ids=[path.stem for path in VOCABULARIES])
def test_vocabulary_files_tokenize_as_recorded_by_llama_cpp(
    load: Load, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEGGUF_TRIAL_LOAD", "again")
    llm = load(path, vocab_only=True)
    texts = (
        path.with_suffix(".gguf.inp")
        .read_bytes()
        .decode()
        .split("\n__ggml_vocab_test__\n")
    )
    recorded = [
        [int(word) for word in line.split()]
        for line in path.with_suffix(".gguf.out").read_text().splitlines()
    ]
    found = [
        llm.tokenize(text.encode(), add_bos=False, special=False) for text in texts
    ]
    assert found[: len(recorded)] == recorded
    assert (
        "hello world"
        in llm.detokenize(llm.tokenize(b"Hello world", add_bos=False)).decode().lower()
    )
    assert llm.session is None and llm.vocabulary.n_tokens == llm.n_vocab()


def test_vocab_only_models_refuse_to_compute(load: Load) -> None:
    llm = load(DEMO, vocab_only=True, embedding=True)
    assert (
        llm.session is None
        and llm.detokenize(llm.tokenize(b"red and blue")) == b"red and blue"
    )
    for call in (
        lambda: llm.eval([1]), lambda: llm("x", max_tokens=1), lambda: llm.embed("x"), lambda: next(llm.generate([1])),
        lambda: llm.create_chat_completion([{"role": "user", "content": "x"}]), lambda: reply(llm, "x"),
    ):  # fmt: skip
        with pytest.raises(CapabilityError, match="load it without vocab_only"):
            call()


def test_options_of_known_wrappers_are_accepted(load: Load) -> None:
    llm = load(
        DEMO,
        f16_kv=True,
        n_parts=-1,
        lora_base=None,
        n_gpu_layers=-1,
        use_mlock=False,
        seed=-1,
        numa=False,
    )
    assert reply(llm, QUESTION, max_tokens=3)[1].answer_tokens == 3


def test_completions_have_the_shapes_of_the_bindings(demo: Llama) -> None:
    whole = demo("What does moegguf", echo=True, stop=["."], **GREEDY)
    assert whole["choices"][0]["text"].startswith("What does moegguf")
    chunks = list(demo("What does moegguf", stream=True, stop=["."], **GREEDY))
    assert (
        "What does moegguf" + "".join(chunk["choices"][0]["text"] for chunk in chunks)
        == whole["choices"][0]["text"]
    )
    messages = [{"role": "user", "content": QUESTION}]
    chat = demo.create_chat_completion(messages, **GREEDY)["choices"][0]["message"]
    assert chat == {
        "role": "assistant",
        "content": reply(demo, QUESTION, max_tokens=12)[0],
    }
    deltas = [
        chunk["choices"][0]["delta"]
        for chunk in demo.create_chat_completion(messages, stream=True, **GREEDY)
    ]
    assert deltas[0] == {"role": "assistant"}
    assert "".join(delta.get("content", "") for delta in deltas) == chat["content"]
    with pytest.raises(
        ValueError, match=r"Requested tokens \(\d+\) exceed context window of 512"
    ):
        demo("word " * 600)


def test_logits_processor_and_logit_bias_both_apply(demo: Llama) -> None:
    vocabulary = demo.vocabulary
    first, second = vocabulary.tokens("red")[0], vocabulary.tokens("blue")[0]

    def neither_wins(_ids: Any, scores: Any) -> Any:
        scores = np.copy(scores)
        scores[first] = 1000.0
        scores[second] = 999.0
        return scores

    processors = library.llama_cpp().LogitsProcessorList([neither_wins])

    def written(**options: Any) -> str:
        text: str = demo("What", max_tokens=1, temperature=0.0, **options)["choices"][
            0
        ]["text"]
        return text

    assert written(logits_processor=processors) == vocabulary.piece(first).decode()
    assert (
        written(logits_processor=processors, logit_bias={second: 2.0})
        == vocabulary.piece(second).decode()
    )
    assert (
        written(logits_processor=processors, logit_bias={str(first): -5.0})
        == vocabulary.piece(second).decode()
    )
    assert written(logit_bias={second: 999.0}) == vocabulary.piece(second).decode()
    assert len(processors) == 1


def test_estimate_equals_the_plan_of_a_load(tiny: TinyModel) -> None:
    plan = Llama.estimate(tiny(), expert_cache="50%", n_ctx=1000)
    assert isinstance(plan, Plan)
    with Llama(
        tiny(), expert_cache="50%", n_ctx=1000, n_threads=1, verbose=False
    ) as llm:
        assert (llm.plan.n_slots, llm.plan.needs) == (plan.n_slots, plan.needs)
    with pytest.raises(OptionError, match="unknown option"):
        Llama.estimate(tiny(), expert_cash="50%")


def greedy_text(llm: Llama) -> str:
    """Returns a greedy answer and closes the model. The test calls this function in
    another process."""
    with llm:
        return reply(llm, QUESTION, max_tokens=12)[0]


def test_a_pickled_model_is_reopened_with_its_options(
    load: Load, tmp_path: Path
) -> None:
    shares: list[float] = []
    llm = load(
        DEMO,
        expert_cache="50%",
        policy="lfu",
        n_ctx=1024,
        progress=shares.append,
        trace=tmp_path / "t.npz",
    )
    pickled = pickle.dumps(llm)
    assert len(pickled) < 5000
    with pickle.loads(pickled) as again:
        assert (again.n_ctx(), again.plan.n_slots, again.decisions()["policy"]) == (
            1024,
            llm.plan.n_slots,
            "lfu",
        )
        assert again.recording is None
    whole = pickle.dumps(
        load(DEMO, expert_cache="50%", strategy="duoserve", n_ctx=1024)
    )
    with pickle.loads(whole) as again:
        assert (
            again.decisions()["predictor"] == "expert-mlp"
            and not again.session.store.options.chunked
        )
    expected = reply(llm, QUESTION, max_tokens=12)[0]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(greedy_text, llm).result(CHILD_TIMEOUT_S) == expected


def test_from_pretrained_opens_the_downloaded_file(tmp_path: Path) -> None:
    with hub_in_use(tmp_path) as hub:
        hub.add("u/r", {"tiny-Q4_0.gguf": DEMO.read_bytes()})
        with Llama.from_pretrained(
            "u/r", local_dir=tmp_path / "here", n_threads=1, verbose=False
        ) as llm:
            assert Path(llm.model_path) == tmp_path / "here" / "tiny-Q4_0.gguf"
            assert reply(llm, "hello", max_tokens=2)[1].answer_tokens == 2


def test_pieces_longer_than_32_bytes_are_complete(
    demo: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama_cpp.Llama reserves 32 bytes for a token, and returns wrong bytes for a
    longer token."""
    bindings = library.llama_cpp()
    text = b"a token of more than 64 bytes: " + b" " * 100

    def piece(
        _vocab: Any, _token: int, buffer: Any, size: int, _strip: int, _special: bool
    ) -> int:
        if size < len(text):
            return -len(text)
        buffer[: len(text)] = text
        return len(text)

    monkeypatch.setattr(bindings, "llama_token_to_piece", piece)
    assert demo.vocabulary.piece(5) == text


ROOT = Path(__file__).resolve().parents[2]

SAMPLE = """
from moegguf import Engine, EngineAnswer, Llama, Sampling

llm = Llama("demo", n_ctx=512, expert_cache="50%", flash_attn=None, verbose=False)
rate: float = llm.stats().hit_rate
engine = Engine("demo", parallel=8, n_ctx=512)
answers: list[EngineAnswer] = engine.generate("a", Sampling(temperature=0.0), max_tokens=8)
text: str = answers[0].text
reveal_type(Llama.estimate("demo"))
"""
MISTAKES = """
from moegguf import Engine, Llama, Sampling

Llama("demo", n_ctxx=512)
Llama("demo", n_ctx="many")
Sampling(temprature=0.0)
Engine("demo").generate(5)
number: int = Engine("demo").generate("a")[0].text
"""


def test_dir_and_pydoc_list_names_before_their_import() -> None:
    assert dir(moegguf) == sorted(moegguf.__all__)
    page = pydoc.plain(pydoc.render_doc(moegguf))
    assert all(
        re.search(rf"\b{name}\b", page) for name in moegguf.__all__ if name[0] != "_"
    )


def test_llama_signature_has_every_keyword_and_documents_its_own() -> None:
    base = UpstreamLlama.__base__
    upstream = {
        name: each
        for name, each in inspect.signature(base.__init__).parameters.items()
        if each.kind == each.KEYWORD_ONLY
    }
    shown = inspect.signature(moegguf.Llama).parameters
    assert set(LlamaCppOptions.__annotations__) == set(upstream)
    assert {name: shown[name].default for name in upstream} == {
        name: each.default for name, each in upstream.items()
    }
    assert not any(each.kind == each.VAR_KEYWORD for each in shown.values())
    documented = set(
        re.findall(
            r"^ {4,8}(\w+): ",
            inspect.getdoc(moegguf.Llama.__init__) or "",
            re.MULTILINE,
        )
    )
    assert set(shown) - set(upstream) <= documented


def test_docs_api_page_is_current() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert page == "\n".join(api_page.page()) + "\n", (
        "run `python -m tools.api_page > docs/api.md`"
    )


def test_mypy_accepts_a_right_program_and_reports_mistakes(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api", reason="mypy is not installed")
    for name, program in (("right", SAMPLE), ("wrong", MISTAKES)):
        (tmp_path / f"{name}.py").write_text(program)
    # Mypy treats other packages as Any, because reading their sources would take most
    # of the time.
    config = tmp_path / "mypy.ini"
    config.write_text(
        "[mypy]\nfollow_imports = skip\n[mypy-moegguf.*]\nfollow_imports = silent\n"
    )
    options = (f"--config-file={config}", f"--cache-dir={tmp_path}")
    recursion_limit = sys.getrecursionlimit()
    written, _, _ = api.run([*options, *map(str, tmp_path.glob("*.py"))])
    # Mypy raises this limit, and other tests in this process would notice the change.
    sys.setrecursionlimit(recursion_limit)
    assert re.findall(r"(\w+)\.py:\d+: error", written) == ["wrong"] * 5, written
    assert 'note: Revealed type is "moegguf.engine.plan.Plan"' in written
