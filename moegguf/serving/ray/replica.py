"""What a Ray Serve replica runs: one model in a worker process, through the `ModelManager` that the server has.

Errors travel as values (`Failure`): Ray would wrap them, and their classes with them.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from ray.serve import metrics

from moegguf.engine.stats import Stats
from moegguf.errors import MoeggufError
from moegguf.generate.request import GenerationRequest
from moegguf.serving.events import Event, LoadedModel, LoadOverrides
from moegguf.serving.model_manager import ModelManager
from moegguf.serving.ray.config import MAX_REQUESTS, ConfiguredCatalog, ModelConfig
from moegguf.serving.ray.preference import Conversation
from moegguf.serving.wire import Message, encode_error
from moegguf.settings import read_settings

COUNTERS: Mapping[str, str] = {
    "tokens": "Tokens computed, of prompts and answers.",
    "lookups": "Distinct experts that a layer needed in a pass.",
    "misses": "Lookups that needed a read of their own.",
    "bytes_missed": "Bytes of experts read for misses.",
    "stall_s": "Seconds that computation waited for experts.",
    "read_errors": "Reads that failed after all retries.",
}
"""{field of `Stats`: help}; Ray exports `ray_moegguf_NAME_total` of each replica."""


@dataclass(frozen=True)
class Failure:
    """An error of moegguf's in place of a value, or of the last item of an answer."""

    error: Message


class Replica:
    """One model of the config. Ray Serve calls the methods; a replica is ready once its model is loaded."""

    async def __init__(self, config: ModelConfig) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        catalog = ConfiguredCatalog((config,))
        settings = read_settings()
        # Serve decides how long a replica lives, and how many requests may wait.
        settings = replace(
            settings, memory_bytes=config.memory_bytes, keep_alive_s=math.inf, max_queue=MAX_REQUESTS,
            n_parallel=config.n_parallel or settings.n_parallel,
        )  # fmt: skip
        self._name = config.name
        self._overrides = LoadOverrides(config.n_ctx, None, config.n_threads, config.expert_cache)
        self._counters = {
            name: metrics.Counter(f"moegguf_{name}", description=text, tag_keys=("model",))
            for name, text in COUNTERS.items()
        }
        for counter in self._counters.values():
            counter.set_default_tags({"model": config.name})
        self._counted = Stats()
        self._manager = ModelManager(catalog, settings)
        loaded = await self._manager.load(self._name, self._overrides)
        self._pid = loaded.pid

    async def __del__(self) -> None:
        """Called by Ray Serve at the end of the replica."""
        await self._manager.__aexit__()

    async def answer(
        self, conversation: Conversation, generation: GenerationRequest, stream: bool
    ) -> AsyncGenerator[Event | Failure]:
        """The items of an answer. Closing it stops the answer within a token."""
        try:
            async with (
                self._manager.lease(self._name, self._overrides) as lease,
                aclosing(lease.answer(generation, stream=stream)) as events,
            ):
                async for event in events:
                    yield event
        except MoeggufError as error:
            yield Failure(encode_error(error))
        finally:
            self._export_counters()

    async def value(self, conversation: Conversation, kind: str, fields: Mapping[str, Any]) -> Any:
        """The value of a request (`Calls.value`); or a `Failure`."""
        try:
            async with self._manager.lease(self._name, self._overrides, will_answer=kind == "embed") as lease:
                return await lease.value(kind, **fields)
        except MoeggufError as error:
            return Failure(encode_error(error))
        finally:
            self._export_counters()

    async def status(self, conversation: Conversation = Conversation()) -> LoadedModel | None:
        """The model in memory; None while it is not, after its worker has ended."""
        return next(iter(self._manager.loaded()), None)

    def _export_counters(self) -> None:
        for model in self._manager.loaded():
            if model.pid != self._pid:  # the worker before it has ended
                self._pid, self._counted = model.pid, Stats()
            new, self._counted = model.stats - self._counted, model.stats
            for name, counter in self._counters.items():
                if (count := getattr(new, name)) > 0:
                    counter.inc(count)
