"""Compares the table of features in docs/performance.md with features measured on
loaded tiny models."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import TinyModel, random_prompt, write_adapter

from moegguf.engine.llama import Llama
from moegguf.processor import has_kernels, read_processor
from tools.models import PRESETS, Shape
from tools.models.tensors import tensors

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
BEGIN = "<!-- table: features -->\n"
END = "<!-- end -->"
HEAD = (
    "| models | `--parallel` | drafts | latest tokens that can be removed | batch-invariant | kept contexts"
    " | LoRA | context shift |\n|---|---|---|---|---|---|---|---|\n"
)
N_TOKENS = 400
STEPS_BACK = (399, 64, 8, 1)


@dataclass(frozen=True)
class Kind:
    """A row of the table: its name, the presets that belong to it, and the name of a
    matrix after `blk.0.`."""

    name: str
    presets: tuple[str, ...]
    matrix: str = "attn_output.weight"


KINDS = [
    Kind("attention", ("tiny-qwen2moe", "tiny-qwen3moe", "tiny-mixtral")),
    Kind("attention, with heads for multi-token prediction", ("tiny-glm4moe",)),
    Kind("attention with image positions", ("tiny-qwen3vlmoe",)),
    Kind("latent attention", ("tiny-deepseek2",)),
    Kind(
        "latent attention, with heads for multi-token prediction", ("tiny-glm-flash",)
    ),
    Kind("sliding windows", ("tiny-gpt-oss", "tiny-gemma4")),
    Kind("gated delta net", ("tiny-qwen3next",), "ssm_out.weight"),
    Kind("gated delta net, with snapshots", ("tiny-qwen35moe",), "ssm_out.weight"),
    Kind("gated delta net, with an n-gram table", ("tiny-qwen4exp",), "ssm_out.weight"),
    Kind("Mamba 2", ("tiny-granitehybrid",), "ssm_out.weight"),
    Kind("Mamba 2, with snapshots", ("tiny-nemotron",), "ssm_out.weight"),
    Kind("short convolution", ("tiny-lfm2moe",), "shortconv.out_proj.weight"),
    Kind("Kimi delta attention", ("tiny-kimi-linear",)),
    Kind("Kimi delta attention, with snapshots", ("tiny-bailingmoe3",)),
    Kind("compressed attention", ("tiny-deepseek4",), "attn_output_b.weight"),
]


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGGUF_HOME", str(tmp_path / "home"))


def load(path: Path, **options: Any) -> Llama:
    return Llama(
        path,
        n_ctx=512,
        n_ubatch=32,
        n_threads=1,
        flash_attn=True,
        verbose=False,
        **options,
    )


def taken_back(llm: Llama) -> str:
    """Returns text for the table: how many of the most recent tokens can be removed
    from a sequence."""
    for n in STEPS_BACK:
        llm.context.clear()
        llm.eval(random_prompt(llm, N_TOKENS))
        if llm.context.truncate(N_TOKENS - n):
            return "all" if n == STEPS_BACK[0] else f"at least {n}"
    return "none"


def last_logits(llm: Llama) -> bytes:
    llm.context.clear()
    llm.eval(random_prompt(llm, 8))
    return bytes(
        np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),))
    )


def adapted(
    path: Path, shape: Shape, matrices: dict[str, str], folder: Path, plain: bytes
) -> str:
    """Returns text for the table: "yes" if an adapter on each of `matrices` changes the
    logits.

    Otherwise returns the names of the parts whose adapter changes the logits, or
    "none", followed by "only". `matrices` maps the name of a part to one matrix of this
    part.
    """
    shapes = {tensor.name: tensor.shape for tensor in tensors(shape, "q4_0")}
    found = []
    for part, matrix in matrices.items():
        adapter = folder / f"{path.stem}-{part}.gguf"
        write_adapter(adapter, shape.arch, matrix, shapes[matrix])
        with load(path, draft="off", lora_path=str(adapter)) as llm:
            if last_logits(llm) != plain:
                found.append(part)
    return (
        "yes" if len(found) == len(matrices) else f"{', '.join(found) or 'none'} only"
    )


def cells(path: Path, shape: Shape, matrix: str, folder: Path) -> tuple[str, ...]:
    matrices = {"mixers": f"blk.0.{matrix}", "experts": "blk.1.ffn_down_exps.weight"}
    with load(path, n_seq_max=4, draft="auto", context_store="64MiB") as llm:
        assert llm.prefix_cache is not None
        drafts = {"mtp": "n-grams, heads", "ngram": "n-grams", "off": "none"}[
            llm._drafts.in_use
        ]
        return (
            "yes" if llm.n_seq_max == 4 else "one at a time",
            drafts,
            taken_back(llm),
            "yes" if llm.batch_invariant else "no",
            llm.prefix_cache.form,
            adapted(path, shape, matrices, folder, last_logits(llm)),
            "moves tokens" if llm.context.can_shift else "computes tokens",
        )


def rows(tiny: TinyModel, folder: Path) -> Iterator[str]:
    for kind in KINDS:
        found = {
            preset: cells(tiny(preset), PRESETS[preset], kind.matrix, folder)
            for preset in kind.presets
        }
        assert len(set(found.values())) == 1, (
            f"{kind.name} has to be two classes: {found}"
        )
        archs = ", ".join(
            dict.fromkeys(PRESETS[preset].arch for preset in kind.presets)
        )
        yield (
            f"| {kind.name} ({archs}) | " + " | ".join(found[kind.presets[0]]) + " |\n"
        )


@pytest.mark.skipif(
    not has_kernels(read_processor(), "auto"), reason="the table is of a CPU with AVX2"
)
@pytest.mark.filterwarnings("ignore:draft")
def test_the_feature_table_of_the_docs_matches_loaded_models(
    tiny: TinyModel, tmp_path: Path
) -> None:
    made = HEAD + "".join(rows(tiny, tmp_path))
    page = PAGE.read_text(encoding="utf-8")
    written = page.partition(BEGIN)[2].partition(END)[0]
    assert written == made, (
        f"replace the table of features in docs/performance.md with:\n{made}"
    )
