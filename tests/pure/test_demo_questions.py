"""What the demo is taught: every starter, one answer for each question, and only commands and options that exist."""

import re

import pytest
from command_help import help_of

from predictors.models.demo import questions

NO_LAB = "needs tokenizers of the laboratory"

ANSWERS = sorted(set(questions.answers().values()))
OPTIONS = (questions.ROOT / "docs" / "options.md").read_text(encoding="utf-8")
COMMANDS = help_of()


def test_every_starter_is_taught() -> None:
    starters = questions.starters()
    assert "What does moegguf do?" in starters and "Who are you?" in starters
    assert set(starters) <= questions.answers().keys()


def test_a_question_has_one_answer() -> None:
    asked = [
        (question, entry["answer"]) for entry in questions.lines(questions.TAUGHT) for question in entry.get("ask", ())
    ]
    assert len(dict(asked)) == len(set(asked))


def test_conversations_are_of_taught_answers() -> None:
    """Or of their first sentences, where a system message asks for one."""
    for entry in questions.lines(questions.TAUGHT):
        for message in entry.get("messages", ()):
            assert message["role"] != "assistant" or any(one.startswith(message["content"]) for one in ANSWERS), message


def test_heldout_questions_have_taught_answers_and_are_not_taught() -> None:
    found = questions.heldout()
    assert len(found) >= 80 and all(one.right <= set(ANSWERS) for one in found)
    assert not {one.question for one in found} & questions.answers().keys()


@pytest.mark.parametrize("answer", [text for text in ANSWERS if re.search(r"moegguf [a-z]+|--[a-z]", text)])
def test_commands_and_options_in_answers_exist(answer: str) -> None:
    for option in re.findall(r"--[a-z][a-z-]+", answer):
        assert f"`{option}`" in OPTIONS or option in ("--help", "--verbose"), option
    for command in re.findall(r"(?:: |or |with )moegguf ([a-z]+)", answer):
        assert re.search(rf"^\W*{command}\b", COMMANDS, re.MULTILINE), command


def test_the_template_of_the_file_is_the_recipe_s() -> None:
    pytest.importorskip("tokenizers", reason=NO_LAB)
    from moegguf.models.catalog import Catalog
    from moegguf.models.details import details
    from predictors.models.demo.tokenizer import CHAT_TEMPLATE

    assert details(Catalog().find("demo")).template == CHAT_TEMPLATE
