"""Old names of options work for one release, each with one line that names the new one."""

import warnings
from typing import Any

import pytest

import moegguf
from moegguf.cli import app
from moegguf.errors import OptionError
from moegguf.options import with_new_flags
from moegguf.settings import read_environment

COMMANDS = (
    ["run", "demo", "hello"], ["serve"], ["batch", __file__], ["bench", "-m", "demo"], ["trace", "simulate", __file__],
)  # fmt: skip


@pytest.mark.parametrize("given", [["--system", "nine"], ["--system=nine"]])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_an_old_flag_works_with_a_hint(
    command: list[str], given: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Analysis:
        @staticmethod
        def open(*_: Any) -> Any:
            raise OptionError("there is no strategy 'nine'")

    monkeypatch.setattr("moegguf.trace.analysis.TraceAnalysis", Analysis)  # __file__ is no trace
    assert app.main([*command, *given]) != 0
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("warning: --system is called --strategy now;")
    assert "no strategy 'nine'" in told[1] and len(told) == 2


def test_an_old_flag_is_in_no_help(capsys: pytest.CaptureFixture[str]) -> None:
    app.main(["run", "--help"])
    assert "--strategy" in (text := capsys.readouterr().out) and "--system " not in text


def test_words_after_two_dashes_are_kept() -> None:
    assert with_new_flags(["--", "--system"], set()) == ["--", "--system"]


def test_a_flag_of_a_command_s_own_is_no_old_name() -> None:
    assert with_new_flags(["kind", "--system"], {"--system"}) == ["kind", "--system"]


def test_an_old_variable_works_with_a_hint() -> None:
    with pytest.warns(FutureWarning, match="MOEGGUF_SYSTEM is called MOEGGUF_STRATEGY now"):
        assert read_environment({"MOEGGUF_SYSTEM": "lru"}).strategy == "lru"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_environment({"MOEGGUF_SYSTEM": "lru", "MOEGGUF_STRATEGY": "promoe"}).strategy == "promoe"


def test_an_old_keyword_works_with_a_hint() -> None:
    with pytest.warns(FutureWarning, match="system= is called strategy= now"), pytest.raises(OptionError, match="nine"):
        moegguf.Llama("demo", system="nine")
