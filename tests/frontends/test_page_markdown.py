"""Markdown of answers in a browser: what it looks like, what it may not do, and while it is written."""

import re
from typing import Any

import pytest
from browsing import Look

pytest_plugins = ("browser",)

# Shows a text in pieces of n characters (0: at once). Returns its HTML and the elements that were removed meanwhile.
SHOW = """async ([text, n]) => {
  const { Markdown, load } = await import("/page/markdown.js");
  await load();
  const element = document.createElement("div"), markdown = new Markdown(element), removed = [];
  const observer = new MutationObserver((records) => {
    for (const { removedNodes } of records) removed.push(...[...removedNodes].map((e) => e.outerHTML).filter(Boolean));
  });
  document.getElementById("log").replaceChildren(element);
  observer.observe(element, { childList: true, subtree: true });
  for (let end = n; n && end < text.length; end += n) {
    markdown.show(text.slice(0, end), false);
    await null; // for the observer
  }
  await new Promise((resolve) => setTimeout(resolve));
  markdown.show(text, true);
  return [element.innerHTML, removed];
}"""


@pytest.fixture
def page(url: str, look: Look) -> Any:
    return look(url)


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
    "a list with empty lines": ("- a\n\n- b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"),
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
    "quotes": (
        "> a\n> - b\n>\n> > c",
        "<blockquote><p>a</p><ul><li>b</li></ul><blockquote><p>c</p></blockquote></blockquote>",
    ),
    "a picture is its description": ("![a **cat**](https://a.example/cat.png)", "<p>a <strong>cat</strong></p>"),
    "entities": ("&lt;b&gt; &amp;amp; \\*", "<p>&lt;b&gt; &amp;amp; *</p>"),
    "line ends of other systems": ("a\r\nb\r\n\r\nc", "<p>a<br>b</p><p>c</p>"),
}


@pytest.mark.parametrize("case", CASES)
def test_markdown_becomes_elements(page: Any, case: str) -> None:
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
def test_hostile_text_stays_text(page: Any, case: str, piece: int) -> None:
    html = shown(page, HOSTILE[case], piece)
    assert page.evaluate("window.hacked") is None
    assert set(re.findall(r"<(\w+)", html)) <= set(ALLOWED)
    names = re.findall(r'\s([\w-]+)="', " ".join(re.findall(r"<\w[^>]*>", html)))
    assert set(names) <= {"href", "title", "target", "rel", "start", "style", "class", "type", "tabindex"}
    for tag in re.findall(r"<a[^>]*>", html):
        assert re.match(r'<a href="(https?://|mailto:)', tag) and 'target="_blank" rel="noopener noreferrer"' in tag


@pytest.mark.parametrize("text", ["> " * 9999, "- " * 500 + "x\n" * 9000, "[a](" * 5000, "*a_" * 7000, "|" * 20000])
def test_repetition_does_not_hang_the_page(page: Any, text: str) -> None:
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
"""


@pytest.mark.parametrize("piece", [1, 3, 7])
def test_nothing_flickers_while_it_is_written(page: Any, piece: int) -> None:
    html, removed = page.evaluate(SHOW, [ANSWER, piece])
    assert removed == []
    assert html == shown(page, ANSWER)


def test_a_long_answer_is_not_parsed_from_its_begin_again(page: Any) -> None:
    n_parsed = """async (text) => {
      const { Markdown } = await import("/page/markdown.js");
      const { default: { prototype } } = await import("/page/vendor/markdown-it.esm.min.mjs");
      const markdown = new Markdown(document.createElement("div")), { parse } = prototype;
      let n = 0;
      prototype.parse = function (text, env) { return (n += text.length, parse.call(this, text, env)); };
      for (let end = 10; end < text.length; end += 10) markdown.show(text.slice(0, end), false);
      markdown.show(text, true);
      return n;
    }"""
    text = ANSWER * 90
    n = page.evaluate(n_parsed, text)
    assert len(text) > 20_000 and len(text) < n < 20 * len(text)
