"""The page in a browser over scripted answers: stop, errors, API key, keyboard and colours."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from browsing import Look, answered, ask, ended, until
from fake_manager import FakeManager, running

from moegguf.errors import WorkerError
from moegguf.generate.request import Delta, PromptProgress
from moegguf.server.app import make_app
from moegguf.settings import Settings

pytest_plugins = ("browser",)


def deltas(*texts: str) -> list[Delta]:
    return [Delta(text=text) for text in texts]


def said(manager: FakeManager) -> list[str]:
    """The contents of the last request's messages."""
    return [message["content"] for message in manager.requests[-1].messages or ()]


@pytest.mark.parametrize("stop", [lambda page: page.click("#stop"), lambda page: page.keyboard.press("Escape")])
def test_stop_and_escape_end_the_request_and_keep_the_text(
    manager: FakeManager, url: str, look: Look, stop: Callable[[Any], None]
) -> None:
    manager.script = [*deltas("It begins", " well"), asyncio.Event()]
    page = look(url)
    ask(page, "Go on for ever")
    until(page, "document.querySelector('.answer .content')?.textContent === 'It begins well'")
    assert manager.n_running == 1
    stop(page)
    page.wait_for_selector("text=Stopped.")
    ended(page)
    manager.script = deltas("Yes.")
    ask(page, "Are you free?")
    page.wait_for_selector("text=Yes.")
    ended(page)
    assert (manager.n_running, manager.n_ended) == (0, 2)
    assert said(manager) == ["Go on for ever", "It begins well", "Are you free?"]


def test_a_reload_keeps_the_chat(manager: FakeManager, url: str, look: Look) -> None:
    manager.script = [Delta(thinking="hm"), *deltas("**Hello** there")]
    page = look(url)
    answered(page, "Hi")
    manager.script = [*deltas("It begins"), asyncio.Event()]
    ask(page, "Go on for ever")
    page.wait_for_selector("text=It begins")
    page.reload()
    until(page, "document.querySelectorAll('.turn').length === 4")
    assert page.inner_text(".answer .content >> nth=0") == "Hello there"
    assert page.inner_text(".answer .content >> nth=1") == "It begins"
    assert page.inner_text(".answer summary").startswith("Thought") and not page.is_visible(".starters")
    manager.script = deltas("Yes.")
    ask(page, "Are you free?")
    page.wait_for_selector("text=Yes.")
    ended(page)
    assert said(manager) == ["Hi", "**Hello** there", "Go on for ever", "It begins", "Are you free?"]
    page.click("#new")
    page.reload()
    page.wait_for_selector(".starters")
    assert page.inner_text("#log") == ""


def test_a_long_prompt_shows_how_far_it_is(manager: FakeManager, url: str, look: Look) -> None:
    shown = {
        300: "Reading the prompt: 300 of 6,300 tokens",
        1200: "Reading the prompt: 1,200 of 6,300 tokens · 45.0 tokens/s · 1 min 53 s left",
        6300: "Waiting for the first token",
    }
    page = look(url)
    for n_done, text in shown.items():
        manager.script = [PromptProgress(6300, 300, n_done, (n_done - 300) / 45), asyncio.Event()]
        ask(page, "Read")
        page.wait_for_selector(f"text='{text}'")
        page.click("#stop")
        ended(page)
        assert page.locator(".waiting").count() == 0


def test_thinking_is_collapsed(manager: FakeManager, url: str, look: Look) -> None:
    manager.script = [Delta(thinking="Let me "), Delta(thinking="see."), Delta(text="Here.")]
    page = look(url)
    answered(page, "Think")
    assert page.inner_text(".thinking summary").startswith("Thought for")
    assert not page.is_visible(".thinking div")
    page.click(".thinking summary")
    assert page.inner_text(".thinking div") == "Let me see."
    assert page.inner_text(".answer .content") == "Here."


def test_an_error_in_mid_answer_is_shown_and_the_chat_continues(manager: FakeManager, url: str, look: Look) -> None:
    manager.script = [*deltas("Half"), WorkerError("the worker process has ended.")]
    page = look(url)
    ask(page, "First")
    assert page.inner_text(".error") == "the worker process has ended."
    ended(page)
    manager.script = deltas("Whole")
    ask(page, "Second")
    page.wait_for_selector("text=Whole")


def test_a_message_that_was_not_answered_can_be_sent_again(manager: FakeManager, url: str, look: Look) -> None:
    manager.enter_error = WorkerError("it does not load.")
    page = look(url, expected="status of 5")
    ask(page, "Again")
    page.wait_for_selector("text=it does not load.")
    ended(page)
    page.reload()  # it is kept
    page.wait_for_selector("text=it does not load.")
    manager.enter_error = None
    page.click("text=Try again")
    page.wait_for_selector(".answer")
    ended(page)
    assert said(manager) == ["Again"]


def test_the_api_key_is_sent_and_kept_in_the_tab(manager: FakeManager, look: Look) -> None:
    manager.script = deltas("Open.")
    app = make_app(manager, manager.catalog, Settings(api_keys=("sesame",)))  # type: ignore[arg-type]
    with running(app) as url:
        page = look(url, expected="status of 401")
        page.fill("#api-key", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key[open]")
        page.fill("#api-key", "sesame")
        page.keyboard.press("Enter")
        ask(page, "Hello")
        page.wait_for_selector("text=Open.")
        assert page.evaluate("Object.values(sessionStorage).includes('sesame')")
        assert "sesame" not in page.evaluate("JSON.stringify(localStorage)")


def test_shift_enter_begins_a_line_and_an_empty_message_is_not_sent(manager: FakeManager, url: str, look: Look) -> None:
    page = look(url)
    ask(page, "   ")
    page.fill("#message", "")
    page.type("#message", "one")
    page.keyboard.press("Shift+Enter")
    page.type("#message", "two")
    page.keyboard.press("Enter")
    ended(page)
    assert len(manager.requests) == 1 and said(manager) == ["one\ntwo"]


def test_light_and_dark_follow_the_system_until_one_is_chosen(url: str, look: Look) -> None:
    brightness = "Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"
    page = look(url, color_scheme="dark")
    assert page.evaluate(brightness) < 60
    page.click("#theme")
    assert page.evaluate(brightness) > 200
    page.reload()
    assert page.evaluate(brightness) > 200
    assert look(url, color_scheme="light").evaluate(brightness) > 200


def test_all_controls_have_an_accessible_name(manager: FakeManager, url: str, look: Look) -> None:
    manager.script = deltas("```py\nx\n```")
    page = look(url)
    answered(page, "Hello")
    nameless = """() => [...document.querySelectorAll("button, input, textarea, select, [role=img]")]
      .filter((e) => !(e.getAttribute("aria-label") || e.textContent.trim() || e.labels?.length))
      .map((e) => e.outerHTML)"""
    assert page.evaluate(nameless) == []
