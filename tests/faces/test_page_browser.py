"""The page in headless Chromium: over the real server with the demo model, and over scripted answers."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from fake_pool import FakeCatalog, FakePool, entry_of, running
from servers import Server, serving

from moegguf.engine.ask import Piece
from moegguf.errors import WorkerError
from moegguf.faces.server.app import make_app
from moegguf.models.find import demo_path
from moegguf.settings import Settings

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH")

PATIENCE_MS = 60_000
OUTLIVED = "ERR_CONNECTION_REFUSED"  # pages are closed after the server that they look at
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
SMALLEST = {"width": 360, "height": 640}

# How many pixels of the map are in memory's grey, and how many are hot (used or fetched just now).
COUNT_PIXELS = """() => {
  const canvas = document.getElementById("map"), counts = { grey: 0, hot: 0, sum: 0 };
  if (canvas.hidden) return counts;
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < data.length; i += 4) {
    const spread = Math.max(data[i], data[i + 1], data[i + 2]) - Math.min(data[i], data[i + 1], data[i + 2]);
    if (data[i + 3] === 255 && data[i] < 180 && spread < 30) counts.grey += 1;
    if (data[i + 3] === 255 && spread > 90) counts.hot += 1;
    counts.sum = (counts.sum * 31 + data[i] + data[i + 1] * 7) % 1000003;
  }
  return counts;
}"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The real one, with a quarter of the demo model's experts in memory.

    One compute thread: several wait for each other, which takes long while the browser has the processor.
    """
    with serving(tmp_path_factory.mktemp("page"), "--expert-cache", "25%") as server:
        load = {"model": "demo", "messages": [], "options": {"num_thread": 1}, "keep_alive": -1}
        assert server.call("/api/chat", load).json["done_reason"] == "load"
        yield server


Look = Callable[..., Any]


@pytest.fixture
def look(chromium: Any) -> Iterator[Look]:
    """`look(url, viewport=..., expected=...)`: the page, ready to be written to. Whatever its console complains of
    (besides `expected`), and whatever it asks of others, fails the test."""
    faults: list[str] = []
    contexts = []

    def open_page(url: str, expected: str = "$^", **options: Any) -> Any:
        context = chromium.new_context(**{"viewport": DESKTOP, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)

        def complain(text: str) -> None:
            if not re.search(f"{expected}|{OUTLIVED}", text):
                faults.append(text)

        page.on("console", lambda message: complain(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complain(str(error)))
        page.on("request", lambda request: None if request.url.startswith(url) else complain(request.url))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def until(page: Any, expression: str) -> None:
    """Waits until it is true. The page's own policy forbids Playwright's way, which evaluates text in the page."""
    deadline_s = time.monotonic() + PATIENCE_MS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < deadline_s, f"{expression} never became true"
        page.wait_for_timeout(20)


def ready(page: Any) -> None:
    """The models are known."""
    page.wait_for_selector("#model:enabled")


def ask(page: Any, text: str) -> None:
    ready(page)
    page.fill("#message", text)
    page.keyboard.press("Enter")


def ended(page: Any) -> None:
    page.wait_for_selector("#send:not([hidden])")
    page.wait_for_selector(".writing", state="detached")


def pool_of(*script: Any) -> FakePool:
    return FakePool(FakeCatalog(entry_of(demo_path())), script)


def app_of(pool: FakePool, api_key: str | None = None) -> Any:
    return make_app(pool, pool.catalog, Settings(api_key=api_key))  # type: ignore[arg-type]


def pieces(*texts: str) -> Sequence[Piece]:
    return [Piece(text=text) for text in texts]


# With the real server


def test_a_message_streams_and_the_map_changes(server: Server, look: Look) -> None:
    page = look(server.url, reduced_motion="no-preference", expected="Canvas2D: Multiple readback")
    ready(page)
    page.evaluate("""() => {
      window.seen = [];
      new MutationObserver(() => {
        const said = document.querySelector(".answer .said")?.textContent ?? "";
        if (said && said !== window.seen.at(-1)) window.seen.push(said);
      }).observe(document.getElementById("log"), { subtree: true, childList: true, characterData: true });
    }""")
    ask(page, "What does moegguf do?")
    until(page, f"({COUNT_PIXELS})().hot > 50")
    ended(page)
    seen = page.evaluate("window.seen")
    assert len(seen) > 2 and seen[-1].startswith(seen[0])  # it grew, word by word
    assert re.search(r"\d+ tokens · [\d.,]+ tokens/s", page.inner_text(".figures").replace("\xa0", " "))
    until(page, f"({COUNT_PIXELS})().hot === 0")
    idle = page.evaluate(COUNT_PIXELS)
    assert idle["grey"] > 1000
    assert page.inner_text("#resident").startswith("48 of 192 in memory")
    for name in ("hit", "bytes"):
        assert re.match(r"[\d.,]+", page.inner_text(f"#{name}-value"))
    ask(page, "What is a mixture of experts?")
    ended(page)
    until(page, f"({COUNT_PIXELS})().sum !== {idle['sum']}")


def test_a_second_turn_knows_the_first_and_a_new_chat_does_not(server: Server, look: Look) -> None:
    page = look(server.url)
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if "/api/chat" in request.url else None)
    ask(page, "What does moegguf do?")
    ended(page)
    ask(page, "What is the hit rate?")
    ended(page)
    assert [message["role"] for message in sent[1]["messages"]] == ["user", "assistant", "user"]
    assert sent[1]["messages"][1]["content"].strip() == page.inner_text(".answer .said >> nth=0").strip()
    page.click("#new")
    assert page.inner_text("#log") == "" and page.is_visible(".starters")
    page.click(".starters button >> nth=1")
    ended(page)
    assert [message["role"] for message in sent[2]["messages"]] == ["user"]


def test_pointing_at_a_cell_tells_its_layer_expert_and_uses(server: Server, look: Look) -> None:
    page = look(server.url)
    ask(page, "What is the hit rate?")
    ended(page)
    box = page.locator("#map").bounding_box()
    page.mouse.move(box["x"] + 40, box["y"] + 10)
    assert re.fullmatch(r"Layer 0, expert 0: .*, used \d+×, fetched \d+× while you watch", page.inner_text("#cell"))
    page.focus("#map")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#cell").startswith("Layer 1, expert 1: ")


@pytest.mark.parametrize("viewport", [PHONE, SMALLEST], ids=["phone", "smallest"])
def test_nothing_overflows_on_a_phone(server: Server, look: Look, viewport: dict[str, int]) -> None:
    page = look(server.url, viewport=viewport, has_touch=True, device_scale_factor=3)
    ask(page, "What does moegguf do? " + "AnUnusuallyLongWordWithoutAnySpaces" * 5)
    ended(page)
    wide = """() => [...document.querySelectorAll("body *:not(.unseen):not(option)")].filter((element) => {
      const { left, right, width } = element.getBoundingClientRect();
      return width && element.checkVisibility() && (left < -0.5 || right > innerWidth + 0.5);
    }).map((element) => element.outerHTML.slice(0, 80))"""
    assert page.evaluate(wide) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    map_box, message_box = (page.locator(name).bounding_box() for name in ("#map", "#message"))
    assert map_box["y"] + map_box["height"] < message_box["y"]
    assert message_box["y"] + message_box["height"] <= viewport["height"]
    page.tap("#fold")
    assert not page.is_visible("#map") and page.get_attribute("#fold", "aria-expanded") == "false"


# With scripted answers


def test_stop_ends_the_request_and_keeps_what_was_said(look: Look) -> None:
    pool = pool_of(*pieces("It begins", " well"), asyncio.Event())
    with running(app_of(pool)) as url:
        page = look(url)
        ask(page, "Go on for ever")
        until(page, "document.querySelector('.answer .said')?.textContent === 'It begins well'")
        assert pool.n_running == 1
        page.click("#stop")
        page.wait_for_selector("text=Stopped.")
        ended(page)
        pool.script = pieces("Yes.")
        ask(page, "Are you free?")
        page.wait_for_selector("text=Yes.")
        ended(page)
    assert (pool.n_running, pool.n_ended) == (0, 2)
    said = [message["content"] for message in pool.asks[1].messages or ()]
    assert said == ["Go on for ever", "It begins well", "Are you free?"]


def test_escape_stops_too(look: Look) -> None:
    pool = pool_of(*pieces("It begins"), asyncio.Event())
    with running(app_of(pool)) as url:
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


def test_what_a_model_writes_never_becomes_html(look: Look) -> None:
    with running(app_of(pool_of(*pieces(*re.findall(r"(?s).{1,7}", HOSTILE))))) as url:
        page = look(url)
        ask(page, "<img src=x onerror='window.hacked=6'>")
        ended(page)
        assert page.evaluate("window.hacked") is None
        assert page.locator("#log :is(img, b, script, svg, iframe, i, a)").count() == 0
        assert page.inner_text(".user .said") == "<img src=x onerror='window.hacked=6'>"
        assert page.inner_text(".answer strong") == "<b>bold</b>"
        assert page.inner_text(".answer pre") == "<img src=x onerror=window.hacked=5>"
        assert page.inner_text(".answer td >> nth=0") == "<iframe srcdoc=x>"


def test_markdown_that_answers_are_made_of(look: Look) -> None:
    text = "## Title\n\nOne *two* `three`\nfour\n\n1. a\n2. b\n   c\n\n> said\n\n---\n\n"
    text += "2 * 3 * 4 and snake_case_name\n\n~~~py\nx = 1\n"
    with running(app_of(pool_of(*pieces(text)))) as url:
        page = look(url)
        ask(page, "Write")
        ended(page)
        kinds = page.evaluate("[...document.querySelector('.answer .said').children].map((e) => e.tagName)")
        assert kinds == ["H3", "P", "OL", "BLOCKQUOTE", "HR", "P", "DIV"]
        assert page.inner_text(".answer em") == "two" and page.locator(".answer em").count() == 1
        assert page.locator(".answer li").all_inner_texts() == ["a", "b\nc"]
        assert page.inner_text(".answer .code code").strip() == "x = 1"
        assert page.inner_text(".answer .code-head span") == "py"


def test_thinking_is_folded_away(look: Look) -> None:
    script = [Piece(thinking="Let me "), Piece(thinking="see."), Piece(text="Here.")]
    with running(app_of(pool_of(*script))) as url:
        page = look(url)
        ask(page, "Think")
        ended(page)
        assert page.inner_text(".thinking summary").startswith("Thought for")
        assert not page.is_visible(".thinking div")
        page.click(".thinking summary")
        assert page.inner_text(".thinking div") == "Let me see."
        assert page.inner_text(".answer .said") == "Here."


def test_a_fault_in_mid_answer_is_told_and_the_chat_goes_on(look: Look) -> None:
    pool = pool_of(*pieces("Half"), WorkerError("the process that held the model has ended."))
    with running(app_of(pool)) as url:
        page = look(url)
        ask(page, "First")
        assert page.inner_text(".fault") == "the process that held the model has ended."
        ended(page)
        pool.script = pieces("Whole")
        ask(page, "Second")
        page.wait_for_selector("text=Whole")


def test_a_message_that_was_not_answered_can_be_sent_again(look: Look) -> None:
    pool = pool_of()
    pool.entering = WorkerError("it does not load.")
    with running(app_of(pool)) as url:
        page = look(url, expected="status of 5")
        ask(page, "Again")
        page.wait_for_selector("text=it does not load.")
        ended(page)
        assert page.input_value("#message") == "Again"
        pool.entering = None
        page.keyboard.press("Enter")
        ended(page)
    assert [message["content"] for message in pool.asks[0].messages or ()] == ["Again"]


def test_a_server_with_a_key_is_asked_with_it_and_the_key_stays_in_the_tab(look: Look) -> None:
    with running(app_of(pool_of(*pieces("Open.")), api_key="sesame")) as url:
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


def test_settings_go_with_the_next_message(look: Look) -> None:
    pool = pool_of()
    with running(app_of(pool)) as url:
        page = look(url)
        page.click("#open-settings")
        for name, value in {"system": "Be brief.", "temperature": "0.5", "seed": "7"}.items():
            page.fill(f"#{name}", value)
        page.click("#settings .primary")
        ask(page, "Hello")
        ended(page)
    asked = pool.asks[0]
    assert [message["role"] for message in asked.messages or ()] == ["system", "user"]
    assert (asked.sampling.temperature, asked.sampling.seed) == (0.5, 7)


def test_shift_enter_begins_a_line_and_an_empty_message_is_not_sent(look: Look) -> None:
    pool = pool_of()
    with running(app_of(pool)) as url:
        page = look(url)
        ask(page, "   ")
        page.fill("#message", "")
        page.type("#message", "one")
        page.keyboard.press("Shift+Enter")
        page.type("#message", "two")
        page.keyboard.press("Enter")
        ended(page)
    assert [[message["content"] for message in asked.messages or ()] for asked in pool.asks] == [["one\ntwo"]]


def test_light_and_dark_follow_the_system_until_one_is_chosen(look: Look) -> None:
    brightness = "Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"
    with running(app_of(pool_of())) as url:
        page = look(url, color_scheme="dark")
        assert page.evaluate(brightness) < 60
        page.click("#theme")
        assert page.evaluate(brightness) > 200
        page.reload()
        assert page.evaluate(brightness) > 200
        assert look(url, color_scheme="light").evaluate(brightness) > 200


def test_everything_that_can_be_used_has_a_name(look: Look) -> None:
    with running(app_of(pool_of(*pieces("```py\nx\n```")))) as url:
        page = look(url)
        ask(page, "Hello")
        ended(page)
        nameless = """() => [...document.querySelectorAll("button, input, textarea, select, canvas")]
          .filter((e) => !(e.getAttribute("aria-label") || e.textContent.trim() || e.labels?.length))
          .map((e) => e.outerHTML)"""
        assert page.evaluate(nameless) == []
