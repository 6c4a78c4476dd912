"""The chat beside a running server that has the model: the server answers, and the chat is as one with a model here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_terminal import ANSWER, QUESTION
from command_line import environment
from servers import Server, serving
from terminal import Terminal, control, moegguf_command

from moegguf.chat import running_server, show_commands
from moegguf.chat.conversation import Conversation
from moegguf.models.entry import NamedModel

ENDLESS = '/set format {"type": "string", "minLength": 100000}'


def served_chat(
    server: Server, home: Path, model: str, *arguments: object, size: tuple[int, int] = (110, 40)
) -> Terminal:
    """A chat with MOEGGUF_HOST; `home`: the folder of its history."""
    command = moegguf_command("run", model, "--temperature", 0, *arguments)
    names = environment(MOEGGUF_HOME=str(home), MOEGGUF_HOST=server.url)
    return Terminal(command, names, columns=size[0], rows=size[1])


@pytest.fixture
def chat(server: Server, tmp_path: Path) -> Iterator[Terminal]:
    """A chat with the server's demo model."""
    with served_chat(server, tmp_path, "demo") as terminal:
        terminal.prompt()
        yield terminal
    server.call("/api/generate", {"model": "demo", "keep_alive": 0})


def loaded(server: Server) -> dict[str, int]:
    return {model["name"]: model["context_length"] for model in server.call("/api/ps").json["models"]}


def begin_answer(chat: Terminal) -> None:
    """Asks for JSON without an end, and waits for its beginning."""
    chat.enter(QUESTION)
    chat.wait(lambda: re.search(r'^"\w', chat.text, re.MULTILINE), "the answer")


def test_the_server_answers_and_remembers_the_conversation(chat: Terminal, server: Server) -> None:
    assert re.search(rf"demo:latest: context of [\d,]+ tokens, in the server at {server.url}", chat.text)
    assert "demo:latest" in loaded(server)
    chat.ask("/set verbose")
    first = chat.ask(QUESTION)
    assert ANSWER in first.replace("\n", " ") and "load duration:" in first
    assert re.search(rf"answered by: +{server.url}", first)
    second = chat.ask("What is an expert?")
    assert "prompt cached:" in second and "load duration:" not in second
    assert "hit rate:" in chat.ask("/stats")
    assert "Cleared session context" in chat.ask("/clear")
    assert ANSWER in chat.ask(QUESTION).replace("\n", " ")
    assert ANSWER in chat.ask("/regen").replace("\n", " ")
    chat.enter("/bye")
    assert chat.exit_code() == 0
    assert "demo:latest" in loaded(server)


def test_ctrl_c_stops_the_answer_and_the_server(chat: Terminal, server: Server) -> None:
    chat.ask(ENDLESS)
    begin_answer(chat)
    chat.send(control("c"))
    chat.prompt()
    assert "stopping after the current pass" not in chat.text
    chat.ask("/set noformat")
    chat.ask("/clear")
    assert ANSWER in chat.ask(QUESTION).replace("\n", " ")


def test_parameters_of_loading_load_again_or_are_refused(chat: Terminal, server: Server) -> None:
    n_ctx = 2 * loaded(server)["demo:latest"]
    chat.ask(f"/set parameter num_ctx {n_ctx}")
    assert ANSWER in chat.ask(QUESTION).replace("\n", " ")
    assert loaded(server)["demo:latest"] > n_ctx // 2
    for name in ("num_gpu", "num_batch"):
        assert f"'{name}' has no effect on a model in a server" in chat.ask(f"/set parameter {name} 1")
    assert "did you mean" in chat.ask("/set parameter expert_cache 1")
    chat.ask("/set parameter expert_cache 1KiB")
    assert "error: " in chat.ask(QUESTION)
    assert ANSWER in chat.ask(QUESTION).replace("\n", " ")


def test_a_full_context_and_a_cut_prompt_are_told(server: Server, tmp_path: Path) -> None:
    with served_chat(server, tmp_path, "demo", "--ctx", 256) as chat:
        chat.prompt()
        chat.ask("/set parameter num_predict 300")
        chat.ask(ENDLESS)
        said = chat.ask("word " * 400)
    server.call("/api/generate", {"model": "demo", "keep_alive": 0})
    assert re.search(r"prompt cut: \d+ tokens left out\nthe context was full", said)


def test_commands_ask_the_server(chat: Terminal, server: Server) -> None:
    assert "qwen" in chat.ask("/show info")
    assert "FROM demo:latest" in chat.ask("/show modelfile")
    assert "<|im_start|>" in chat.ask("/show template")
    shown = chat.ask("/experts")
    assert "layers down, experts across" in shown and "`moegguf top` shows its experts" in shown.replace("\n", " ")
    assert "warning: model 'demo:latest' does not support thinking" in chat.ask("/set think")
    assert "Couldn't find model 'nothing-of-that-name'" in chat.ask("/load nothing-of-that-name")
    chat.ask("/set parameter top_k 7")
    chat.ask("/set system You are brief.")
    chat.ask(QUESTION)
    assert "Created new model 'mine'" in chat.ask("/save mine")
    assert "mine:latest" in chat.ask("/list")
    assert "in the server at" in chat.ask("/load mine")
    assert re.search(r"Model defined parameters:\n(.*\n)*? +top_k +7", chat.ask("/show parameters"))
    assert "You are brief." in chat.ask("/show system")
    assert ANSWER in chat.ask("/regen").replace("\n", " ")
    server.call("/api/delete", {"model": "mine"}, method="DELETE")


def test_another_model_is_shown_with_its_own_context(chat: Terminal, server: Server) -> None:
    parameters = {"num_ctx": 256, "num_batch": 64}  # a process of its own
    server.call("/api/create", {"model": "other", "from": "demo", "parameters": parameters})
    assert "other:latest: context of 256 tokens" in chat.ask("/load other")
    assert "other:latest" in chat.ask("/list OTH")
    server.call("/api/generate", {"model": "other", "keep_alive": 0})
    server.call("/api/delete", {"model": "other"}, method="DELETE")


def test_clear_keeps_what_the_server_would_add_again() -> None:
    own = ({"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."})
    conversation = Conversation(NamedModel("a:latest", system="Be brief.", messages=own), system="")
    conversation.add_user_message("What?")
    asked = running_server._messages(conversation)
    assert asked == [{"role": "system", "content": ""}, {"role": "user", "content": "What?"}]
    conversation.clear()
    assert conversation.messages == list(own)


def test_a_model_without_parameters_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    session: Any = SimpleNamespace(conversation=Conversation(NamedModel("a:latest"), system=""))
    show_commands.show(session, "parameters")
    assert "  No additional parameters were specified for this model." in "".join(capsys.readouterr())


def test_a_server_that_goes_away_ends_the_answer_and_not_the_chat(tmp_path: Path) -> None:
    with serving(tmp_path / "server") as server, served_chat(server, tmp_path, "demo") as chat:
        chat.prompt()
        chat.ask(ENDLESS)
        begin_answer(chat)
        server.process.kill()
        chat.expect(f"error: lost the connection to the server at {server.url}.")
        chat.prompt()
        assert f"error: no server is running at {server.url}" in chat.ask("hello").replace("\n", " ")
        chat.send(control("d"))
        assert chat.exit_code() == 0


def test_thinking_is_shown_apart(served: Server, tmp_path: Path) -> None:
    with served_chat(served, tmp_path, "thinker", "--think", "-n", 8) as chat:
        chat.prompt()
        assert "Thinking..." in chat.ask("why?")
