"""The application: a deployment per model, whose replicas are moegguf workers, and one with the HTTP APIs in front of
them. What a replica runs is one model in a worker process, through the `ModelManager` that the server has; the server
gets the same interface over the handles of replicas. The router of requests asks `preference.rank` with what Ray Serve
knows of a model's replicas.

Errors travel as values (`Failure`): Ray would wrap them, and their classes with them.
"""

from __future__ import annotations

import asyncio
import math
import pkgutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve import metrics
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from moegguf.engine.stats import Stats
from moegguf.errors import BusyError, MoeggufError, OptionError, QueueFullError, WorkerError
from moegguf.generate.request import Request
from moegguf.models.entry import ModelEntry
from moegguf.models.names import DEFAULT_TAG
from moegguf.serving.clients import current_client
from moegguf.serving.events import Event, LoadedModel, LoadedName, LoadOverrides
from moegguf.serving.lease import BESIDE_ANSWERS, Calls
from moegguf.serving.model_manager import ModelManager
from moegguf.serving.ray.config import MAX_REQUESTS, ConfiguredCatalog, ModelConfig
from moegguf.serving.ray.preference import MAX_CONVERSATIONS, conversation_of, rank
from moegguf.serving.wire import Message, build_error, encode_error
from moegguf.settings import n_parallel, read_settings

# Ray takes applications and routers by name. HTTP lies above this package, and only the ingress replica needs it.
MAKE_HTTP = "moegguf.server.app:make_http"
MAX_HTTP_REQUESTS = 4096  # most requests at once in the ingress replica, which only translates
STATUS_PERIOD_S = 5.0
STATUS_TIMEOUT_S = 5.0
COUNTERS: Mapping[str, str] = {
    "tokens": "Tokens computed, of prompts and answers.",
    "lookups": "Distinct experts that a layer needed in a pass.",
    "misses": "Lookups that needed a read of their own.",
    "bytes_missed": "Bytes of experts read for misses.",
    "stall_s": "Seconds that computation waited for experts.",
    "read_errors": "Reads that failed after all retries.",
}
"""{field of `Stats`: help}; Ray exports `ray_moegguf_NAME_total` of each replica."""


def build(configs: Sequence[ModelConfig]) -> serve.Application:
    """The application of these models. Raises OptionError for what Ray does not take."""
    models = {config.name: _model(config) for config in configs}
    ingress = serve.deployment(
        serve.ingress(_http_of(configs))(),
        name="http",
        max_ongoing_requests=MAX_HTTP_REQUESTS,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(models)


def deployment_name(model: str) -> str:
    """The name of a model's deployment, which stays when others are added."""
    return quote(model.removesuffix(f":{DEFAULT_TAG}"), safe="")


def _model(config: ModelConfig) -> serve.Application:
    scaling: dict[str, Any] = (
        {"autoscaling_config": dict(config.autoscaling_config)} if config.autoscaling_config else {}
    )
    actor = {"num_cpus": config.n_threads or 1, **config.ray_actor_options}
    if config.memory_bytes is not None:
        actor.setdefault("memory", config.memory_bytes)  # Ray then places no more replicas than fit a machine
    try:
        found = serve.deployment(
            Replica,
            name=deployment_name(config.name),
            max_ongoing_requests=config.ongoing_requests(n_parallel()),
            max_queued_requests=config.max_queued_requests,
            ray_actor_options=actor,
            request_router_config=RequestRouterConfig(request_router_class=ConversationRouter),
            **scaling,
        )
        return found.bind(config)
    except (ValueError, TypeError) as error:
        text = " ".join(str(error).split())
        raise OptionError(f"models.{config.name}: Ray Serve does not take its options: {text}") from None


def _http_of(configs: Sequence[ModelConfig]) -> Callable[[], Any]:

    def make() -> Any:
        catalog = ConfiguredCatalog(configs)
        names = [config.name for config in configs]
        handles = {name: serve.get_deployment_handle(deployment_name(name)) for name in names}
        return pkgutil.resolve_name(MAKE_HTTP)(ReplicaManager(catalog, handles), catalog)

    return make


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
            loading={"n_parallel": config.n_parallel} if config.n_parallel else {},
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

    async def call(
        self, conversation: str, kind: str, fields: Mapping[str, Any], client: str
    ) -> AsyncGenerator[Event | Failure | Any]:
        """The events of an answer, of the kind "generate"; else the value of a request (`Calls.value`). Closing it
        stops an answer within a token. `conversation` is the router's; `client`: whose turn it takes."""
        current_client.set(client)
        try:
            will_answer = kind not in BESIDE_ANSWERS
            async with self._manager.lease(self._name, self._overrides, will_answer=will_answer) as lease:
                if kind != "generate":
                    yield await lease.value(kind, **fields)
                    return
                async with aclosing(lease.answer(**fields)) as events:
                    async for event in events:
                        yield event
        except MoeggufError as error:
            yield Failure(encode_error(error))
        finally:
            self._export_counters()

    async def status(self) -> LoadedModel | None:
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


class ReplicaManager:
    """Models by name, each a deployment: `handles`. All calls belong to the event loop that entered it.

    Options of loading and keep-alive times of requests have no effect: the config has them.
    """

    def __init__(self, catalog: ConfiguredCatalog, handles: Mapping[str, DeploymentHandle]) -> None:
        self._catalog = catalog
        self._handles = handles
        self._loaded: dict[str, LoadedModel] = {}
        self._updating: asyncio.Task[None]

    async def __aenter__(self) -> ReplicaManager:
        self._updating = asyncio.create_task(self._update_loaded())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._updating.cancel()
        with suppress(asyncio.CancelledError):
            await self._updating

    @asynccontextmanager
    async def lease(self, name: str | ModelEntry, *_: object, **__: object) -> AsyncIterator[ReplicaLease]:
        """The use of a model by one request; each call goes to a replica that suits it. Raises ModelNotFoundError,
        ModelNameError."""
        entry = await self._find(name)
        yield ReplicaLease(entry, self._handles[entry.name])

    async def load(self, name: str | ModelEntry, *_: object, **__: object) -> LoadedModel:
        """The state of a model, which its replicas hold in memory. Raises BusyError while none does."""
        entry = await self._find(name)
        with ray_errors():
            found: LoadedModel | None = await self._handles[entry.name].status.remote()
        if found is None:
            raise BusyError(f"no replica has {entry.name!r} in memory; try again later.")
        return found

    async def unload(self, name: str | ModelEntry) -> bool:
        """Raises OptionError."""
        raise OptionError(
            f"{(await self._find(name)).name!r} is not unloaded by requests; set its autoscaling_config in the config"
            " file, then `serve deploy` it."
        )

    def loaded(self) -> list[LoadedModel]:
        """The models that replicas hold, in the config's order: sums over their replicas, at most some seconds old."""
        return [self._loaded[name] for name in self._handles if name in self._loaded]

    async def _find(self, name: str | ModelEntry) -> ModelEntry:
        return name if isinstance(name, ModelEntry) else await asyncio.to_thread(self._catalog.find, name)

    async def _update_loaded(self) -> None:
        while True:
            for name, handle in self._handles.items():
                with suppress(RayError, RayServeException, TimeoutError):
                    found = await handle.broadcast("status").results_async(
                        timeout_s=STATUS_TIMEOUT_S, return_exceptions=True
                    )
                    self._loaded.pop(name, None)
                    if replicas := [each for each in found if isinstance(each, LoadedModel)]:
                        self._loaded[name] = total(replicas)
            await asyncio.sleep(STATUS_PERIOD_S)


def total(replicas: Sequence[LoadedModel]) -> LoadedModel:
    """One model's replicas as one: sums, the shortest context, the first one's process and plan."""
    first = replicas[0]
    return replace(
        first,
        n_ctx=min(each.n_ctx for each in replicas),
        size_bytes=sum(each.size_bytes for each in replicas),
        vram_bytes=sum(each.vram_bytes for each in replicas),
        busy=any(each.busy for each in replicas),
        queue=sum(each.queue for each in replicas),
        n_requests=sum(each.n_requests for each in replicas),
        stats=sum((each.stats for each in replicas), Stats()),
        names=(LoadedName(first.name, first.digest, None),),
    )


class ReplicaLease(Calls):
    """The use of a model by one request, as `moegguf.serving.lease.Lease`. A call is repeated by another replica."""

    load_s = 0.0

    def __init__(self, entry: ModelEntry, handle: DeploymentHandle) -> None:
        self.entry = entry
        self._handle = handle

    def answer(self, request: Request, *, stream: bool = True) -> AsyncGenerator[Event, None]:
        """The events of an answer. Closing it stops the answer. Raises what `Lease.answer` raises."""
        return self.events("generate", conversation=conversation_of(request), request=request, stream=stream)

    async def _attempt(self, kind: str, conversation: str = "", **fields: Any) -> AsyncGenerator[Any, None]:
        items = self._handle.options(stream=True).call.remote(conversation, kind, fields, current_client.get())
        try:
            with ray_errors():
                async for item in items:
                    if isinstance(item, Failure):
                        raise build_error(item.error)
                    yield item
        finally:
            items.cancel()


@contextmanager
def ray_errors() -> Iterator[None]:
    """Raises Ray's errors as moegguf's."""
    try:
        yield
    except BackPressureError:
        raise QueueFullError from None
    except RayTaskError:  # an exception in the replica, which is not one of moegguf's
        raise
    except (RayError, RayServeException) as error:
        raise WorkerError(
            f"the replica that computed this has ended ({type(error).__name__}); send the request again: another one"
            " takes it, and Ray starts a new one."
        ) from None


class ConversationRouter(RequestRouter):
    """Ranks replicas for requests whose first argument is a conversation (`conversation_of`), by where it went before:
    all requests come through one ingress replica. A replica that has lost its KV cache since is preferred in vain,
    which costs nothing: no other one holds the conversation."""

    def initialize_state(self) -> None:
        """Called by Ray Serve."""
        self._went: dict[str, ReplicaID] = {}  # each conversation's replica; the latest conversation comes last

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Called by Ray Serve: replicas in ranks, preferred ones first."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # when all are full
        # The first of equals is taken: the one that got no conversation for the longest time.
        last_sent = {replica: i for i, replica in enumerate(self._went.values())}
        replicas = sorted(candidate_replicas, key=lambda replica: last_sent.get(replica.replica_id, -1))
        ids = [replica.replica_id for replica in replicas]
        went = self._went.get(asked_conversation(pending_request))
        queues = [self.replica_queue_len_cache.get(each) or 0 for each in ids]  # None: not known yet
        ranks = rank(ids.index(went) if went in ids else None, queues)
        return [[replicas[i] for i in indices] for indices in ranks]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Ray Serve: a replica has accepted a request."""
        if conversation := asked_conversation(pending_request):
            self._went.pop(conversation, None)
            self._went[conversation] = replica_id
            if len(self._went) > MAX_CONVERSATIONS:
                del self._went[next(iter(self._went))]


def asked_conversation(pending: PendingRequest | None) -> str:
    """The conversation of a request; "" where it is part of none."""
    return str(pending.args[0]) if pending is not None and pending.args else ""
