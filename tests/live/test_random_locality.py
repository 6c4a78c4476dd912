"""Random models with the routing of a real model: their recorded routing hits as published, whatever they decode."""

from dataclasses import replace
from pathlib import Path

import pytest
from running import Load

from moegguf.bench.record import RecordOptions, record
from moegguf.bench.rows import LOCALITY_KEY
from moegguf.controller.policies import LRU
from moegguf.controller.predictors.base import NoPrediction
from moegguf.engine.recording import TraceOptions
from moegguf.trace.format import read
from moegguf.trace.prompts import Prompt
from moegguf.trace.simulate import Simulation, slots_of
from moegguf.trace.trace import Trace
from tools.models import PRESETS, Shape, write_model
from tools.models.locality import LOCALITIES

PROMPTS = [Prompt(text, "text") for text in ("Once upon a time", "def main():", "The cat sat on the mat and")]
# Shapes with an expert's width of 64 and heads wide enough; the experts are those of the model that is imitated.
SHAPES = {
    "qwen2moe": replace(PRESETS["tiny-qwen2moe"], n_embd=512, n_embd_head=128, n_vocab=8192),
    "qwen3moe": replace(PRESETS["tiny-qwen3moe"], n_embd=512, n_vocab=8192),
    "qwen3vlmoe": replace(PRESETS["tiny-qwen3vlmoe"], n_embd=512, n_vocab=8192),
    "llama": replace(PRESETS["tiny-mixtral"], n_embd=512, n_vocab=8192),
    "deepseek2": replace(PRESETS["tiny-deepseek2"], n_embd=512, n_vocab=8192),
}


def model(folder: Path, locality: str, arch: str = "qwen3moe", quant: str = "q4_0", shape: Shape | None = None) -> Path:
    real = LOCALITIES[locality]
    shape = replace(shape or SHAPES[arch], n_expert=real.n_expert, n_expert_used=real.n_expert_used)
    return write_model(folder / "m.gguf", shape, quant, locality=locality)[0]


def recorded(path: Path, temperature: float) -> Trace:
    """The decoded tokens of several prompts."""
    out = path.with_suffix(".npz")
    options = RecordOptions(n_predict=400, temperature=temperature)
    record(path, PROMPTS, out, options, expert_cache="100%", n_ctx=512, n_threads=1, verbose=False)
    return read(out).decode()


def assert_hits_as_published(trace: Trace, locality: str) -> None:
    for share, published in LOCALITIES[locality].hit_rates.items():
        result = Simulation(trace, LRU, NoPrediction(trace.shape), slots_of(trace.shape, share)).run()
        assert result.hit_rate == pytest.approx(published, abs=0.03), share


@pytest.mark.parametrize("temperature", [1.0, 0.0], ids=["sampled", "greedy"])
@pytest.mark.parametrize("locality", LOCALITIES)
def test_the_recorded_routing_hits_as_published(tmp_path: Path, locality: str, temperature: float) -> None:
    trace = recorded(model(tmp_path, locality), temperature)
    assert trace.n_tokens > 500
    assert len(set(trace.tokens.tolist())) > trace.n_tokens / 2  # no loop
    assert_hits_as_published(trace, locality)


@pytest.mark.parametrize("arch", SHAPES)
def test_in_every_architecture(tmp_path: Path, arch: str) -> None:
    assert_hits_as_published(recorded(model(tmp_path, "qwen3-30b", arch), 1.0), "qwen3-30b")


def test_in_blocks_of_256(tmp_path: Path) -> None:
    shape = replace(PRESETS["tiny-mix"], n_embd=1024, n_embd_head=256, n_layer=2, n_vocab=4096)
    assert_hits_as_published(recorded(model(tmp_path, "qwen3-30b", quant="q4_k_m", shape=shape), 1.0), "qwen3-30b")


def test_far_into_a_long_context(tmp_path: Path, load: Load) -> None:
    """Keys are of 16 bits, and the angle that tells positions apart is small."""
    shape = replace(SHAPES["qwen3moe"], n_ctx_train=32768, n_layer=2)
    path = model(tmp_path, "qwen3-30b", shape=shape)
    llm = load(path, trace=TraceOptions(tmp_path / "t"), n_ctx=5000, logits_all=False, expert_cache="100%")
    tokens = [n * n * 7919 % llm.n_vocab() for n in range(4800)]
    llm.eval(tokens[:4300])
    for token in tokens[4300:]:
        llm.eval([token])
    llm.close()
    assert_hits_as_published(read(tmp_path / "t").decode(), "qwen3-30b")


def test_the_file_says_so(tmp_path: Path, load: Load) -> None:
    llm = load(model(tmp_path, "olmoe"))
    assert llm.layout.metadata[LOCALITY_KEY] == "olmoe"
