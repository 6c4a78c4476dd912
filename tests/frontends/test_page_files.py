"""Tests attached files, pulled and deleted models, and searched and exported
conversations on the page.

The last tests check that error messages disappear with their cause.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browsing import Look, answered, ask, ended, ready, until
from documents import pdf_of
from fake_hub import FakeHub, Gate, hub_in_use
from fake_manager import TEMPLATE, FakeCatalog, FakeManager, entry_of, server_of

from moegguf.generate.request import Delta
from moegguf.models.catalog import Catalog, demo_path
from moegguf.server import pdf

TAGS = "<img src=x onerror=window.hacked=1>"
MODEL = "hf.co/user/repo-GGUF:Q4_K_M"


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
    return FakeManager(FakeCatalog(entry_of(path), able, see), [Delta(text="Yes.")])


# Files


def test_attached_text_and_pdf_files_are_sent_before_the_question(
    manager: FakeManager, url: str, look: Look, tmp_path: Path
) -> None:
    notes, report = tmp_path / f"{TAGS.replace('/', '')}.md", tmp_path / "report.PDF"
    notes.write_text(f"Notes {TAGS}")
    report.write_bytes(pdf_of([f"First page {TAGS}", "Second (page)"]))
    page = look(url)
    ready(page)
    page.set_input_files("#files", [notes, report])
    page.wait_for_selector("#attached .file-name >> nth=1")
    assert page.inner_text("#attached small >> nth=1") == "2 pages · about 16 tokens"
    answered(page, "What is in them?")
    sent = str((manager.requests[-1].messages or ())[-1]["content"])
    assert sent == (
        f"[File: {notes.name}]\nNotes {TAGS}\n[End of the file: {notes.name}]\n\n"
        f"[File: report.PDF]\nFirst page {TAGS}\n\nSecond (page)\n[End of the file: report.PDF]\n\nWhat is in them?"
    )
    page.reload()
    page.click(".file summary >> nth=1")
    assert (
        page.inner_text(".file pre >> nth=1")
        == f"First page {TAGS}\n\nSecond (page)\n\n"
    )
    assert page.inner_text(".file b >> nth=0") == notes.name
    assert (
        page.locator(".turn img").count() == 0
        and page.evaluate("window.hacked") is None
    )
    page.hover(".user")
    page.click("[title=Edit]")
    page.keyboard.type(" Again")
    page.keyboard.press("Enter")
    page.wait_for_selector(".user >> text=Again")
    ended(page)
    assert str((manager.requests[-1].messages or ())[-1]["content"]).startswith(
        f"[File: {notes.name}]"
    )


def test_refused_files_show_reasons_until_the_next_input(
    manager: FakeManager, url: str, look: Look, tmp_path: Path
) -> None:
    wrong = {
        "scan.pdf": (
            pdf_of(["", ""]),
            "scan.pdf: its 2 pages have no text, as in a scan.",
        ),
        "broken.pdf": (b"%PDF-1.4\nno more", "broken.pdf: it is"),
        "binary.bin": (
            bytes(range(256)),
            "binary.bin: it is not text in UTF-8, a PDF file or a picture.",
        ),
        "empty.txt": (b" \n", "empty.txt: it is empty."),
        "large.txt": (
            b"x" * 1_000_001,
            "large.txt: it has 1.00 MB, but at most 1.00 MB can be read.",
        ),
        "large.pdf": (
            b"x" * (17 << 20),
            "large.pdf: it has 17.8 MB, but at most 16.8 MB can be read.",
        ),
        "picture.png": (b"x", "picture.png: demo:latest does not see pictures."),
    }
    for name, (data, _) in wrong.items():
        (tmp_path / name).write_bytes(data)
    page = look(url, expected="status of 400")
    ready(page)
    page.set_input_files("#files", [tmp_path / name for name in wrong])
    page.wait_for_selector("#problem >> text=picture.png")
    told = page.inner_text("#problem").splitlines()
    assert len(told) == len(wrong)
    for line, (_, begin) in zip(told, wrong.values(), strict=True):
        assert line.startswith(begin)
    assert page.locator("#attached li").count() == 0 and page.is_disabled("#send")
    page.type("#message", "a")
    assert page.inner_text("#problem") == ""


def test_pdf_text_refuses_damaged_slow_and_large_files(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert http.post("/pdf-text", content=pdf_of(["One"])).json() == {
        "n_pages": 1,
        "text": "One\n\n",
    }
    reply = http.post("/pdf-text", content=b"no PDF")
    assert (
        reply.status_code == 400
        and "not a PDF file that can be read" in reply.json()["error"]
    )
    monkeypatch.setattr(pdf, "MAX_S", 0.001)
    reply = http.post("/pdf-text", content=pdf_of(["One"]))
    assert (reply.status_code, reply.json()) == (
        400,
        {"error": "reading it takes more than 0.001 s; attach a part of it"},
    )
    monkeypatch.setattr(pdf, "MAX_BYTES", 10)
    assert http.post("/pdf-text", content=bytes(11)).status_code == 413


# Models


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with hub_in_use(tmp_path) as hub:
        yield hub


def test_a_model_is_pulled_with_progress_and_deleted(hub: FakeHub, look: Look) -> None:
    data = demo_path().read_bytes()
    hub.add("user/repo-GGUF", {"model-Q4_K_M.gguf": data})
    gate = Gate(len(data) // 2)
    hub.faults["model-Q4_K_M.gguf"] = [gate]
    manager = FakeManager(Catalog(paths=False))  # type: ignore[arg-type]
    questions = []
    with server_of(manager) as url:
        page = look(url, expected="status of 40")
        page.on(
            "dialog", lambda dialog: (questions.append(dialog.message), dialog.accept())
        )
        ready(page)
        page.click("#open-models")
        page.fill("#pull-name", f"{TAGS}")
        page.keyboard.press("Enter")
        page.wait_for_selector("#pulls .problem")
        page.click("#pulls >> text=Close")
        page.fill("#pull-name", MODEL)
        page.keyboard.press("Enter")
        until(
            page,
            "/^7.*MB of 14.5 MB/.test(document.querySelector('#pulls p')?.textContent)",
        )
        assert 0.4 < page.evaluate("document.querySelector('progress').value") < 0.6
        page.click("#close-models")
        assert page.get_attribute("#open-models", "class").endswith("busy")
        gate.open.set()
        page.wait_for_selector(f"#model option >> text={MODEL}", state="attached")
        assert not page.get_attribute("#open-models", "class").endswith("busy")
        page.click("#open-models")
        assert page.locator("#pulls li").count() == 0
        assert (
            page.inner_text("#models-list small >> nth=0")
            == "14.5 MB · 23.4M · Q4_0 · new"
        )
        page.click("[title='Delete demo:latest']")
        page.wait_for_selector("#models-list >> text=it ships with moegguf")
        page.click(f"[title='Delete {MODEL}']")
        until(page, "document.querySelectorAll('#models-list li').length === 1")
        assert page.locator("#models-list .problem").count() == 0
        assert questions[1].startswith(f"Delete {MODEL}?")
        assert page.evaluate("window.hacked") is None


def test_a_stopped_pull_can_be_tried_again(hub: FakeHub, look: Look) -> None:
    data = demo_path().read_bytes()
    hub.add("user/repo-GGUF", {"model-Q4_K_M.gguf": data})
    gate = Gate(len(data) // 2)
    hub.faults["model-Q4_K_M.gguf"] = [gate]
    with server_of(FakeManager(Catalog(paths=False))) as url:  # type: ignore[arg-type]
        page = look(url)
        ready(page)
        page.click("#open-models")
        page.fill("#pull-name", MODEL)
        page.keyboard.press("Enter")
        until(page, "document.querySelector('progress')?.value > 0")
        page.click("#pulls >> text=Stop")
        page.wait_for_selector("#pulls >> text=The received part is kept")
        gate.open.set()
        page.click("#pulls >> text=Try again")
        page.wait_for_selector("#models-list >> text=user/repo-GGUF")
        page.click("#models-list .name >> nth=0")
        assert not page.is_visible("#models") and page.input_value("#model") == MODEL


def test_a_load_shows_its_progress(manager: FakeManager, url: str, look: Look) -> None:
    manager.script = [asyncio.Event()]
    page = look(url)
    ready(page)
    manager.shares = {"demo:latest": 0.43}
    page.wait_for_selector("#map-note >> text=Loading: 43 %")
    ask(page, "Hello")
    page.wait_for_selector(".waiting >> text=Loading the model: 43 %")
    manager.shares = {}
    page.wait_for_selector(".waiting >> text=Waiting for the first token")
    page.click("#stop")


# Conversations


def test_search_finds_messages_in_hidden_versions_and_marks_the_match(
    manager: FakeManager, url: str, look: Look
) -> None:
    page = look(url)
    manager.script = [
        Delta(
            text=f"Long ago. {'And so on. ' * 9}The **capital** of Italy is Rome {TAGS}."
        )
    ]
    answered(page, "A question")
    manager.script = [Delta(text="No.")]
    page.click("[title='Answer again']")
    page.wait_for_selector("#log >> text=No.")
    ended(page)
    page.click("#new")
    answered(page, "Another")
    page.keyboard.press("Control+k")
    page.keyboard.type("italy IS rome")
    page.wait_for_selector("#list mark >> text='Italy is Rome'")
    assert page.locator("#list a").count() == 1
    page.click("#list a")
    # This version of the answer has not been shown before.
    page.wait_for_selector("#log >> text=of Italy is Rome")
    until(
        page, "[...CSS.highlights.get('found')].map(String).join() === 'Italy is Rome'"
    )
    page.fill("#filter", "nowhere")
    page.wait_for_selector("#list-note >> text=Nothing found.")
    page.fill("#filter", "")
    page.wait_for_selector("#list a >> nth=1")
    assert page.evaluate("window.hacked") is None


def test_a_conversation_is_exported_as_markdown_and_json(
    manager: FakeManager, url: str, look: Look, tmp_path: Path
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("```\ncode\n```")
    manager.script = [Delta(thinking="hm"), Delta(text="**Yes**, $x^2$.")]
    page = look(url)
    ready(page)
    page.set_input_files("#files", [notes])
    page.wait_for_selector("#attached .file-name")
    answered(page, "Is it? / Or not?")
    page.click("#open-list")
    with page.expect_download() as download:
        page.click("#export >> text=Markdown")
    assert download.value.suggested_filename == "Is-it-Or-not.md"
    head, _, text = Path(download.value.path()).read_text().partition("\n\n## ")
    assert head.startswith("# Is it? / Or not?\n\ndemo:latest · 20")
    assert text == (
        "You\n\nFile notes.txt:\n\n````\n```\ncode\n```\n````\n\nIs it? / Or not?\n\n"
        "## Answer\n\n> hm\n\n**Yes**, $x^2$.\n"
    )
    with page.expect_download() as download:
        page.click("#export >> text=JSON")
    kept = json.loads(Path(download.value.path()).read_text())
    assert (kept["kind"], kept["model"]) == ("moegguf conversation", "demo:latest")
    assert [message["role"] for message in kept["messages"]] == ["user", "assistant"]
    assert kept["messages"][0]["files"] == [
        {"name": "notes.txt", "text": notes.read_text()}
    ]


# Errors


def test_a_change_of_the_model_clears_the_problem(
    manager: FakeManager, url: str, look: Look, tmp_path: Path
) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"x")
    page = look(url)
    ready(page)
    page.set_input_files("#files", [picture])
    page.wait_for_selector("#problem >> text=does not see pictures")
    page.select_option("#model", "see:latest")
    assert page.inner_text("#problem") == ""


def test_models_of_a_returned_server_are_listed_without_a_reload(
    manager: FakeManager, url: str, look: Look
) -> None:
    page = look("about:blank", expected=f"Failed to load|net::ERR|{url}")
    failing: list[Any] = [True]
    page.route(
        "**/api/tags", lambda route: route.abort() if failing else route.continue_()
    )
    page.goto(url)
    page.wait_for_selector(
        "#model option >> text=The server is not reachable.", state="attached"
    )
    failing.clear()
    ready(page)
    assert page.input_value("#model") == "demo:latest"
