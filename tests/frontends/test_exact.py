"""`exact` as users of the clients send it to a server that computes requests together."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ollama
import openai
import pytest
from servers import Server, serving
from waiting import until

from moegguf import Engine, Sampling

QUESTION = "What does moegguf do?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
N_TOKENS = 24


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("exact"), "--parallel", "4", MOEGGUF_CONTEXT_LENGTH="512") as found:
        yield found


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The logprobs of the answer where a model computes one request at a time."""
    with Engine("demo", parallel=1, n_ctx=512) as engine:
        (answer,) = engine.chat(MESSAGES, Sampling(temperature=0, max_tokens=N_TOKENS), n_logprobs=0)
    return [logprob.logprob for logprob in answer.logprobs]


def by_openai(server: Server) -> list[float]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        answer = client.chat.completions.create(
            model="demo", messages=MESSAGES, temperature=0, logprobs=True, max_tokens=N_TOKENS,
            extra_body={"exact": True},
        )  # fmt: skip
    found = answer.choices[0].logprobs
    return [each.logprob for each in found.content or ()]


def by_ollama(server: Server) -> list[float]:
    options = {"temperature": 0, "num_predict": N_TOKENS, "exact": True}
    found = ollama.Client(server.url).chat("demo", MESSAGES, logprobs=True, options=options)
    return [each.logprob for each in found.logprobs or ()]


@pytest.mark.parametrize("ask", [by_openai, by_ollama])
def test_it_has_the_bits_of_a_request_alone_among_others(ask: Any, parallel: Server, alone: list[float]) -> None:
    others = {"model": "demo", "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 60}
    with ThreadPoolExecutor(6) as threads:
        beside = [threads.submit(parallel.call, "/v1/chat/completions", {**others, "seed": i}) for i in range(6)]
        found = ask(parallel)
        assert all(reply.result().status == 200 for reply in beside)
    assert found == alone[: len(found)] and len(found) == len(alone)


def test_the_choices_of_a_prompt_are_those_of_requests_of_their_own(parallel: Server) -> None:
    asked: Any = {"model": "demo", "prompt": "moegguf is", "max_tokens": 6, "temperature": 0.8}
    asked["extra_body"] = {"exact": True}
    with openai.OpenAI(base_url=f"{parallel.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        texts = [client.completions.create(**asked, seed=3 + i).choices[0].text for i in range(6)]
        for exact in (True, False):
            several = client.completions.create(**{**asked, "extra_body": {"exact": exact}}, seed=3, n=6)
            assert [choice.index for choice in several.choices] == list(range(6))
            assert not exact or [choice.text for choice in several.choices] == texts
        with pytest.raises(openai.BadRequestError, match="context"):
            client.completions.create(**{**asked, "prompt": ["a", "many words " * 600]}, n=3)
        stream = client.completions.create(**{**asked, "max_tokens": 400, "extra_body": {}}, n=4, stream=True)
        next(iter(stream))
        stream.close()
    until(lambda: not any(slot["is_processing"] for slot in parallel.call("/slots?model=demo").json))
