"""A GBNF grammar for sampling, by llama.cpp's own sampler, outside of llama.cpp's chain.

Where no token may follow, llama.cpp leaves it to its caller to stop: accepting another token raises a C++ exception,
which ends a Python process. So the grammar masks the scores as a logits processor, and tells when none is left.
"""

from __future__ import annotations

import ctypes as c
from typing import Any

import numpy as np
import numpy.typing as npt

from moegguf.errors import SchemaError
from moegguf.native import library

_bindings = library.llama_cpp()

Floats = npt.NDArray[np.float32]


class GrammarMask:
    """A logits processor, the last of a request. `vocab`: llama.cpp's, of `n_vocab` tokens. `grammar`: a
    `LlamaGrammar`, or its text in GBNF.

    `exhausted`: no token may follow; the text is complete, or no token of the model continues it. Raises SchemaError
    for a grammar that llama.cpp cannot read.
    """

    def __init__(self, vocab: Any, n_vocab: int, grammar: Any) -> None:
        self._sampler = None
        text, root = (grammar, "root") if isinstance(grammar, str) else (grammar._grammar, grammar._root)
        self._sampler = _bindings.llama_sampler_init_grammar(vocab, text.encode(), root.encode())
        if not self._sampler:
            raise SchemaError(
                f"a grammar is GBNF with a rule {root!r}, without left recursion, but llama.cpp cannot read this one:"
                f" {text[:80]!r}; correct it."
            )
        self._candidates = _bindings._internals.LlamaTokenDataArray(n_vocab=n_vocab)
        self.exhausted = False

    def __call__(self, _ids: npt.NDArray[np.intc], scores: Floats) -> Floats:
        """The scores, -inf for tokens that may not follow."""
        self._candidates.copy_logits(scores)
        _bindings.llama_sampler_apply(self._sampler, c.pointer(self._candidates.candidates))
        masked: Floats = self._candidates.candidates_data.logit
        self.exhausted = not np.isfinite(masked).any()
        return scores if self.exhausted else masked

    def accept(self, token: int) -> None:
        """Advances past a sampled token, unless `exhausted`: then it is none of the grammar's."""
        if not self.exhausted:
            _bindings.llama_sampler_accept(self._sampler, token)

    def __del__(self) -> None:
        if self._sampler:
            _bindings.llama_sampler_free(self._sampler)
