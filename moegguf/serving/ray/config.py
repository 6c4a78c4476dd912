"""The `args` of the application in a config file of Ray Serve: models, their budgets, and what Ray is told of each.

models:
  NAME:                          # as clients ask for it
    model: hf.co/user/repo:Q4    # a name or path, equal on every machine; default: NAME
    memory: 24GiB                # of one replica; default: what is free on its machine
    expert_cache: 50%
    context_length: 8192
    threads: 8
    parallel: 4                  # requests that a replica computes together; default: MOEGGUF_NUM_PARALLEL, or 1
    max_ongoing_requests: 16     # of one replica; more wait where they can still go to another; default: 8, or twice
                                 # what it computes together
    max_queued_requests: 512     # that wait; more are refused
    autoscaling_config: {...}    # Ray Serve's, as it is; default: one replica
    ray_actor_options: {...}     # Ray's, as they are
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moegguf.errors import BudgetError, ModelNameError, OptionError
from moegguf.models.names import parse_name
from moegguf.options import MAX_CONTEXT_TOKENS, MAX_PARALLEL
from moegguf.quantities import parse_expert_cache, parse_size

MAX_THREADS = 1024
MAX_REQUESTS = 1_000_000
MIN_ONGOING = 8  # of a replica, where the config has no number


@dataclass(frozen=True)
class ModelConfig:
    """One model. `name`: canonical; `model`: a name or path on the replica's machine. None: what `moegguf serve` would
    choose there. `autoscaling_config`, `ray_actor_options`: Ray's."""

    name: str
    model: str
    memory_bytes: int | None = None
    expert_cache: str | None = None
    n_ctx: int | None = None
    n_threads: int | None = None
    n_parallel: int | None = None
    max_ongoing_requests: int | None = None
    max_queued_requests: int = 512
    autoscaling_config: Mapping[str, Any] = field(default_factory=dict)
    ray_actor_options: Mapping[str, Any] = field(default_factory=dict)

    def ongoing_requests(self, n_parallel: int) -> int:
        """Most requests of one replica at once, where `n_parallel` is what it computes together unless the model has
        its own: enough that as many again wait when they end."""
        return self.max_ongoing_requests or max(MIN_ONGOING, 2 * (self.n_parallel or n_parallel))


def read_config(arguments: Mapping[str, Any]) -> tuple[ModelConfig, ...]:
    """The models in `arguments`; without any, the bundled demo.

    Raises OptionError, naming the key, for unknown keys and values out of range, ModelNameError.
    """
    _check_keys("", arguments, {"models"})
    models = arguments.get("models", {"demo": {}})
    if not isinstance(models, Mapping) or not models:
        raise OptionError(
            f"models must map names to options, but is {models!r:.60}; give at least one, such as demo: {{}}."
        )
    configs = tuple(_read_model(str(name), options) for name, options in models.items())
    names = [config.name.lower() for config in configs]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise OptionError(f"models has {repeated[0]!r} more than once; names differ in more than case and ':latest'.")
    return configs


def _read_model(name: str, options: Any) -> ModelConfig:
    key = f"models.{name}"
    options = {} if options is None else options
    if not isinstance(options, Mapping):
        raise OptionError(f"{key} must map options to values, but is {options!r:.60}; {{}} takes all defaults.")
    _check_keys(f"{key}.", options, _READERS.keys())
    try:
        canonical = parse_name(name).canonical
    except ModelNameError as error:
        raise ModelNameError(f"{key}: {error}") from None
    found: dict[str, Any] = {"model": name}
    for option, value in options.items():
        field_name, read = _READERS[option]
        try:
            found[field_name] = read(value)
        except (OptionError, BudgetError, ValueError) as error:
            raise OptionError(f"{key}.{option}: {error}") from None
    return ModelConfig(name=canonical, **found)


def _check_keys(prefix: str, given: Mapping[str, Any], known: Any) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
            raise OptionError(f"unknown option {prefix + str(name)!r:.80}; {hint}")


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise OptionError(f"must be a name or a path, but is {value!r:.60}.")
    return value


def _cache(value: Any) -> str:
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise OptionError(f"must be 'auto', a share such as '50%' or a size such as '4GiB', but is {value!r:.60}.")
    parse_expert_cache(value)
    return str(value)


def _whole(least: int, most: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise OptionError(f"must be a whole number from {least} to {most}, but is {value!r:.60}.")
        return value

    return read


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise OptionError(f"must map names to values, as in Ray's documentation, but is {value!r:.60}.")
    return dict(value)


_READERS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "model": ("model", _text),
    "memory": ("memory_bytes", parse_size),
    "expert_cache": ("expert_cache", _cache),
    "context_length": ("n_ctx", _whole(1, MAX_CONTEXT_TOKENS)),
    "threads": ("n_threads", _whole(1, MAX_THREADS)),
    "parallel": ("n_parallel", _whole(1, MAX_PARALLEL)),
    "max_ongoing_requests": ("max_ongoing_requests", _whole(1, MAX_REQUESTS)),
    "max_queued_requests": ("max_queued_requests", _whole(1, MAX_REQUESTS)),
    "autoscaling_config": ("autoscaling_config", _mapping),
    "ray_actor_options": ("ray_actor_options", _mapping),
}
"""{option: (field of `ModelConfig`, what reads its value)}."""
