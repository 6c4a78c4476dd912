"""Embeddings: pooled by an embedding model, else the last token's hidden state of a generative model.

Every input is evaluated alone, from an empty context: its vector does not depend on other inputs in any bit.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from moegguf.engine.vocabulary import to_utf8
from moegguf.errors import ContextError
from moegguf.generate.prompt import MAX_WHOLE_CHARACTERS
from moegguf.native import library

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama


@dataclass(frozen=True)
class Embeddings:
    """[n_inputs][n_embd] vectors, in the order of the inputs, and the tokens evaluated for all of them."""

    vectors: list[list[float]]
    n_tokens: int


def embed(
    llm: Llama, inputs: Sequence[str | Sequence[int]], *, truncate: bool = True, normalize: bool = True
) -> Embeddings:
    """The vectors of `inputs`, texts or tokens; of length 1 with `normalize`.

    A model loaded with embedding=True pools as its file specifies. With another one the context holds the last input
    afterwards. An empty text is evaluated as BOS, or EOS; for a model with neither its vector is zero. Raises
    ContextError for an input that is too long unless `truncate` cuts it, OptionError for an invalid token, and what
    `Llama.eval` raises.
    """
    limit = _limit(llm)
    token_lists = [_tokens(llm, item, limit, truncate) for item in inputs]
    vectors = [vector for tokens in token_lists for vector in llm.context.as_request(_steps(llm, tokens))]
    if normalize:
        vectors = [_normalized(vector) for vector in vectors]
    return Embeddings([vector.tolist() for vector in vectors], sum(map(len, token_lists)))


def _limit(llm: Llama) -> int:
    """The maximum tokens of an input. Pooling needs all of them in one pass."""
    if llm.context_params.embeddings:
        return int(min(llm.n_ctx(), llm.n_batch, llm.context_params.n_ubatch))
    return int(llm.n_ctx())


def _tokens(llm: Llama, item: str | Sequence[int], limit: int, truncate: bool) -> list[int]:
    vocabulary = llm.vocabulary
    if isinstance(item, str):
        tokens = _first_tokens(llm, item, 2 * limit)
    else:
        tokens = list(item)
        vocabulary.check(tokens)
    if not tokens:
        return [token for token in (llm.token_bos(), llm.token_eos()) if token != -1][:1]
    if len(tokens) <= limit:
        return tokens
    if not truncate:
        raise ContextError(
            f"the input length exceeds the context length: {len(tokens)} tokens or more, but {limit} are read at a"
            " time; give a shorter input, or let it be cut (truncate)."
        )
    end = tokens[-1:] if not vocabulary.piece(tokens[-1]) else []  # the token that the tokenizer appends to each text
    return tokens[: limit - len(end)] + end


def _first_tokens(llm: Llama, text: str, n_enough: int) -> list[int]:
    """The tokens of a text; of a long one, more than `n_enough` of them suffice."""
    n_read = MAX_WHOLE_CHARACTERS
    while True:
        tokens = list(llm.tokenize(to_utf8(text[:n_read]), add_bos=True, special=True))
        if n_read >= len(text) or len(tokens) > n_enough:
            return tokens
        n_read *= 2


def _steps(llm: Llama, tokens: list[int]) -> Generator[npt.NDArray[np.float64], None, None]:
    """The vector of one input."""
    if not tokens:
        yield np.zeros(_n_embd(llm))
    elif llm.context_params.embeddings:
        yield from _pooled(llm, tokens)
    else:
        yield from _last_state(llm, tokens)


def _last_state(llm: Llama, tokens: list[int]) -> Generator[npt.NDArray[np.float64], None, None]:
    """The hidden state of the last token, the only one that attends to all others."""
    bindings = library.llama_cpp()
    llm.reset()
    if tokens[:-1]:
        llm.eval(tokens[:-1])
    bindings.llama_set_embeddings(llm.ctx, True)
    try:
        llm.eval(tokens[-1:])
        yield _vector(llm, llm._ctx.get_embeddings_ith(-1))
    finally:
        bindings.llama_set_embeddings(llm.ctx, False)


def _pooled(llm: Llama, tokens: list[int]) -> Generator[npt.NDArray[np.float64], None, None]:
    def decode() -> None:
        llm.reset()
        llm._ctx.kv_cache_clear()
        llm._batch.reset()
        llm._batch.add_sequence(tokens, 0, True)
        llm._ctx.decode(llm._batch)

    llm.context.evaluate(decode, tokens)
    pooled = llm.pooling_type() != library.llama_cpp().LLAMA_POOLING_TYPE_NONE
    yield _vector(llm, llm._ctx.get_embeddings_seq(0) if pooled else llm._ctx.get_embeddings_ith(-1))


def _vector(llm: Llama, pointer: object) -> npt.NDArray[np.float64]:
    return np.ctypeslib.as_array(pointer, shape=(_n_embd(llm),)).astype(np.float64)


def _n_embd(llm: Llama) -> int:
    return int(library.llama_cpp().llama_model_n_embd_out(llm.model))


def _normalized(vector: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    length = np.linalg.norm(vector)
    return vector / length if length > 0 else vector
