"""Tests the conversion of a dense model into a model with experts
(recipes/moefication).

If each token uses all experts, the logits are close to the dense model's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter, TokenType
from running import Llama, hooks_off, random_prompt, written

from moegguf.gguf.experts import read_layout
from moegguf.gguf.routers import read_routers
from tools.models.vocabulary import SPECIALS, build_vocabulary

torch = pytest.importorskip(
    "torch", reason="the tool needs torch (the extra `lab`), which is not installed"
)
pytest.importorskip(
    "tokenizers",
    reason="the tool needs tokenizers (the extra `lab`), which is not installed",
)

from predictors.study.controls import probabilities  # noqa: E402
from recipes.moefication import (  # noqa: E402
    clustering,
    convert,
    distil,
    export,
    source,
)
from recipes.moefication.card import unevenness  # noqa: E402
from recipes.moefication.network import Network, Shape  # noqa: E402

if TYPE_CHECKING:
    from recipes.moefication.convert import Split

N_VOCAB, N_EXPERT, N_SHARED, N_FF_EXP = 320, 6, 2, 32
SHAPE = Shape(
    N_VOCAB, 2, 64, N_FF_EXP * (N_EXPERT + N_SHARED), 2, 1, 256, 10_000.0, 1e-5
)


def split(n_used: int) -> Split:
    """Returns a split with `n_used` experts per token, whose routers weight the chosen
    experts almost equally."""
    return convert.Split(N_EXPERT, n_used, N_FF_EXP, N_SHARED, router_std=1e-3)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a random Llama of SHAPE with matrices in float32. Returns its path."""
    path = tmp_path_factory.mktemp("lab") / "dense.gguf"
    writer, random = GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_block_count(SHAPE.n_layer)
    writer.add_context_length(SHAPE.n_ctx_train)
    writer.add_embedding_length(SHAPE.n_embd)
    writer.add_feed_forward_length(SHAPE.n_ff)
    writer.add_head_count(SHAPE.n_head)
    writer.add_head_count_kv(SHAPE.n_head_kv)
    writer.add_rope_dimension_count(SHAPE.n_embd_head)
    writer.add_rope_freq_base(SHAPE.rope_freq_base)
    writer.add_layer_norm_rms_eps(SHAPE.norm_eps)
    vocabulary = build_vocabulary(N_VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types([TokenType(kind) for kind in vocabulary.types])
    writer.add_token_merges(vocabulary.merges)
    writer.add_eos_token_id(vocabulary.id_of(SPECIALS[0]))
    for name, parameter in Network(SHAPE).named_parameters():
        values = random.standard_normal(parameter.shape, dtype=np.float32)
        values = (
            1 + 0.1 * values
            if "norm" in name
            else values / np.sqrt(np.float32(parameter.shape[-1]))
        )
        writer.add_tensor(source.gguf_name(name), values.astype(np.float32))
    return written(writer, path)


def converted(dense: Path, n_used: int, quant: str = "f32") -> tuple[Path, Network]:
    reader = GGUFReader(dense)
    network = source.load(reader)
    ids = torch.randint(
        0, N_VOCAB, (8, 128), generator=torch.Generator().manual_seed(0)
    )
    convert.convert(
        network, split(n_used), ids, export.rounding(quant), lambda line: None
    )
    path = dense.with_name(f"experts-{n_used}-{quant}.gguf")
    export.write(path, network, split(n_used), reader, quant)
    return path, network


def logits(path: Path, **options: Any) -> np.ndarray:
    with Llama(
        path, n_ctx=256, logits_all=True, verbose=False, n_threads=1, **options
    ) as llm:
        llm.eval(random_prompt(llm, 100))
        return np.array(llm.scores[:100])


def test_a_converted_model_with_all_experts_equals_the_dense_model(dense: Path) -> None:
    path, network = converted(dense, N_EXPERT)
    with hooks_off():
        wanted = logits(dense)
    found = logits(path, expert_cache="100%")
    assert np.abs(found - wanted).max() < 0.01 * wanted.std()
    rows = torch.randint(
        0, N_VOCAB, (1, 64), generator=torch.Generator().manual_seed(1)
    )
    assert torch.allclose(
        network(rows),
        source.load(GGUFReader(dense))(rows),
        atol=0.01 * float(wanted.std()),
    )


def test_a_converted_model_has_the_given_shape_and_uses_all_experts(
    dense: Path,
) -> None:
    path, network = converted(dense, 2, "q4_0")
    layout = read_layout(path)
    assert (layout.arch, layout.n_layer, layout.n_expert, layout.n_expert_used) == (
        "deepseek",
        2,
        N_EXPERT,
        2,
    )
    assert export.expert_bytes(SHAPE, split(2), "q4_0") == 3 * 64 * N_FF_EXP * 18 // 32
    assert np.isfinite(logits(path, expert_cache="50%")).all()
    text = np.random.default_rng(2).integers(0, N_VOCAB, (4, 128))
    # The value is sqrt(2) = 1.4 if all tokens use the same two of the six experts.
    assert max(unevenness(network, {"random": text})) < 1.0
    inputs = (
        np.random.default_rng(3).standard_normal((500, SHAPE.n_embd)).astype(np.float32)
    )
    routers = read_routers(layout)
    for il in range(SHAPE.n_layer):
        assert {int(probabilities(routers, il, row).argmax()) for row in inputs} == set(
            range(N_EXPERT)
        )


def test_distillation_lowers_the_divergence_from_the_dense_model(dense: Path) -> None:
    teacher, (_, network) = source.load(GGUFReader(dense)), converted(dense, 2, "q4_0")
    rows = torch.randint(
        0, N_VOCAB, (8, 64), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        before = float(distil.divergence(network, teacher, {}, rows))
    n_tokens = distil.distil(
        network,
        teacher,
        rows,
        export.rounding("q4_0"),
        distil.Schedule(0.03, peak_lr=1e-3),
        lambda line: None,
    )
    assert n_tokens > 0
    with torch.no_grad():
        assert float(distil.divergence(network, teacher, {}, rows)) < before


def test_order_neurons_groups_neurons_active_together() -> None:
    random = torch.Generator().manual_seed(0)
    active = torch.rand(200, 4, generator=random) < 0.3
    contributions = active.repeat_interleave(8, dim=1) * torch.rand(
        200, 32, generator=random
    )
    contributions = torch.cat(
        (contributions, 3 * torch.rand(200, 4, generator=random)), dim=1
    )
    mixed = torch.randperm(36, generator=random)
    order = mixed[
        clustering.order_neurons(
            contributions[:, mixed], n_shared=4, n_expert=4, n_ff_exp=8
        )
    ]
    assert set(order[:4].tolist()) == {32, 33, 34, 35}
    assert {frozenset(part.tolist()) for part in order[4:].split(8)} == {
        frozenset(range(8 * group, 8 * group + 8)) for group in range(4)
    }


def test_order_neurons_repeats_neurons_for_extra_experts() -> None:
    contributions = torch.rand(200, 36, generator=torch.Generator().manual_seed(0))
    order = clustering.order_neurons(contributions, n_shared=4, n_expert=10, n_ff_exp=8)
    assert len(order) == 4 + 10 * 8
    assert sorted(order[:36].tolist()) == list(range(36))
    assert set(order[36:68].tolist()) == set(order[4:36].tolist())
    assert set(torch.bincount(order[4:], minlength=36).tolist()) == {0, 2, 3}


def test_fill_evenly_fills_every_cluster() -> None:
    wishes = torch.tensor([[0.9, 0.1, 0.0]] * 6)
    assert torch.bincount(clustering.fill_evenly(wishes)).tolist() == [2, 2, 2]


def test_split_check_rejects_sizes_that_do_not_add_up() -> None:
    with pytest.raises(
        ValueError,
        match=r"6 experts of 32 neurons must hold the 236 of the network's 300",
    ):
        split(2).check(300)
    with pytest.raises(ValueError, match=r"experts used must be in 1\.\.6, but are 7"):
        split(7).check(SHAPE.n_ff)


def test_distillation_resumes_from_its_saved_state(dense: Path, tmp_path: Path) -> None:
    teacher, (_, network) = source.load(GGUFReader(dense)), converted(dense, 2, "q4_0")
    rows = torch.randint(
        0, N_VOCAB, (8, 64), generator=torch.Generator().manual_seed(1)
    )
    kept = tmp_path / "training"

    def train(minutes: float) -> int:
        schedule = distil.Schedule(minutes, peak_lr=1e-3, save_every_steps=1)
        return distil.distil(
            network,
            teacher,
            rows,
            export.rounding("q4_0"),
            schedule,
            lambda line: None,
            kept,
        )

    n_tokens = train(0.01)
    trained = network.layers[0].ffn.ffn.down.clone()
    with torch.no_grad():
        network.layers[0].ffn.ffn.down.zero_()
    # No time is left: the call only restores the saved state.
    assert train(0) == n_tokens > 0
    assert torch.equal(network.layers[0].ffn.ffn.down, trained)
