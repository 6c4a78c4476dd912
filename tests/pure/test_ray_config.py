"""The args of the Ray Serve application: typed, checked, and errors that name the key."""

from typing import Any

import pytest

from moegguf.errors import ModelNameError, ModelNotFoundError, OptionError
from moegguf.models.catalog import demo_path
from moegguf.serving.ray.config import ConfiguredCatalog, ModelConfig, read_config

WHOLE = {
    "model": "hf.co/user/repo:Q4_K_M",
    "memory": "24GiB",
    "expert_cache": "50%",
    "context_length": 8192,
    "threads": 8,
    "parallel": 4,
    "max_ongoing_requests": 4,
    "max_queued_requests": 16,
    "autoscaling_config": {"min_replicas": 1, "max_replicas": 3},
    "ray_actor_options": {"resources": {"ssd": 1}},
}


def test_every_option_is_read() -> None:
    (found,) = read_config({"models": {"big": WHOLE}})
    assert found.model_dump(by_alias=True) == {"name": "big:latest"} | WHOLE | {"memory": 24 << 30}


def test_without_models_it_is_the_demo() -> None:
    demo = ModelConfig(name="demo:latest", model="demo")
    assert read_config({}) == read_config({"models": {"demo": None}}) == (demo,)


def test_a_replica_gets_as_many_requests_as_it_computes_and_as_many_again() -> None:
    def ongoing(n_parallel: int = 1, **options: Any) -> int:
        (config,) = read_config({"models": {"demo": options}})
        return config.ongoing_requests(n_parallel)

    assert (ongoing(), ongoing(parallel=4), ongoing(parallel=32), ongoing(n_parallel=16)) == (8, 8, 64, 32)
    assert ongoing(n_parallel=16, parallel=2) == 8
    assert ongoing(parallel=32, max_ongoing_requests=3) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": {}}, "unknown option 'model'; did you mean 'models'"),
        ({"models": {}}, "at least one"),
        ({"models": ["demo"]}, "must map names"),
        ({"models": {"demo": 4}}, "models.demo must map options"),
        ({"models": {"demo": {"memry": "1GiB"}}}, "'models.demo.memry'; did you mean 'memory'"),
        ({"models": {"demo": {"memory": "much"}}}, r"models.demo.memory: .*much"),
        ({"models": {"demo": {"expert_cache": "200%"}}}, r"models.demo.expert_cache: "),
        ({"models": {"demo": {"expert_cache": True}}}, r"models.demo.expert_cache: must be .* True"),
        ({"models": {"demo": {"threads": 0}}}, "models.demo.threads: .* than or equal to 1, but is 0"),
        ({"models": {"demo": {"context_length": "4k"}}}, "models.demo.context_length: .*integer, but is '4k'"),
        ({"models": {"demo": {"model": ""}}}, "models.demo.model: must be a name or a path"),
        ({"models": {"demo": {"autoscaling_config": 3}}}, "demo.autoscaling_config: .*dictionary, but is 3"),
        ({"models": {"demo": {}, "Demo:latest": {}}}, "more than once"),
    ],
)
def test_errors_name_the_key_and_the_rule(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        read_config(arguments)


def test_names_are_checked() -> None:
    with pytest.raises(ModelNameError, match=r"models\..*: "):
        read_config({"models": {"../x": {}}})


def test_the_catalog_has_the_names_of_the_config_only() -> None:
    catalog = ConfiguredCatalog(read_config({"models": {"small": {"model": str(demo_path())}}}))
    assert [entry.name for entry in catalog.entries()] == ["small:latest"]
    assert catalog.find("SMALL").path == demo_path()
    for name in ("demo", "other"):
        with pytest.raises(ModelNotFoundError, match="known are small:latest"):
            catalog.find(name)
    with pytest.raises(ModelNameError):
        catalog.find(str(demo_path()))
