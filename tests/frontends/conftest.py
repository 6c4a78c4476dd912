"""Fixtures: the command `moegguf`, traces that it recorded, running servers, and
headless Chromium.

A test with the fixture `look` fails if the browser's console shows an error or a
warning that the test does not expect.
"""

import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import psutil
import pytest
import typer.main
from browsing import Look, looking
from fake_manager import HUB, TEMPLATE, FakeCatalog, FakeManager, entry_of, server_of
from servers import Command, Server, completed, environment, serving
from terminal import moegguf_command

from moegguf.cli.app import main
from moegguf.models.catalog import demo_path
from moegguf.trace.format import read
from moegguf.trace.trace import Trace

PROMPTS = (
    {"prompt": "What is an expert?", "label": "chat"},
    {"prompt": "def add(a, b):", "label": "code", "completion": "\n    return a + b\n"},
    {"prompt": "What is a router?", "label": "chat", "n_predict": 3},
    {"prompt": "import os", "label": "code"},
)
QUICK = ("-t", "1", "-n", "8")


@pytest.fixture
def manager() -> FakeManager:
    """A scripted manager of four models: `demo`, `able`, `mine`, and a model that is
    named like one on the Hugging Face hub.

    `able` supports tools and thinking. `mine` has default options and its own system
    message.
    """
    path = demo_path()
    assert path is not None
    own = {"parameters": {"temperature": 0.25, "top_k": 7}, "system": "Be kind."}
    own_entries = (
        entry_of(path, "able:latest", template=TEMPLATE),
        entry_of(path, "mine:latest", **own),
    )
    return FakeManager(FakeCatalog(entry_of(path), entry_of(path, HUB), *own_entries))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sets MOEGGUF_HOME, moegguf's folder, for one test. Returns its path."""
    monkeypatch.setenv("MOEGGUF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def url(manager: FakeManager) -> Iterator[str]:
    with server_of(manager) as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        yield client


@pytest.fixture(scope="session")
def moegguf() -> Command:
    """Returns `moegguf("run", path, ..., stdin="", NAME="value")`, which runs the
    command in a new process. The function returns the output and the exit code."""

    def call(
        *arguments: object, stdin: str = "", **extra: str
    ) -> subprocess.CompletedProcess[str]:
        return completed(moegguf_command(*arguments), stdin, **extra)

    return call


@pytest.fixture(scope="session")
def here() -> Iterator[Command]:
    """Yields a function like the fixture `moegguf` that runs the command in this
    process, to save time.

    Tests of a process, or of how it ends, use the fixture `moegguf`. typer builds the
    parsers of all commands once, and not for each call.
    """

    def call(
        *arguments: object, stdin: str = "", **extra: str
    ) -> subprocess.CompletedProcess[str]:
        before = set(psutil.Process().children())
        given, out, said = (
            TextIOWrapper(BytesIO(text.encode(errors="surrogateescape")), "utf-8")
            for text in (stdin, "", "")
        )
        with (
            patch.dict(os.environ, environment(**extra), clear=True), patch("sys.stdin", given),
            redirect_stdout(out), redirect_stderr(said),
        ):  # fmt: skip
            code = main(list(map(str, arguments)))
            out.flush()
            said.flush()
        # Stops the command's workers. Outside tests, a worker exits with the command's
        # process.
        for left in set(psutil.Process().children()) - before:
            left.kill()
            left.wait()
        texts = (stream.buffer.getvalue().decode() for stream in (out, said))  # type: ignore[attr-defined]
        return subprocess.CompletedProcess(arguments, code, *texts)

    with patch("typer.main.get_command", functools.cache(typer.main.get_command)):
        yield call


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path]
) -> Iterator[Server]:
    """A running `moegguf serve` with the demo and the random model `tiny`. Tests share
    this server, so each test leaves the models' names as it found them."""
    with serving(
        tmp_path_factory.mktemp("server"), models={"tiny": tiny("tiny-qwen2moe")}
    ) as found:
        yield found


@pytest.fixture(scope="session")
def served(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path]
) -> Iterator[Server]:
    """A server that has loaded the demo and two random models. `tools` has a template
    with tools, and `thinker` a template with thinking."""
    models = {"tools": tiny(template="qwen"), "thinker": tiny(template="deepseek")}
    with serving(tmp_path_factory.mktemp("served"), models=models) as found:
        # One thread per model: a second thread would spin while other processes use the
        # cores.
        for name in ("demo", *models):
            found.call(
                "/api/generate",
                {"model": name, "keep_alive": -1, "options": {"num_thread": 1}},
            )
        yield found


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return path


@pytest.fixture(scope="session")
def recorded(moegguf: Command, prompts: Path) -> Path:
    """The path of a small trace of the demo model, including the routers' inputs."""
    path = prompts.with_name("demo.npz")
    done = moegguf(
        "trace", "record", "demo", "--prompts", prompts, "-o", path, *QUICK, "--inputs"
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert re.fullmatch(
        re.escape(str(path))
        + r": 4 request\(s\), \d+ tokens, [\d.]+KiB; hit rate .+%\n",
        done.stderr,
    )
    return path


@pytest.fixture(scope="session")
def trace(recorded: Path) -> Trace:
    return read(recorded)


@pytest.fixture(scope="session")
def without_inputs(moegguf: Command, prompts: Path) -> Path:
    path = prompts.with_name("plain.npz")
    assert (
        moegguf(
            "trace", "record", "demo", "--prompts", prompts, "-o", path, *QUICK
        ).returncode
        == 0
    )
    return path


# The first is the fastest.
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
NO_BROWSER = "no browser: "  # the beginning of the reasons of skipped tests


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason=f"{NO_BROWSER}playwright is not installed"
    )
    if CHROMIUM is None:
        pytest.skip(f"{NO_BROWSER}there is no chromium on the PATH")
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def look(chromium: Any) -> Iterator[Look]:
    """Yields the function of `looking`, which opens a page in the browser."""
    with looking(chromium) as look:
        yield look


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the number of tests of the page that were skipped without a browser."""
    reports = terminalreporter.getreports("skipped")
    if n_skipped := sum(NO_BROWSER in str(report.longrepr) for report in reports):
        terminalreporter.write_line(
            f"warning: {n_skipped} tests of the page were skipped; `make browser` installs the browser"
        )
