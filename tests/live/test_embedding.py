"""Tests embeddings and ranking: vectors do not depend on other inputs, and a later
answer is unchanged."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from answering import DEMO, QUESTION, Load, TinyModel, reply

from moegguf.engine.llama import Llama
from moegguf.errors import CapabilityError, ContextError, ExpertIOError, OptionError
from moegguf.generate.embedding import embed, rank
from moegguf.generate.prompt import MAX_WHOLE_CHARACTERS
from moegguf.testing.library import arm_fault

TEXTS = ["a cat sat on the mat", "moegguf keeps experts in a cache", "x"]
LONG = "word " * 600


@pytest.fixture(scope="module")
def pooling() -> Iterator[Llama]:
    with Llama(
        DEMO, n_ctx=512, n_threads=1, verbose=False, embedding=True, pooling_type=1
    ) as llm:
        yield llm


@pytest.fixture(params=["shared", "pooling"])
def model(request: pytest.FixtureRequest) -> Llama:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def test_embed_gives_equal_vectors_in_any_order_and_alone(model: Llama) -> None:
    forth, back = embed(model, TEXTS), embed(model, TEXTS[::-1])
    alone = [embed(model, [text]).vectors[0] for text in TEXTS]
    assert forth.vectors == back.vectors[::-1] == alone
    assert forth.n_tokens == sum(len(model.tokenize(text.encode())) for text in TEXTS)
    assert {len(vector) for vector in forth.vectors} == {model.n_embd()}
    assert np.linalg.norm(np.subtract(*forth.vectors[:2])) > 0.01


@pytest.mark.parametrize("normalize", [False, True])
def test_embed_without_pooling_has_a_vector_for_each_token(
    load: Load, normalize: bool
) -> None:
    llm = load(DEMO, n_ctx=512, n_threads=1, embedding=True, pooling_type=0)
    alone = [llm.embed(text, normalize) for text in TEXTS]
    assert llm.embed(TEXTS, normalize) == alone
    assert llm.embed(TEXTS[::-1], normalize) == alone[::-1]
    counts = [len(llm.tokenize(text.encode())) for text in TEXTS]
    assert llm.embed(TEXTS, normalize, return_count=True) == (alone, sum(counts))
    assert [len(vectors) for vectors in alone] == counts
    assert llm.embed([]) == []
    made = llm.create_embedding(TEXTS)
    assert [each["embedding"] for each in made["data"]] == [
        llm.embed(text) for text in TEXTS
    ]
    assert made["usage"]["total_tokens"] == sum(counts)


def test_embed_cuts_at_num_ctx_and_accepts_texts_among_tokens(model: Llama) -> None:
    tokens = model.tokenize(LONG.encode())
    cut = embed(model, [LONG], num_ctx=128)
    assert (cut.n_tokens, cut.vectors) == (128, embed(model, [tokens[:128]]).vectors)
    assert embed(model, [LONG], num_ctx=4096).vectors == embed(model, [LONG]).vectors
    with pytest.raises(ContextError, match="128 are read"):
        embed(model, [LONG], truncate=False, num_ctx=128)
    mixed = [*model.vocabulary.tokens("An expert"), *model.vocabulary.tokens(" is")]
    assert (
        embed(model, [["An expert", *mixed[-1:]]]).vectors
        == embed(model, [[*model.vocabulary.bos_tokens, *mixed]]).vectors
    )


def test_embed_normalizes_vectors_unless_disabled(model: Llama) -> None:
    plain, normal = (
        embed(model, TEXTS, normalize=False).vectors,
        embed(model, TEXTS).vectors,
    )
    for a, b in zip(plain, normal, strict=True):
        assert np.linalg.norm(b) == pytest.approx(1)
        assert np.linalg.norm(a) != pytest.approx(1)
        assert np.allclose(np.array(a) / np.linalg.norm(a), b)


def test_embed_cuts_or_refuses_a_long_input(model: Llama) -> None:
    cut = embed(model, [LONG])
    assert cut.n_tokens == 512
    assert cut.vectors == embed(model, [model.tokenize(LONG.encode())[:512]]).vectors
    with pytest.raises(
        ContextError, match="the input length exceeds the context length"
    ):
        embed(model, [LONG], truncate=False)


def test_embed_tokenizes_only_the_beginning_of_a_huge_input(
    model: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, sizes, long = (
        model.tokenize,
        [],
        LONG * (4 * MAX_WHOLE_CHARACTERS // len(LONG)),
    )
    monkeypatch.setattr(
        model,
        "tokenize",
        lambda text, **options: (sizes.append(len(text)), read(text, **options))[1],
    )
    assert embed(model, [long]).vectors == embed(model, [LONG]).vectors
    assert max(sizes) <= MAX_WHOLE_CHARACTERS


def test_embed_accepts_no_input_and_refuses_unknown_tokens(model: Llama) -> None:
    assert embed(model, []).vectors == []
    with pytest.raises(OptionError, match="is not a token of this model"):
        embed(model, [[model.n_vocab()]])


def test_embed_of_an_empty_text_gives_a_vector(model: Llama) -> None:
    first, empty, last = embed(model, [TEXTS[0], "", TEXTS[1]]).vectors
    assert [[first], [last]] == [embed(model, [text]).vectors for text in TEXTS[:2]]
    begin = [token for token in (model.token_bos(), model.token_eos()) if token != -1][
        :1
    ]
    assert empty == embed(model, [begin]).vectors[0]


def test_an_answer_after_an_embedding_is_unchanged(shared: Llama) -> None:
    shared.reset()
    before, first = reply(shared, QUESTION)
    embed(shared, TEXTS)
    after, second = reply(shared, QUESTION)
    assert after == before
    assert (second.cached_tokens, second.prompt_tokens) == (0, first.prompt_tokens)
    again, third = reply(shared, QUESTION)
    assert again == before
    assert third.cached_tokens == first.prompt_tokens - 1
    assert embed(shared, TEXTS[:1]).vectors[0] == embed(shared, TEXTS).vectors[0]


def test_an_encoder_refuses_to_generate(
    shared: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An encoder's context has no KV cache in llama.cpp.
    monkeypatch.setattr(shared._ctx, "memory", None)
    with pytest.raises(
        CapabilityError, match="embed text and do not generate text; use another model"
    ):
        reply(shared, QUESTION)
    with pytest.raises(
        CapabilityError, match="embed text and do not generate text; use another model"
    ):
        shared.create_completion("a", max_tokens=1)


def test_embed_equals_last_token_pooling_of_an_embedding_context(shared: Llama) -> None:
    with Llama(
        DEMO, n_ctx=512, n_threads=1, verbose=False, embedding=True, pooling_type=3
    ) as last:
        theirs, ours = embed(last, TEXTS).vectors, embed(shared, TEXTS).vectors
    for a, b in zip(theirs, ours, strict=True):
        assert np.dot(a, b) == pytest.approx(1, abs=1e-3)


@pytest.fixture
def reranker(load: Load) -> Llama:
    return load(DEMO, n_ctx=256, embedding=True, pooling_type=4)


def test_rank_scores_each_document_independently(reranker: Llama) -> None:
    together = rank(reranker, "What is a cache?", TEXTS)
    assert together.vectors == [
        rank(reranker, "What is a cache?", [text]).vectors[0] for text in TEXTS
    ]
    assert len({tuple(vector) for vector in together.vectors}) == len(TEXTS)
    assert all(
        len(vector) == 1 and np.isfinite(vector[0]) for vector in together.vectors
    )
    assert together.vectors != rank(reranker, "Who are you?", TEXTS).vectors
    with pytest.raises(ContextError, match="document 1 has"):
        rank(reranker, "What is a cache?", ["a", LONG])


def test_rerankers_refuse_to_embed_and_other_models_to_rank(
    reranker: Llama, model: Llama
) -> None:
    with pytest.raises(
        CapabilityError, match="scores documents and returns no vectors"
    ):
        embed(reranker, TEXTS)
    with pytest.raises(CapabilityError, match="cannot rank"):
        rank(model, "a", TEXTS)


def test_a_model_is_usable_after_a_fault_while_embedding(
    tiny: TinyModel, load: Load
) -> None:
    path: Path = tiny("tiny-mix")
    llm = load(path, expert_cache="25%")
    expected = embed(llm, TEXTS).vectors
    arm_fault("read", 1, errno=5, sticky=True)
    with pytest.raises(ExpertIOError):
        embed(llm, ["something else altogether, which needs other experts"])
    arm_fault("read", 0)
    assert embed(llm, TEXTS).vectors == expected
    assert reply(llm, "hello", max_tokens=3)[1].answer_tokens == 3
