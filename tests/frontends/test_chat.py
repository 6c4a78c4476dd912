"""The chat with a real model: cached prompts, reloading with other parameters, switching models."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
from chat_terminal import ANSWER, QUESTION, demo_chat
from command_line import TinyModel
from terminal import control


def figure(text: str, label: str) -> int:
    """The last value of a line of statistics."""
    return int(re.findall(rf"{label}: +(\d+) token", text)[-1])


def test_a_second_turn_evaluates_only_what_is_new(tmp_path: Path) -> None:
    with demo_chat(tmp_path, "--verbose") as chat:
        chat.prompt()
        first = chat.ask(QUESTION)
        assert ANSWER in first.replace("\n", " ")
        whole = figure(first, "prompt eval count") + figure(first, "eval count")
        second = chat.ask("What is an expert?")
        assert figure(second, "prompt cached") >= whole - 2
        assert figure(second, "prompt eval count") < figure(first, "prompt eval count") + 10
        chat.ask("/clear")
        again = chat.ask(QUESTION)
        assert ANSWER in again.replace("\n", " ")
        chat.send(control("d"))
        assert chat.exit_code() == 0


def test_statistics_and_the_map_of_the_experts(tmp_path: Path) -> None:
    with demo_chat(tmp_path, size=(100, 40)) as chat:
        chat.prompt()
        assert "slots for 96 of 192 experts" in chat.text
        assert "There is no answer yet." in chat.ask("/stats")
        assert "eval rate" not in chat.ask(QUESTION)
        said = chat.ask("/stats")
        for label in (
            "total duration:",
            "eval rate:",
            "time to first token:",
            "hit rate:",
            "moved:",
            "stall:",
            "since load:",
        ):
            assert label in said
        shown = chat.ask("/experts")
        rows = re.findall(r"^(\d) ([·~░▒▓█+○]{32})$", shown, re.MULTILINE)
        assert [int(row) for row, _ in rows] == list(range(6))
        assert re.search(r"96 of 192 experts in memory; hit rate \d+\.\d%", shown)
        letters = "".join(cells for _, cells in rows)
        assert "+" in letters or "█" in letters
        assert sum(letters.count(one) for one in "+█▒") == 96


def test_uses_of_a_fully_resident_model_are_counted_after_the_first_map(tmp_path: Path) -> None:
    with demo_chat(tmp_path, "--expert-cache", "100%", "--verbose") as chat:
        chat.prompt()
        chat.ask(QUESTION)
        chat.ask("What is an expert?")
        assert "192 of 192 experts in memory" in chat.ask("/experts")
        chat.ask("What is an expert?")
        assert chat.ask("/experts").count("█") > 10


def test_load_parameters_reload_the_model(tmp_path: Path) -> None:
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


def test_a_model_whose_worker_ends_is_loaded_again(tmp_path: Path) -> None:
    with demo_chat(tmp_path) as chat:
        chat.prompt()
        (worker,) = psutil.Process(chat.child.pid).children()
        worker.kill()
        psutil.wait_procs([worker], timeout=30)
        assert ANSWER in chat.ask(QUESTION).replace("\n", " ")


def test_another_model_is_loaded_or_the_present_one_stays(tmp_path: Path, tiny: TinyModel) -> None:
    with demo_chat(tmp_path, size=(160, 24)) as chat:
        chat.prompt()
        chat.ask(QUESTION)
        assert "Couldn't find model 'nothing-of-that-name'" in chat.ask("/load nothing-of-that-name")
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


def test_a_session_is_saved_as_a_model_and_loaded_again(tmp_path: Path) -> None:
    with demo_chat(tmp_path, size=(100, 50)) as chat:
        chat.prompt()
        chat.ask("/set system You are brief.")
        chat.ask("/set parameter top_k 7")
        chat.ask(QUESTION)
        assert "Created new model 'mine'" in chat.ask("/save mine")
        assert "error: " in chat.ask("/save ../evil")
        chat.ask("/clear")
        assert "Loading model 'mine'" in chat.ask("/load mine")
        assert re.search(r"Model defined parameters:\n(.*\n)*? +top_k +7", chat.ask("/show parameters"))
        assert "You are brief." in chat.ask("/show system")
        assert "mine:latest" in chat.ask("/list")
        assert "FROM" in chat.ask("/show modelfile")
        assert ANSWER in chat.ask("/regen").replace("\n", " ")
