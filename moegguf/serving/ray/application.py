"""The deployments of the application: one per model, and one with the HTTP APIs in front of them; and the router of
requests to a model's replicas: `preference.rank` over what Ray Serve knows of these."""

from __future__ import annotations

import pkgutil
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from moegguf.errors import OptionError
from moegguf.models.names import DEFAULT_TAG
from moegguf.serving.ray.config import ConfiguredCatalog, ModelConfig
from moegguf.serving.ray.preference import Candidate, Conversation, Sequences, after, rank
from moegguf.serving.ray.replica import Replica, ReplicaManager
from moegguf.settings import read_settings

# By name, as Ray takes applications and routers: HTTP lies above this package, and only the ingress replica needs it.
MAKE_HTTP = "moegguf.server.ray:make_http"
MAX_HTTP_REQUESTS = 4096  # at once, in the ingress replica, which only translates


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
    default_parallel = read_settings().n_parallel
    try:
        found = serve.deployment(
            Replica,
            name=deployment_name(config.name),
            max_ongoing_requests=config.ongoing_requests(default_parallel),
            max_queued_requests=config.max_queued_requests,
            ray_actor_options=actor,
            request_router_config=RequestRouterConfig(
                request_router_class=ConversationRouter,
                request_router_kwargs={"n_sequences": config.n_parallel or default_parallel},
            ),
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


class ConversationRouter(RequestRouter):
    """Ranks replicas for requests whose first argument is a `Conversation`, by what it sent them before: all requests
    come through one ingress replica. A replica that has lost its KV cache since is preferred in vain, which costs
    nothing: no other one holds the conversation."""

    def initialize_state(self, n_sequences: int = 1) -> None:
        """Called by Ray Serve with `request_router_kwargs`. n_sequences: of a replica's KV cache."""
        self._n_sequences = n_sequences
        self._held: dict[ReplicaID, Sequences] = {}
        self._last_sent_s: dict[ReplicaID, float] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Called by Ray Serve: replicas in ranks, preferred ones first."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # when all are full
        # The first of equals is taken: the one whose cache is the oldest.
        replicas = sorted(candidate_replicas, key=lambda replica: self._last_sent_s.get(replica.replica_id, 0.0))
        queues = self.replica_queue_len_cache
        candidates = [Candidate(self._held.get(each.replica_id, ()), queues.get(each.replica_id)) for each in replicas]
        ranks = rank(asked_conversation(pending_request), candidates)
        return [[replicas[i] for i in indices] for indices in ranks]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Ray Serve: a replica has accepted a request."""
        conversation = asked_conversation(pending_request)
        if conversation.digests:
            self._last_sent_s[replica_id] = time.monotonic()
            self._held[replica_id] = after(self._held.get(replica_id, ()), conversation, self._n_sequences)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Ray Serve: what it held is lost."""
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray Serve: forgets what those had that are gone."""
        super().update_replicas(replicas)
        for gone in self._held.keys() - {replica.replica_id for replica in replicas}:
            self._forget(gone)

    def _forget(self, replica_id: ReplicaID) -> None:
        self._held.pop(replica_id, None)
        self._last_sent_s.pop(replica_id, None)


def asked_conversation(pending: PendingRequest | None) -> Conversation:
    """The conversation of a request; an empty one where it is not one of moegguf's."""
    first = pending.args[0] if pending is not None and pending.args else None
    return first if isinstance(first, Conversation) else Conversation()
