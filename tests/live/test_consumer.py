"""What a program that imports moegguf finds: names, documentation, types, and `llama_cpp`."""

import inspect
import os
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

import moegguf
from moegguf.engine.upstream import LlamaCppOptions, UpstreamLlama
from tools import api_page

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


def test_names_are_listed_before_they_are_loaded() -> None:
    assert dir(moegguf) == sorted(moegguf.__all__)
    page = pydoc.plain(pydoc.render_doc(moegguf))
    assert all(re.search(rf"\b{name}\b", page) for name in moegguf.__all__ if name[0] != "_")


def test_every_keyword_is_in_the_signature_and_every_own_one_is_documented() -> None:
    base = UpstreamLlama.__base__
    upstream = {
        name: each
        for name, each in inspect.signature(base.__init__).parameters.items()
        if each.kind == each.KEYWORD_ONLY
    }
    shown = inspect.signature(moegguf.Llama).parameters
    assert set(LlamaCppOptions.__annotations__) == set(upstream)
    assert {name: shown[name].default for name in upstream} == {name: each.default for name, each in upstream.items()}
    assert not any(each.kind == each.VAR_KEYWORD for each in shown.values())
    documented = set(re.findall(r"^ {4,8}(\w+): ", inspect.getdoc(moegguf.Llama.__init__) or "", re.MULTILINE))
    assert set(shown) - set(upstream) <= documented


def test_importing_moegguf_is_enough_for_the_bindings() -> None:
    program = "import moegguf, llama_cpp; print(llama_cpp.Llama is moegguf.Llama.__mro__[2], llama_cpp.__file__)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    printed = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert printed.stdout.startswith("True ") and "moegguf/bindings/llama_cpp" in printed.stdout


def test_the_page_of_the_api_is_current() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert page == "\n".join(api_page.page()) + "\n", "run `python -m tools.api_page > docs/api.md`"


def test_type_checkers_see_what_a_program_uses(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api", reason="mypy is not installed")
    for name, program in (("right", SAMPLE), ("wrong", MISTAKES)):
        (tmp_path / f"{name}.py").write_text(program)
    options = ("--config-file=", f"--cache-dir={tmp_path}", "--follow-imports=silent")
    written, _, _ = api.run([*options, *map(str, tmp_path.glob("*.py"))])
    assert re.findall(r"(\w+)\.py:\d+: error", written) == ["wrong"] * 5, written
    assert 'note: Revealed type is "moegguf.engine.plan.Plan"' in written
