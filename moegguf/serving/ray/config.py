"""Reads the `args` of the application in a config file of Ray Serve: models, their
budgets, and Ray's options for each.

models:
  NAME:                          # the name that clients use
    model: hf.co/user/repo:Q4    # a name or path, the same on every machine; default: NAME
    memory: 24GiB                # memory of one replica; default: the free memory of its machine
    expert_cache: 50%
    context_length: 8192
    threads: 8
    parallel: 4                  # requests that a replica processes together; default: MOEGGUF_NUM_PARALLEL, or 1
    max_ongoing_requests: 16     # requests that one replica accepts at once; others wait until a replica has room;
                                 # default: twice the requests that it processes together, but at least 8
    max_queued_requests: 512     # requests that wait; further requests are refused
    autoscaling_config: {...}    # passed to Ray Serve unchanged; default: one replica
    ray_actor_options: {...}     # passed to Ray; may replace num_cpus and memory, which this program sets
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from moegguf.errors import ModelNameError, ModelNotFoundError, OptionError
from moegguf.models.catalog import Catalog
from moegguf.models.entry import ModelEntry
from moegguf.models.names import Name, parse_name
from moegguf.options import MAX_CONTEXT_TOKENS, MAX_PARALLEL
from moegguf.quantities import parse_expert_cache, parse_size

MAX_THREADS = 1024
MAX_REQUESTS = 1_000_000
MIN_ONGOING = 8  # smallest default of `max_ongoing_requests`


def _budget(value: Any) -> str:
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ValueError(
            "must be 'auto', a share such as '50%' or a size such as '4GiB'"
        )
    parse_expert_cache(value)
    return str(value)


def _name(text: str) -> str:
    if not text.strip():
        raise ValueError("must be a name or a path")
    return text


class ModelConfig(BaseModel):
    """The configuration of one model. A load option of None means the value that
    `moegguf serve` would choose on the replica's machine."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str  # canonical name, which clients use
    # Name or path on the replica's machine.
    model: Annotated[str, AfterValidator(_name)]
    memory_bytes: Annotated[int, BeforeValidator(parse_size)] | None = Field(
        None, alias="memory"
    )
    expert_cache: Annotated[str, BeforeValidator(_budget)] | None = None
    n_ctx: int | None = Field(None, ge=1, le=MAX_CONTEXT_TOKENS, alias="context_length")
    n_threads: int | None = Field(None, ge=1, le=MAX_THREADS, alias="threads")
    n_parallel: int | None = Field(None, ge=1, le=MAX_PARALLEL, alias="parallel")
    max_ongoing_requests: int | None = Field(None, ge=1, le=MAX_REQUESTS)
    max_queued_requests: int = Field(512, ge=1, le=MAX_REQUESTS)
    autoscaling_config: dict[str, Any] = Field(default_factory=dict)
    ray_actor_options: dict[str, Any] = Field(default_factory=dict)

    def load_options(self) -> dict[str, Any]:
        """Returns the options with which a replica loads the model."""
        return self.model_dump(
            include={"n_ctx", "n_threads", "expert_cache"}, exclude_none=True
        )

    def ongoing_requests(self, n_parallel: int) -> int:
        """Returns the maximum number of requests that one replica accepts at once. The
        default is twice the number of requests that a replica processes together, but
        at least MIN_ONGOING. So the next requests already wait in the replica.

        n_parallel: number of requests that a replica processes together, if the config
        does not set this number.
        """
        return self.max_ongoing_requests or max(
            MIN_ONGOING, 2 * (self.n_parallel or n_parallel)
        )


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    models: dict[str, dict[str, Any] | None] = Field({"demo": None}, min_length=1)


def read_config(arguments: Mapping[str, Any]) -> tuple[ModelConfig, ...]:
    """Returns the models in `arguments`, or the bundled demo model if there is no key
    `models`.

    Raises OptionError, which names the key, for unknown keys, invalid values and
    repeated names. Raises ModelNameError for an invalid name.
    """
    with _naming():
        models = _Arguments.model_validate(dict(arguments)).models
    configs = tuple(
        _read_model(name, options or {}) for name, options in models.items()
    )
    names = [config.name.lower() for config in configs]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise OptionError(
            f"models has {repeated[0]!r} more than once; names must differ in more than case and ':latest', so"
            " rename one."
        )
    return configs


def _read_model(name: str, options: Mapping[str, Any]) -> ModelConfig:
    with _naming("models", name):
        return ModelConfig(
            **{"model": name, **options, "name": parse_name(name).canonical}
        )


@contextmanager
def _naming(*keys: str) -> Iterator[None]:
    """Context manager that adds the full key of an invalid value to errors. The key
    begins with `keys`. A ValidationError becomes an OptionError."""
    try:
        yield
    except ModelNameError as error:
        raise ModelNameError(f"{'.'.join(keys)}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join((*keys, *map(str, first["loc"])))
        message = first["msg"].removeprefix("Value error, ").rstrip(".")
        value = f"is {first['input']!r:.60}"
        told = message if value in message else f"{message}, but {value}"
        raise OptionError(f"{key}: {told}; correct it.") from None


class ConfiguredCatalog(Catalog):
    """A catalog of the names in the config, in the config's order, with the files of
    this machine. Thread-safe."""

    def __init__(self, configs: Sequence[ModelConfig]) -> None:
        super().__init__(paths=False)
        self._configs = {config.name.lower(): config for config in configs}
        # Allows paths, since the author of the config may use any file.
        self._files = Catalog()

    def entries(self, prefix: str = "") -> list[ModelEntry]:
        """Returns the models whose names start with `prefix`, ignoring case."""
        return [
            entry
            for entry in self._models()
            if entry.name.lower().startswith(prefix.lower())
        ]

    def _models(self, text: str | None = None) -> Iterator[ModelEntry]:
        for key in self._configs if text is None else [parse_name(text).key]:
            if config := self._configs.get(key):
                yield replace(
                    self._files.find(config.model, even_missing=True), name=config.name
                )

    def _not_found(self, text: str, name: Name | None) -> ModelNotFoundError:
        known = ", ".join(config.name for config in self._configs.values())
        return ModelNotFoundError(
            f"there is no model named {text!r:.200} in the config of this application; known models: {known}."
        )
