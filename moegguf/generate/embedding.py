"""Embeddings of texts, and a reranker's scores of documents. A model loaded with
embedding=True pools the hidden states as its file or the option `pooling_type`
specifies. For any other model, the embedding is the hidden state of the last token.

Each input is evaluated alone, from an empty context, so its vector is bit-identical
whatever the other inputs are.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from moegguf.errors import CapabilityError, ContextError
from moegguf.generate.prompt import TOKEN_CHARACTERS
from moegguf.generate.request import Embeddings
from moegguf.native import library
from moegguf.text import to_utf8

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama


def embed(
    llm: Llama,
    inputs: Sequence[str | Sequence[int | str]],
    *,
    truncate: bool = True,
    normalize: bool = True,
    num_ctx: int | None = None,
) -> Embeddings:
    """Returns the vectors of `inputs`. Each input is a string, or a list of strings and
    token ids. With `normalize`, vectors are scaled to length 1 (zero vectors stay
    zero). `num_ctx` is an additional limit on the tokens per input; None: no additional
    limit.

    If the model was loaded with embedding=True, its file or the option `pooling_type`
    specifies the pooling. Otherwise the vector is the hidden state of the last token,
    and the context contains the last input after the call. An input without tokens is
    evaluated as BOS, or else EOS; if the model has neither token, the vector is zero.

    Raises ContextError for an input that is too long unless `truncate` is True,
    OptionError for an invalid token, CapabilityError for a reranker, and the errors of
    `Llama.eval`.
    """
    if ranks(llm):
        raise CapabilityError(
            "this model scores documents and returns no vectors; send a query and documents to /v1/rerank."
        )
    limit = min(_limit(llm), num_ctx or llm.n_ctx())
    token_lists = [_tokens(llm, item, limit, truncate) for item in inputs]
    vectors = [
        vector
        for tokens in token_lists
        for vector in llm.context.as_request(_steps(llm, tokens))
    ]
    if normalize:
        vectors = [vector / (np.linalg.norm(vector) or 1.0) for vector in vectors]
    return Embeddings(
        [vector.tolist() for vector in vectors], sum(map(len, token_lists))
    )


def ranks(llm: Llama) -> bool:
    """Returns True if the model is a reranker that was loaded with embedding=True. A
    reranker's pooling computes a score of a text, not a vector."""
    return (
        bool(llm.context_params.embeddings)
        and llm.pooling_type() == library.llama_cpp().LLAMA_POOLING_TYPE_RANK
    )


def rank(llm: Llama, query: str, documents: Sequence[str]) -> Embeddings:
    """Returns one vector for each document. The vector has one element, the reranker's
    score of the document for the query.

    Raises CapabilityError if the model is not a reranker. Raises ContextError if the
    query and a document together are too long.
    """
    if not ranks(llm):
        raise CapabilityError(
            "this model cannot rank documents: it was not loaded with embedding=True and pooling of type RANK; use a"
            " reranker, or compare vectors of /v1/embeddings."
        )
    limit = _limit(llm)
    token_lists = [_pair(llm, query, document, limit) for document in documents]
    for i, tokens in enumerate(token_lists):
        if len(tokens) > limit:
            raise ContextError(
                f"document {i} has {len(tokens)} tokens or more with the query, but {limit} are read at a time;"
                " shorten it."
            )
    scores = [
        vector
        for tokens in token_lists
        for vector in llm.context.as_request(_steps(llm, tokens))
    ]
    return Embeddings(
        [score[:1].tolist() for score in scores], sum(map(len, token_lists))
    )


def _pair(llm: Llama, query: str, document: str, limit: int) -> list[int]:
    """Returns the tokens of a query and a document, joined as in llama-server: by the
    model's chat template "rerank" or, if there is no such template, by its separator
    tokens."""
    bindings, vocab = library.llama_cpp(), llm._model.vocab
    if template := llm.metadata.get("tokenizer.chat_template.rerank"):
        text = template.replace("{query}", query).replace("{document}", document)
        return _first_tokens(llm, text, limit, add_bos=True, special=True)
    parts = [
        _first_tokens(llm, text, limit, add_bos=False, special=False)
        for text in (query, document)
    ]
    sep = bindings.llama_vocab_sep(vocab)
    eos = next(
        (token for token in (bindings.llama_vocab_eos(vocab), sep) if token != -1), None
    )
    ends = [eos] if bindings.llama_vocab_get_add_eos(vocab) and eos is not None else []
    separators = [sep] if bindings.llama_vocab_get_add_sep(vocab) and sep != -1 else []
    return [*llm.vocabulary.bos_tokens, *parts[0], *ends, *separators, *parts[1], *ends]


def _limit(llm: Llama) -> int:
    """Returns the maximum number of tokens of an input: the length of the context. If
    the model was loaded for embeddings, an input must also fit into one pass, because
    pooling needs all tokens in the same pass."""
    if llm.context_params.embeddings:
        return int(min(llm.n_ctx(), llm.n_batch, llm.context_params.n_ubatch))
    return int(llm.n_ctx())


def _first_tokens(
    llm: Llama, text: str, limit: int, *, add_bos: bool, special: bool
) -> list[int]:
    """Returns the token ids of `text`. For a very long text, returns only the tokens of
    a prefix with more than 2 * `limit` tokens, because running answers wait while a
    text is tokenized."""
    tokens, n_read = list[int](), 0
    while not n_read or (n_read < len(text) and len(tokens) <= 2 * limit):
        n_read = 2 * n_read or TOKEN_CHARACTERS * limit
        tokens = list(
            llm.tokenize(to_utf8(text[:n_read]), add_bos=add_bos, special=special)
        )
    return tokens


def _tokens(
    llm: Llama, item: str | Sequence[int | str], limit: int, truncate: bool
) -> list[int]:
    vocabulary, tokens = llm.vocabulary, list[int]()
    for i, each in enumerate([item] if isinstance(item, str) else item):
        more = (
            _first_tokens(llm, each, limit, add_bos=not i, special=True)
            if isinstance(each, str)
            else [each]
        )
        tokens += more
    vocabulary.check(tokens)
    if not tokens:
        return [token for token in (llm.token_bos(), llm.token_eos()) if token != -1][
            :1
        ]
    if len(tokens) <= limit:
        return tokens
    if not truncate:
        raise ContextError(
            f"the input length exceeds the context length: {len(tokens)} tokens or more, but {limit} are read at a"
            " time; give a shorter input, or let it be cut (truncate)."
        )
    # A last token without text is kept.
    end = tokens[-1:] if not vocabulary.piece(tokens[-1]) else []
    return tokens[: limit - len(end)] + end


def _steps(
    llm: Llama, tokens: list[int]
) -> Generator[npt.NDArray[np.float64], None, None]:
    """Evaluates the tokens of an input and yields its vector: the pooled vector, or the
    hidden state of the last token. (In a causal model, only the last token attends to
    all others.) Yields zeros if there are no tokens."""
    bindings = library.llama_cpp()
    n_embd = int(
        (
            bindings.llama_model_n_cls_out
            if ranks(llm)
            else bindings.llama_model_n_embd_out
        )(llm.model)
    )

    def vector(pointer: object) -> npt.NDArray[np.float64]:
        return np.ctypeslib.as_array(pointer, shape=(n_embd,)).astype(np.float64)

    def decode() -> None:
        llm.reset()
        llm._ctx.kv_cache_clear()
        llm._batch.reset()
        llm._batch.add_sequence(tokens, 0, True)
        llm._ctx.decode(llm._batch)

    if not tokens:
        yield np.zeros(n_embd)
    elif llm.context_params.embeddings:
        llm.context.evaluate(decode, tokens)
        pooled = llm.pooling_type() != bindings.LLAMA_POOLING_TYPE_NONE
        yield vector(
            llm._ctx.get_embeddings_seq(0)
            if pooled
            else llm._ctx.get_embeddings_ith(-1)
        )
    else:
        llm.reset()
        if tokens[:-1]:
            llm.eval(tokens[:-1])
        bindings.llama_set_embeddings(llm.ctx, True)
        try:
            llm.eval(tokens[-1:])
            yield vector(llm._ctx.get_embeddings_ith(-1))
        finally:
            bindings.llama_set_embeddings(llm.ctx, False)
