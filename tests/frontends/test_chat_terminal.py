"""Tests the chat in a terminal with a scripted model: commands, keyboard, screen,
Ctrl-C, editor and history."""

import os
import re
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from chat_terminal import ECHO, echo_chat
from servers import environment
from terminal import ENTER, Terminal, control

SMALL_ECHO = f"{sys.executable} {ECHO} run demo -t 1 -c 512 --expert-cache 50%"


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Terminal]:
    """A chat that waits for a message. Its history is in the test's folder."""
    with echo_chat(tmp_path) as terminal:
        terminal.prompt()
        yield terminal


def history(home: Path) -> list[str]:
    lines = (home / "history").read_text().splitlines()
    return [line[1:] for line in lines if line.startswith("+")]


def test_triple_quotes_enclose_a_message_of_several_lines(chat: Terminal) -> None:
    chat.send('"""messages one' + ENTER)
    chat.wait(lambda: chat.line == "...", "the second line")
    chat.send("two" + ENTER + 'three"""' + ENTER)
    chat.expect("[user: messages one")
    chat.prompt()
    assert "... two" in chat.text
    assert "[user: messages one\ntwo\nthree]" in chat.text


def test_ctrl_j_and_pasted_newlines_begin_lines_and_only_enter_sends(
    chat: Terminal,
) -> None:
    chat.type("messages a")
    chat.send(control("j"))
    chat.wait(lambda: chat.line == "...", "the second line")
    chat.send("b" + ENTER)
    chat.expect("[user: messages a")
    chat.prompt()
    assert "[user: messages a\nb]" in chat.text
    chat.paste("messages 1\n/bye\n3\n")
    chat.wait(lambda: "... 3" in chat.text, "what was pasted")
    assert "[user: messages 1" not in chat.text
    chat.send(ENTER)
    chat.expect("[user: messages 1")
    chat.prompt()
    assert "[user: messages 1\n/bye\n3\n]" in chat.text


def test_a_command_in_three_quotes_is_a_message(chat: Terminal) -> None:
    assert "\n/bye is said" in chat.ask('"""/bye is said"""')


def test_ctrl_c_stops_the_answer_and_keeps_its_text(chat: Terminal) -> None:
    chat.enter("slowly tick")
    chat.expect("tick tick tick")
    chat.send(control("c"))
    chat.prompt()
    said = chat.ask("messages")
    assert re.search(r"\[user: slowly tick\] \[assistant: (tick\s)+\]", said)
    chat.send(control("c"))
    chat.expect("Use Ctrl + d or /bye to exit.")
    chat.prompt()
    chat.type("never sent")
    chat.send(control("c"))
    chat.prompt()
    assert "never sent" not in chat.ask("messages")
    chat.send(control("d"))
    assert chat.exit_code() == 0


def test_a_second_ctrl_c_ends_a_chat_with_an_unresponsive_model(
    chat: Terminal, tmp_path: Path
) -> None:
    chat.enter("stubborn mule")
    chat.expect("mule mule")
    chat.send(control("c"))
    chat.expect("stopping after the current pass")
    chat.send(control("c"))
    assert chat.exit_code() == 130
    assert history(tmp_path) == ["stubborn mule"]


def test_ctrl_c_during_a_load_ends_the_worker_but_not_the_chat(tmp_path: Path) -> None:
    go = tmp_path / "go"
    go.touch()
    with echo_chat(tmp_path, FAKE_WORKER_WAIT=str(go)) as chat:
        chat.prompt()
        go.unlink()
        assert "Set parameter" in chat.ask("/set parameter num_ctx 256")
        chat.enter("hello")
        chat.expect("starting a worker")
        chat.send(control("c"))
        chat.prompt()
        assert psutil.Process(chat.child.pid).children() == []
        go.touch()
        assert "\nworld" in chat.ask("world")
        assert "[user: world] [assistant: world]" in chat.ask("messages").replace(
            "\n", " "
        )


def test_ctrl_c_during_the_load_of_run_ends_the_command_and_its_worker(
    tmp_path: Path,
) -> None:
    with echo_chat(tmp_path, "hello", FAKE_WORKER_WAIT=str(tmp_path / "go")) as command:
        command.expect("starting a worker")
        (worker,) = psutil.Process(command.child.pid).children()
        command.send(control("c"))
        assert command.exit_code() == 130
        assert psutil.wait_procs([worker], timeout=30)[1] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_chat_and_leaves_the_terminal_as_it_was(
    tmp_path: Path, number: signal.Signals
) -> None:
    words = f"trap : TERM HUP; stty -a; {SMALL_ECHO}; echo code $?; stty -a"
    names = environment(MOEGGUF_HOME=str(tmp_path))
    with Terminal(["/bin/sh", "-c", words], names) as chat:
        chat.prompt()
        # The shell is in this group, too, but survives the signal because of its trap
        os.killpg(chat.child.pid, number)
        chat.expect(f"code {128 + number}")
        chat.exit_code()
        before, after = chat.text.split("code")
        modes = [
            set(re.findall(r"-?(?:icanon|echo|icrnl|isig)\b", part))
            for part in (before, after)
        ]
        assert modes[0] == modes[1] and "icanon" in modes[1]


def test_input_during_an_answer_goes_to_the_next_prompt(chat: Terminal) -> None:
    chat.enter("slowly tock")
    chat.expect("tock tock")
    chat.send("typed ahead" + ENTER + control("c"))
    chat.expect(">>> typed ahead")
    chat.prompt()
    assert "tock typed" not in chat.text
    assert "\ntyped ahead" in chat.text


def test_ctrl_g_opens_the_editor_on_the_message(tmp_path: Path) -> None:
    editor = tmp_path / "editor.sh"
    editor.write_text('#!/bin/sh\nprintf " and\\nmore" >> "$1"\n')
    editor.chmod(0o755)
    with echo_chat(tmp_path, OLLAMA_EDITOR=str(editor), VISUAL="false") as chat:
        chat.prompt()
        chat.type("messages")
        chat.send(control("g"))
        chat.wait(lambda: chat.line == "... more", "what the editor wrote")
        chat.send(ENTER)
        chat.expect("[user: messages and")
        chat.prompt()


def test_ctrl_z_suspends_and_fg_resumes(tmp_path: Path) -> None:
    with Terminal(
        ["/bin/bash", "--norc", "--noediting", "-i"],
        environment(MOEGGUF_HOME=str(tmp_path), PS1="$ "),
    ) as shell:
        shell.wait(lambda: shell.line.startswith("$"), "the shell")
        shell.send(SMALL_ECHO + ENTER)
        shell.prompt()
        shell.send(control("z"))
        shell.expect("Stopped")
        shell.wait(lambda: shell.line.startswith("$"), "the shell again")
        shell.send("fg" + ENTER)
        shell.prompt()
        assert "\nhello" in shell.ask("hello")
        shell.enter("slowly tick")
        shell.expect("tick tick")
        shell.send(control("z"))
        shell.wait(lambda: shell.line.startswith("$"), "the shell a third time")
        ticks = shell.text.count("tick")
        shell.send("fg" + ENTER)
        shell.wait(lambda: shell.text.count("tick") > ticks, "more of the answer")
        shell.send("typed ahead" + ENTER + control("c"))
        shell.expect(">>> typed ahead")


def test_history_is_appended_privately_except_after_nohistory(tmp_path: Path) -> None:
    old = "".join(f"\n# then\n+message {n}\n" for n in range(150))
    (tmp_path / "history").write_text(old)
    (tmp_path / "history").chmod(0o644)
    with echo_chat(tmp_path) as chat:
        chat.prompt()
        chat.send(control("p"))
        chat.wait(lambda: chat.line == ">>> message 149", "the newest message")
        chat.send(control("u"))
        chat.prompt()
        chat.ask("new")
        chat.ask("/set nohistory")
        chat.ask("secret")
        chat.ask("/set history")
        chat.ask("known")
        chat.enter("/bye")
        assert chat.exit_code() == 0
    entries = history(tmp_path)
    assert entries == [
        *(f"message {n}" for n in range(150)),
        "new",
        "/set nohistory",
        "known",
        "/bye",
    ]
    assert stat.S_IMODE((tmp_path / "history").stat().st_mode) == 0o600


def test_ollama_nohistory_disables_the_history(tmp_path: Path) -> None:
    with echo_chat(tmp_path, OLLAMA_NOHISTORY="1") as chat:
        chat.prompt()
        chat.ask("hello")
        chat.enter("/bye")
        assert chat.exit_code() == 0
    assert not (tmp_path / "history").exists()


LONG = "the quick brown fox jumps over the lazy dog and then some"


def test_nowordwrap_leaves_wrapping_to_the_terminal(tmp_path: Path) -> None:
    with echo_chat(tmp_path, "--nowordwrap", size=(40, 24)) as chat:
        chat.prompt()
        chat.send(LONG + ENTER)
        chat.wait(
            lambda: f"\n{LONG[:40].rstrip()}\n{LONG[40:]}" in chat.text,
            "an unbroken answer",
        )
        chat.prompt()


def test_thinking_is_coloured_and_separated_from_the_answer(chat: Terminal) -> None:
    said = chat.ask("think: deep thought|the answer")
    assert re.search(
        r"Thinking\.\.\.\ndeep thought\n\.\.\.done thinking\.\n\nthe answer", said
    )
    assert chat.colour_of("...done") != "default"
    chat.ask("/set nowordwrap")
    assert "42" in chat.ask("think: hmm|42")


def test_no_color_disables_colours(tmp_path: Path) -> None:
    with echo_chat(tmp_path, NO_COLOR="1") as chat:
        chat.prompt()
        chat.ask("think: deep thought|the answer")
        chat.ask("/experts")
        assert not re.search(rb"\x1b\[[0-9;]*\b(3[0-7]|9[0-7]|38;5;\d+)m", chat.raw)


def test_control_characters_of_a_model_do_not_reach_the_terminal(
    chat: Terminal,
) -> None:
    chat.paste("a\x1b[31mb\x07c")
    chat.send(ENTER)
    chat.expect("a␛[31mb␇c")
    chat.prompt()


def test_tab_completes_commands(chat: Terminal) -> None:
    chat.send("/exp\t")
    chat.wait(lambda: chat.line == ">>> /experts", "the whole command")
    chat.send(ENTER)
    chat.expect("This model has no experts.")


def test_a_dumb_terminal_gets_no_escape_sequences(tmp_path: Path) -> None:
    with echo_chat(tmp_path, term="dumb") as chat:
        chat.wait(lambda: chat.line == ">>>", "the prompt")
        chat.send("think: hm|plain words" + ENTER)
        chat.expect("...done thinking.")
        chat.expect("plain words")
        chat.wait(lambda: chat.line == ">>>", "the prompt")
        assert b"\x1b[" not in chat.raw.partition(b">>>")[2]
        chat.send("/bye" + ENTER)
        assert chat.exit_code() == 0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def shared(home: Path) -> Iterator[Terminal]:
    """One chat, 160 columns wide, for all tests with this fixture; each test undoes its
    changes to the settings."""
    with echo_chat(home, size=(160, 60)) as terminal:
        terminal.prompt()
        yield terminal


@pytest.mark.parametrize(("command", "words"), [
    ("/?", "  /load <model>   Load a session or model"),
    ("/? set", "  /set parameter ...     Set a parameter"),
    ("/help shortcuts", "  Ctrl + c            Stop the model from responding"),
    ("/set parameter", "  /set parameter num_ctx <int>          Set the context size"),
    ("/show info", "architecture"),
    ("/show license", "No license was specified for this model."),
    ("/show modelfile", "FROM demo:latest"),
    ("/show parameters", "Model defined parameters:\n  temperature                    0\n"),
    ("/show system", "No system message was specified for this model."),
    ("/show template", "<|im_start|>"),
    ("/list", "demo:latest"),
    ("/show nothing", "Unknown command '/show nothing'. Type /? for help"),
    ("/home/me/cat.png what is this", "Unknown command '/home/me/cat.png'. Type /? for help"),
    ("/save", "Usage:\n  /save <modelname>"),
    ("/read", "Usage:\n  /read <file>"),
    ("/read /nowhere/at-all", "error: /read cannot read '/nowhere/at-all' (No such file or directory); check"),
    ("/set think", "warning: model 'demo:latest' does not support thinking output"),
    ("/set think sideways", "Invalid level 'sideways'."),
    ("/set format xml", "error: --format must be json, a JSON schema"),
    ("/set format", "Invalid or missing format. For 'json' mode use '/set format json'"),
    ("/set parameter nonsense 1", "Couldn't set parameter: unknown parameter 'nonsense'"),
    (
        "/set parameter top_k 1e3",
        "Couldn't set parameter: the parameter 'top_k' must be a 64-bit integer, but is '1e3'",
    ),
    ("/set parameter top_p 7", "Couldn't set parameter: top_p must be from 0 to 1, but is 7"),
])  # fmt: skip
def test_each_chat_command_prints_its_text(
    shared: Terminal, command: str, words: str
) -> None:
    assert words in shared.ask(command)
    assert "Traceback" not in shared.text


def test_set_parameter_applies_to_the_next_answer(shared: Terminal) -> None:
    assert "Set parameter 'temperature' to '0.25'" in shared.ask(
        "/set parameter temperature 0.25"
    )
    assert "Set parameter 'temperature' to '.25'" in shared.ask(
        "/set parameter temperature .25"
    )
    assert "Set parameter 'stop' to 'one, two three'" in shared.ask(
        '/set parameter stop one "two three"'
    )
    said = shared.ask("settings").replace("\n", " ")
    assert "temperature=0.25" in said
    assert "stop=['one', 'two three']" in said
    shown = shared.ask("/show parameters")
    assert "User defined parameters:" in shown
    assert '  stop                           "two three"' in shown


def test_set_turns_modes_on_and_off(shared: Terminal) -> None:
    assert "Set format to 'json' mode." in shared.ask("/set format json")
    assert "format=json" in shared.ask("settings").replace("\n", " ")
    assert "Set format to a JSON schema." in shared.ask(
        '/set format {"type": "object"}'
    )
    assert "format={'type': 'object'}" in shared.ask("settings").replace("\n", " ")
    assert "Disabled format." in shared.ask("/set noformat")
    assert "Set 'nothink' mode." in shared.ask("/set nothink")
    assert "format=None think=False" in shared.ask("settings").replace("\n", " ")
    assert "Set 'verbose' mode." in shared.ask("/set verbose")
    assert "eval rate:" in shared.ask("hello")
    assert "Set 'quiet' mode." in shared.ask("/set quiet")
    assert "eval rate:" not in shared.ask("hello")


def test_clear_drops_messages_and_keeps_the_system_message(shared: Terminal) -> None:
    assert "Set system message." in shared.ask("/set system Be brief.")
    shared.ask("remember me")
    assert "[system: Be brief.]" in shared.ask("messages").replace("\n", " ")
    assert "Cleared session context" in shared.ask("/clear")
    said = shared.ask("messages").replace("\n", " ")
    assert "[system: Be brief.] [user: messages]" in said
    shared.send('/set system """Be' + ENTER)
    shared.wait(lambda: shared.line == "...", "the second line")
    shared.send('briefer."""' + ENTER)
    shared.expect("Set system message.")
    shared.prompt()
    assert "Be\nbriefer." in shared.ask("/show system")
    shared.ask('/set system """"""')
    assert "No system message was specified for this model." in shared.ask(
        "/show system"
    )
    shared.ask("/clear")


def test_read_puts_a_file_before_the_next_message(
    shared: Terminal, tmp_path: Path
) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("first line\nsecond line\n")
    assert (
        f"Read '{file}' (22 characters); it goes before your next message."
        in shared.ask(f"/read {file}").replace("\n", "")
    )
    shared.ask("and now?")
    assert "[user: first line second line  and now?]" in shared.ask("messages").replace(
        "\n", " "
    )
    file.write_text("café", "utf-16")
    shared.ask(f"/read {file}")
    shared.ask("and this?")
    assert "[user: café  and this?]" in shared.ask("messages").replace("\n", " ")
    file.write_bytes(b"\0\1")
    assert "error: /read accepts text" in shared.ask(f"/read {file}")
    shared.ask("/clear")


def test_regen_answers_the_last_message_again(shared: Terminal) -> None:
    shared.ask("/clear")
    assert "There is no message to answer again." in shared.ask("/regen")
    shared.ask("the same")
    assert shared.ask("/regen").startswith(">>> /regen\nthe same")
    assert "[user: the same] [assistant: the same] [user: messages]" in shared.ask(
        "messages"
    ).replace("\n", " ")
    shared.ask("/clear")


def test_errors_do_not_end_the_chat(shared: Terminal) -> None:
    shared.ask("/clear")
    assert "error: as scripted" in shared.ask("fail ContextError")
    assert "error: ZeroDivisionError: as scripted" in shared.ask(
        "fail ZeroDivisionError"
    )
    said = shared.ask("fail ExpertIOError half")
    assert "half" in said and "error: as scripted" in said
    assert (
        "[user: fail ExpertIOError half] [assistant: half] [user: messages]"
        in shared.ask("messages")
    )
    assert "prompt cut: 3 messages left out" in shared.ask("cut")
    shared.ask("/clear")


def test_bye_and_exit_end_the_chat(home: Path) -> None:
    for command in ("/bye", "/exit"):
        with echo_chat(home) as chat:
            chat.prompt()
            chat.enter(command)
            assert chat.exit_code() == 0
