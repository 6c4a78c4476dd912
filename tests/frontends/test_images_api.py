"""Tests images in Ollama's and OpenAI's APIs, in `moegguf run` and in its interactive
chat.

The image projectors have random weights.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_terminal import demo_chat
from client_types import client_of
from pictures import base64_of, gif, jpeg, png, with_thumbnail
from servers import Command, Server, serving

from moegguf.gguf.experts import read_layout
from moegguf.models.catalog import demo_path
from tools.models import write_projector

Tiny = Callable[..., Path]
QUIET = {"temperature": 0, "num_predict": 4, "num_thread": 1}


@pytest.fixture(scope="module")
def vision(
    tmp_path_factory: pytest.TempPathFactory, tiny: Tiny, projector: Tiny
) -> Iterator[Server]:
    """Yields a server with two models: `see` has an image projector, and `blind` has
    none."""
    models = {
        "see": tiny("tiny-qwen2moe"),
        "mmproj-see": projector("mlp"),
        "blind": tiny("tiny-qwen2moe"),
    }
    with serving(tmp_path_factory.mktemp("vision"), models=models) as found:
        yield found


def chat(server: Server, *images: str, model: str = "see", **more: Any) -> Any:
    message = {"role": "user", "content": "what is it?", "images": [*images]}
    body = {
        "model": model,
        "messages": [message],
        "options": QUIET,
        "stream": False,
        **more,
    }
    return server.call("/api/chat", body)


def test_only_a_model_with_a_projector_lists_vision(vision: Server) -> None:
    assert "vision" in vision.call("/api/show", {"model": "see"}).json["capabilities"]
    assert (
        vision.call("/api/show", {"model": "see"}).json["projector_info"][
            "clip.projector_type"
        ]
        == "mlp"
    )
    assert (
        "vision"
        not in vision.call("/api/show", {"model": "blind"}).json["capabilities"]
    )
    for model in ("see", "blind"):
        modalities = vision.call(f"/props?model={model}").json["modalities"]
        assert modalities == {"vision": model == "see", "audio": False}
    listed = {
        model["name"]: model["capabilities"]
        for model in vision.call("/api/tags").json["models"]
    }
    assert "vision" in listed["see:latest"] and "vision" not in listed["blind:latest"]


def test_ollama_endpoints_accept_images(vision: Server) -> None:
    text_only = chat(vision).json["prompt_eval_count"]
    first = chat(vision, base64_of(png(seed=1)))
    assert first.status == 200 and first.json["prompt_eval_count"] == text_only + 64
    body = {
        "model": "see",
        "prompt": "what is it?",
        "images": [base64_of(png(seed=1))],
        "options": QUIET,
    }
    reply = vision.call("/api/generate", {**body, "stream": False}).json
    assert reply["response"] == first.json["message"]["content"]
    assert (
        vision.call(
            "/api/generate", {**body, "context": reply["context"], "stream": False}
        ).status
        == 200
    )
    assert "raw mode" in vision.call("/api/generate", {**body, "raw": True}).error


def test_openai_chat_accepts_each_form_of_image_url(vision: Server) -> None:
    url = "data:image/png;base64," + base64_of(png(seed=1))
    with client_of(vision.url) as client:

        def ask(image_url: Any) -> Any:
            parts: Any = [
                {"type": "text", "text": "see "},
                {"type": "image_url", "image_url": image_url},
            ]
            messages: Any = [
                {"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}
            ]
            return client.chat.completions.create(
                model="see", messages=messages, max_tokens=4, temperature=0
            )

        answers = [ask(url), ask({"url": url}), ask({"url": url, "detail": "high"})]
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert answers[0].usage.prompt_tokens > 64


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "data", [png(64, 64)[:-3000], gif(3)[:-500]], ids=["by decoding", "by its end"]
)
def test_damaged_images_get_a_400(vision: Server, data: bytes, stream: bool) -> None:
    reply = chat(vision, base64_of(data), stream=stream)
    assert reply.status == 400 and "damaged" in reply.error
    assert chat(vision, base64_of(png())).status == 200


def test_complete_images_of_each_format_are_accepted(vision: Server) -> None:
    for data in (jpeg(), jpeg(progressive=True), with_thumbnail(jpeg()), gif(), gif(3)):
        assert chat(vision, base64_of(data)).status == 200


def test_run_reads_an_image_path_with_a_projector(
    here: Command, tiny: Tiny, projector: Tiny, tmp_path: Path
) -> None:
    (tmp_path / "a b.png").write_bytes(png())
    options = ("--temperature", 0, "-n", 4, "-t", 1, "-c", 512, "--expert-cache", "50%")
    question = f"what is in '{tmp_path}/a b.png'?"
    done = here("run", tiny(), question, "--mmproj", projector(), *options)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    assert done.stderr.strip() == f"Added image '{tmp_path}/a b.png'"
    without = here("run", tiny(), question, *options)
    assert (
        without.returncode == 0
        and without.stdout != done.stdout
        and "Added" not in without.stderr
    )
    wrong = here("run", tiny(), question, "--mmproj", tiny(), *options)
    assert wrong.returncode == 1 and "architecture" in wrong.stderr


def test_run_sends_images_to_a_running_server(
    here: Command, vision: Server, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(png())
    options = ("-n", 4, "--temp", 0, "--seed", 1)
    done = here(
        "run", "see", f"what is {tmp_path}/a.png", *options, MOEGGUF_HOST=vision.url
    )
    assert (
        done.returncode == 0
        and done.stderr.strip() == f"Added image '{tmp_path}/a.png'"
    )
    message = {"role": "user", "content": "what is", "images": [base64_of(png())]}
    body = {
        "model": "see",
        "messages": [message],
        "options": {**QUIET, "seed": 1},
        "stream": False,
    }
    assert (
        done.stdout.strip()
        == vision.call("/api/chat", body).json["message"]["content"].strip()
    )
    blind = here(
        "run", "blind", f"what is {tmp_path}/a.png", *options, MOEGGUF_HOST=vision.url
    )
    assert blind.returncode == 0 and "Added" not in blind.stderr


def test_the_chat_reads_image_paths_and_refuses_other_files(tmp_path: Path) -> None:
    demo = demo_path()
    assert demo is not None
    mmproj = write_projector(
        tmp_path / "mmproj.gguf", "mlp", read_layout(demo).hparams.n_embd
    )
    (tmp_path / "a.png").write_bytes(png())
    with demo_chat(tmp_path, "--mmproj", mmproj, "-n", 4, size=(160, 24)) as terminal:
        terminal.prompt()
        assert "reads images" in terminal.text
        said = terminal.ask(f"{tmp_path}/a.png what is it?")
        assert (
            "Added image" in said
            and "error" not in said
            and "Unknown command" not in said
        )
        assert "Unknown command" in terminal.ask("/nothing.png")
        (tmp_path / "bad.png").write_bytes(b"text")
        assert "PNG, JPEG or GIF" in terminal.ask(f"{tmp_path}/bad.png what is it?")
        assert "error" not in terminal.ask("and now?")
