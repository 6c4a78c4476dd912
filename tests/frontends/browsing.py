"""What is done on the page, for tests in a browser."""

import time
from collections.abc import Callable
from typing import Any

PATIENCE_MS = 60_000
Look = Callable[..., Any]


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


def answered(page: Any, text: str) -> None:
    """Asks, and waits for the end of the answer."""
    ask(page, text)
    ended(page)
