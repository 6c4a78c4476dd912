// Shows Markdown, also while it is written. markdown-it parses it into tokens; elements and text nodes are built from
// these: output of a model is never parsed as HTML.

import { button, copy, make } from "./dom.js";
import { addFormulas, formulaView, withoutOpenFormula } from "./math.js";
import MarkdownIt from "./vendor/markdown-it.esm.min.mjs";

const parser = new MarkdownIt({ breaks: true, linkify: true });
parser.validateLink = (url) => /^(https?:\/\/|mailto:)/i.test(url);
parser.linkify.set({ fuzzyLink: false }); // "main.py" is not a host
addFormulas(parser);
parser.core.ruler.after("inline", "tasks", ({ tokens }) => tokens.forEach((token, i) => markTask(token, tokens[i - 2])));

const TAGS = { h1: "h3", h2: "h3", h3: "h4", h5: "h4", h6: "h4" }; // h1 and h2 are the page's own

// Ends of an unfinished text whose meaning the next characters decide.
const TABLE_HEAD = /(?<!^\|.*\n)^\|.*(\n[-|: \t]*)?$(?![^])/m;
const LINE_MARKS = /^[-+*=#`~_> \t]*(\d{1,9}[.)]?[*_`~ \t]*)?(\[[ xX]?\]?[ \t]*)?$/;
const INLINE_MARKS = /(?<![*_`~[\\])[*_`~[\\]+$/;
const LINK_ADDRESS = /!?\[([^[\]]*)\]\([^()\s]*$/;
const OPEN = { open: true }; // marks a block of code that may go on
const TASK = /^\[([ xX])\]\s/;
const FENCES = /^[-+*>\d.) \t]*(```|~~~)/gm;

/** The Markdown of one growing text in an element. */
export class Markdown {
  constructor(element) {
    this.element = element;
    this.restart();
  }

  restart() {
    this.nChars = this.nElements = 0; // sizes of the blocks before the last one: further text does not change them
    this.references = {};
  }

  /** Shows a text that begins with the one shown before. Until it is complete, only its last block is parsed again. */
  show(text, complete) {
    if (complete) this.restart(); // references may precede their definition
    const rest = text.replace(/\r\n?/g, "\n").slice(this.nChars);
    const tokens = parser.parse(complete ? rest : withoutOpenEnd(rest), this.references);
    const code = complete ? null : tokens.findLast((token) => token.type === "fence");
    if (code) code.meta = OPEN;
    const elements = [...build(tokens).children];
    merge(this.element, elements, this.nElements);
    const last = tokens.findLast((token) => token.level === 0 && token.nesting >= 0);
    if (!last) return;
    this.nElements += elements.length - 1;
    this.nChars += rest.split("\n", last.map[0]).reduce((n, line) => n + line.length + 1, 0);
  }
}

/** Makes a checkbox of the mark "[x]" that begins the text of a list item. `before`: the token two places before that text. */
function markTask(token, before) {
  const text = token.type === "inline" && before?.type === "list_item_open" && token.children[0];
  const mark = text && TASK.exec(text.content);
  if (!mark) return;
  before.attrSet("class", "task");
  text.content = text.content.slice(mark[0].length);
  token.children.unshift(Object.assign(new text.constructor("task", "input", 0), { info: mark[1] === " " ? "" : "done" }));
}

/** Returns an unfinished text without the marks at its end that wait for more text, and with code and bold text closed.
 *  So the part that is shown does not change its kind when the text goes on. */
function withoutOpenEnd(text) {
  if (text.match(FENCES)?.length % 2) return text; // the end lies in a block of code
  text = withoutOpenFormula(text).replace(TABLE_HEAD, "");
  const start = text.lastIndexOf("\n") + 1;
  const line = text.slice(start).replace(INLINE_MARKS, "").replace(LINE_MARKS, "").replace(LINK_ADDRESS, "$1");
  const open = ["`", "**"].find((mark) => line.split(mark).length % 2 === 0 && /^\S/.test(line.split(mark).at(-1)));
  return text.slice(0, start) + (open ? line.trimEnd() + open : line);
}

/** The elements of tokens, as a fragment. */
function build(tokens) {
  let at = document.createDocumentFragment();
  for (const token of tokens) {
    if (token.hidden) continue; // a paragraph in a list without empty lines
    if (token.nesting < 0) at = at.parentNode;
    else if (token.children) at.append(build(token.children)); // a picture's children are its description
    else {
      const node = nodeOf(token);
      at.append(node);
      if (token.nesting > 0) at = node;
    }
  }
  return at;
}

/** The element of a token, or the text of one that has none. */
function nodeOf(token) {
  const { type, tag, content, info, attrs, meta } = token;
  if (type === "formula") return formulaView(token);
  if (type === "task") return make("input", { type: "checkbox", disabled: true, checked: Boolean(info), ariaLabel: info ? "Done" : "To do" });
  if (!tag) return content;
  if (type === "fence" || type === "code_block") return codeBlock(info.trim().split(/\s/)[0], content.trimEnd(), meta === OPEN);
  const element = make(TAGS[tag] ?? tag, {}, content);
  for (const [name, value] of attrs ?? []) {
    if (name === "style") element.style.cssText = value; // a style attribute is against the page's policy
    else element.setAttribute(name, value);
  }
  if (tag === "a") Object.assign(element, { target: "_blank", rel: "noopener noreferrer" });
  return element;
}

/** Makes the children of `parent` from the given index on equal to `nodes`; those that are equal stay, with their
 *  selection and scroll position. */
function merge(parent, nodes, from = 0) {
  nodes.forEach((node, i) => {
    const old = parent.childNodes[from + i];
    if (!old) parent.append(node);
    else if (old.isEqualNode(node)) return;
    else if (node.hasChildNodes() && old.cloneNode().isEqualNode(node.cloneNode())) merge(old, [...node.childNodes]);
    else old.replaceWith(node);
  });
  while (parent.childNodes.length > from + nodes.length) parent.lastChild.remove();
}

/** Code with its language and a button. Of a block that is being written, the last line has no colours yet. */
export function codeBlock(language, text, open = false) {
  const end = open ? text.lastIndexOf("\n") + 1 : text.length;
  const code = make("code", {}, ...coloured(text.slice(0, end), language), text.slice(end));
  code.normalize();
  const label = make("span", {}, language || "text");
  const head = make("div", { className: "code-head" }, label, button("Copy", (event) => copy(code.textContent, event)));
  return make("div", { className: "code" }, head, make("pre", { tabIndex: 0 }, code)); // lines scroll by keyboard
}

let highlighter = null, fetching = null;

/** Fetches the highlighter, which is done with the first block of code; blocks are plain until then. */
export function load() {
  return (fetching ??= import("./vendor/highlight.min.js").then((module) => {
    highlighter = module.default;
    for (const block of document.querySelectorAll(".code")) {
      const code = block.querySelector("code");
      code.replaceChildren(...coloured(code.textContent, block.querySelector("span").textContent));
    }
  }));
}

/** The nodes of `text` in a language, by any of its names; the text where it is unknown. The highlighter's tree of scopes becomes
 *  spans: its HTML is not used. */
function coloured(text, language) {
  if (!highlighter) load();
  if (!text || !highlighter?.getLanguage(language)) return [text];
  const nodeOf = (found) =>
    typeof found === "string" ? found : make("span", { className: `hl-${found.scope?.split(/[.:]/)[0]}` }, ...found.children.map(nodeOf));
  return highlighter.highlight(text, { language, ignoreIllegals: true })._emitter.rootNode.children.map(nodeOf);
}
