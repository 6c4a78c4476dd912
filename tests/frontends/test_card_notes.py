"""Tests the note about a graphics card that this build cannot use.

Commands print it as one line, unless the user chose the CPU.
"""

import json

import pytest
from servers import Command

from moegguf.cli.serve import print_address, serve_settings
from moegguf.engine import cards
from moegguf.engine.cards import Card
from moegguf.errors import LibraryError
from moegguf.server.serve import listen

LINE = (
    "This machine has an NVIDIA card (driver 580.65), but this build of moegguf cannot use it:"
    ' pip install "moegguf[cuda]".\n'
)
RUN = ("run", "demo", "hi", "-n", "1", "-t", "1")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes find_cards() report an NVIDIA card."""
    monkeypatch.setattr(cards, "find_cards", lambda: [Card("NVIDIA", "580.65")])


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("words", "n_lines"),
    [
        ((*RUN, "-v"), 1),
        (RUN, 0),  # no note without -v, because stderr is not a terminal
        ((*RUN, "-v", "--placement", "cpu"), 0),
        ((*RUN, "-v", "-ngl", "0"), 0),
        (("estimate", "demo"), 1),
        (("estimate", "demo", "--placement", "cpu"), 0),
    ],
)
def test_run_and_estimate_print_the_card_note_unless_quiet_or_on_the_cpu(
    here: Command, words: tuple[str, ...], n_lines: int
) -> None:
    done = here(*words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(LINE) == n_lines and "NVIDIA" not in done.stdout


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("given", "is_said"), [({}, True), ({"placement": "cpu"}, False)]
)
def test_serve_prints_the_card_note_unless_placed_on_the_cpu(
    capsys: pytest.CaptureFixture[str], given: dict[str, str], is_said: bool
) -> None:
    settings = serve_settings(0, {"loading": given})
    with listen(settings.host) as listener:
        print_address(settings, listener)
    assert (LINE in capsys.readouterr().err) is is_said


@pytest.mark.usefixtures("card")
def test_serve_prints_its_address_without_the_native_library(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise LibraryError("the native library is not built")

    monkeypatch.setattr(cards, "read_build", missing)
    settings = serve_settings(0, {})
    with listen(settings.host) as listener:
        print_address(settings, listener)
    assert "listening on" in capsys.readouterr().err


def test_doctor_reports_the_card_and_its_note_as_json_fields(
    here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moegguf.engine import doctor

    monkeypatch.setattr(cards, "find_cards", lambda: [Card("NVIDIA", "580.65")])
    monkeypatch.setattr(doctor, "find_cards", cards.find_cards)
    facts = json.loads(here("doctor", "--json").stdout)["cards"]
    assert facts == {
        "found": ["NVIDIA 580.65"],
        "plugins": [],
        "problems": [],
        "note": LINE.rstrip("\n"),
    }
    assert LINE in here("doctor").stdout
