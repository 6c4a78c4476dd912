"""Tests `/` for browsers and other clients, the page's files, and `/live`, with a fake
manager and no workers."""

import asyncio
import base64
import hashlib
import json
import re
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from fake_manager import SNAPSHOT, FedManager, added
from scripted_manager import until

from moegguf.server import live, page

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"
FILES = sorted(path for path in page.FOLDER.rglob("*") if path.is_file())
VENDOR = page.FOLDER / "vendor"
OWN = [path for path in FILES if VENDOR not in path.parents]
PERMISSIONS = {
    "MIT": "Permission is hereby granted, free of charge",
    "BSD-3-Clause": "BSD 3-Clause License",
    "OFL-1.1": "SIL OPEN FONT LICENSE Version 1.1",
}
TEXTS = [path for path in FILES if path.suffix != ".woff2"]


@pytest.mark.parametrize("accept", ["*/*", "", "application/json"])
def test_root_without_html_in_accept_replies_ollamas_greeting(
    http: httpx.Client, accept: str
) -> None:
    response = http.get("/", headers={"Accept": accept})
    assert (response.status_code, response.text) == (200, "Ollama is running")
    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    assert response.headers["vary"] == "Accept"


@pytest.mark.parametrize("accept", [BROWSER, "text/html", "TEXT/HTML; q=0.9, */*"])
def test_root_with_html_in_accept_replies_the_page(
    http: httpx.Client, accept: str
) -> None:
    response = http.get("/", headers={"Accept": accept})
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>moegguf</title>" in response.text
    assert response.headers["vary"] == "Accept"


@pytest.mark.parametrize(
    "path", ["/", "/page/app.js", "/page/style.css", "/page/icon.svg"]
)
def test_all_responses_of_the_page_have_security_headers(
    http: httpx.Client, path: str
) -> None:
    headers = http.get(path, headers={"Accept": BROWSER}).headers
    policy = headers["content-security-policy"]
    assert "require-trusted-types-for 'script'; trusted-types 'none'" in policy
    assert (
        "default-src 'self'" in policy
        and "frame-ancestors 'none'" in policy
        and "unsafe" not in policy
    )
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-frame-options"] == "DENY"
    assert path == "/" or (headers["cache-control"] == "no-cache" and headers["etag"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_of_the_page_has_its_media_type(
    http: httpx.Client, path: Path
) -> None:
    response = http.get(f"/page/{path.relative_to(page.FOLDER).as_posix()}")
    kinds = {
        ".html": "text/html",
        ".css": "text/css",
        ".svg": "image/svg+xml",
        ".txt": "text/plain",
    }
    kinds[".woff2"] = "font/woff2"
    kind = kinds.get(path.suffix, "javascript")
    assert response.status_code == 200 and response.content == path.read_bytes()
    assert kind in response.headers["content-type"]


@pytest.mark.parametrize(
    "path",
    [
        "/page/none.js",
        "/page/../page.py",
        "/page/%2e%2e/page.py",
        "/page/..%2fpage.py",
        "/page/",
    ],
)
def test_paths_outside_the_page_get_a_404(http: httpx.Client, path: str) -> None:
    response = http.get(path)
    assert response.status_code == 404
    assert response.json() == {"error": "not found"}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_page_files_have_no_foreign_addresses_and_parse_no_html(path: Path) -> None:
    # The name of the SVG namespace, not an address.
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert path not in OWN or not re.findall(
        r"https?:|//[\w-]+\.\w|@import|url\(", text
    )
    # This library contains `eval` in its lists of words to highlight. It sets
    # `innerHTML` in a function that the page's security policy blocks.
    if path.name != "highlight.min.js":
        assert not re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function",
            text,
        )


def test_the_page_has_no_inline_script_or_style() -> None:
    text = (page.FOLDER / "index.html").read_text()
    assert not re.findall(r"\son\w+=|\sstyle=|<style|javascript:", text)
    assert not re.findall(r"<script(?![^>]*\ssrc=)", text)


def test_files_and_ids_used_by_the_page_exist() -> None:
    text = (page.FOLDER / "index.html").read_text()
    referred = set(re.findall(r'(?:href|src)="page/([^"#]+)', text))
    for script in page.FOLDER.glob("*.js"):
        referred |= set(
            re.findall(
                r'(?:from |import\(|href: )"(?:\./|page/)([^"]+)"', script.read_text()
            )
        )
    ids = set(re.findall(r'\bid="([^"]+)"', text))
    used = {
        name
        for script in page.FOLDER.glob("*.js")
        for name in re.findall(r'\bat\("([^"]+)"\)', script.read_text())
    }
    assert {"app.js", "map.js", "style.css"} <= referred
    used_files = {
        path.relative_to(page.FOLDER).as_posix()
        for path in TEXTS
        if path.suffix != ".txt"
    }
    assert referred == used_files - {"index.html"}
    fonts = set(
        re.findall(r"fonts/[\w-]+\.woff2", (VENDOR / "katex.min.css").read_text())
    )
    assert fonts == {
        path.relative_to(VENDOR).as_posix() for path in FILES if path not in TEXTS
    }
    assert used <= ids


def test_vendored_files_have_the_recorded_hashes_and_licences() -> None:
    lines = [
        line
        for line in (VENDOR / "UPSTREAM.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    noted = [
        dict(line.split(" = ") for line in block.splitlines())
        for block in "\n".join(lines).split("\n\n")
    ]
    license_text = (VENDOR / "LICENSE.txt").read_text()
    kept = {"LICENSE.txt", "UPSTREAM.txt"}
    for each in noted:
        pattern = each["from"].rpartition("/")[2]
        files = sorted(path for path in VENDOR.rglob(pattern) if path.name not in kept)
        kept |= {path.name for path in files}
        content = b"".join(path.read_bytes() for path in files)
        assert hashlib.sha256(content).hexdigest() == each["sha256"]
        assert PERMISSIONS[each["license"]] in license_text
        if "*" not in pattern:
            assert re.search(
                rf"[ v:\"]{re.escape(each['version'])}[ \"]", content.decode()
            )
            bundled = set(re.findall(r"node_modules/([^/]+)/", content.decode()))
            assert all(f"parts of {name}," in license_text for name in bundled)
    assert {path.name for path in FILES if path not in OWN} == kept


# /live


def lines_of(
    manager: FedManager, name: str | None, ending: threading.Event | None = None
) -> AsyncGenerator[bytes]:
    entry = name and manager.catalog.find(name)
    return live.snapshot_lines(
        cast("Any", manager), cast("Any", entry), 20.0, ending or threading.Event()
    )


async def next_line(lines: AsyncGenerator[bytes]) -> dict[str, Any]:
    async with asyncio.timeout(30):
        return json.loads(await anext(lines))


async def next_snapshot(lines: AsyncGenerator[bytes]) -> dict[str, Any]:
    while "state" not in (line := await next_line(lines)):
        pass
    return line


async def test_a_snapshot_line_has_its_model_and_base64_bytes() -> None:
    manager = FedManager()
    manager.put_in_memory()
    manager.send(SNAPSHOT)
    async with aclosing(lines_of(manager, "demo:latest")) as lines:
        assert await next_line(lines) == {"loaded_models": ["demo:latest"]}
        assert base64.b64decode((await next_snapshot(lines))["uses"]) == bytes(6), (
            "nothing since it watches"
        )
        manager.send(replace(SNAPSHOT, seconds=4.08, answer_tokens=8))
        line = await next_snapshot(lines)
    assert (
        base64.b64decode(line["state"]) == SNAPSHOT.state
        and base64.b64decode(line["uses"]) == SNAPSHOT.uses
    )
    assert (line["model"], line["layers"], line["n_expert"]) == (
        "demo:latest",
        [0, 2],
        3,
    )
    assert (
        line["tokens_per_s"] == pytest.approx(12.5) and line["stats"]["hit_rate"] == 0.9
    )
    assert line["loaded"]["queue"] == 0 and "plan" not in line["loaded"]


async def test_an_unused_name_shows_the_loaded_model_of_its_digest() -> None:
    manager = FedManager("demo:latest", "copied:latest")
    manager.put_in_memory("demo:latest")
    manager.send(replace(SNAPSHOT, model="copied:latest"))
    async with aclosing(lines_of(manager, "copied:latest")) as lines:
        assert (await next_line(lines))["loaded_models"][1:] == ["copied:latest"]
        assert "lookups" in (await next_snapshot(lines))["loaded"]["last_answer_stats"]


async def test_watching_loads_no_model_and_ends_with_the_client() -> None:
    manager = FedManager()
    async with aclosing(lines_of(manager, "demo:latest")) as lines:
        assert await next_line(lines) == {"loaded_models": []}
        manager.put_in_memory()
        assert await next_line(lines) == {"loaded_models": ["demo:latest"]}
        assert manager.n_asked == 1
    await asyncio.sleep(0.1)
    assert manager.n_asked == 1
    assert manager.leases == []


async def test_load_progress_is_sent_at_each_change() -> None:
    manager = FedManager()
    async with aclosing(lines_of(manager, "demo:latest")) as lines:
        assert await next_line(lines) == {"loaded_models": []}
        manager.shares = {"demo:latest": 0.4321}
        assert await next_line(lines) == {
            "loaded_models": [],
            "loading": {"demo:latest": 0.43},
        }
        manager.shares = {}
        manager.put_in_memory()
        assert await next_line(lines) == {"loaded_models": ["demo:latest"]}


async def test_live_without_a_name_watches_all_loaded_models() -> None:
    manager = FedManager("demo:latest", "other:latest")
    for name in ("demo:latest", "other:latest"):
        manager.put_in_memory(name)
        manager.send(replace(SNAPSHOT, model=name))
    async with aclosing(lines_of(manager, None)) as lines:
        assert await next_line(lines) == {
            "loaded_models": ["demo:latest", "other:latest"]
        }
        assert {(await next_snapshot(lines))["model"] for _ in range(2)} == {
            "demo:latest",
            "other:latest",
        }
        del manager.there["other:latest"]
        assert await next_line(lines) == {"loaded_models": ["demo:latest"]}


async def test_an_unchanged_snapshot_is_not_sent() -> None:
    manager = FedManager()
    manager.put_in_memory()
    quiet = replace(SNAPSHOT, uses=bytes(6), loads=bytes(6), busy=False)
    manager.send(quiet)
    async with aclosing(lines_of(manager, "demo:latest")) as lines:
        await next_line(lines)
        assert (await next_snapshot(lines))["busy"] is False
        pending = asyncio.ensure_future(next_snapshot(lines))
        await until(lambda: manager.n_asked == 3)
        manager.send(replace(quiet, seconds=4.5, busy=True))
        assert (await pending)["busy"] is True


def test_uses_of_skipped_snapshots_are_added_up() -> None:
    first = added(None, SNAPSHOT)
    later = added(
        added(first, SNAPSHOT), replace(SNAPSHOT, seconds=5.0, state=bytes(6))
    ).since(first)
    assert later.uses == bytes([6, 0, 0, 255, 2, 0]) and later.loads == bytes(
        [2, 0, 0, 0, 0, 0]
    )
    assert later.state == bytes(6)
    assert added(None, replace(SNAPSHOT, seconds=1.0)).since(first).uses == bytes(6), (
        "loaded anew meanwhile"
    )
    fewer = added(
        None,
        replace(
            SNAPSHOT, seconds=9.0, uses=bytes([9, 0, 0, 254, 9, 0]), answer_tokens=9
        ),
    ).since(first)
    assert fewer.uses == fewer.loads == bytes(6) and fewer.tokens_per_s == 0, (
        "loaded anew longer ago"
    )


async def test_a_server_shutdown_ends_the_live_stream() -> None:
    manager, ending = FedManager(), threading.Event()
    manager.put_in_memory()
    manager.send(SNAPSHOT)
    found = []
    async with asyncio.timeout(30):
        async for line in lines_of(manager, "demo:latest", ending):
            found.append(json.loads(line).get("model"))
            if found[-1]:
                ending.set()
    assert found == [None, "demo:latest"]
