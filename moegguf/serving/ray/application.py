"""The Ray Serve application: one deployment for each model, and one deployment with the
HTTP APIs in front of them.

A replica runs one model in a worker process, with the same `ModelManager` as the
server. The HTTP APIs use a `ReplicaManager`, which calls replicas. The request router
ranks replicas with `preference.rank`.

Errors are sent as values (`Failure`), because Ray would wrap exceptions in its own
classes.
"""

from __future__ import annotations

import asyncio
import math
import pkgutil
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve import metrics
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
)
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from moegguf.engine.stats import Stats
from moegguf.errors import (
    BusyError,
    MoeggufError,
    OptionError,
    QueueFullError,
    WorkerError,
)
from moegguf.generate.request import Event
from moegguf.models.entry import ModelEntry
from moegguf.models.names import DEFAULT_TAG
from moegguf.serving.clients import current_client
from moegguf.serving.events import LoadedModel
from moegguf.serving.lease import BESIDE_ANSWERS, Calls
from moegguf.serving.model_manager import ModelManager
from moegguf.serving.ray.config import MAX_REQUESTS, ConfiguredCatalog, ModelConfig
from moegguf.serving.ray.preference import MAX_CONVERSATIONS, conversation_of, rank
from moegguf.serving.ray.status import total
from moegguf.serving.wire import Message, build_error, encode_error
from moegguf.settings import n_parallel, read_settings

# The name of the function that creates the HTTP application. This package does not
# import it: only the replica with the HTTP APIs needs it.
MAKE_HTTP = "moegguf.server.app:make_http"
# maximum number of simultaneous requests in the HTTP replica, which forwards them to
# the models' replicas
MAX_HTTP_REQUESTS = 4096
STATUS_PERIOD_S = 5.0
STATUS_TIMEOUT_S = 5.0
COUNTERS: Mapping[str, str] = {
    "tokens": "Tokens evaluated, in prompts and answers.",
    "lookups": "Lookups: distinct experts that layers needed, summed over passes.",
    "misses": "Lookups that found the expert neither in a slot nor on its way to one.",
    "bytes_missed": "Bytes of experts read for misses.",
    "stall_s": "Seconds that computation spent waiting for experts.",
    "read_errors": "Reads that failed permanently.",
}
"""{field of `Stats`: description of its metric}. For each replica, Ray exports the
metric `ray_moegguf_FIELD_total`."""


def build(configs: Sequence[ModelConfig]) -> serve.Application:
    """Returns the Ray Serve application with these models. Raises OptionError for
    options that Ray does not accept."""
    models = {config.name: _model(config) for config in configs}
    ingress = serve.deployment(
        serve.ingress(_http_of(configs))(),
        name="http",
        max_ongoing_requests=MAX_HTTP_REQUESTS,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(models)


def deployment_name(model: str) -> str:
    """Returns the name of a model's deployment. It depends only on the model's name."""
    return quote(model.removesuffix(f":{DEFAULT_TAG}"), safe="")


def _model(config: ModelConfig) -> serve.Application:
    scaling: dict[str, Any] = (
        {"autoscaling_config": dict(config.autoscaling_config)}
        if config.autoscaling_config
        else {}
    )
    actor = {"num_cpus": config.n_threads or 1, **config.ray_actor_options}
    if config.memory_bytes is not None:
        # Stops Ray from placing too many replicas on a machine.
        actor.setdefault("memory", config.memory_bytes)
    try:
        found = serve.deployment(
            Replica,
            name=deployment_name(config.name),
            max_ongoing_requests=config.ongoing_requests(n_parallel()),
            max_queued_requests=config.max_queued_requests,
            ray_actor_options=actor,
            request_router_config=RequestRouterConfig(
                request_router_class=ConversationRouter
            ),
            **scaling,
        )
        return found.bind(config)
    except (ValueError, TypeError) as error:
        text = " ".join(str(error).split())
        raise OptionError(
            f"models.{config.name}: Ray Serve does not accept this model's options ({text}); correct them in the config"
            " file."
        ) from None


def _http_of(configs: Sequence[ModelConfig]) -> Callable[[], Any]:

    def make() -> Any:
        catalog = ConfiguredCatalog(configs)
        names = [config.name for config in configs]
        handles = {
            name: serve.get_deployment_handle(deployment_name(name)) for name in names
        }
        return pkgutil.resolve_name(MAKE_HTTP)(
            ReplicaManager(catalog, handles), catalog
        )

    return make


@dataclass(frozen=True)
class Failure:
    """A moegguf error, sent instead of a value or as the last item of an answer."""

    error: Message


class Replica:
    """A replica of one model. Ray Serve calls its methods. The replica is ready when
    the model is loaded."""

    async def __init__(self, config: ModelConfig) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        catalog = ConfiguredCatalog((config,))
        settings = read_settings()
        # Ray Serve decides how long a replica lives and how many requests may wait. So
        # keep_alive_s and max_queue have values that impose no further limit.
        settings = replace(
            settings, memory_bytes=config.memory_bytes, keep_alive_s=math.inf, max_queue=MAX_REQUESTS,
            loading={"n_parallel": config.n_parallel} if config.n_parallel else {},
        )  # fmt: skip
        self._name = config.name
        self._overrides = config.load_options()
        self._counters = {
            name: metrics.Counter(
                f"moegguf_{name}", description=text, tag_keys=("model",)
            )
            for name, text in COUNTERS.items()
        }
        for counter in self._counters.values():
            counter.set_default_tags({"model": config.name})
        self._counted = Stats()
        self._manager = ModelManager(catalog, settings)
        loaded = await self._manager.load(self._name, self._overrides)
        self._pid = loaded.pid

    async def __del__(self) -> None:
        """Stops the worker process. Ray Serve calls this method when it stops the
        replica."""
        await self._manager.__aexit__()

    async def call(
        self, conversation: str, kind: str, fields: Mapping[str, Any], client: str
    ) -> AsyncGenerator[Event | Failure | Any]:
        """Yields the events of an answer if `kind` is "generate", otherwise one item:
        the value that `Calls.value` returns. A moegguf error is yielded as a `Failure`.
        Closing the generator stops an answer, after the current pass at the latest.

        Only the router uses `conversation`. `client` determines the request's position
        in the queue.
        """
        current_client.set(client)
        try:
            will_answer = kind not in BESIDE_ANSWERS
            async with self._manager.lease(
                self._name, self._overrides, will_answer=will_answer
            ) as lease:
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
        """Returns the state of the model, or None while the model is not loaded because
        its worker has ended."""
        return next(iter(self._manager.loaded()), None)

    def _export_counters(self) -> None:
        for model in self._manager.loaded():
            if model.pid != self._pid:  # the previous worker has ended
                self._pid, self._counted = model.pid, Stats()
            new, self._counted = model.stats - self._counted, model.stats
            for name, counter in self._counters.items():
                if (count := getattr(new, name)) > 0:
                    counter.inc(count)


class ReplicaManager:
    """Replaces `ModelManager` for the HTTP APIs, with its methods lease, load, unload
    and loaded. Each model is a deployment in `handles`. All calls must come from the
    event loop that entered the manager.

    Load options and keep-alive times of requests have no effect: the config file and
    Ray Serve decide.
    """

    def __init__(
        self, catalog: ConfiguredCatalog, handles: Mapping[str, DeploymentHandle]
    ) -> None:
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
    async def lease(
        self, name: str | ModelEntry, *_: object, **__: object
    ) -> AsyncIterator[ReplicaLease]:
        """Yields a lease of a model for one request. Ray Serve chooses a replica for
        each call. Raises ModelNotFoundError or ModelNameError."""
        entry = await self._find(name)
        yield ReplicaLease(entry, self._handles[entry.name])

    async def load(
        self, name: str | ModelEntry, *_: object, **__: object
    ) -> LoadedModel:
        """Returns the state of a model in one of its replicas. Raises BusyError if this
        replica has no loaded model."""
        entry = await self._find(name)
        with ray_errors():
            found: LoadedModel | None = await self._handles[entry.name].status.remote()
        if found is None:
            raise BusyError(
                f"a replica of {entry.name!r} has no loaded model; send a prompt, which loads it."
            )
        return found

    async def unload(self, name: str | ModelEntry) -> bool:
        """Raises OptionError: a request cannot unload a model that Ray's replicas
        serve."""
        raise OptionError(
            f"{(await self._find(name)).name!r} cannot be unloaded by a request; set min_replicas: 0 in its"
            " autoscaling_config in the config file, then `serve deploy` the file."
        )

    def loaded(self) -> list[LoadedModel]:
        """Returns the states of the loaded models in the config's order. A state
        combines all replicas of its model (`total`), and may be a few seconds old."""
        return [self._loaded[name] for name in self._handles if name in self._loaded]

    async def _find(self, name: str | ModelEntry) -> ModelEntry:
        return (
            name
            if isinstance(name, ModelEntry)
            else await asyncio.to_thread(self._catalog.find, name)
        )

    async def _update_loaded(self) -> None:
        while True:
            for name, handle in self._handles.items():
                with suppress(RayError, RayServeException, TimeoutError):
                    found = await handle.broadcast("status").results_async(
                        timeout_s=STATUS_TIMEOUT_S, return_exceptions=True
                    )
                    self._loaded.pop(name, None)
                    if replicas := [
                        each for each in found if isinstance(each, LoadedModel)
                    ]:
                        self._loaded[name] = total(replicas)
            await asyncio.sleep(STATUS_PERIOD_S)


class ReplicaLease(Calls):
    """The use of a model by one request, with the calls of
    `moegguf.serving.lease.Lease`. A call that failed before its first event may be
    repeated by another replica."""

    load_s = 0.0

    def __init__(self, entry: ModelEntry, handle: DeploymentHandle) -> None:
        self.entry = entry
        self._handle = handle

    async def _attempt(self, kind: str, **fields: Any) -> AsyncGenerator[Any, None]:
        conversation = conversation_of(fields["request"]) if kind == "generate" else ""
        items = self._handle.options(stream=True).call.remote(
            conversation, kind, fields, current_client.get()
        )
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
    """Context manager that converts Ray's errors about full or failed replicas to
    moegguf's errors. A RayTaskError, which an exception in the replica has caused, is
    not converted."""
    try:
        yield
    except BackPressureError:
        raise QueueFullError from None
    except RayTaskError:  # an exception in the replica that is not a moegguf error
        raise
    except DeploymentUnavailableError:
        raise WorkerError(
            "Ray could not start a replica of this model; see `serve status` and the log of the replica, then deploy"
            " the configuration again."
        ) from None
    except (RayError, RayServeException) as error:
        raise WorkerError(
            f"the replica that processed this request failed ({type(error).__name__}); send the request again, because"
            " Ray replaces a failed replica."
        ) from None


class ConversationRouter(RequestRouter):
    """A Ray Serve router that prefers the replica that received the conversation's last
    request. The conversation (`conversation_of`) is the first argument of a request.

    All requests come through one HTTP replica, so this router sees every request of a
    conversation. The router remembers MAX_CONVERSATIONS conversations, and may prefer a
    replica that has lost a conversation's KV cache.
    """

    def initialize_state(self) -> None:
        """Sets up the router's state. Ray Serve calls this method once."""
        # {conversation: its replica}, the latest conversation last.
        self._went: dict[str, ReplicaID] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Returns the replicas grouped into ranks, preferred replicas first. Ray Serve
        calls this method for each request."""
        if pending_request is not None:
            # Ray retries later if all replicas are full.
            pending_request.routing_context.should_backoff = True
        # Ray chooses the first of equally loaded replicas. So the replica whose last
        # conversation is oldest comes first.
        last_sent = {replica: i for i, replica in enumerate(self._went.values())}
        replicas = sorted(
            candidate_replicas,
            key=lambda replica: last_sent.get(replica.replica_id, -1),
        )
        ids = [replica.replica_id for replica in replicas]
        went = self._went.get(asked_conversation(pending_request))
        # None: Ray does not know the length yet.
        queues = [self.replica_queue_len_cache.get(each) or 0 for each in ids]
        ranks = rank(ids.index(went) if went in ids else None, queues)
        return [[replicas[i] for i in indices] for indices in ranks]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Remembers the replica of a conversation. Ray Serve calls this when a replica
        has accepted a request."""
        if conversation := asked_conversation(pending_request):
            self._went.pop(conversation, None)
            self._went[conversation] = replica_id
            if len(self._went) > MAX_CONVERSATIONS:
                del self._went[next(iter(self._went))]


def asked_conversation(pending: PendingRequest | None) -> str:
    """Returns the conversation of a request, or "" if it has none."""
    return str(pending.args[0]) if pending is not None and pending.args else ""
