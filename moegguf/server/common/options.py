"""The fields that the request bodies of several APIs share: a model, and options for
loading and sampling.

Most options have Ollama's names and ranges. Unknown options are ignored with a warning
in the log. Options in PARAMETERS that have no effect here are ignored without a
warning.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    create_model,
    model_validator,
)
from starlette.datastructures import State

from moegguf.engine.machine import count_cpus
from moegguf.errors import ModelNotFoundError, MoeggufError
from moegguf.generate.request import Sampling, sampling_with
from moegguf.models.catalog import Catalog
from moegguf.models.details import details, parameters_of
from moegguf.models.entry import Details, ModelEntry
from moegguf.models.recipe import PARAMETERS, RANGES
from moegguf.options import OPTIONS
from moegguf.quantities import parse_duration, parse_expert_cache
from moegguf.server.common import limits
from moegguf.server.common.body import Body, Whole, explain, integral, without_nulls
from moegguf.server.common.errors import HttpError
from moegguf.serving.events import LoadedModel, LoadOverrides, load_overrides

log = logging.getLogger(__name__)

LORA_SCALE = OPTIONS["lora_scale"]
MAX_TOKEN = 2**31 - 1  # llama.cpp's token ids have 32 bits

# The name of a model, or the id of a stored object.
Name = Annotated[str, Field(min_length=1, max_length=limits.NAME_CHARS)]
# "" selects the only loaded model.
SelectedName = Annotated[str, Field(max_length=limits.NAME_CHARS)]

# Models


def find(catalog: Catalog, name: str, *, even_missing: bool = False) -> ModelEntry:
    """Returns the model entry with this name. With `even_missing`, its files may be
    missing. Raises HttpError 404 with Ollama's message if there is no such model, and
    ModelNameError for an invalid name."""
    try:
        return catalog.find(name, even_missing=even_missing)
    except ModelNotFoundError as error:
        hint = f" ({error.hint.rstrip('.')})" if error.hint else ""
        message = f"model {name!r:.200} not found, try pulling it first{hint}"
        raise HttpError(message, 404, "model_not_found") from None


def check_loaded(state: State) -> None:
    """Raises HttpError 503, with llama-server's message, while the models that were
    named at the server's start are being loaded."""
    if state.preloading is not None and not state.preloading.done():
        raise HttpError("Loading model", 503, headers={"retry-after": "1"})


def selected_model(state: State, model: str | None) -> str:
    """Returns `model`, or the name of the only loaded model if `model` is None or
    empty. In the second case raises HttpError 400 unless exactly one model is loaded,
    and 503 as `check_loaded` does."""
    if model:
        return model
    check_loaded(state)
    loaded: list[LoadedModel] = state.manager.loaded()
    if len(loaded) != 1:
        raise HttpError(
            f"model: is missing, and {len(loaded)} models are loaded; name one"
        )
    return loaded[0].name


def loaded_of(state: State, entry: ModelEntry) -> LoadedModel | None:
    """Returns the loaded model that has the entry's name, or None if there is none."""
    loaded: list[LoadedModel] = state.manager.loaded()
    return next(
        (
            model
            for model in loaded
            if entry.name in {each.name for each in model.names}
        ),
        None,
    )


async def look_up(state: State, model: str | None) -> tuple[ModelEntry, Details]:
    """Returns the entry of the selected model and the details in its file. Raises the
    errors of `selected_model`, `find` and `details`."""

    def both(name: str) -> tuple[ModelEntry, Details]:
        entry = find(state.catalog, name)
        return entry, details(entry)

    return await asyncio.to_thread(both, selected_model(state, model))


def check_capabilities(
    entry: ModelEntry, known: Details, needs: Mapping[str, bool]
) -> None:
    """Raises HttpError 400, with Ollama's message, for the first needed operation that
    the model does not support. `needs` is {operation: True if it is needed}."""
    for operation, needed in needs.items():
        capability = "completion" if operation in ("chat", "generate") else operation
        if needed and capability not in known.capabilities:
            name = entry.name if operation == "tools" else f'"{entry.name}"'
            raise HttpError(f"{name} does not support {operation}")


def details_or_none(entry: ModelEntry) -> Details | None:
    """Returns the details of a model, or None if its file cannot be read. Lists also
    show models without details."""
    try:
        return details(entry)
    except (MoeggufError, OSError):
        return None
    except Exception:
        # A bug in the reader; it must not hide the other models of a list.
        log.exception("the details of %s cannot be read", entry.name)
        return None


# Options


def _budget(value: str | int) -> str:
    parse_expert_cache(str(value))
    return str(value)


def in_range(name: str) -> Any:
    """Returns the pydantic field of a model parameter: limited to the parameter's
    range, and None by default."""
    least, most = RANGES.get(name, (None, None))
    return Field(default=None, ge=least, le=most)


Number = float | None
Budget = Annotated[str | Whole, AfterValidator(_budget)] | None
Stop = Annotated[str, Field(max_length=limits.STOP_CHARS)]
Stops = Annotated[list[Stop], Field(max_length=limits.STOPS)]


_TYPES: Mapping[type, Any] = {int: Whole, float: float, str: Stop}
if TYPE_CHECKING:

    class _TableOptions(Body):  # only the fields that code reads by name
        temperature: Number = None
        top_k: int | None = None
        top_p: Number = None
        reasoning_budget_tokens: int | None = None

else:
    _TableOptions = create_model(
        "_TableOptions",
        __base__=Body,
        **{
            name: (_TYPES[PARAMETERS[name]] | None, in_range(name))
            for name, option in OPTIONS.items()
            if option.scope == "request" and name not in ("num_predict", "num_keep")
        },
    )


class SamplingOptions(_TableOptions):
    """The options that control how tokens are chosen. Most are Ollama's, and OpenAI's
    bodies accept them as keys.

    The base class has the options of scope `request` in the table of options. Options
    whose names begin with `reasoning`, `dry`, `xtc` or `top_n` are llama-server's. None
    means the model's own parameter, or else the default.
    """

    dry_sequence_breakers: (
        Annotated[list[Stop], Field(min_length=1, max_length=limits.STOPS)] | None
    ) = None
    stop: Stops | None = None
    # True if simultaneous requests must not change any bit of the answer.
    exact: bool | None = None


class Options(SamplingOptions):
    """The options of a request: all of Ollama's options that have an effect here, and
    moegguf's own."""

    num_ctx: Whole | None = in_range("num_ctx")  # tokens of the context; 0: the default
    # Ignored in a request; a Modelfile can set it.
    num_batch: Whole | None = in_range("num_batch")
    # Limited to the number of processors; 0: the default.
    num_thread: Whole | None = in_range("num_thread")
    expert_cache: Budget = None
    draft: Literal["auto", "off", "ngram", "mtp"] | None = None
    # Below 1: until the model or the context ends the answer.
    num_predict: Whole | None = in_range("num_predict")
    # Leading tokens to keep when the context is full; -1: the prompt.
    num_keep: Whole | None = in_range("num_keep")

    @model_validator(mode="before")
    @classmethod
    def _warn_of_unknown(cls, given: Any) -> Any:
        known = cls.model_fields.keys() | PARAMETERS.keys()
        for name in given.keys() - known if isinstance(given, Mapping) else ():
            log.warning("the option %.60r is unknown and ignored", name)
        return given


class Loading(Body):
    """The fields `options` and `keep_alive`, which most request bodies that load a
    model have."""

    options: Options = Options()
    keep_alive: int | float | str | None = None

    def overrides(self) -> LoadOverrides:
        """Returns the load options in the body."""
        options = self.options
        given = options.model_dump(exclude_none=True, exclude={"num_batch"})
        # More threads than processors would busy-wait, and slow the whole machine down.
        if options.num_thread:
            given["num_thread"] = min(options.num_thread, count_cpus())
        return load_overrides(given)

    def keep_alive_s(self) -> float | None:
        """Returns how long the idle model stays loaded, in seconds. inf means forever,
        and None means the server's setting. Raises OptionError."""
        return None if self.keep_alive is None else parse_duration(self.keep_alive)


class Adapter(Body):
    """The scale of a LoRA adapter. `id` is the adapter's index in the list of
    /lora-adapters."""

    id: Annotated[Whole, Field(ge=0)]
    scale: Annotated[float, Field(ge=LORA_SCALE.least, le=LORA_SCALE.most)]


Adapters = Annotated[list[Adapter], Field(max_length=limits.STOPS)]


def scale_of(entry: ModelEntry, adapters: Sequence[Adapter]) -> float | None:
    """Returns the scale of a model's LoRA adapter: 0 if `adapters` is empty, or None if
    the model has no adapter. If several scales are given, the last one is used. Raises
    HttpError 400 for an id that the model does not have."""
    n_adapters = 0 if entry.adapter is None else 1
    if wrong := [adapter.id for adapter in adapters if adapter.id >= n_adapters]:
        raise HttpError(
            f"lora: {entry.name} has no adapter with id {wrong[0]}; GET /lora-adapters lists the ids of its adapters"
        )
    if not n_adapters:
        return None
    return adapters[-1].scale if adapters else 0.0


def sampling_of(
    entry: ModelEntry, options: Options = Options(), **own: Any
) -> Sampling:
    """Returns the sampling parameters. `own` values (keyed by Ollama's names) take
    precedence over `options`, and `options` over the model entry's parameters. A value
    of None is treated as absent. Raises HttpError 400 if a parameter of the entry is
    invalid."""
    try:
        known = Options.model_validate(parameters_of(entry))
    except ValidationError as error:
        raise HttpError(f"parameters of {entry.name}: {explain(error)}") from None
    given = known.model_dump(exclude_none=True) | options.model_dump(exclude_none=True)
    return sampling_with(Sampling(), given | without_nulls(own))


# Texts


NO_TEXT = "must be a text, the tokens of one, or a list of texts or tokens"


def _is_number(given: Any) -> bool:
    return type(given) in (int, float)  # a bool is no number


def _token_of(given: Any) -> int:
    token = integral(given)
    if type(token) is not int or not 0 <= token <= MAX_TOKEN:
        raise ValueError(NO_TEXT)
    return token


def _text_of(given: Any) -> Text:
    """Reads a string, a list of token ids and strings, or llama-server's object with
    one of these under the key `prompt_string`. Raises ValueError for anything else."""
    if isinstance(given, dict) and "prompt_string" in given:
        if given.get("multimodal_data"):
            raise ValueError(
                "multimodal_data is not supported here; send images to /v1/chat/completions"
            )
        given = given["prompt_string"]
    if isinstance(given, list) and any(map(_is_number, given)):
        return [each if isinstance(each, str) else _token_of(each) for each in given]
    if not isinstance(given, str):
        raise ValueError(NO_TEXT)
    return given


def _texts_of(given: Any) -> list[Text]:
    """Reads one text or a list of at most limits.INPUTS texts. Each text has a form
    that `_text_of` accepts. Raises ValueError for anything else."""
    is_list = (
        isinstance(given, list) and bool(given) and not any(map(_is_number, given))
    )
    texts = given if is_list else [given]
    if len(texts) > limits.INPUTS:
        raise ValueError(
            f"has {len(texts)} texts, but at most {limits.INPUTS} are accepted; send several requests"
        )
    return [_text_of(text) for text in texts]


Text = str | list[Whole | str]
"""A string, or a list of token ids and strings that are joined."""
Texts = Annotated[list[Text], BeforeValidator(_texts_of)]
