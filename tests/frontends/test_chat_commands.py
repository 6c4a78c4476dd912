"""The chat's commands, in a terminal with the scripted model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_terminal import echo_chat
from terminal import ENTER, Terminal

from moegguf.chat.conversation import load_options_with, parse_parameter
from moegguf.errors import MoeggufError
from moegguf.generate.request import Sampling, sampling_with


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def chat(home: Path) -> Iterator[Terminal]:
    """One chat for all tests of this file, 160 columns wide; each test undoes what it sets."""
    with echo_chat(home, size=(160, 60)) as terminal:
        terminal.prompt()
        yield terminal


@pytest.mark.parametrize(("command", "words"), [
    ("/?", "  /load <model>   Load a session or model"),
    ("/help", "Use \"\"\" to begin a multi-line message."),
    ("/? set", "  /set parameter ...     Set a parameter"),
    ("/? /set", "  /set nothink           Disable thinking"),
    ("/? show", "  /show modelfile    Show Modelfile for this model"),
    ("/help shortcuts", "  Ctrl + c            Stop the model from responding"),
    ("/set", "  /set nohistory         Disable history"),
    ("/show", "  /show license      Show model license"),
    ("/set parameter", "  /set parameter num_ctx <int>          Set the context size"),
    ("/show info", "architecture"),
    ("/show license", "No license was specified for this model."),
    ("/show modelfile", "FROM demo:latest"),
    ("/show parameters", "Model defined parameters:\n  temperature                    0\n"),
    ("/show system", "No system message was specified for this model."),
    ("/show template", "<|im_start|>"),
    ("/list", "demo:latest"),
    ("/show nothing", "Unknown command '/show nothing'. Type /? for help"),
    ("/set nothing", "Unknown command '/set nothing'. Type /? for help"),
    ("/nothing at all", "Unknown command '/nothing'. Type /? for help"),
    ("/clearly", "Unknown command '/clearly'. Type /? for help"),
    ("/home/me/cat.png what is this", "Unknown command '/home/me/cat.png'. Type /? for help"),
    ("/load", "Usage:\n  /load <modelname>"),
    ("/save", "Usage:\n  /save <modelname>"),
    ("/read", "Usage:\n  /read <file>"),
    ("/read /nowhere/at-all", "error: [Errno 2] No such file or directory"),
    ("/set think", "warning: model 'demo:latest' does not support thinking output"),
    ("/set think sideways", "Invalid level 'sideways'."),
    ("/set format xml", "error: --format takes json, a JSON schema"),
    ("/set format", "Invalid or missing format. For 'json' mode use '/set format json'"),
    ("/set parameter nonsense 1", "Couldn't set parameter: unknown parameter 'nonsense'"),
    ("/set parameter temperature hot", "Couldn't set parameter: the parameter 'temperature' must be a number"),
    ("/set parameter top_p 7", "Couldn't set parameter: top_p takes 0 to 1, but is 7"),
    ("/set history", "Set 'history' mode."),
])  # fmt: skip
def test_the_output_of_a_command(chat: Terminal, command: str, words: str) -> None:
    assert words in chat.ask(command)
    assert "Traceback" not in chat.text


def test_parameters_reach_the_next_answer(chat: Terminal) -> None:
    assert "Set parameter 'temperature' to '0.25'" in chat.ask("/set parameter temperature 0.25")
    assert "Set parameter 'stop' to 'one, two three'" in chat.ask('/set parameter stop one "two three"')
    said = chat.ask("settings").replace("\n", " ")
    assert "temperature=0.25" in said
    assert "stop=['one', 'two three']" in said
    shown = chat.ask("/show parameters")
    assert "User defined parameters:" in shown
    assert '  stop                           "two three"' in shown


def test_modes_are_set_and_unset(chat: Terminal) -> None:
    assert "Set format to 'json' mode." in chat.ask("/set format json")
    assert "format=json" in chat.ask("settings").replace("\n", " ")
    assert "Set format to a JSON schema." in chat.ask('/set format {"type": "object"}')
    assert "format={'type': 'object'}" in chat.ask("settings").replace("\n", " ")
    assert "Disabled format." in chat.ask("/set noformat")
    assert "Set 'nothink' mode." in chat.ask("/set nothink")
    assert "format=None think=False" in chat.ask("settings").replace("\n", " ")
    assert "Set 'verbose' mode." in chat.ask("/set verbose")
    assert "eval rate:" in chat.ask("hello")
    assert "Set 'quiet' mode." in chat.ask("/set quiet")
    assert "eval rate:" not in chat.ask("hello")
    assert "Set 'nowordwrap' mode." in chat.ask("/set nowordwrap")
    assert "Set 'wordwrap' mode." in chat.ask("/set wordwrap")


def test_clear_keeps_the_system_message(chat: Terminal) -> None:
    assert "Set system message." in chat.ask("/set system Be brief.")
    chat.ask("remember me")
    assert "[system: Be brief.]" in chat.ask("messages").replace("\n", " ")
    assert "Cleared session context" in chat.ask("/clear")
    said = chat.ask("messages").replace("\n", " ")
    assert "[system: Be brief.] [user: messages]" in said
    chat.send('/set system """Be' + ENTER)
    chat.wait(lambda: chat.line == "...", "the second line")
    chat.send('briefer."""' + ENTER)
    chat.expect("Set system message.")
    chat.prompt()
    assert "Be\nbriefer." in chat.ask("/show system")
    chat.ask('/set system """ """')
    chat.ask("/clear")


def test_a_file_goes_before_the_next_message(chat: Terminal, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("first line\nsecond line\n")
    assert f"Read '{file}' (22 characters); it goes before your next message." in chat.ask(f"/read {file}").replace(
        "\n", ""
    )
    chat.ask("and now?")
    assert "[user: first line second line  and now?]" in chat.ask("messages").replace("\n", " ")
    file.write_bytes(b"\0\1")
    assert "error: /read takes text" in chat.ask(f"/read {file}")
    chat.ask("/clear")


def test_regen_answers_again(chat: Terminal) -> None:
    chat.ask("/clear")
    assert "There is no message to answer again." in chat.ask("/regen")
    chat.ask("the same")
    assert chat.ask("/regen").startswith(">>> /regen\nthe same")
    assert "[user: the same] [assistant: the same] [user: messages]" in chat.ask("messages").replace("\n", " ")
    chat.ask("/clear")


def test_errors_do_not_end_the_chat(chat: Terminal) -> None:
    chat.ask("/clear")
    assert "error: as scripted" in chat.ask("fail ContextError")
    assert "error: ZeroDivisionError: as scripted" in chat.ask("fail ZeroDivisionError")
    said = chat.ask("fail ExpertIOError half")
    assert "half" in said and "error: as scripted" in said
    assert "[user: fail ExpertIOError half] [assistant: half] [user: messages]" in chat.ask("messages")
    assert "prompt cut: 3 messages left out" in chat.ask("cut")
    chat.ask("/clear")


def test_bye_and_exit_end_the_chat(home: Path, chat: Terminal) -> None:
    with echo_chat(home) as other:
        other.prompt()
        other.enter("/exit")
        assert other.exit_code() == 0
    chat.enter("/bye")
    assert chat.exit_code() == 0


@pytest.mark.parametrize(("name", "words", "value"), [
    ("num_ctx", ["4096"], 4096), ("temperature", ["1"], 1.0), ("top_p", ["0.5", "ignored"], 0.5),
    ("stop", ["a", "b"], ["a", "b"]), ("seed", ["-1"], -1), ("expert_cache", ["50%"], "50%"), ("numa", ["true"], True),
])  # fmt: skip
def test_parameters_have_types(name: str, words: list[str], value: Any) -> None:
    parsed = parse_parameter(name, words)
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize(("name", "word"), [
    ("num_ctx", "-5"), ("num_ctx", "1.5"), ("temperature", "nan"), ("temperature", "1e999"), ("top_k", "many"),
    ("seed", "99999999999999999999999"), ("expert_cache", "lots"), ("nonsense", "1"), ("num_predict", "true"),
])  # fmt: skip
def test_invalid_values_of_parameters(name: str, word: str) -> None:
    with pytest.raises(MoeggufError):
        parse_parameter(name, [word])


def test_parameters_set_sampling_and_load_options() -> None:
    parameters = {"seed": -1, "num_predict": 9, "stop": ["x"], "num_ctx": 512, "numa": True, "top_k": 3}
    assert sampling_with(Sampling(seed=4), parameters) == Sampling(max_tokens=9, stop=("x",), top_k=3)
    options = {"expert_cache": "50%", "n_threads": 2}
    assert load_options_with(options, parameters) == {**options, "n_ctx": 512}
    assert load_options_with(options, {"num_thread": 0, "num_gpu": -1}) == {"expert_cache": "50%"}
    assert load_options_with(options, {"num_gpu": 0})["n_gpu_layers"] == 0
