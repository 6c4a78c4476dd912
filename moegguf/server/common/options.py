"""Options of a request that every API takes: for loading a model and for sampling, Ollama's names, with their ranges.

Unknown options are left out with a warning in the log; those that Ollama itself has given up, without one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from moegguf.generate.options import RANGES, sampling_with
from moegguf.generate.request import Sampling
from moegguf.models.entry import ModelEntry
from moegguf.models.recipe import PARAMETERS
from moegguf.quantities import parse_duration, parse_expert_cache
from moegguf.server.common import limits
from moegguf.server.common.body import Body, explain
from moegguf.server.common.errors import HttpError
from moegguf.serving.events import LoadOptions

log = logging.getLogger(__name__)

MAX_TOKEN = 2**31 - 1  # llama.cpp's numbers of tokens have 32 bits
KeepAlive = int | float | str | None
ModelName = Annotated[str, Field(min_length=1, max_length=limits.NAME_CHARS)]


def _integral(value: Any) -> Any:
    """Go reads all numbers as floats, and so do clients that send 4096.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _budget(value: str | int | None) -> str | None:
    if value is not None:
        parse_expert_cache(value)
    return None if value is None else str(value)


def _in_range(name: str) -> Any:
    least, most = RANGES[name]
    return Field(default=None, ge=least, le=most)


Whole = Annotated[int | None, BeforeValidator(_integral)]
Number = float | None
Budget = Annotated[str | int | None, AfterValidator(_budget)]
Stop = Annotated[str, Field(max_length=limits.STOP_CHARS)]


class Options(Body):
    """Ollama's options that mean something here. None: the model's, or the default.

    num_predict -1 and -2 go on until the model ends or the context is full; seed -1 differs each time; num_thread 0
    and num_ctx 0 leave it to us. `moe_cache_ram` is another name of `expert_cache`.
    """

    num_ctx: Whole = _in_range("num_ctx")
    num_batch: Whole = _in_range("num_batch")
    num_thread: Whole = _in_range("num_thread")
    expert_cache: Budget = None
    moe_cache_ram: Budget = None
    num_predict: Whole = _in_range("num_predict")
    seed: Whole = _in_range("seed")
    temperature: Number = _in_range("temperature")
    top_k: Whole = _in_range("top_k")
    top_p: Number = _in_range("top_p")
    min_p: Number = _in_range("min_p")
    typical_p: Number = _in_range("typical_p")
    repeat_last_n: Whole = _in_range("repeat_last_n")
    repeat_penalty: Number = _in_range("repeat_penalty")
    presence_penalty: Number = _in_range("presence_penalty")
    frequency_penalty: Number = _in_range("frequency_penalty")
    stop: Annotated[list[Stop] | None, Field(max_length=limits.STOPS)] = None

    @model_validator(mode="before")
    @classmethod
    def _warn_of_unknown(cls, given: Any) -> Any:
        known = cls.model_fields.keys() | PARAMETERS.keys()
        for name in given.keys() - known if isinstance(given, Mapping) else ():
            log.warning("the option %.60r is not known and has no effect", name)
        return given

    def load(self) -> LoadOptions:
        """How the model is to be opened."""
        cache = self.moe_cache_ram if self.expert_cache is None else self.expert_cache
        return LoadOptions(
            n_ctx=self.num_ctx or None,
            n_batch=self.num_batch,
            n_threads=self.num_thread or None,
            expert_cache=cache if cache is None else str(cache),
        )

    def sampling(self) -> Sampling:
        """How tokens are chosen; Sampling's own defaults where nothing is said."""
        return sampling_with(Sampling(), self.model_dump(exclude_none=True))


def options_of(given: Options | None, entry: ModelEntry) -> Options:
    """The request's options over those of the model. Raises HttpError 400 when the model's cannot be used."""
    if not entry.parameters:
        return given or Options()
    try:
        return Options.model_validate({**entry.parameters, **(given.model_dump(exclude_none=True) if given else {})})
    except ValidationError as error:
        raise HttpError(400, f"parameters of {entry.name}: {explain(error)}") from None


def keep_alive_s(given: int | float | str | None) -> float | None:
    """Seconds to stay loaded, inf for ever, None as the settings say. Raises OptionError."""
    return None if given is None else parse_duration(given)
