"""Tests `moegguf.serving.ray:app` on a local Ray, if Ray is installed.

The application has two replicas of the demo, and a second model whose number of
replicas grows from one to two under load. The last tests run without Ray. They check
which calls the HTTP application in front of the replicas refuses.
"""

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from threading import Event
from typing import Any, cast

import psutil
import pytest
from fake_manager import FakeCatalog, FakeManager, entry_of, running
from ray_application import RayApplication, ray_application
from servers import Reply, call
from waiting import until

from moegguf.errors import OptionError
from moegguf.models.catalog import demo_path
from moegguf.server.app import make_http

FOREVER = {"type": "string", "minLength": 100_000}
SCALED = {
    "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1, "upscale_delay_s": 0,
    "metrics_interval_s": 0.5, "look_back_period_s": 1,
}  # fmt: skip
N_ONGOING = 3
ONE = {
    "model": "demo",
    "memory": "300MiB",
    "context_length": 1024,
    "threads": 1,
    "max_ongoing_requests": N_ONGOING,
}
ARGUMENTS = {
    "models": {
        "demo": {**ONE, "autoscaling_config": {"min_replicas": 2, "max_replicas": 2}},
        "scaled:b": {**ONE, "parallel": 2, "autoscaling_config": SCALED},
    }
}


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayApplication]:
    pytest.importorskip("ray.serve")
    with ray_application(ARGUMENTS, tmp_path_factory.mktemp("ray")) as found:
        yield found


def chat(
    application: RayApplication,
    *contents: str,
    path: str = "/v1/chat/completions",
    **options: Any,
) -> Reply:
    roles = ("user", "assistant")
    messages = [
        {"role": roles[i % 2], "content": text} for i, text in enumerate(contents)
    ]
    body = {
        "model": "demo",
        "messages": messages,
        "temperature": 0,
        "max_tokens": 12,
        **options,
    }
    return call(f"{application.url}{path}", body)


class Stream:
    """A streamed answer. The constructor reads its first line; the caller reads the
    rest or closes the stream."""

    def __init__(
        self,
        application: RayApplication,
        text: str,
        path: str = "/api/chat",
        **options: Any,
    ) -> None:
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": text}],
            **options,
        }
        request = urllib.request.Request(
            f"{application.url}{path}", json.dumps(body).encode()
        )
        self._response = urllib.request.urlopen(request, timeout=60)
        self.first = self._response.readline()

    def rest(self) -> list[bytes]:
        return [line for line in self._response.read().splitlines() if line]

    def line(self) -> bytes:
        return bytes(self._response.readline())

    def close(self) -> None:
        self._response.close()


def ollama_stream(application: RayApplication, text: str) -> Stream:
    return Stream(application, text, format=FOREVER, options={"num_predict": 30_000})


def openai_stream(application: RayApplication, text: str) -> Stream:
    form = {"type": "json_schema", "json_schema": {"name": "text", "schema": FOREVER}}
    return Stream(
        application,
        text,
        "/v1/chat/completions",
        stream=True,
        response_format=form,
        max_tokens=30_000,
    )


def busy(application: RayApplication, model: str = "demo") -> bool:
    found = call(f"{application.url}/api/ps").json["models"]
    return any(each["moe"]["busy"] for each in found if each["name"].startswith(model))


def test_whole_and_streamed_answers_are_equal_on_each_api(
    application: RayApplication,
) -> None:
    whole = chat(application, "What does moegguf do?").json["choices"][0]["message"][
        "content"
    ]
    assert whole.startswith("moegguf")
    lines = chat(application, "What does moegguf do?", stream=True).text.split("\n\n")
    chunks = [
        json.loads(line.removeprefix("data: "))
        for line in lines
        if line.startswith("data: {")
    ]
    assert (
        "".join(
            chunk["choices"][0]["delta"].get("content", "")
            for chunk in chunks
            if chunk["choices"]
        )
        == whole
    )
    ollama = {"options": {"temperature": 0, "num_predict": 12}, "stream": False}
    assert (
        chat(application, "What does moegguf do?", path="/api/chat", **ollama).json[
            "message"
        ]["content"]
        == whole
    )


def test_a_second_turn_is_sent_to_the_replica_with_its_context(
    application: RayApplication,
) -> None:
    questions = ("What is an expert?", "Who are you?")
    # The first calls let Ray learn both replicas' queue lengths, because Ray skips a
    # replica whose queue length is unknown.
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda i: chat(application, f"What is {i}?"), range(4)))
    first = [chat(application, text).json for text in questions]
    for question, answer in zip(questions, first, strict=True):
        content = answer["choices"][0]["message"]["content"]
        second = chat(application, question, content, "Why?").json
        assert second["timings"]["cache_n"] >= answer["usage"]["prompt_tokens"]


def test_tokenize_detokenize_and_embed_reach_a_replica(
    application: RayApplication,
) -> None:
    tokens = call(
        f"{application.url}/tokenize", {"model": "demo", "content": "What is a hit?"}
    ).json["tokens"]
    text = call(
        f"{application.url}/detokenize", {"model": "demo", "tokens": tokens}
    ).json["content"]
    assert text == "What is a hit?"
    vectors = call(
        f"{application.url}/api/embed", {"model": "demo", "input": ["a", "b"]}
    ).json["embeddings"]
    assert len(vectors) == 2


def test_options_refused_by_ray_raise_an_error_with_the_model() -> None:
    pytest.importorskip("ray.serve")
    from moegguf.serving.ray import app

    wrong = {"demo": {"autoscaling_config": {"min_replicas": 3, "max_replicas": 1}}}
    with pytest.raises(
        OptionError, match=r"models\.demo:latest: Ray Serve does not accept"
    ):
        app({"models": wrong})


def test_errors_of_the_application_have_the_form_of_the_api(
    application: RayApplication,
) -> None:
    unknown = chat(application, "x", model="unknown")
    assert unknown.status == 404 and unknown.json["error"]["code"] == "model_not_found"
    too_long = call(
        f"{application.url}/api/generate",
        {"model": "demo", "prompt": "x " * 4000, "truncate": False},
    )
    assert too_long.status == 400 and "tokens" in too_long.error
    unload = call(f"{application.url}/api/generate", {"model": "demo", "keep_alive": 0})
    assert unload.status == 400 and "serve deploy" in unload.error


def test_models_of_the_config_are_listed(application: RayApplication) -> None:
    names = [
        each["name"] for each in call(f"{application.url}/api/tags").json["models"]
    ]
    assert names == ["demo:latest", "scaled:b"]
    until(lambda: len(call(f"{application.url}/api/ps").json["models"]) == 2)


def test_a_disconnected_client_stops_its_answer(application: RayApplication) -> None:
    with closing(ollama_stream(application, "Go on.")) as stream:
        assert stream.first
        until(lambda: busy(application))
    until(lambda: not busy(application))


def test_a_killed_replica_ends_its_stream_with_an_error_and_restarts(
    application: RayApplication,
) -> None:
    before = until(lambda: len(found := application.replicas("demo")) == 2 and found)
    with (
        closing(ollama_stream(application, "Tell me all of it.")) as ollama,
        closing(openai_stream(application, "Count the experts.")) as openai,
    ):
        before[0].kill()
        assert chat(application, "What is a hit?").status == 200
        ended, last = None, [b""]
        # One of the two streams came from the killed replica. An error follows the
        # lines that this replica had sent.
        for _ in range(20_000):
            for stream in (ollama, openai):
                if b'"error"' in (line := stream.line()):
                    ended, last = stream, [line]
            if ended:
                break
        error = json.loads(last[0].removeprefix(b"data: "))["error"]
        assert "replica" in (error if ended is ollama else error["message"])
        assert (ended.rest() or [b""])[-1] in (b"", b"data: [DONE]")
        other = openai if ended is ollama else ollama
        assert all(b'"error"' not in other.line() for _ in range(20))
    until(lambda: len({*application.replicas("demo")} - {before[0]}) == 2)
    assert chat(application, "What is a hit?").status == 200


def test_a_killed_worker_ends_its_stream_with_an_error(
    application: RayApplication,
) -> None:
    until(lambda: len(application.replicas("demo")) == 2)
    with closing(ollama_stream(application, "Go on.")) as stream:
        for replica in application.replicas("demo"):
            for worker in replica.children():
                with suppress(psutil.NoSuchProcess):
                    worker.kill()
        assert "worker process has ended" in json.loads(stream.rest()[-1])["error"]
    for _ in range(3):
        assert chat(application, "What is a hit?").status == 200


def test_queued_requests_start_another_replica(application: RayApplication) -> None:
    assert len(application.replicas("scaled%3Ab")) == 1
    came = Event()

    def keep_asking(i: int) -> set[int]:
        statuses = set()
        while not came.is_set():
            statuses.add(
                chat(
                    application, f"Wait, {i}.", model="scaled:b", max_tokens=100
                ).status
            )
        return statuses

    # One request more than a replica accepts at a time.
    with ThreadPoolExecutor() as threads:
        asking = [threads.submit(keep_asking, i) for i in range(N_ONGOING + 1)]
        try:
            until(lambda: len(application.replicas("scaled%3Ab")) == 2)
        finally:
            came.set()
    assert set().union(*(each.result() for each in asking)) == {200}


@pytest.fixture
def url(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[str]:
    for name, value in getattr(request, "param", {}).items():
        monkeypatch.setenv(name, value)
    catalog = FakeCatalog(entry_of(demo_path()))
    with running(
        make_http(cast(Any, FakeManager(catalog)), cast(Any, catalog))
    ) as found:
        yield found


def test_every_api_answers_through_the_http_application(url: str) -> None:
    assert call(url + "/").text == "Ollama is running"
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "x"}],
        "stream": False,
        "max_tokens": 5,
    }
    assert call(url + "/api/chat", body).json["message"]["content"] == "Hello"
    assert (
        call(url + "/v1/chat/completions", body).json["choices"][0]["message"][
            "content"
        ]
        == "Hello"
    )
    assert call(url + "/v1/messages", body).json["content"][0]["text"] == "Hello"


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/api/pull"), ("POST", "/api/create"), ("POST", "/api/copy"), ("DELETE", "/api/delete"),
     ("POST", f"/api/blobs/sha256:{'a' * 64}"), ("GET", "/metrics"), ("GET", "/live")],
)  # fmt: skip
def test_calls_that_only_moegguf_serve_answers_get_a_501_with_the_next_step(
    url: str, method: str, path: str
) -> None:
    reply = call(url + path, method=method)
    assert reply.status == 501
    assert any(
        step in reply.error
        for step in ("serve deploy", "docs/deployment.md", "moegguf serve")
    )


def test_without_a_key_foreign_hosts_and_proxies_get_a_403(url: str) -> None:
    assert call(url + "/api/tags", host="evil.example").status == 403
    assert call(url + "/api/tags", x_forwarded_for="10.1.2.3").status == 403


@pytest.mark.parametrize("url", [{"MOEGGUF_API_KEY": "secret"}], indirect=True)
def test_a_key_admits_any_host_name_and_proxy(url: str) -> None:
    assert call(url + "/api/tags").status == 401
    proxied = {
        "authorization": "Bearer secret",
        "host": "models.example",
        "x_forwarded_for": "10.1.2.3",
    }
    assert call(url + "/api/tags", **proxied).status == 200
