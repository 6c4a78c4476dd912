"""Opens the server's web page in a browser and operates the page, for tests."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE_MS = 60_000
# Chromium's error when a page sends a request to a server that has already exited.
OUTLIVED = "ERR_CONNECTION_REFUSED"
DESKTOP = {"width": 1280, "height": 800}
Look = Callable[..., Any]


@contextmanager
def looking(chromium: Any) -> Iterator[Look]:
    """Yields `look(url, viewport=..., expected=...)`, which opens the page at `url` and
    returns it.

    Fails at the end if a page's console showed an error or a warning, or if a page
    requested anything from another server. Texts that match `expected` are allowed, and
    so are errors of a page after its server has exited.
    """
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

        page.on(
            "console",
            lambda message: (
                complain(message.text) if message.type in ("error", "warning") else None
            ),
        )
        page.on("pageerror", lambda error: complain(str(error)))
        page.on(
            "request",
            lambda request: None if is_own(request.url, url) else complain(request.url),
        )
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def is_own(requested: str, url: str) -> bool:
    """Returns True if a request goes to the page's server, or to a file that the page
    itself has created."""
    return requested.startswith((url, f"blob:{url}"))


def until(page: Any, expression: str) -> None:
    """Waits until the JavaScript `expression` is true. Playwright's own wait is not
    used, because the page's security policy forbids it."""
    deadline_s = time.monotonic() + PATIENCE_MS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < deadline_s, f"{expression} never became true"
        page.wait_for_timeout(20)


def ready(page: Any) -> None:
    """Waits until the page has received the list of models."""
    page.wait_for_selector("#model:enabled")


def ask(page: Any, text: str) -> None:
    ready(page)
    page.fill("#message", text)
    page.keyboard.press("Enter")


def ended(page: Any) -> None:
    page.wait_for_selector("#send:not([hidden])")
    page.wait_for_selector(".writing", state="detached")


def answered(page: Any, text: str) -> None:
    """Sends a question and waits for the end of the answer."""
    ask(page, text)
    ended(page)
