"""Tests which replica a request prefers in Ray Serve, the sum of replicas' states, and
the checks of the application's arguments."""

import subprocess
import sys
from typing import Any

import pytest
from scripted_manager import EMPTY_PLAN

from moegguf.engine.stats import Stats
from moegguf.errors import ModelNameError, ModelNotFoundError, OptionError
from moegguf.generate.request import Request
from moegguf.models.catalog import demo_path
from moegguf.serving.events import LoadedModel
from moegguf.serving.ray.config import ConfiguredCatalog, ModelConfig, read_config
from moegguf.serving.ray.preference import (
    BEGINNING,
    MAX_IMBALANCE,
    conversation_of,
    rank,
)
from moegguf.serving.ray.status import total

WITHOUT_RAY = ("config", "preference", "status")


def talk(*contents: str, **fields: Any) -> Request:
    system, *turns = contents
    messages = [{"role": "system", "content": system}] if system else []
    messages += [
        {"role": ("user", "assistant")[i % 2], "content": text}
        for i, text in enumerate(turns)
    ]
    return Request(messages=tuple(messages), **fields)


def test_ray_preference_modules_import_without_ray() -> None:
    modules = ", ".join(f"moegguf.serving.ray.{name}" for name in WITHOUT_RAY)
    code = f"import sys; sys.modules['ray'] = None; import {modules}"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_total_sums_the_requests_that_replicas_answer_and_can_answer_at_once() -> None:
    def replica(n_ctx: int, n_parallel: int, n_answering: int) -> LoadedModel:
        return LoadedModel(
            "demo:latest", "ab", 1, n_ctx, 10, 0, None, False, False, 1, 2, Stats(), EMPTY_PLAN, n_parallel=n_parallel,
            n_answering=n_answering,
        )  # fmt: skip

    found = total([replica(2048, 4, 3), replica(1024, 2, 1)])
    assert (found.n_parallel, found.n_answering, found.n_ctx, found.queue) == (
        6,
        4,
        1024,
        2,
    )


def test_conversation_of_is_equal_for_all_turns_of_a_conversation() -> None:
    first = conversation_of(talk("", "What is an expert?"))
    assert conversation_of(talk("", "What is an expert?", "A matrix.", "Why?")) == first
    prompts = [
        Request(prompt="x" * n + "?") for n in (BEGINNING, BEGINNING + 1, BEGINNING - 1)
    ]
    assert [
        conversation_of(each) == conversation_of(prompts[0]) for each in prompts
    ] == [True, True, False]
    turns = [
        Request(prompt="Why?", context=tuple(range(n)))
        for n in (BEGINNING, BEGINNING + 9, 9)
    ]
    assert [conversation_of(each) == conversation_of(turns[0]) for each in turns] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    "other",
    [
        talk(
            "",
            "What is an expert?",
            tools=({"type": "function", "function": {"name": "f"}},),
        ),
        talk("", "What is an expert?", template="{{ messages }}"),
        talk("", "What is an expert?", think=True),
        talk("Be short.", "What is an expert?"),
        talk("", "Who are you?"),
        talk("", "What is an expert?", owner="another"),
    ],
)
def test_conversation_of_differs_by_owner_and_text_before_the_first_answer(
    other: Request,
) -> None:
    assert conversation_of(other) != conversation_of(talk("", "What is an expert?"))


@pytest.mark.parametrize(
    ("holder", "queues", "expected"),
    [
        (1, [0, 2, 0], [[1], [0, 2]]),
        (0, [9], [[0]]),
        (None, [1, 0], [[0, 1]]),
        (None, [], []),
        (0, [MAX_IMBALANCE, 0], [[0, 1]]),
    ],
    ids=[
        "the holder first",
        "the only one",
        "none holds it",
        "none",
        "not one with too long a queue",
    ],
)
def test_rank_puts_the_holder_first_unless_its_queue_is_too_long(
    holder: int | None, queues: list[int], expected: list[Any]
) -> None:
    assert rank(holder, queues) == expected


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


def test_read_config_reads_every_option_and_defaults_to_the_demo() -> None:
    (found,) = read_config({"models": {"big": WHOLE}})
    assert found.model_dump(by_alias=True) == {"name": "big:latest"} | WHOLE | {
        "memory": 24 << 30
    }
    demo = ModelConfig(name="demo:latest", model="demo")
    assert read_config({}) == read_config({"models": {"demo": None}}) == (demo,)


def test_ongoing_requests_is_twice_the_parallel_requests_with_a_minimum() -> None:
    def ongoing(n_parallel: int = 1, **options: Any) -> int:
        (config,) = read_config({"models": {"demo": options}})
        return config.ongoing_requests(n_parallel)

    assert (
        ongoing(),
        ongoing(parallel=4),
        ongoing(parallel=32),
        ongoing(n_parallel=16),
    ) == (8, 8, 64, 32)
    assert ongoing(n_parallel=16, parallel=2) == 8
    assert ongoing(parallel=32, max_ongoing_requests=3) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": {}}, "model: Extra inputs are not permitted"),
        ({"models": {}}, "models: .* at least 1 item"),
        ({"models": {"demo": 4}}, "models.demo: .*dictionary, but is 4"),
        (
            {"models": {"demo": {"memry": "1GiB"}}},
            "models.demo.memry: Extra inputs are not permitted",
        ),
        (
            {"models": {"demo": {"memory": "much"}}},
            r"models.demo.memory: .*\"4GiB\", but is 'much'; correct it\.$",
        ),
        (
            {"models": {"demo": {"expert_cache": "200%"}}},
            r"models.demo.expert_cache: .* \"2\.5 GB\"; correct it\.$",
        ),
        (
            {"models": {"demo": {"expert_cache": True}}},
            r"models.demo.expert_cache: must be .* True",
        ),
        (
            {"models": {"demo": {"threads": 0}}},
            "models.demo.threads: .* than or equal to 1, but is 0",
        ),
        (
            {"models": {"demo": {"model": ""}}},
            "models.demo.model: must be a name or a path",
        ),
        ({"models": {"demo": {}, "Demo:latest": {}}}, "more than once"),
    ],
)
def test_read_config_names_the_key_and_the_rule_of_an_error(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        read_config(arguments)


def test_read_config_rejects_invalid_model_names() -> None:
    with pytest.raises(ModelNameError, match=r"models\..*: "):
        read_config({"models": {"../x": {}}})


def test_configured_catalog_has_only_the_names_of_the_config() -> None:
    catalog = ConfiguredCatalog(
        read_config({"models": {"small": {"model": str(demo_path())}}})
    )
    assert [entry.name for entry in catalog.entries()] == ["small:latest"]
    assert catalog.find("SMALL").path == demo_path()
    for name in ("demo", "other"):
        with pytest.raises(ModelNotFoundError, match="known models: small:latest"):
            catalog.find(name)
    with pytest.raises(ModelNameError):
        catalog.find(str(demo_path()))
