"""The page in a browser over scripted answers: stop, errors, hostile text, API key, settings, keyboard and colours."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from browsing import Look, ask, ended, until
from fake_manager import FakeCatalog, FakeManager, entry_of, running

from moegguf.errors import WorkerError
from moegguf.generate.request import Delta, PromptProgress
from moegguf.models.catalog import demo_path
from moegguf.server.app import make_app
from moegguf.settings import Settings

pytest_plugins = ("browser",)


def manager_of(*script: Any) -> FakeManager:
    return FakeManager(FakeCatalog(entry_of(demo_path())), script)


def app_of(manager: FakeManager, *api_keys: str) -> Any:
    return make_app(manager, manager.catalog, Settings(api_keys=api_keys))  # type: ignore[arg-type]


def deltas(*texts: str) -> Sequence[Delta]:
    return [Delta(text=text) for text in texts]


def test_stop_ends_the_request_and_keeps_the_text(look: Look) -> None:
    manager = manager_of(*deltas("It begins", " well"), asyncio.Event())
    with running(app_of(manager)) as url:
        page = look(url)
        ask(page, "Go on for ever")
        until(page, "document.querySelector('.answer .content')?.textContent === 'It begins well'")
        assert manager.n_running == 1
        page.click("#stop")
        page.wait_for_selector("text=Stopped.")
        ended(page)
        manager.script = deltas("Yes.")
        ask(page, "Are you free?")
        page.wait_for_selector("text=Yes.")
        ended(page)
    assert (manager.n_running, manager.n_ended) == (0, 2)
    said = [message["content"] for message in manager.requests[1].messages or ()]
    assert said == ["Go on for ever", "It begins well", "Are you free?"]


def test_a_reload_keeps_the_chat(look: Look) -> None:
    manager = manager_of(Delta(thinking="hm"), *deltas("**Hello** there"))
    with running(app_of(manager)) as url:
        page = look(url)
        ask(page, "Hi")
        ended(page)
        manager.script = (*deltas("It begins"), asyncio.Event())
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
        said = [message["content"] for message in manager.requests[2].messages or ()]
        assert said == ["Hi", "**Hello** there", "Go on for ever", "It begins", "Are you free?"]
        page.click("#new")
        page.reload()
        page.wait_for_selector(".starters")
        assert page.inner_text("#log") == ""


def test_escape_stops(look: Look) -> None:
    manager = manager_of(*deltas("It begins"), asyncio.Event())
    with running(app_of(manager)) as url:
        page = look(url)
        ask(page, "Go on for ever")
        page.wait_for_selector("text=It begins")
        page.keyboard.press("Escape")
        page.wait_for_selector("text=Stopped.")


HOSTILE = (
    "<img src=x onerror='window.hacked=1'> **<b>bold</b>** `<script>window.hacked=2</script>`\n\n"
    "- <svg onload=window.hacked=3>\n\n| <i>a</i> | b |\n|---|---|\n| <iframe srcdoc=x> | 2 |\n\n"
    "# <a href='javascript:window.hacked=4'>head</a>\n\n```html\n<img src=x onerror=window.hacked=5>\n```\n"
)


def test_model_output_never_becomes_html(look: Look) -> None:
    with running(app_of(manager_of(*deltas(*re.findall(r"(?s).{1,7}", HOSTILE))))) as url:
        page = look(url)
        ask(page, "<img src=x onerror='window.hacked=6'>")
        ended(page)
        assert page.evaluate("window.hacked") is None
        assert page.locator("#log .content :is(img, b, script, svg, iframe, i, a)").count() == 0
        assert page.inner_text(".user .content") == "<img src=x onerror='window.hacked=6'>"
        assert page.inner_text(".answer strong") == "<b>bold</b>"
        assert page.inner_text(".answer pre") == "<img src=x onerror=window.hacked=5>"
        assert page.inner_text(".answer td >> nth=0") == "<iframe srcdoc=x>"


def test_a_long_prompt_shows_how_far_it_is(look: Look) -> None:
    read = [PromptProgress(6300, 300, done, (done - 300) / 45) for done in (300, 1200, 6300)]
    shown = {
        300: "Reading the prompt: 300 of 6,300 tokens",
        1200: "Reading the prompt: 1,200 of 6,300 tokens · 45.0 tokens/s · 1 min 53 s left",
        6300: "Waiting for the first token",
    }
    for progress in read:
        with running(app_of(manager_of(progress, asyncio.Event()))) as url:
            page = look(url)
            ask(page, "Read")
            page.wait_for_selector(f"text='{shown[progress.n_done]}'")
            page.click("#stop")
            ended(page)
            assert page.locator(".waiting").count() == 0


def test_thinking_is_collapsed(look: Look) -> None:
    script = [Delta(thinking="Let me "), Delta(thinking="see."), Delta(text="Here.")]
    with running(app_of(manager_of(*script))) as url:
        page = look(url)
        ask(page, "Think")
        ended(page)
        assert page.inner_text(".thinking summary").startswith("Thought for")
        assert not page.is_visible(".thinking div")
        page.click(".thinking summary")
        assert page.inner_text(".thinking div") == "Let me see."
        assert page.inner_text(".answer .content") == "Here."


def test_an_error_in_mid_answer_is_shown_and_the_chat_continues(look: Look) -> None:
    manager = manager_of(*deltas("Half"), WorkerError("the worker process has ended."))
    with running(app_of(manager)) as url:
        page = look(url)
        ask(page, "First")
        assert page.inner_text(".error") == "the worker process has ended."
        ended(page)
        manager.script = deltas("Whole")
        ask(page, "Second")
        page.wait_for_selector("text=Whole")


def test_a_message_that_was_not_answered_can_be_sent_again(look: Look) -> None:
    manager = manager_of()
    manager.enter_error = WorkerError("it does not load.")
    with running(app_of(manager)) as url:
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
    assert [message["content"] for message in manager.requests[0].messages or ()] == ["Again"]


def test_the_api_key_is_sent_and_kept_in_the_tab(look: Look) -> None:
    with running(app_of(manager_of(*deltas("Open.")), "sesame")) as url:
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


def test_settings_apply_to_the_next_message(look: Look) -> None:
    manager = manager_of()
    with running(app_of(manager)) as url:
        page = look(url)
        page.click("#open-settings")
        for name, value in {"system": "Be brief.", "temperature": "0.5", "seed": "7"}.items():
            page.fill(f"#{name}", value)
        page.click("#settings .primary")
        ask(page, "Hello")
        ended(page)
    asked = manager.requests[0]
    assert [message["role"] for message in asked.messages or ()] == ["system", "user"]
    assert (asked.sampling.temperature, asked.sampling.seed) == (0.5, 7)


def test_shift_enter_begins_a_line_and_an_empty_message_is_not_sent(look: Look) -> None:
    manager = manager_of()
    with running(app_of(manager)) as url:
        page = look(url)
        ask(page, "   ")
        page.fill("#message", "")
        page.type("#message", "one")
        page.keyboard.press("Shift+Enter")
        page.type("#message", "two")
        page.keyboard.press("Enter")
        ended(page)
    assert [[message["content"] for message in asked.messages or ()] for asked in manager.requests] == [["one\ntwo"]]


def test_light_and_dark_follow_the_system_until_one_is_chosen(look: Look) -> None:
    brightness = "Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"
    with running(app_of(manager_of())) as url:
        page = look(url, color_scheme="dark")
        assert page.evaluate(brightness) < 60
        page.click("#theme")
        assert page.evaluate(brightness) > 200
        page.reload()
        assert page.evaluate(brightness) > 200
        assert look(url, color_scheme="light").evaluate(brightness) > 200


def test_all_controls_have_an_accessible_name(look: Look) -> None:
    with running(app_of(manager_of(*deltas("```py\nx\n```")))) as url:
        page = look(url)
        ask(page, "Hello")
        ended(page)
        nameless = """() => [...document.querySelectorAll("button, input, textarea, select, [role=img]")]
          .filter((e) => !(e.getAttribute("aria-label") || e.textContent.trim() || e.labels?.length))
          .map((e) => e.outerHTML)"""
        assert page.evaluate(nameless) == []
