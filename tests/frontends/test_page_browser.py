"""Tests the page in a browser.

The first tests use a real server with the demo model: streaming, the map of experts,
the panel, and a phone-sized screen. The later tests use a fake manager: rendering
Markdown and formulas, hostile text, and text that is still growing.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from browsing import Look, answered, ask, ended, looking, ready, until
from fake_manager import FakeCatalog, FakeManager, entry_of, server_of
from servers import Server, serving

from moegguf.models.catalog import demo_path

# A JavaScript expression that is true if the panel shows a quarter of the experts (48
# of 192) as resident.
RESIDENT = (
    "document.getElementById('resident').textContent.startsWith('48 of 192 in memory')"
)
PHONE, SMALLEST = {"width": 390, "height": 844}, {"width": 360, "height": 640}

# A JavaScript function that counts the map's grey pixels (`grey`: resident experts) and
# strongly coloured pixels (`hot`: experts just used or read). `sum` is a checksum of
# all pixels. All are 0 while the map is hidden.
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
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yields a real server with slots for a quarter of the demo model's experts.

    The model uses one compute thread: several threads would wait for each other while
    the browser uses the CPU.
    """
    with serving(tmp_path_factory.mktemp("page"), "--expert-cache", "25%") as server:
        load = {
            "model": "demo",
            "messages": [],
            "options": {"num_thread": 1},
            "keep_alive": -1,
        }
        assert server.call("/api/chat", load).json["done_reason"] == "load"
        yield server


def test_a_message_streams_and_the_map_changes(server: Server, look: Look) -> None:
    page = look(
        server.url,
        reduced_motion="no-preference",
        expected="Canvas2D: Multiple readback",
    )
    ready(page)
    page.evaluate("""() => {
      window.seen = [];
      new MutationObserver(() => {
        const said = document.querySelector(".answer .content")?.textContent ?? "";
        if (said && said !== window.seen.at(-1)) window.seen.push(said);
      }).observe(document.getElementById("log"), { subtree: true, childList: true, characterData: true });
    }""")
    ask(page, "What does moegguf do?")
    until(page, f"({COUNT_PIXELS})().hot > 50")
    ended(page)
    seen = page.evaluate("window.seen")
    # The text grew in several steps.
    assert len(seen) > 2 and seen[-1].startswith(seen[0])
    assert re.search(
        r"\d+ tokens · [\d.,]+ tokens/s",
        page.inner_text(".statistics").replace("\xa0", " "),
    )
    until(page, f"({COUNT_PIXELS})().hot === 0")
    idle = page.evaluate(COUNT_PIXELS)
    assert idle["grey"] > 1000
    until(page, RESIDENT)
    for name in ("hit", "bytes"):
        assert re.match(r"[\d.,]+", page.inner_text(f"#{name}-value"))
        assert re.match(
            r"\d+,[\d.]+",
            page.get_attribute(f"#{name}-chart polyline >> nth=0", "points"),
        )
    answered(page, "What is a mixture of experts?")
    until(page, f"({COUNT_PIXELS})().sum !== {idle['sum']}")


def test_the_panel_shows_the_figures_of_the_last_answer(
    server: Server, look: Look
) -> None:
    page = look(server.url)
    until(page, "document.getElementById('resident').textContent !== ''")
    for question in ("What does moegguf do?", "What is a mixture of experts?"):
        answered(page, question)
        told = page.inner_text(".statistics >> nth=-1").replace("\xa0", " ")
        for name, pattern in (
            ("hit", r"hit rate (\S+ %)"),
            ("bytes", r"([\d.,]+ \S+) read per token"),
        ):
            found = re.search(pattern, told)
            assert found, told
            shown = f"document.getElementById('{name}-value').textContent"
            until(page, f"{shown} === {found[1].replace(' ', '')!r}")
        [loaded] = server.call("/api/ps").json["models"]
        last = loaded["moe"]["last_answer"]
        count, speed = re.search(r"(\d+) tokens · ([\d.,]+) tokens/s", told).groups()  # type: ignore[union-attr]
        rate = last["eval_count"] / last["eval_duration"] * 1e9
        assert int(count) == last["eval_count"]
        assert float(speed.replace(",", "")) == pytest.approx(rate, rel=0.006)
        until(
            page, f"document.getElementById('speed-value').textContent === '{speed}t/s'"
        )
        before = [page.inner_text(f"#{name}-value") for name in ("hit", "bytes")]
    # The heading is visible only once, in the panel. The table of tiers, which is
    # hidden, has the same heading.
    assert page.locator(".panel :text-is('Hit rate'):visible").count() == 1
    page.reload()
    until(page, f"document.getElementById('speed-value').textContent === '{speed}t/s'")
    assert [page.inner_text(f"#{name}-value") for name in ("hit", "bytes")] == before


def test_the_budget_slider_changes_expert_memory_and_the_map(
    server: Server, look: Look
) -> None:
    page = look(server.url, expected="status of 400")
    page.wait_for_selector("#ram-budget")
    assert page.inner_text("#ram-budget-value") == "48 of 192 experts, 2.65 MB"
    answered(page, "What does moegguf do?")
    page.focus("#ram-budget")
    for _ in range(24):
        page.keyboard.press("ArrowLeft")
    # The count of resident experts changes with the budget, without another answer.
    page.wait_for_selector("#resident >> text='24 of 192 in memory, 1.33 MB'")
    assert server.call("/budget?model=demo").json["n_slots"] == 24
    page.keyboard.press("Home")
    page.wait_for_selector("#budget-note >> text=is too small")
    assert page.input_value("#ram-budget") == "24"
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#resident >> text='23 of 192 in memory, 1.27 MB'")
    # The note about the refused budget is gone.
    assert page.inner_text("#budget-note") == ""
    # Another client changes the budget.
    server.call("/budget", {"model": "demo", "expert_cache": "auto"}, method="PUT")
    until(page, "document.getElementById('ram-budget').value === '48'")
    labels = [page.inner_text(f"#bytes-chart small >> nth={i}") for i in range(2)]
    assert re.fullmatch(r"[125]0{0,2} [kM]B", labels[0]) and labels[1] == "0"


def test_a_copied_name_of_a_loaded_model_shows_its_figures(
    server: Server, look: Look
) -> None:
    server.call("/api/copy", {"source": "demo", "destination": "mine"})
    page = look(server.url)
    ready(page)
    for name in ("demo:latest", "mine:latest"):
        page.select_option("#model", name)
        until(
            page,
            "document.getElementById('ram-budget-value').textContent === '48 of 192 experts, 2.65 MB'",
        )
    server.call("/api/delete", {"model": "mine"}, method="DELETE")


def test_the_panel_shows_tiers_and_staging_only_with_vram_layers(
    server: Server, look: Look
) -> None:
    snapshot = server.call("/live?once=1").json["models"][0]["snapshot"]
    tier = {"device": "GPU0", "lookups": 10, "hits_ready": 9, "hits_late": 0, "misses": 1, "evictions": 7,
            "bytes_missed": 3_000_000, "bytes_prefetched": 0, "stall_s": 0.5, "slots_used": 47,
            "n_slots": 48}  # fmt: skip
    stats = {
        **snapshot["stats"],
        "tiers": [{"name": "VRAM", **tier}, {"name": "RAM", **tier, "hits_ready": 0}],
    }
    stats |= {
        "staging_bytes": 6_000_000,
        "bytes_staged": 9_000_000,
        "staging_overlap": 0.93,
    }
    page = look(server.url)
    until(page, "document.getElementById('resident').textContent !== ''")
    assert page.is_hidden("#tiers") and page.is_hidden("#staging")
    page.route(
        "**/live?*",
        lambda route: route.fulfill(
            body=json.dumps({**snapshot, "stats": stats}) + "\n"
        ),
    )
    page.reload()
    page.wait_for_selector("#staging:visible")
    rows = page.locator("#tiers tbody tr").all_inner_texts()
    assert [row.split("\t") for row in rows] == [
        ["VRAM", "47 of 48", "90.0 %", "3.00 MB", "7", "500 ms"],
        ["RAM", "47 of 48", "0.0 %", "3.00 MB", "7", "500 ms"],
    ]
    assert (
        page.inner_text("#staging")
        == "Prompts staged: 9.00 MB through 6.00 MB, 93.0 % of the time while computing"
    )


def test_a_chart_of_zeros_has_no_label_at_the_top(server: Server, look: Look) -> None:
    snapshot = server.call("/live?once=1").json["models"][0]["snapshot"]
    lines = [
        json.dumps({**snapshot, "stats": {**snapshot["stats"], "tokens": n}}) + "\n"
        for n in (7, 8)
    ]
    page = look(server.url)
    page.route("**/live?*", lambda route: route.fulfill(body="".join(lines)))
    page.reload()
    until(
        page,
        "document.querySelector('#bytes-chart small:last-child').textContent === '0'",
    )
    assert page.inner_text("#bytes-chart small >> nth=0") == ""


def test_pointing_at_a_cell_shows_its_layer_expert_and_uses(
    server: Server, look: Look
) -> None:
    page = look(server.url)
    answered(page, "What is the hit rate?")
    box = page.locator("#map").bounding_box()
    page.mouse.move(box["x"] + 40, box["y"] + 10)
    assert re.fullmatch(
        r"Layer 0, expert 0: .*, used \d+×, fetched \d+× while you watch",
        page.inner_text("#cell"),
    )
    page.focus("#map")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#cell").startswith("Layer 1, expert 1: ")


@pytest.mark.parametrize("viewport", [PHONE, SMALLEST], ids=["phone", "smallest"])
def test_no_element_overflows_on_a_phone(
    server: Server, look: Look, viewport: dict[str, int]
) -> None:
    page = look(server.url, viewport=viewport, has_touch=True, device_scale_factor=3)
    answered(page, "What does moegguf do? " + "AnUnusuallyLongWordWithoutAnySpaces" * 5)
    wide = """() => [...document.querySelectorAll("body *:not(.unseen):not(option)")].filter((element) => {
      const { left, right, width } = element.getBoundingClientRect();
      return width && element.checkVisibility() && (left < -0.5 || right > innerWidth + 0.5);
    }).map((element) => element.outerHTML.slice(0, 80))"""
    assert page.evaluate(wide) == []
    assert (
        not page.is_visible("#map")
        and page.get_attribute("#fold", "aria-expanded") == "false"
    )
    until(page, RESIDENT)
    title = page.locator(".panel h2").bounding_box()
    # A tap on the panel's title opens the map.
    page.touchscreen.tap(title["x"] + 5, title["y"] + 5)
    page.wait_for_selector("#map")
    assert page.evaluate(wide) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    map_box, message_box = (
        page.locator(name).bounding_box() for name in ("#map", "#message")
    )
    assert map_box["y"] + map_box["height"] < message_box["y"]
    assert message_box["y"] + message_box["height"] <= viewport["height"]
    page.tap("#open-settings")
    dialog, done = (
        page.locator(name).bounding_box()
        for name in ("#settings", "#settings .primary")
    )
    assert done["y"] + done["height"] < dialog["y"] + dialog["height"]
    page.reload()
    page.wait_for_selector("#map")  # the map is open again after a reload
    page.tap("#fold")
    assert (
        not page.is_visible("#map")
        and page.get_attribute("#fold", "aria-expanded") == "false"
    )


# A JavaScript function that renders `text` as Markdown while it grows by n characters
# at a time, or all at once if n is
# 0. Returns the final HTML, and the HTML of elements that were removed from the page while the text grew.
SHOW = """async ([text, n]) => {
  const { Markdown, load } = await import("/page/markdown.js");
  const { load: loadKatex } = await import("/page/math.js");
  await Promise.all([load(), loadKatex()]);
  const answer = document.createElement("article"), element = document.createElement("div"), removed = [];
  answer.className = "answer";
  element.className = "content";
  answer.append(element);
  const markdown = new Markdown(element);
  const observer = new MutationObserver((records) => {
    for (const { removedNodes } of records) removed.push(...[...removedNodes].map((e) => e.outerHTML).filter(Boolean));
  });
  document.getElementById("log").replaceChildren(answer);
  observer.observe(element, { childList: true, subtree: true });
  for (let end = n; n && end < text.length; end += n) {
    markdown.show(text.slice(0, end), false);
    await null; // for the observer
  }
  await new Promise((resolve) => setTimeout(resolve));
  markdown.show(text, true);
  return [element.innerHTML, removed];
}"""


@pytest.fixture(scope="module")
def page(chromium: Any) -> Iterator[Any]:
    """Yields a page that all Markdown tests of this file share. The tests replace only
    the contents of `#log`."""
    with (
        server_of(FakeManager(FakeCatalog(entry_of(demo_path())))) as url,
        looking(chromium) as look,
    ):
        yield look(url)


def shown(page: Any, text: str, piece: int = 0) -> str:
    return page.evaluate(SHOW, [text, piece])[0]


LINK = '<a href="{0}" target="_blank" rel="noopener noreferrer">{1}</a>'
CASES = {
    "nested lists": (
        "- a\n  - b\n    1. c\n    2. d\n- e\n",
        "<ul><li>a<ul><li>b<ol><li>c</li><li>d</li></ol></li></ul></li><li>e</li></ul>",
    ),
    "a list that goes on after code": (
        "3. a\n   ```sh\n   ls\n   ```\n4. b\n",
        '<ol start="3"><li>a<div class="code"><div class="code-head"><span>sh</span><button type="button">Copy</button>'
        '</div><pre tabindex="0"><code><span class="hl-built_in">ls</span></code></pre></div></li><li>b</li></ol>',
    ),
    "links": (
        "[**a**](https://a.example/x_y_z?q=1) and [mail](mailto:a@b.example), [c]\n\n[c]: http://c.example",
        f"<p>{LINK.format('https://a.example/x_y_z?q=1', '<strong>a</strong>')} and "
        f"{LINK.format('mailto:a@b.example', 'mail')}, {LINK.format('http://c.example', 'c')}</p>",
    ),
    "addresses": (
        "See https://a.example/b. And main.py, test.com",
        f"<p>See {LINK.format('https://a.example/b', 'https://a.example/b')}. And main.py, test.com</p>",
    ),
    "a table": (
        "a | b\n---|--:\n`1` \\| | *2*\n",
        '<table><thead><tr><th>a</th><th style="text-align: right;">b</th></tr></thead>'
        '<tbody><tr><td><code>1</code> |</td><td style="text-align: right;"><em>2</em></td></tr></tbody></table>',
    ),
    "a picture is its description": (
        "![a **cat**](https://a.example/cat.png)",
        "<p>a <strong>cat</strong></p>",
    ),
    "a task list": (
        "- [x] **a**\n- [ ] b\n- [y] c",
        '<ul><li class="task"><input type="checkbox" disabled="" aria-label="Done"><strong>a</strong></li>'
        '<li class="task"><input type="checkbox" disabled="" aria-label="To do">b</li><li>[y] c</li></ul>',
    ),
    "line ends of other systems": ("a\r\nb\r\n\r\nc", "<p>a<br>b</p><p>c</p>"),
}


@pytest.mark.parametrize("case", CASES)
def test_markdown_is_rendered_as_elements(page: Any, case: str) -> None:
    text, wanted = CASES[case]
    assert shown(page, text) == wanted
    assert shown(page, text, piece=1) == wanted


HOSTILE = {
    "script": "<script>window.hacked=1</script>\n\na <script src=/page/app.js></script>",
    "handlers": "<img src=x onerror=window.hacked=1>\n\n<svg/onload=window.hacked=1>\n<details open ontoggle=hacked=1>",
    "frames": "<iframe srcdoc='<script>parent.hacked=1</script>'></iframe> <object data=/> <base href=//e.example>",
    "forms": "<form action=//e.example><button>x</button></form><style>*{display:none}</style><meta http-equiv=x>",
    "schemes": "[a](javascript:window.hacked=1) [b](JaVaScRiPt:x) [c](java&#10;script:x) [d](data:text/html,x)"
               " [e](vbscript:x) <javascript:x> [f](\x01javascript:x) [g]\n\n[g]: javascript:x",
    "own pages": "[a](/api/delete) [b](//e.example) [c](#x) [d](page/app.js) [e](file:///etc/passwd) ftp://e.example",
    "attributes": "[a](https://a.example\"onclick=window.hacked=1) [b](https://b.example \"t\\\" onclick=hacked=1\")"
                  " ![x\" onerror=window.hacked=1](x)\n\n```\" onclick=window.hacked=1\nx\n```",
    "pictures": "![a](https://a.example/x.png) ![b](/page/icon.svg) ![c](data:image/png;base64,AA==)"
                " [![d](http://d.example/)](x)",
    "broken marks": "<![CDATA[<b>]]> <!--<b>--><!--> <?php <b> ?> <a href='`'><b>`'>",
    "in a table": "| <b>a</b> |\n|---|\n| [x](javascript:x) <i onclick=x> |",
}  # fmt: skip
ALLOWED = "p br a strong em s h3 h4 ul ol li hr blockquote table thead tbody tr th td code pre div span button".split()


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("piece", [0, 1])
def test_hostile_text_runs_no_script_and_makes_allowed_elements_only(
    page: Any, case: str, piece: int
) -> None:
    html = shown(page, HOSTILE[case], piece)
    assert page.evaluate("window.hacked") is None
    assert set(re.findall(r"<(\w+)", html)) <= set(ALLOWED)
    names = re.findall(r'\s([\w-]+)="', " ".join(re.findall(r"<\w[^>]*>", html)))
    assert set(names) <= {
        "href",
        "title",
        "target",
        "rel",
        "start",
        "style",
        "class",
        "type",
        "tabindex",
    }
    for tag in re.findall(r"<a[^>]*>", html):
        assert (
            re.match(r'<a href="(https?://|mailto:)', tag)
            and 'target="_blank" rel="noopener noreferrer"' in tag
        )


SOURCES = """([text, n]) => {
  const found = [...document.querySelectorAll("#log .formula")];
  return found.map((e) => [e.querySelector("annotation")?.textContent ?? e.textContent, e.matches(".apart")]);
}"""
FORMULAS = {
    "$a$, \\(b_1\\), and $$c$$": [["a", False], ["b_1", False], ["c", True]],
    "$$\na\n= b\n- c\n$$\n\n\\[\nx\n\\]": [["\na\n= b\n- c\n", True], ["\nx\n", True]],
    "text\n\\[ x \\]\ntext": [[" x ", True]],
    "- one\n  $$\n  + x\n  $$\n> $y_1$ **$z$**": [
        ["\n+ x\n", True],
        ["y_1", False],
        ["z", False],
    ],
    "It costs $5 and $6, $n$ times.": [["n", False]],
    "$\\frac{a$ and $\\text{for all } x$": [
        ["$\\frac{a$", False],
        ["\\text{for all } x", False],
    ],
    "the $n$th and the $k$-means": [["n", False], ["k", False]],
    "$a * b * c$ and $d_1 e_2 f_3$": [["a * b * c", False], ["d_1 e_2 f_3", False]],
}
AMOUNTS = [
    "$5 and $6", "US$5 or US$6", "from $5 to 10$", "**$5** and **$6**", "$5-$6", "$5/month, $6/year", "$HOME/$USER",
    "$path/$file",
    "$ a $", "a $ b", "\\$a\\$", "`$a$`", "~$5k, ~$6k", "a$b$", "$5,000 (or $6,000)", "```sh\necho $a $b$\n```", "$$",
    "echo $$ prints a number",
]  # fmt: skip


@pytest.mark.parametrize("text", FORMULAS)
@pytest.mark.parametrize("piece", [0, 1])
def test_formulas_are_rendered(page: Any, text: str, piece: int) -> None:
    shown(page, text, piece)
    assert page.evaluate(SOURCES, [text, piece]) == FORMULAS[text]


@pytest.mark.parametrize("text", AMOUNTS)
def test_dollar_amounts_and_variables_stay_text(page: Any, text: str) -> None:
    html = shown(page, text)
    assert "formula" not in html and html == shown(page, text, piece=1)
    assert page.inner_text("#log").count("$") == text.count("$")


HOSTILE_FORMULAS = [
    r"$\href{javascript:window.hacked=1}{x}$ $\url{javascript:window.hacked=1}$ \(\href{https://a.example}{b}\)",
    r"$$\includegraphics[width=9em]{https://a.example/x.png}$$ $\htmlClass{tool}{x}$ $\htmlStyle{position:fixed}{x}$",
    r"$\htmlData{a=b}{x}$ $\htmlId{log}{x}$ $<img src=x onerror=window.hacked=1>$ \[\text{<script>hacked=1</script>}\]",
    r"$\def\x{\x\x}\x$ $\rule{99999em}{99999em}$ $\kern{99999em}$ $\def\a#1{#1#1#1}\a{\a{\a{\a{\a{\a{\a{x}}}}}}}$",
    r"$\frac{a" + r"{" * 900 + r"$ $" + r"\frac{x}{" * 300 + "y" + "}" * 300 + "$",
]


@pytest.mark.parametrize("text", HOSTILE_FORMULAS)
def test_hostile_formulas_run_no_script_and_load_no_address(
    page: Any, text: str
) -> None:
    html = shown(page, text)
    assert page.evaluate("window.hacked") is None
    assert not re.findall(r"<(a|img|script|iframe|style|link|object|form)\b", html)
    assert not re.findall(r'<[^>]*\s(on\w+|href|src|id|data-\w+)="', html)
    assert page.evaluate("document.querySelector('#log').scrollWidth") < 5000


@pytest.mark.parametrize(
    "text",
    [
        "> " * 9999,
        "- " * 500 + "x\n" * 9000,
        "[a](" * 5000,
        "*a_" * 7000,
        "|" * 20000,
        "$a" * 9000,
        "\\(" * 9000,
        "$$\n" * 9000,
    ],
)
def test_repetitive_markdown_does_not_hang_the_page(page: Any, text: str) -> None:
    page.set_default_timeout(20_000)
    assert shown(page, text)


ANSWER = """Intro:
- **First thing**: with `code` and
  1. a [link](https://a.example/path) in it
  2. more
- Second
* * *
# Title

| Name | Value |
|:-----|------:|
| one  | **1** |
| two  | 2     |

```py
x = [1] ** 2  # *
- y
```

7. Seven

With $x_1$ it is $5 or $\\frac{a * b}{c_2}$:
$$
x = \\sqrt{b}
- c
$$
- [x] \\(d\\) and
- [ ] $e$
"""


@pytest.mark.parametrize("piece", [1, 3, 7])
def test_a_streamed_answer_removes_no_element(page: Any, piece: int) -> None:
    html, removed = page.evaluate(SHOW, [ANSWER, piece])
    assert removed == []
    assert html == shown(page, ANSWER)


def test_a_long_answer_is_parsed_incrementally(page: Any) -> None:
    n_parsed = """async (text) => {
      const { Markdown } = await import("/page/markdown.js");
      const { default: { prototype } } = await import("/page/vendor/markdown-it.esm.min.mjs");
      const markdown = new Markdown(document.createElement("div")), { parse } = prototype;
      let n = 0;
      prototype.parse = function (text, env) { return (n += text.length, parse.call(this, text, env)); };
      for (let end = 20; end < text.length; end += 20) markdown.show(text.slice(0, end), false);
      markdown.show(text, true);
      prototype.parse = parse;
      return n;
    }"""
    text = ANSWER * 70
    n = page.evaluate(n_parsed, text)
    assert len(text) > 20_000 and len(text) < n < 20 * len(text)
