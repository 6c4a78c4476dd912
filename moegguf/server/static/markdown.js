// A subset of Markdown. Text becomes text nodes only: output of a model is never parsed as HTML.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^(\s*)([-*+•]|\d{1,4}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const TABLE_LINE = /^\s*\|.*\|\s*$/;
const TABLE_RULE = /^\s*\|?(\s*:?-+:?\s*\|)+\s*:?-*:?\s*\|?\s*$/;
const INLINE = /(`+)(.+?)\1(?!`)|\*\*(?=\S)(.+?)(?<=\S)\*\*|(?<![\w*])\*(?=[^\s*])(.+?)(?<=[^\s*])\*(?![\w*])/gs;

/** Shows `text` in `element`; blocks that did not change since the last call stay as they are. */
export function render(element, text) {
  const blocks = parse(text);
  const old = element.blocks ?? [];
  blocks.forEach((block, i) => {
    const same = old[i]?.source === block.source && old[i].kind === block.kind;
    if (same) return;
    if (block.kind === "code" && old[i]?.kind === "code" && old[i].language === block.language) {
      element.children[i].querySelector("code").textContent = block.text; // keeps the scroll position
    } else if (element.children[i]) {
      element.children[i].replaceWith(build(block));
    } else {
      element.append(build(block));
    }
  });
  while (element.children.length > blocks.length) element.lastElementChild.remove();
  element.blocks = blocks;
}

/** Blocks {kind, source, ...} of a text; a code block may still be open. */
export function parse(text) {
  const rows = text.split("\n");
  const blocks = [];
  let at = 0;
  const take = (test) => {
    const from = at;
    while (at < rows.length && test(rows[at])) at += 1;
    return rows.slice(from, at);
  };
  while (at < rows.length) {
    const from = at;
    const block = next(rows[at]);
    if (block) blocks.push({ ...block, source: rows.slice(from, at).join("\n") });
  }
  return blocks;

  function next(row) {
    const fence = row.match(FENCE);
    if (fence) return code(fence);
    if (!row.trim()) return void (at += 1);
    if (RULE.test(row)) return (at += 1), { kind: "rule" };
    const heading = row.match(HEADING);
    if (heading) return (at += 1), { kind: "heading", level: heading[1].length, text: heading[2] };
    if (row.startsWith(">")) return { kind: "quote", text: take((r) => r.startsWith(">")).map((r) => r.replace(/^> ?/, "")).join("\n") };
    if (ITEM.test(row)) return list(row);
    if (TABLE_LINE.test(row) && TABLE_RULE.test(rows[at + 1] ?? "")) return { kind: "table", rows: take((r) => TABLE_LINE.test(r)).map(cells) };
    const first = rows[at++];
    return { kind: "paragraph", text: [first, ...take((r) => r.trim() && !begins(r))].join("\n") };
  }

  function code(fence) {
    at += 1;
    const end = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
    const body = take((r) => !end.test(r));
    at += 1;
    return { kind: "code", language: fence[2], text: body.join("\n") };
  }

  function list(row) {
    const ordered = /\d/.test(row.match(ITEM)[2]);
    const items = [];
    while (at < rows.length) {
      const item = rows[at].match(ITEM);
      if (item) items.push({ deeper: item[1].length > 1, number: parseInt(item[2], 10), text: item[3] });
      else if (rows[at].startsWith("  ") && rows[at].trim()) items.at(-1).text += `\n${rows[at].trim()}`;
      else if (!(rows[at].trim() === "" && ITEM.test(rows[at + 1] ?? ""))) break; // one empty line between items
      at += 1;
    }
    return { kind: "list", ordered, items };
  }
}

function begins(row) {
  return FENCE.test(row) || HEADING.test(row) || ITEM.test(row) || row.startsWith(">");
}

function cells(row) {
  return row.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
}

function build(block) {
  switch (block.kind) {
    case "code": return codeBlock(block);
    case "rule": return document.createElement("hr");
    case "heading": return inline(document.createElement(block.level < 3 ? "h3" : "h4"), block.text);
    case "quote": return inline(document.createElement("blockquote"), block.text);
    case "list": return listBlock(block);
    case "table": return tableBlock(block);
    default: return inline(document.createElement("p"), block.text);
  }
}

function inline(element, text) {
  let from = 0;
  for (const match of text.matchAll(INLINE)) {
    element.append(text.slice(from, match.index));
    const [all, ticks, code, strong, emphasis] = match;
    const child = document.createElement(ticks ? "code" : strong ? "strong" : "em");
    if (ticks) child.textContent = code;
    else inline(child, strong ?? emphasis);
    element.append(child);
    from = match.index + all.length;
  }
  element.append(text.slice(from));
  return element;
}

function listBlock({ ordered, items }) {
  const list = document.createElement(ordered ? "ol" : "ul");
  for (const item of items) {
    const entry = inline(document.createElement("li"), item.text);
    if (item.deeper) entry.className = "deeper";
    if (ordered && item.number) entry.value = item.number;
    list.append(entry);
  }
  return list;
}

function tableBlock({ rows }) {
  const table = document.createElement("table");
  rows.forEach((row, i) => {
    if (i === 1) return; // the rule below the head
    const line = table.insertRow();
    for (const cell of row) line.append(inline(document.createElement(i ? "td" : "th"), cell));
  });
  const frame = document.createElement("div");
  frame.className = "wide";
  frame.append(table);
  return frame;
}

function codeBlock({ language, text }) {
  const frame = document.createElement("div");
  frame.className = "code";
  const head = document.createElement("div");
  head.className = "code-head";
  head.append(document.createElement("span"), copyButton(frame));
  head.firstChild.textContent = language || "text";
  const pre = document.createElement("pre");
  pre.tabIndex = 0; // makes long lines scrollable by keyboard
  pre.append(document.createElement("code"));
  pre.firstChild.textContent = text;
  frame.append(head, pre);
  return frame;
}

function copyButton(frame) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.hidden = !navigator.clipboard; // only available on secure origins
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(frame.querySelector("code").textContent);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}
