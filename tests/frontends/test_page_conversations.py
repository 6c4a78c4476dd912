"""Tests conversations on the page, with scripted answers.

The browser stores the conversations. Tests cover versions of a message, settings,
pictures, tools, the choice of a model, stopping, errors, and the API key. They also
cover the keyboard, colours, and the accessibility checker axe.
"""

import asyncio
import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from browsing import Look, answered, ask, ended, ready, until
from fake_manager import TEMPLATE, FakeCatalog, FakeManager, entry_of, server_of
from pictures import png

from moegguf.errors import WorkerError
from moegguf.generate.request import Delta, PromptProgress, ToolCall
from moegguf.models.catalog import demo_path

TOOLS = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'


@pytest.fixture
def manager(projector: Callable[..., Path]) -> FakeManager:
    """Returns a fake manager that answers "Yes." until a test sets another script.

    Its models are `demo`, `able` (its template has tools and thinking) and `see` (reads
    pictures).
    """
    path = demo_path()
    able, see = (
        entry_of(path, "able:latest", template=TEMPLATE),
        entry_of(path, "see:latest", mmproj=projector("mlp")),
    )
    return FakeManager(FakeCatalog(entry_of(path), able, see), texts("Yes."))


def texts(*parts: str) -> Sequence[Delta]:
    return [Delta(text=part) for part in parts]


def said(manager: FakeManager) -> list[str]:
    """Returns the content of each message in the last request."""
    return [str(message["content"]) for message in manager.requests[-1].messages or ()]


def test_conversations_are_stored_in_the_browser_and_listed(
    manager: FakeManager, url: str, look: Look
) -> None:
    page = look(url)
    answered(page, "First question")
    page.click("#new")
    answered(page, "Second question")
    assert page.title() == "Second question – moegguf"
    page.click("#open-list")
    page.wait_for_selector("#list a >> nth=1")
    assert page.locator("#list a").all_inner_texts() == [
        "Second question",
        "First question",
    ]
    page.click("#list a >> nth=1")
    page.wait_for_selector("#log >> text=First question")
    answered(page, "And then?")
    assert said(manager) == ["First question", "Yes.", "And then?"]
    page.go_back()
    page.wait_for_selector("#log >> text=Second question")
    page.reload()  # the list of conversations stays open
    page.wait_for_selector("#list a[aria-current=page] >> text=Second question")
    page.fill("#filter", "first")
    until(page, "document.querySelectorAll('#list a').length === 1")


def test_a_conversation_is_renamed_and_deleted(url: str, look: Look) -> None:
    page = look(url)
    answered(page, "A question")
    page.click("#open-list")
    page.hover("#list li")
    page.once("dialog", lambda dialog: dialog.accept("A title"))
    page.click("#list [title^=Rename]")
    page.wait_for_selector("#list a >> text=A title")
    assert page.title() == "A title – moegguf"
    answered(page, "Another")
    page.on("dialog", lambda dialog: dialog.accept())
    page.hover("#list li")
    page.click("#list [title^=Delete]")
    page.wait_for_selector("text=No conversations yet.")
    assert page.inner_text("#log") == ""
    page.reload()
    page.wait_for_selector("text=No conversations yet.")


def test_a_conversation_deleted_during_its_answer_stays_deleted(
    manager: FakeManager, url: str, look: Look
) -> None:
    manager.script = [*texts("It begins"), asyncio.Event()]
    page = look(url)
    ask(page, "Go on for ever")
    page.wait_for_selector("text=It begins")
    page.click("#open-list")
    page.on("dialog", lambda dialog: dialog.accept())
    page.hover("#list li")
    page.click("#list [title^=Delete]")
    page.wait_for_selector("text=No conversations yet.")
    page.reload()
    page.wait_for_selector("text=No conversations yet.")
    until(page, "document.querySelector('#send:not([hidden])') !== null")
    assert manager.n_running == 0


def test_an_answer_continues_while_another_conversation_is_shown(
    manager: FakeManager, url: str, look: Look
) -> None:
    manager.script = [*texts("It begins"), asyncio.Event(), *texts(", and ends.")]
    page = look(url)
    ask(page, "Slowly")
    page.wait_for_selector("text=It begins")
    first = page.url
    waited = manager.script[1]
    page.click("#new")
    manager.script = texts("At once.")
    ask(page, "Quickly")
    page.wait_for_selector("text=At once.")
    ended(page)
    page.goto(first)
    page.wait_for_selector(".writing >> text=It begins")
    assert page.is_visible("#stop")
    waited._loop.call_soon_threadsafe(waited.set)
    page.wait_for_selector("text=It begins, and ends.")
    ended(page)


def test_edited_questions_and_repeated_answers_are_kept_as_versions(
    manager: FakeManager, url: str, look: Look
) -> None:
    page = look(url)
    answered(page, "One?")
    manager.script = texts("No.")
    page.click("[title='Answer again']")
    page.wait_for_selector("#log >> text=No.")
    ended(page)
    assert said(manager) == ["One?"]
    assert "2/2" in page.inner_text(".answer .below")
    page.click("[title='Previous version']")
    page.wait_for_selector("#log >> text=Yes.")
    page.hover(".user")
    page.click("[title=Edit]")
    page.keyboard.press("Control+A")
    page.keyboard.type("Two?")
    page.keyboard.press("Enter")
    page.wait_for_selector("#log >> text=No.")
    ended(page)
    assert said(manager) == ["Two?"]
    page.reload()
    page.wait_for_selector("#log >> text=Two?")
    page.hover(".user")
    page.click(".user [title='Previous version']")
    # The newest answer to this question is shown.
    page.wait_for_selector("#log >> text=No.")
    assert page.inner_text(".user .content") == "One?"


def test_escape_discards_the_edit_of_a_question(url: str, look: Look) -> None:
    page = look(url)
    answered(page, "One?")
    page.focus(".user [title=Edit]")
    page.keyboard.press("Enter")
    page.keyboard.type(" More")
    page.keyboard.press("Escape")
    assert page.inner_text(".user .content") == "One?"
    assert page.evaluate("document.activeElement.title") == "Edit"


def test_copy_buttons_copy_messages_and_code(
    manager: FakeManager, url: str, look: Look
) -> None:
    manager.script = texts("**Code**:\n\n```py\nif x:\n    y()\n```\n")
    page = look(url, permissions=["clipboard-read", "clipboard-write"])
    answered(page, "Write")
    for button, wanted in (
        (".answer [title=Copy]", str(manager.script[0].text)),
        (".code button", "if x:\n    y()"),
    ):
        page.evaluate("document.getElementById('status').textContent = ''")
        page.click(button)
        until(page, "document.getElementById('status').textContent === 'Copied'")
        assert page.evaluate("navigator.clipboard.readText()") == wanted


def test_settings_apply_to_their_own_conversation_only(
    manager: FakeManager, url: str, look: Look
) -> None:
    page = look(url)
    answered(page, "First")
    first = page.url
    page.click("#new")
    page.click("#open-settings")
    until(page, "document.getElementById('top_k').placeholder === '40'")
    given = {
        "system": "Be brief.",
        "top_k": "5",
        "min_p": "0.25",
        "num_predict": "9",
        "num_ctx": "64",
    }
    for name, value in {**given, "temperature": "0.5", "seed": "7"}.items():
        page.fill(f"#{name}", value)
    # The template has only tools.
    assert page.is_visible("#tools") and not page.is_visible("#think")
    page.click("#settings .primary")
    answered(page, "Second")
    sampling = manager.requests[-1].sampling
    assert said(manager) == ["Be brief.", "Second"]
    assert (sampling.top_k, sampling.min_p, sampling.max_tokens) == (5, 0.25, 9)
    assert (sampling.temperature, sampling.seed) == (0.5, 7)
    assert manager.leases[-1][1]["n_ctx"] == 64
    page.goto(first)
    page.wait_for_selector("#log >> text=First")
    answered(page, "Third")
    assert said(manager)[0] == "First" and manager.requests[-1].sampling.top_k == 40


def test_tool_calls_are_shown_and_their_results_sent(
    manager: FakeManager, url: str, look: Look
) -> None:
    call = ToolCall(id="call_1", name="weather", arguments={"city": "Paris"})
    manager.script = [Delta(text="I ask."), Delta(tool_calls=(call,))]
    page = look(url)
    ready(page)
    page.select_option("#model", "able:latest")
    page.click("#open-settings")
    page.fill("#tools", "{}")
    page.click("#settings .primary")
    # `{}` is not a list of tools, so the form stays open.
    assert page.is_visible("#settings")
    page.fill("#tools", TOOLS)
    page.select_option("#think", "on")
    page.click("#settings .primary")
    answered(page, "How is the weather?")
    assert (
        manager.requests[-1].tools == tuple(json.loads(TOOLS))
        and manager.requests[-1].think is True
    )
    assert page.inner_text(".call summary") == "Calls weather"
    assert json.loads(page.inner_text(".call pre")) == {"city": "Paris"}
    manager.script = texts("It rains.")
    page.fill(".results textarea", "rain")
    page.click("text=Send the result")
    page.wait_for_selector("text=It rains.")
    ended(page)
    [result] = (manager.requests[-1].messages or ())[-1:]
    assert result == {
        "role": "tool",
        "content": "rain",
        "tool_name": "weather",
        "tool_call_id": "call_1",
    }
    page.reload()
    page.click(".result summary")
    assert page.inner_text(".result pre") == "rain"


PASTE = """(data) => {
  const transfer = new DataTransfer(), bytes = Uint8Array.from(atob(data), (char) => char.charCodeAt(0));
  transfer.items.add(new File([bytes], "picture.png", { type: "image/png" }));
  const paste = new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true, cancelable: true });
  const drop = new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true });
  document.getElementById("message").dispatchEvent(paste);
  document.getElementById("log").dispatchEvent(drop);
}"""


def test_pictures_are_attached_by_choice_paste_and_drop(
    manager: FakeManager, url: str, look: Look, tmp_path: Path
) -> None:
    picture, text, data = (
        tmp_path / "picture.png",
        tmp_path / "text.png",
        base64.b64encode(png(4, 4)).decode(),
    )
    picture.write_bytes(png(4, 4))
    text.write_text("no picture")
    page = look(url)
    ready(page)
    page.evaluate(PASTE, data)
    page.wait_for_selector("text=picture.png: demo:latest does not see pictures.")
    page.select_option("#model", "see:latest")
    page.set_input_files("#files", [picture])
    page.wait_for_selector("#attached img")
    page.evaluate(PASTE, data)
    page.wait_for_selector("#attached img >> nth=2")
    page.set_input_files("#files", [text])
    page.wait_for_selector("text=text.png: the browser cannot read it as a picture.")
    page.click("#attached button >> nth=2")
    page.click("#send")
    page.wait_for_selector(".answer")
    ended(page)
    page.reload()
    page.wait_for_selector(".user img >> nth=1")
    parts = (manager.requests[-1].messages or ())[-1]["content"]
    assert parts == [{"type": "image", "data": data}] * 2 + [
        {"type": "text", "text": ""}
    ]


def test_a_large_picture_is_scaled_to_2048_pixels(
    url: str, look: Look, tmp_path: Path
) -> None:
    path = tmp_path / "large.png"
    path.write_bytes(png(4096, 64))
    page = look(url)
    ready(page)
    page.select_option("#model", "see:latest")
    page.set_input_files("#files", [path])
    until(page, "document.querySelector('#attached img')?.naturalWidth === 2048")


def test_the_loaded_model_is_selected_and_only_the_demo_has_starters(
    manager: FakeManager, url: str, look: Look
) -> None:
    page = look(url)
    ready(page)
    assert page.input_value("#model") == "demo:latest" and page.is_visible("#starters")
    manager.there["able:latest"] = manager.catalog.known["able:latest"]
    page.reload()
    ready(page)
    assert page.input_value("#model") == "able:latest" and not page.is_visible(
        "#starters"
    )
    groups = page.locator("optgroup").evaluate_all(
        "(groups) => groups.map((group) => group.label)"
    )
    assert groups == ["In memory", "On disk"]
    answered(page, "Hello")
    page.click("#new")
    page.select_option("#model", "demo:latest")
    page.go_back()
    page.wait_for_selector("#log >> text=Hello")
    # The model of the shown conversation.
    assert page.input_value("#model") == "able:latest"


def test_a_click_on_a_starter_sends_one_message(
    manager: FakeManager, url: str, look: Look
) -> None:
    page = look(url)
    page.click(".starters button >> nth=1")
    ended(page)
    assert len(said(manager)) == 1


def test_a_stopped_server_is_reported_and_try_again_is_offered(
    manager: FakeManager, look: Look
) -> None:
    manager.script = [*texts("It begins"), asyncio.Event()]
    with server_of(manager) as url:
        page = look(url, expected="net::ERR_|Failed to load")
        ask(page, "Go on for ever")
        page.wait_for_selector("text=It begins")
    page.wait_for_selector(".error >> text=/connection|server/")
    ended(page)
    ask(page, "Are you there?")
    page.wait_for_selector("text=The server is not reachable.")
    assert page.is_visible("text=Try again") and page.input_value("#message") == ""


@pytest.fixture
def violations() -> Callable[..., list[str]]:
    """Returns `violations(page, *rules)`, which lists axe's serious and critical
    findings on a page.

    Without `rules`, axe applies all of its rules. Skips the test if
    axe-playwright-python is not installed.
    """
    reason = "axe-playwright-python is not installed"
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason=reason
    ).Axe()

    def find(page: Any, *rules: str) -> list[str]:
        options = {"resultTypes": ["violations"], "elementRef": False}
        if rules:
            options["runOnly"] = {"type": "rule", "values": rules}
        found = axe.run(page, options=options).response["violations"]
        grave = [each for each in found if each["impact"] in ("serious", "critical")]
        return [
            f"{each['id']}: {node['html']}" for each in grave for node in each["nodes"]
        ]

    return find


ANSWER = """# Title

```py
x = 'a'  # one
def f(y: int): return 1
```
| a |
|---|
| [c](http://c.example) |

- [x] done, as $x^2$
- [ ] to do

$$\\frac{a}{b}$$
"""


# The dark theme differs only in its colours, so only its contrast is checked.
@pytest.mark.parametrize(
    ("scheme", "rules"), [("light", ()), ("dark", ("color-contrast",))]
)
def test_axe_reports_no_serious_finding(
    manager: FakeManager, url: str, look: Look, violations: Callable[..., list[str]], tmp_path: Path, scheme: str,
    rules: Sequence[str],
) -> None:  # fmt: skip
    notes = tmp_path / "notes.txt"
    notes.write_text("Some notes.")
    page = look(
        url, color_scheme=scheme, expected="status of [45]", reduced_motion="reduce"
    )
    ready(page)
    page.select_option("#model", "able:latest")
    page.click("#open-settings")
    assert violations(page, *rules) == []
    page.keyboard.press("Escape")
    page.click("#open-models")
    page.fill("#pull-name", "no-such-model")
    page.keyboard.press("Enter")
    page.wait_for_selector("#pulls .problem")
    assert violations(page, *rules) == []
    page.keyboard.press("Escape")
    call = ToolCall(id="call_1", name="weather", arguments={"city": "Paris"})
    manager.script = [Delta(thinking="hm"), *texts(ANSWER), Delta(tool_calls=(call,))]
    page.set_input_files("#files", [notes, notes])
    page.wait_for_selector("#attached .file-name >> nth=1")
    page.click("#attached button >> nth=1")
    answered(page, "Write")
    page.wait_for_selector(".code .hl-keyword")
    page.wait_for_selector(".apart .katex")
    page.set_input_files("#files", [notes])
    page.wait_for_selector("#attached .file-name")
    page.click(".user .file summary")
    page.click("#open-list")
    page.fill("#filter", "done")
    page.wait_for_selector("#list mark")
    assert violations(page, *rules) == []
    page.click("#attached button")
    manager.enter_error = WorkerError("it does not load.")
    ask(page, "Again")
    page.wait_for_selector("text=it does not load.")
    page.focus(".user [title=Edit] >> nth=0")
    page.keyboard.press("Enter")
    page.set_viewport_size({"width": 390, "height": 844})
    assert violations(page, *rules) == []
    page.click("#open-list")
    assert violations(page, *rules) == []


@pytest.mark.parametrize(
    "stop",
    [lambda page: page.click("#stop"), lambda page: page.keyboard.press("Escape")],
)
def test_stop_and_escape_cancel_the_request_and_keep_the_text(
    manager: FakeManager, url: str, look: Look, stop: Callable[[Any], None]
) -> None:
    manager.script = [*texts("It begins", " well"), asyncio.Event()]
    page = look(url)
    ask(page, "Go on for ever")
    until(
        page,
        "document.querySelector('.answer .content')?.textContent === 'It begins well'",
    )
    assert manager.n_running == 1
    stop(page)
    page.wait_for_selector("text=Stopped.")
    ended(page)
    manager.script = texts("Yes.")
    ask(page, "Are you free?")
    page.wait_for_selector("text=Yes.")
    ended(page)
    assert (manager.n_running, manager.n_ended) == (0, 2)
    assert said(manager) == ["Go on for ever", "It begins well", "Are you free?"]


def test_a_reload_keeps_complete_and_partial_answers(
    manager: FakeManager, url: str, look: Look
) -> None:
    manager.script = [Delta(thinking="hm"), *texts("**Hello** there")]
    page = look(url)
    answered(page, "Hi")
    manager.script = [*texts("It begins"), asyncio.Event()]
    ask(page, "Go on for ever")
    page.wait_for_selector("text=It begins")
    page.reload()
    until(page, "document.querySelectorAll('.turn').length === 4")
    assert page.inner_text(".answer .content >> nth=0") == "Hello there"
    assert page.inner_text(".answer .content >> nth=1") == "It begins"
    assert page.inner_text(".answer summary").startswith(
        "Thought"
    ) and not page.is_visible(".starters")
    manager.script = texts("Yes.")
    ask(page, "Are you free?")
    page.wait_for_selector("text=Yes.")
    ended(page)
    assert said(manager) == [
        "Hi",
        "**Hello** there",
        "Go on for ever",
        "It begins",
        "Are you free?",
    ]
    page.click("#new")
    page.reload()
    page.wait_for_selector(".starters")
    assert page.inner_text("#log") == ""


def test_a_long_prompt_shows_its_progress(
    manager: FakeManager, url: str, look: Look
) -> None:
    shown = {
        300: "Reading the prompt: 300 of 6,300 tokens",
        1200: "Reading the prompt: 1,200 of 6,300 tokens · 45.0 tokens/s · 1 min 53 s left",
        6300: "Waiting for the first token",
    }
    page = look(url)
    for n_done, text in shown.items():
        manager.script = [
            PromptProgress(6300, 300, n_done, (n_done - 300) / 45),
            asyncio.Event(),
        ]
        ask(page, "Read")
        page.wait_for_selector(f"text='{text}'")
        page.click("#stop")
        ended(page)
        assert page.locator(".waiting").count() == 0


def test_thinking_is_collapsed_until_a_click(
    manager: FakeManager, url: str, look: Look
) -> None:
    manager.script = [
        Delta(thinking="Let me "),
        Delta(thinking="see."),
        Delta(text="Here."),
    ]
    page = look(url)
    answered(page, "Think")
    assert page.inner_text(".thinking summary").startswith("Thought for")
    assert not page.is_visible(".thinking div")
    page.click(".thinking summary")
    assert page.inner_text(".thinking div") == "Let me see."
    assert page.inner_text(".answer .content") == "Here."


def test_an_error_during_an_answer_is_shown_and_the_chat_continues(
    manager: FakeManager, url: str, look: Look
) -> None:
    manager.script = [*texts("Half"), WorkerError("the worker process has ended.")]
    page = look(url)
    ask(page, "First")
    assert page.inner_text(".error") == "the worker process has ended."
    ended(page)
    manager.script = texts("Whole")
    ask(page, "Second")
    page.wait_for_selector("text=Whole")


def test_try_again_sends_an_unanswered_message_after_a_reload(
    manager: FakeManager, url: str, look: Look
) -> None:
    manager.enter_error = WorkerError("it does not load.")
    page = look(url, expected="status of 5")
    ask(page, "Again")
    page.wait_for_selector("text=it does not load.")
    ended(page)
    page.reload()  # the browser has stored the message and its error
    page.wait_for_selector("text=it does not load.")
    manager.enter_error = None
    page.click("text=Try again")
    page.wait_for_selector(".answer")
    ended(page)
    assert said(manager) == ["Again"]


def test_the_api_key_is_sent_and_kept_in_the_tab(
    manager: FakeManager, look: Look
) -> None:
    manager.script = texts("Open.")
    with server_of(manager, api_keys=("sesame",)) as url:
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


def test_entering_the_key_again_restarts_the_map(
    manager: FakeManager, look: Look
) -> None:
    with server_of(manager, api_keys=("sesame",)) as url:
        page = look(url, expected="status of 401")
        page.fill("#api-key", "sesame")
        page.keyboard.press("Enter")
        page.wait_for_selector("#model:not([disabled])")
        page.evaluate(
            "sessionStorage.clear(); document.dispatchEvent(new Event('visibilitychange'))"
        )
        page.wait_for_selector("#key[open]")
        page.wait_for_selector("#map-note:has-text('API key')")
        page.fill("#api-key", "sesame")
        page.keyboard.press("Enter")
        page.wait_for_selector("#map-note:not(:has-text('API key'))", state="attached")


def test_shift_enter_begins_a_line_and_an_empty_message_is_not_sent(
    manager: FakeManager, url: str, look: Look
) -> None:
    page = look(url)
    ask(page, "   ")
    page.fill("#message", "")
    page.type("#message", "one")
    page.keyboard.press("Shift+Enter")
    page.type("#message", "two")
    page.keyboard.press("Enter")
    ended(page)
    assert len(manager.requests) == 1 and said(manager) == ["one\ntwo"]


def test_colours_follow_the_system_until_a_theme_is_chosen(
    url: str, look: Look
) -> None:
    brightness = (
        "Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"
    )
    page = look(url, color_scheme="dark")
    assert page.evaluate(brightness) < 60
    page.click("#theme")
    assert page.evaluate(brightness) > 200
    page.reload()
    assert page.evaluate(brightness) > 200
    assert look(url, color_scheme="light").evaluate(brightness) > 200
