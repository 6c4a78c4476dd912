"""The deployments of the application: one per model, and one with the HTTP APIs in front of them."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

from ray import serve
from ray.serve.config import RequestRouterConfig

from moegguf.errors import OptionError
from moegguf.models.names import DEFAULT_TAG
from moegguf.serving.ray.config import ConfiguredCatalog, ModelConfig
from moegguf.serving.ray.manager import ReplicaManager
from moegguf.serving.ray.replica import Replica
from moegguf.serving.ray.router import ConversationRouter
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
    """The function that makes the ASGI application in the ingress replica."""

    def make() -> Any:
        catalog = ConfiguredCatalog(configs)
        names = [config.name for config in configs]
        handles = {name: serve.get_deployment_handle(deployment_name(name)) for name in names}
        return pkgutil.resolve_name(MAKE_HTTP)(ReplicaManager(catalog, handles), catalog)

    return make
