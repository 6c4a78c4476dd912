"""Fixtures of the tests that need a browser: headless Chromium, whose console must stay silent."""

import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from browsing import PATIENCE_MS, Look

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OUTLIVED = "ERR_CONNECTION_REFUSED"  # pages are closed after the server that they look at
DESKTOP = {"width": 1280, "height": 800}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium on the PATH")
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


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
