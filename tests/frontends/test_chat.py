"""Tests the chat with a real model, loaded by the chat itself or by a running
server."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
from chat_terminal import ANSWER, QUESTION, demo_chat
from servers import Server, TinyModel, environment, serving
from terminal import ENTER, Terminal, control, moegguf_command

from moegguf.chat.conversation import Conversation
from moegguf.chat.served import messages_to_server
from moegguf.models.entry import NamedModel


def test_stats_and_experts_commands_print_figures_and_the_residency_map(
    tmp_path: Path,
) -> None:
    with demo_chat(tmp_path, size=(100, 40)) as chat:
        chat.prompt()
        assert re.search(r"^demo:latest: takes [\d.]+MiB, context of 512 tokens, slots for 96 of 192 experts$",
                         chat.text, re.MULTILINE)  # fmt: skip
        assert "There is no answer yet." in chat.ask("/stats")
        assert "eval rate" not in chat.ask(QUESTION)
        said = chat.ask("/stats")
        for label in (
            "total duration:", "eval rate:", "time to first token:", "hit rate:", "moved:", "stall:", "since load:",
        ):  # fmt: skip
            assert label in said
        labels = [
            line.partition(":")[0] for line in said.splitlines()[1:] if ":" in line
        ]
        assert len(labels) == len(set(labels))
        shown = chat.ask("/experts")
        rows = re.findall(r"^(\d) ([·~░▒▓█+○]{32})$", shown, re.MULTILINE)
        assert [int(row) for row, _ in rows] == list(range(6))
        assert re.search(r"96 of 192 experts in memory; hit rate \d+\.\d%", shown)
        letters = "".join(cells for _, cells in rows)
        assert "+" in letters or "█" in letters
        assert sum(letters.count(one) for one in "+█▒") == 96


def test_experts_shows_uses_of_answers_after_its_first_call(tmp_path: Path) -> None:
    with demo_chat(tmp_path, "--expert-cache", "100%", size=(100, 40)) as chat:
        chat.prompt()
        shown = chat.ask("/experts")
        assert re.search("^0 ▒{32}$", shown, re.MULTILINE)
        assert "Uses are counted from now on" in shown.replace("\n", " ")
        chat.ask(QUESTION)
        shown = chat.ask("/experts")
        assert re.search(r"^0 .*█", shown, re.MULTILINE)
        assert "Uses are counted" not in shown


def test_enter_while_the_model_loads_sends_the_message(tmp_path: Path) -> None:
    with demo_chat(tmp_path) as chat:
        chat.expect("starting a worker")
        chat.send(QUESTION + ENTER)
        chat.wait(lambda: ANSWER in chat.text.replace("\n", " "), "the answer")


def test_read_and_set_with_wrong_arguments_name_the_next_step(tmp_path: Path) -> None:
    with demo_chat(tmp_path) as chat:
        chat.prompt()
        assert (
            "/read cannot read 'no such file' (No such file or directory)"
            in chat.ask("/read no such file")
        )
        assert "Unknown setting 'foo'. Type /set for the settings" in chat.ask(
            "/set foo"
        )
        assert "/set system <string>" in chat.ask("/set")
        assert max(map(len, chat.ask("/set parameter").splitlines())) < 80
        for given in ("foo", "foo 1"):
            said = chat.ask(f"/set parameter {given}")
            assert "unknown parameter 'foo'; known parameters: draft," in said


def test_changed_load_parameters_reload_the_local_model(tmp_path: Path) -> None:
    with demo_chat(tmp_path, "-v") as chat:
        chat.prompt()
        chat.ask(QUESTION)
        chat.ask("/set parameter num_ctx 256")
        chat.ask("/set parameter expert_cache 100%")
        said = chat.ask("What is an expert?")
        assert "load duration:" in said
        assert "192 of 192 experts (100%)" in said
        assert "load duration:" not in chat.ask("/stats")
        assert "did you mean" in chat.ask("/set parameter expert_cache 1")
        chat.ask("/set parameter expert_cache 1KiB")
        assert "error: " in chat.ask(QUESTION)
        assert ANSWER in chat.ask(QUESTION).replace("\n", " ")


def test_a_rewritten_model_file_reloads_the_model(
    tiny: TinyModel, tmp_path: Path
) -> None:
    path = Path(shutil.copy(tiny(), tmp_path / "a.gguf"))
    command = moegguf_command("run", path, "-t", 1, "-c", 256, "-n", 4, "-v")
    with Terminal(
        command, environment(MOEGGUF_HOME=str(tmp_path)), columns=110
    ) as chat:
        chat.prompt()
        assert "load duration:" in chat.ask("hello")
        assert "load duration:" not in chat.ask("hello")
        path.write_bytes(path.read_bytes())
        assert "load duration:" in chat.ask("hello")


def test_a_killed_worker_is_replaced_for_the_next_message(tmp_path: Path) -> None:
    with demo_chat(tmp_path) as chat:
        chat.prompt()
        (worker,) = psutil.Process(chat.child.pid).children()
        worker.kill()
        psutil.wait_procs([worker], timeout=30)
        assert ANSWER in chat.ask(QUESTION).replace("\n", " ")


def test_load_changes_the_model_and_a_failed_load_keeps_the_old_one(
    tmp_path: Path, tiny: TinyModel
) -> None:
    with demo_chat(tmp_path, size=(160, 24)) as chat:
        chat.prompt()
        chat.ask(QUESTION)
        assert "Couldn't find model 'nothing-of-that-name'" in chat.ask(
            "/load nothing-of-that-name"
        )
        bad = tmp_path / "bad.gguf"
        bad.write_bytes(b"GGUF no more")
        assert "error: " in chat.ask(f"/load {bad}")
        assert ANSWER in chat.ask("/regen").replace("\n", " ")
        path = tiny("tiny-qwen2moe")
        said = chat.ask(f"/model {path}")
        assert "Loading model" in said
        assert "of 64 experts" in said
        assert "There is no message to answer again." in chat.ask("/regen")
        chat.ask("/load demo")
        assert ANSWER in chat.ask(QUESTION).replace("\n", " ")


ENDLESS = '/set format {"type": "string", "minLength": 100000}'


def served_chat(server: Server, home: Path, *arguments: object) -> Terminal:
    """Returns a terminal that runs a chat with the server's demo model. `home` is the
    chat's MOEGGUF_HOME."""
    command = moegguf_command("run", "demo", "--temperature", 0, *arguments)
    names = environment(MOEGGUF_HOME=str(home), MOEGGUF_HOST=server.url)
    return Terminal(command, names, columns=110, rows=40)


@pytest.fixture
def chat(server: Server, tmp_path: Path) -> Iterator[Terminal]:
    """A chat with the server's demo model, which is unloaded afterwards."""
    with served_chat(server, tmp_path) as terminal:
        terminal.prompt()
        yield terminal
    server.call("/api/generate", {"model": "demo", "keep_alive": 0})
    # A test may have saved this model.
    server.call("/api/delete", {"model": "mine"}, method="DELETE")


def begin_answer(chat: Terminal) -> None:
    """Sends a question and waits for the beginning of the answer. The test has set
    ENDLESS, so the answer is an endless JSON string."""
    chat.enter(QUESTION)
    chat.wait(lambda: re.search(r'^"\w', chat.text, re.MULTILINE), "the answer")


def test_a_chat_with_a_server_keeps_the_conversation(
    chat: Terminal, server: Server
) -> None:
    assert re.search(
        rf"demo:latest: takes [\d.]+MiB, context of [\d,]+ tokens, in the server at {server.url}",
        chat.text,
    )
    assert "demo:latest" in server.loaded()
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
    assert "demo:latest" in server.loaded()


def test_ctrl_c_stops_the_answer_in_the_server(chat: Terminal, server: Server) -> None:
    chat.ask(ENDLESS)
    begin_answer(chat)
    chat.send(control("c"))
    chat.prompt()
    assert "stopping after the current pass" not in chat.text
    chat.ask("/set noformat")
    chat.ask("/clear")
    assert ANSWER in chat.ask(QUESTION).replace("\n", " ")


def test_load_parameters_reload_in_the_server_or_are_refused(
    chat: Terminal, server: Server
) -> None:
    n_ctx = 2 * server.loaded()["demo:latest"]["context_length"]
    chat.ask(f"/set parameter num_ctx {n_ctx}")
    assert ANSWER in chat.ask(QUESTION).replace("\n", " ")
    assert server.loaded()["demo:latest"]["context_length"] > n_ctx // 2
    for name in ("num_gpu", "num_batch"):
        assert f"'{name}' has no effect on a model in a server" in chat.ask(
            f"/set parameter {name} 1"
        )
    assert "did you mean" in chat.ask("/set parameter expert_cache 1")
    chat.ask("/set parameter expert_cache 1KiB")
    assert "error: " in chat.ask(QUESTION)
    assert ANSWER in chat.ask(QUESTION).replace("\n", " ")


def test_chat_commands_print_facts_of_the_server(
    chat: Terminal, server: Server
) -> None:
    assert "qwen" in chat.ask("/show info")
    assert "FROM demo:latest" in chat.ask("/show modelfile")
    assert "<|im_start|>" in chat.ask("/show template")
    shown = chat.ask("/experts")
    assert (
        "layers down, experts across" in shown
        and "`moegguf top` also shows which experts" in shown.replace("\n", " ")
    )
    assert "warning: model 'demo:latest' does not support thinking" in chat.ask(
        "/set think"
    )
    assert "Couldn't find model 'nothing-of-that-name'" in chat.ask(
        "/load nothing-of-that-name"
    )


@pytest.mark.parametrize("place", ["here", "in a server"])
def test_save_stores_a_session_that_load_restores(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with (
        demo_chat(tmp_path, size=(100, 50))
        if place == "here"
        else nullcontext(request.getfixturevalue("chat")) as it
    ):
        it.prompt()
        for setting in (
            "/set system You are brief.",
            "/set parameter top_k 7",
            QUESTION,
        ):
            it.ask(setting)
        assert "Created new model 'mine'" in it.ask("/save mine")
        assert "error: " in it.ask("/save ../evil")
        it.ask("/clear")
        assert (
            "Loading model 'mine'" if place == "here" else "in the server at"
        ) in it.ask("/load mine")
        assert re.search(
            r"Model defined parameters:\n(.*\n)*? +top_k +7", it.ask("/show parameters")
        )
        assert "You are brief." in it.ask("/show system")
        assert "mine:latest" in it.ask("/list")
        assert "FROM" in it.ask("/show modelfile")
        assert ANSWER in it.ask("/regen").replace("\n", " ")


def test_a_killed_server_ends_the_answer_but_not_the_chat(tmp_path: Path) -> None:
    with serving(tmp_path / "server") as server, served_chat(server, tmp_path) as chat:
        chat.prompt()
        chat.ask(ENDLESS)
        begin_answer(chat)
        server.process.kill()
        chat.expect(
            f"error: lost the connection to the server at {server.url}; check that it is running"
        )
        chat.prompt()
        assert f"error: no server is running at {server.url}" in chat.ask(
            "hello"
        ).replace("\n", " ")
        chat.send(control("d"))
        assert chat.exit_code() == 0


def test_clear_keeps_the_messages_of_the_model() -> None:
    own = (
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Hello."},
    )
    conversation = Conversation(
        NamedModel("a:latest", system="Be brief.", messages=own), system=""
    )
    conversation.add_user_message("What?")
    asked = messages_to_server(conversation)
    assert asked == [
        {"role": "system", "content": ""},
        {"role": "user", "content": "What?"},
    ]
    conversation.clear()
    assert conversation.messages == list(own)
