"""llama-cpp-python's `Llama` with corrections that do not concern experts: downloads,
logit_bias, grammars, pickling, tokenizing."""

from __future__ import annotations

import ctypes as c
import inspect
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Self, TypedDict

import numpy as np
import numpy.typing as npt

from moegguf.engine.model_path import readable
from moegguf.errors import OptionError, SchemaError
from moegguf.gguf.reader import StrPath
from moegguf.models.pull import fetch
from moegguf.native import library

_bindings = library.llama_cpp()
# `Llama` compares the adapter with None, but ctypes returns a null pointer, which would
# make llama.cpp abort.
_bindings.llama_adapter_lora_init.errcheck = lambda adapter, *_: adapter or None

Floats = npt.NDArray[np.float32]
# A generator of tokens. Tokens that are sent to it follow the yielded token.
TokenSteps = Generator[int, Sequence[int] | None, None]
# Room for BOS, EOS and a leading space, in addition to one token per byte.
ADDED_TOKENS = 8


class BoundedTokenizer(_bindings.LlamaTokenizer):  # type: ignore[name-defined]  # found at run time
    """llama-cpp-python's tokenizer, but with a buffer for as many tokens as the text
    has bytes. llama-cpp-python's buffer is as long as the context length that the file
    claims."""

    def tokenize(
        self, text: bytes, add_bos: bool = True, special: bool = True
    ) -> list[int]:
        """Returns the tokens of a text. Raises OptionError for a text that llama.cpp
        cannot tokenize."""
        size = len(text) + ADDED_TOKENS
        for _ in range(2):
            tokens = (_bindings.llama_token * size)()
            n = _bindings.llama_tokenize(
                self._model.vocab, text, len(text), tokens, size, add_bos, special
            )
            if n >= 0:
                return list(tokens[:n])
            size = -n
        raise OptionError(
            f"a text of {len(text)} bytes cannot be tokenized; shorten it."
        )


class GrammarMask:
    """A GBNF grammar for sampling: a logits processor, which must be the last one of a
    request. It uses llama.cpp's grammar sampler outside llama.cpp's chain. If no token
    may follow, the caller must stop: a token outside the grammar would make llama.cpp
    terminate the process with a C++ exception.

    `vocab`: llama.cpp's vocabulary, of `n_vocab` tokens. `grammar`: a `LlamaGrammar`,
    or its text in GBNF.

    `exhausted`: True if no token may follow, because the text is complete, or because
    no token of the model continues it. Raises SchemaError for a grammar that llama.cpp
    cannot read.
    """

    def __init__(self, vocab: Any, n_vocab: int, grammar: Any) -> None:
        self._sampler = None
        text, root = (
            (grammar, "root")
            if isinstance(grammar, str)
            else (grammar._grammar, grammar._root)
        )
        self._sampler = _bindings.llama_sampler_init_grammar(
            vocab, text.encode(), root.encode()
        )
        if not self._sampler:
            raise SchemaError(
                f"a grammar must be GBNF with a rule {root!r} and without left recursion, but llama.cpp cannot read"
                f" this one: {text[:80]!r}; correct it."
            )
        self._candidates = _bindings._internals.LlamaTokenDataArray(n_vocab=n_vocab)
        self.exhausted = False

    def __call__(self, _ids: npt.NDArray[np.intc], scores: Floats) -> Floats:
        """Returns the scores, with -inf for tokens that may not follow; unchanged if no
        token may follow."""
        self._candidates.copy_logits(scores)
        _bindings.llama_sampler_apply(
            self._sampler, c.pointer(self._candidates.candidates)
        )
        masked: Floats = self._candidates.candidates_data.logit
        self.exhausted = not np.isfinite(masked).any()
        return scores if self.exhausted else masked

    def accept(self, token: int) -> None:
        """Advances the grammar past a sampled token. Does nothing if `exhausted`: the
        token is then outside the grammar."""
        if not self.exhausted:
            _bindings.llama_sampler_accept(self._sampler, token)

    def __del__(self) -> None:
        if self._sampler:
            _bindings.llama_sampler_free(self._sampler)


class UpstreamLlama(_bindings.Llama):  # type: ignore[name-defined]  # found at run time
    """The base class of moegguf's `Llama`. Subclasses keep the keywords of the
    constructor in `_keywords`, for pickling. They also complete the structs from which
    llama.cpp creates the model and the context (`_attach_model`, `_attach_context`)."""

    _keywords: dict[str, Any]
    n_tokens: int
    input_ids: npt.NDArray[np.intc]
    _batch: Any
    # True: the last row of logits does not belong to the context's current tokens, or
    # belongs to another request
    _requires_eval: bool
    # Grammar of the request that is currently sampling.
    _grammar: GrammarMask | None = None
    tokenizer_: Any

    def __init__(
        self, model_path: StrPath, *, lora_path: str | None = None, **options: Any
    ) -> None:
        with (
            readable(model_path) as path,
            readable(lora_path) if lora_path else nullcontext() as adapter,
        ):
            super().__init__(path, lora_path=adapter, **options)
        # A user's own tokenizer is kept.
        if type(self.tokenizer_) is _bindings.LlamaTokenizer:
            self.tokenizer_ = BoundedTokenizer(self)

    @property
    def model_params(self) -> c.Structure:
        """The struct llama_model_params. The setter calls `_attach_model` with it."""
        return self._model_params

    @model_params.setter
    def model_params(self, params: c.Structure) -> None:
        self._model_params = params
        self._attach_model(params)

    def _attach_model(self, params: c.Structure) -> None:
        raise NotImplementedError

    @property
    def _model(self) -> Any:
        return self._opened_model

    @_model.setter
    def _model(self, model: Any) -> None:
        self._opened_model = model
        self._attach_context()

    def _attach_context(self) -> None:
        raise NotImplementedError

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of the file as strings."""
        return self._metadata

    @metadata.setter
    def metadata(self, _: Mapping[str, str]) -> None:
        # llama-cpp-python returns no metadata at all if one text is not UTF-8, or if
        # llama.cpp cuts a text within a character.
        self._metadata = _metadata(self._model.model)

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None = None,
        additional_files: Sequence[str] | None = None,
        local_dir: StrPath | None = None,
        local_dir_use_symlinks: bool | str = "auto",
        cache_dir: StrPath | None = None,
        **options: Any,
    ) -> Self:
        """Loads a model from the Hugging Face Hub, with all shards of a split model.
        `options`: keywords of the class.

        `filename` and `additional_files`: names or patterns ("*Q4_K_M*"); without a
        filename, the default quantisation. `local_dir_use_symlinks` has no effect.
        Raises ModelNotFoundError if no model or more than one model matches, and
        PullError if the download fails.
        """
        return cls(
            fetch(repo_id, filename, additional_files or (), local_dir, cache_dir),
            **options,
        )

    def _init_sampler(
        self,
        *arguments: Any,
        logits_processor: Sequence[Any] | None = None,
        grammar: Any = None,
        **options: Any,
    ) -> Any:
        self._grammar = None
        if grammar is not None:
            self._grammar = GrammarMask(self._model.vocab, self.n_vocab(), grammar)
            logits_processor = _bindings.LogitsProcessorList(
                [*(logits_processor or ()), self._grammar]
            )
        return super()._init_sampler(
            *arguments, logits_processor=logits_processor, **options
        )

    def sample(self, *arguments: Any, **options: Any) -> int:
        """Returns the next token, as in llama-cpp-python."""
        token: int = super().sample(*arguments, **options)
        if self._grammar is not None:
            self._grammar.accept(token)
        return token

    def generate(
        self,
        *arguments: Any,
        stopping_criteria: Sequence[Any] | None = None,
        **options: Any,
    ) -> TokenSteps:
        """Yields tokens as in llama-cpp-python. Also stops, without yielding an
        end-of-text token, if a grammar allows no further token. Raises OptionError if
        `tokens` is empty, unless `reset` is false and the context already has
        tokens."""
        tokens = arguments[0] if arguments else options.get("tokens", ())
        if not len(tokens) and (options.get("reset", True) or not self.n_tokens):
            raise OptionError(
                "there is nothing to continue, because the prompt has no tokens; give at least one."
            )
        return super().generate(
            *arguments,
            stopping_criteria=self._with_grammar_end(stopping_criteria, options),
            **options,
        )

    def _with_grammar_end(
        self, criteria: Sequence[Any] | None, options: Mapping[str, Any]
    ) -> Sequence[Any] | None:
        """Returns `criteria`, with a criterion for the end of the grammar added if the
        request has a grammar."""
        if options.get("grammar") is None:
            return criteria

        def complete(*_: Any) -> bool:
            return self._grammar is not None and self._grammar.exhausted

        return _bindings.StoppingCriteriaList([*(criteria or ()), complete])

    def _create_completion(
        self,
        *arguments: Any,
        logits_processor: Sequence[Any] | None = None,
        logit_bias: Mapping[Any, float] | None = None,
        stopping_criteria: Sequence[Any] | None = None,
        **options: Any,
    ) -> Iterator[Any]:
        stopping_criteria = self._with_grammar_end(stopping_criteria, options)
        # the base class would lose the processors and the biases, because it uses the
        # result of list.extend(): None
        if logits_processor is not None and logit_bias:
            logits_processor = _bindings.LogitsProcessorList(
                [*logits_processor, _bias(logit_bias)]
            )
            logit_bias = None
        return super()._create_completion(
            *arguments,
            logits_processor=logits_processor,
            logit_bias=logit_bias,
            stopping_criteria=stopping_criteria,
            **options,
        )

    @property
    def _is_stateful(self) -> bool:
        """True if the model has a recurrent state, from which tokens cannot be removed
        freely."""
        return bool(self._is_recurrent or self._is_hybrid)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the keywords of the constructor: unpickling reloads the model."""
        return self._keywords

    def __copy__(self) -> Self:
        raise OptionError(
            "a loaded model cannot be copied; share it, or load it a second time."
        )

    def __deepcopy__(self, _memo: object) -> Self:
        return self.__copy__()


def _metadata(model: Any) -> dict[str, str]:
    """Returns the metadata of a model's file as strings, in which U+FFFD replaces bytes
    that are not UTF-8."""

    def text(read: Callable[..., int], i: int) -> str:
        buffer = c.create_string_buffer(max(0, read(model, i, None, 0)) + 1)
        read(model, i, buffer, len(buffer))
        return buffer.value.decode(errors="replace")

    key = _bindings.llama_model_meta_key_by_index
    value = _bindings.llama_model_meta_val_str_by_index
    return {
        text(key, i): text(value, i)
        for i in range(_bindings.llama_model_meta_count(model))
    }


def _bias(logit_bias: Mapping[Any, float]) -> Any:
    """Returns a logits processor that adds these biases to the scores of tokens."""
    tokens = [int(token) for token in logit_bias]
    added = np.array([*logit_bias.values()], np.float32)

    def add(_ids: npt.NDArray[np.intc], scores: Floats) -> Floats:
        scores = np.copy(scores)
        scores[tokens] += added
        return scores

    return add


class LlamaCppOptions(TypedDict, total=False):
    """Keywords of the pinned release's `llama_cpp.Llama`. `moegguf.Llama` accepts them
    with the same meaning."""

    n_gpu_layers: int
    split_mode: int
    main_gpu: int
    tensor_split: list[float] | None
    vocab_only: bool
    use_mmap: bool
    use_mlock: bool
    kv_overrides: dict[str, bool | int | float | str] | None
    seed: int
    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_threads: int | None
    n_threads_batch: int | None
    rope_scaling_type: int | None
    pooling_type: int
    attention_type: int
    rope_freq_base: float
    rope_freq_scale: float
    yarn_ext_factor: float
    yarn_attn_factor: float
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_orig_ctx: int
    logits_all: bool
    embedding: bool
    offload_kqv: bool
    flash_attn: bool | None
    op_offload: bool | None
    swa_full: bool | None
    no_perf: bool
    last_n_tokens_size: int
    lora_base: str | None
    lora_scale: float
    lora_path: str | None
    numa: bool | int
    chat_format: str | None
    chat_handler: Any
    draft_model: Any
    tokenizer: Any
    type_k: int | None
    type_v: int | None
    spm_infill: bool
    verbose: bool


def with_keywords(
    init: Callable[..., None], base: Callable[..., None]
) -> inspect.Signature:
    """Returns the signature of `init`, in which the keywords of `base`, with their
    defaults, replace **options."""
    own = inspect.signature(init).parameters
    further = inspect.signature(base).parameters.values()
    kinds = inspect.Parameter
    return inspect.Signature(
        [
            *(each for each in own.values() if each.kind != kinds.VAR_KEYWORD),
            *(
                each
                for each in further
                if each.kind == kinds.KEYWORD_ONLY and each.name not in own
            ),
        ]
    )
