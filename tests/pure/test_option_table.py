"""The table of options: docs/options.md is printed from it, and what reads options has a row for each."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

from moegguf import Llama
from moegguf.options import GROUPS, OPTIONS, TO_WORKERS, page
from moegguf.serving.wire import LoadConfig
from moegguf.settings import Environment, Settings

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_table_prints() -> None:
    text = (ROOT / "docs" / "options.md").read_text()
    assert text == "\n".join(page()) + "\n", "run `python -m moegguf.options > docs/options.md`"


def test_every_setting_is_in_the_table() -> None:
    fields = {field.name for kind in (Environment, Settings) for field in dataclasses.fields(kind)}
    assert fields - {"loading"} == {option.name for option in OPTIONS.values() if option.variable}
    assert all(option.group in GROUPS for option in OPTIONS.values())
    assert set(TO_WORKERS) <= {field.name for field in dataclasses.fields(Environment)}


def test_options_of_loading_are_keywords() -> None:
    taken = {name for base in Llama.__mro__ for name in inspect.signature(base.__init__).parameters}
    flags = {option.name for option in OPTIONS.values() if option.scope == "load" and option.flags}
    assert flags <= taken
    assert flags <= {field.name for field in dataclasses.fields(LoadConfig)}
