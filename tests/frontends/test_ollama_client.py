"""Every call of the real `ollama` client against a real server, streamed and not."""

import hashlib

import ollama
import pytest
from servers import Server

QUESTION = "What does moegguf do?"
ANSWER = "moegguf runs Mixture-of-Experts models"


@pytest.fixture
def client(server: Server) -> ollama.Client:
    return ollama.Client(host=server.url, timeout=60)


def test_a_streamed_chat_has_the_same_text(client: ollama.Client) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    whole = client.chat("demo", messages, options={"seed": 1}).message.content
    parts = list(client.chat("demo", messages, options={"seed": 1}, stream=True))
    assert len(parts) > 2
    assert "".join(part.message.content or "" for part in parts) == whole
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].message.content == "" and parts[-1].eval_count


def test_generate_whole_streamed_and_raw(client: ollama.Client) -> None:
    whole = client.generate("demo", QUESTION, options={"temperature": 0})
    assert whole.response.startswith(ANSWER)
    parts = list(client.generate("demo", QUESTION, options={"temperature": 0}, stream=True))
    assert "".join(part.response for part in parts) == whole.response and parts[-1].done
    raw = client.generate("demo", "moegguf runs", raw=True, options={"num_predict": 4, "temperature": 0})
    assert raw.response and raw.eval_count == 4 and raw.done_reason == "length" and not raw.context


def test_copy_create_show_and_delete(client: ollama.Client) -> None:
    client.copy("demo", "twin")
    assert "twin:latest" in {model.model for model in client.list().models}
    assert client.delete("twin").status == "success"
    assert "twin:latest" not in {model.model for model in client.list().models}
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError):
            list(client.pull("hf.co/nobody/nothing", stream=stream))
    with pytest.raises(ollama.ResponseError) as caught:
        client.delete("twin")
    assert caught.value.status_code == 404 and "model 'twin' not found" in caught.value.error


def test_a_model_is_made_from_an_uploaded_file(client: ollama.Client, tiny: type) -> None:
    path = tiny("tiny-qwen2moe")
    digest = client.create_blob(path)
    assert digest == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert client.create_blob(path) == digest
    steps = [step.status for step in client.create("sent", files={"model.gguf": digest}, stream=True)]
    try:
        assert steps[-1] == "success"
        assert client.generate("sent", "Hi", raw=True, options={"num_predict": 2}).eval_count == 2
    finally:
        client.delete("sent")
