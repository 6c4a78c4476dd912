"""Stop strings: however a text is chunked, the output ends before the first of them."""

import time

from hypothesis import given
from hypothesis import strategies as st

from moegguf.generate.parsing import StopStrings

TEXT = st.text("ab<>|", max_size=40)


def fed(stops: list[str], text: str, cuts: list[int]) -> tuple[str, StopStrings]:
    """The output for `text` cut at `cuts`, and the filter after it."""
    filtered, out, begin = StopStrings(stops), "", 0
    for end in [*sorted(cut % (len(text) + 1) for cut in cuts), len(text)]:
        out += filtered.feed(text[begin:end])
        begin = end
    return out + filtered.end(), filtered


@given(st.lists(st.text("ab<>|", max_size=5), max_size=4), TEXT, st.lists(st.integers(0, 40), max_size=12))
def test_the_text_ends_before_the_first_stop_string(stops: list[str], text: str, cuts: list[int]) -> None:
    places = [text.index(stop) for stop in stops if stop and stop in text]
    out, filtered = fed(stops, text, sorted(cuts))
    whole, _ = fed(stops, text, [])
    assert whole == text[: min(places, default=len(text))]
    assert bool(filtered.found) == bool(places)
    # A complete stop string ends the text, though a longer one that began before it could still have been completed.
    assert whole.startswith(out) or out.startswith(whole)
    assert not any(stop in out for stop in stops if stop)


def test_only_what_may_become_a_stop_string_is_held() -> None:
    stops = StopStrings(["<|end|>", "\n\nUser:"])
    assert [stops.feed(text) for text in ("a<", "b", "<|en", "x<|end", "|>y", "z")] == ["a", "<b", "", "<|enx", "", ""]
    assert stops.found
    assert stops.end() == ""


def test_no_stop_strings_hold_nothing() -> None:
    stops = StopStrings(["", ""])
    assert not stops
    assert stops.feed("abc") == "abc"
    assert (stops.n_held, stops.end()) == (0, "")


def test_many_stop_strings_take_no_longer_than_they_must() -> None:
    begin = time.process_time()
    stops = StopStrings(f"stop number {n}" for n in range(1000))
    for _ in range(1000):
        assert stops.feed("st ") == "st "
    assert time.process_time() - begin < 2
