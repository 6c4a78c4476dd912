"""Ray Serve: which replica a request prefers; the args of the application: typed, checked, errors name the key."""

import subprocess
import sys
from typing import Any

import pytest

from moegguf.errors import ModelNameError, ModelNotFoundError, OptionError
from moegguf.generate.request import GenerationRequest
from moegguf.models.catalog import demo_path
from moegguf.serving.ray.config import ConfiguredCatalog, ModelConfig, read_config
from moegguf.serving.ray.preference import (
    FIRST_CUT_BYTES,
    MAX_IMBALANCE,
    Candidate,
    Conversation,
    Sequences,
    after,
    conversation_of,
    rank,
)

WITHOUT_RAY = ("config", "preference")


def talk(*contents: str, **fields: Any) -> GenerationRequest:
    system, *turns = contents
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    return GenerationRequest(messages=tuple(messages), **fields)


def holding(*conversations: Conversation) -> Sequences:
    return tuple(each.digests for each in conversations)


FIRST = conversation_of(talk("", "What is an expert?"))
NEXT = conversation_of(talk("", "What is an expert?", "A matrix.", "Why?"))
OTHER = conversation_of(talk("", "Who are you?"))


def test_preference_needs_no_ray() -> None:
    modules = ", ".join(f"moegguf.serving.ray.{name}" for name in WITHOUT_RAY)
    code = f"import sys; sys.modules['ray'] = None; import {modules}"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_turn_begins_with_the_turns_before_it() -> None:
    assert NEXT.digests[: len(FIRST.digests)] == FIRST.digests
    assert not set(OTHER.digests) & set(NEXT.digests)


@pytest.mark.parametrize(
    "other",
    [
        talk("", "What is an expert?", tools=({"type": "function", "function": {"name": "f"}},)),
        talk("", "What is an expert?", template="{{ messages }}"),
        talk("", "What is an expert?", think=True),
        talk("Be short.", "What is an expert?"),
        talk("", "What is an expert?", owner="another"),
    ],
)
def test_its_owner_and_what_the_template_writes_first_are_part_of_every_prefix(other: GenerationRequest) -> None:
    assert not set(conversation_of(other).digests) & set(FIRST.digests)


def test_a_system_message_alone_is_not_a_conversation() -> None:
    system = "You are short. " * 3
    one, two = (conversation_of(talk(system, f"{text}? " * 40)) for text in ("Why", "How"))
    assert set(one.digests) & set(two.digests)
    assert one.n_shared(two.digests) == 0


def test_a_long_beginning_counts_without_the_rest() -> None:
    document = "An expert is a matrix. " * 400
    one, two = (conversation_of(talk(document, text)) for text in ("Why?", "How?"))
    assert one.n_shared(two.digests) == len(one.digests) - 1


def test_a_prompt_is_cut_at_doubling_lengths() -> None:
    long = conversation_of(GenerationRequest(prompt="x" * 3000)).digests
    for n_cuts in range(4):
        n_bytes = FIRST_CUT_BYTES << n_cuts
        assert conversation_of(GenerationRequest(prompt="x" * n_bytes)).digests[-1] == long[n_cuts]
    assert len(long) == 5


THIRD = conversation_of(talk("", "What is an expert?", "A matrix.", "Why?", "So.", "And?"))
RANKS: dict[str, tuple[Conversation, list[Candidate], list[list[int]]]] = {
    "the holder first": (
        NEXT, [Candidate(holding(OTHER)), Candidate(holding(FIRST), queue=2), Candidate()], [[1], [2, 0]]
    ),
    "of two holders the one with more of it": (
        THIRD, [Candidate(holding(FIRST)), Candidate(holding(NEXT))], [[1], [0]]
    ),
    "of equals an empty cache": (Conversation(), [Candidate(holding(OTHER)), Candidate(), Candidate()], [[1, 2, 0]]),
    "none": (NEXT, [], []),
    "not one with too long a queue": (
        NEXT, [Candidate(holding(FIRST), queue=MAX_IMBALANCE), Candidate(queue=0)], [[1, 0]]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("conversation", "candidates", "expected"), RANKS.values(), ids=RANKS)
def test_replicas_are_ranked(conversation: Conversation, candidates: list[Candidate], expected: list[Any]) -> None:
    assert rank(conversation, candidates) == expected


def test_what_is_sent_takes_the_place_of_its_earlier_turns_and_then_of_the_oldest() -> None:
    assert after((), FIRST, 1) == holding(FIRST)
    assert after(holding(FIRST), OTHER, 1) == holding(OTHER)
    both = after(holding(FIRST), OTHER, 2)
    assert both == holding(FIRST, OTHER)
    assert after(both, NEXT, 2) == holding(OTHER, NEXT)
    assert after(holding(OTHER, NEXT), conversation_of(talk("", "Where?")), 2)[0] == NEXT.digests


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


def test_every_option_is_read_and_without_models_it_is_the_demo() -> None:
    (found,) = read_config({"models": {"big": WHOLE}})
    assert found.model_dump(by_alias=True) == {"name": "big:latest"} | WHOLE | {"memory": 24 << 30}
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
