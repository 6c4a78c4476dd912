// Shows Markdown, even while the text still grows. markdown-it parses the text into tokens, and elements and text nodes
// are built from the tokens. So a model's output is never parsed as HTML.

import { button, copy, make } from "./dom.js";
import { addFormulas, formulaView, withoutOpenFormula } from "./math.js";
import MarkdownIt from "./vendor/markdown-it.esm.min.mjs";

const parser = new MarkdownIt({ breaks: true, linkify: true });
parser.validateLink = (url) => /^(https?:\/\/|mailto:)/i.test(url);
parser.linkify.set({ fuzzyLink: false }); // no links from texts such as "main.py"
addFormulas(parser);
parser.core.ruler.after("inline", "tasks", ({ tokens }) => tokens.forEach((token, i) => markTask(token, tokens[i - 2])));

const TAGS = { h1: "h3", h2: "h3", h3: "h4", h5: "h4", h6: "h4" }; // the page itself uses h1 and h2

// Expressions that match the end of an unfinished text if the next characters may change its meaning.
const TABLE_HEAD = /(?<!^\|.*\n)^\|.*(\n[-|: \t]*)?$(?![^])/m;
const LINE_MARKS = /^[-+*=#`~_> \t]*(\d{1,9}[.)]?[*_`~ \t]*)?(\[[ xX]?\]?[ \t]*)?$/;
const INLINE_MARKS = /(?<![*_`~[\\])[*_`~[\\]+$/;
const LINK_ADDRESS = /!?\[([^[\]]*)\]\([^()\s]*$/;
const OPEN = { open: true }; // marks a code block whose text may still grow
const TASK = /^\[([ xX])\]\s/;
const FENCES = /^[-+*>\d.) \t]*(```|~~~)/gm;

/** Shows one growing text as Markdown in an element. */
export class Markdown {
  constructor(element) {
    this.element = element;
    this.restart();
  }

  restart() {
    this.nChars = this.nElements = 0; // characters and elements before the last block; further text changes neither
    this.references = {};
  }

  /** Shows `text`, which begins with the text of the last call. Parses only the text from the last block on, unless
   *  `complete` is true: then the whole text is parsed. */
  show(text, complete) {
    if (complete) this.restart(); // a link may come before the definition of its address
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

/** Replaces the mark "[x]" or "[ ]" at the beginning of a list item with a checkbox. `token`: the item's text.
 *  `before`: the token two places before, which begins the item. */
function markTask(token, before) {
  const text = token.type === "inline" && before?.type === "list_item_open" && token.children[0];
  const mark = text && TASK.exec(text.content);
  if (!mark) return;
  before.attrSet("class", "task");
  text.content = text.content.slice(mark[0].length);
  token.children.unshift(Object.assign(new text.constructor("task", "input", 0), { info: mark[1] === " " ? "" : "done" }));
}

/** Returns an unfinished text without marks at its end whose meaning depends on the next characters. Closes inline code
 *  or bold text that is still open in the last line. So the format of the shown text seldom changes when more text
 *  arrives. */
function withoutOpenEnd(text) {
  if (text.match(FENCES)?.length % 2) return text; // the text ends within a code block
  text = withoutOpenFormula(text).replace(TABLE_HEAD, "");
  const start = text.lastIndexOf("\n") + 1;
  const line = text.slice(start).replace(INLINE_MARKS, "").replace(LINE_MARKS, "").replace(LINK_ADDRESS, "$1");
  const open = ["`", "**"].find((mark) => line.split(mark).length % 2 === 0 && /^\S/.test(line.split(mark).at(-1)));
  return text.slice(0, start) + (open ? line.trimEnd() + open : line);
}

/** Returns a document fragment with the elements of the tokens. */
function build(tokens) {
  let at = document.createDocumentFragment();
  for (const token of tokens) {
    if (token.hidden) continue; // the paragraph token in an item of a list that has no empty lines
    if (token.nesting < 0) at = at.parentNode;
    else if (token.children) at.append(build(token.children)); // the children of a picture are its description, which is shown instead
    else {
      const node = nodeOf(token);
      at.append(node);
      if (token.nesting > 0) at = node;
    }
  }
  return at;
}

/** Returns the element of a token, or the token's text if it has no element. */
function nodeOf(token) {
  const { type, tag, content, info, attrs, meta } = token;
  if (type === "formula") return formulaView(token);
  if (type === "task") return make("input", { type: "checkbox", disabled: true, checked: Boolean(info), ariaLabel: info ? "Done" : "To do" });
  if (!tag) return content;
  if (type === "fence" || type === "code_block") return codeBlock(info.trim().split(/\s/)[0], content.trimEnd(), meta === OPEN);
  const element = make(TAGS[tag] ?? tag, {}, content);
  for (const [name, value] of attrs ?? []) {
    if (name === "style") element.style.cssText = value; // the page's security policy forbids the attribute `style`
    else element.setAttribute(name, value);
  }
  if (tag === "a") Object.assign(element, { target: "_blank", rel: "noopener noreferrer" });
  return element;
}

/** Replaces the children of `parent`, from index `from` on, with `nodes`. A child that is equal to its new node stays,
 *  and keeps its selection and scroll position. */
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

/** Returns a code block with the name of its language and a button that copies the code. If `open` is true, the code
 *  may still grow, and its last line has no colours yet. */
export function codeBlock(language, text, open = false) {
  const end = open ? text.lastIndexOf("\n") + 1 : text.length;
  const code = make("code", {}, ...coloured(text.slice(0, end), language), text.slice(end));
  code.normalize();
  const label = make("span", {}, language || "text");
  const head = make("div", { className: "code-head" }, label, button("Copy", (event) => copy(code.textContent, event)));
  return make("div", { className: "code" }, head, make("pre", { tabIndex: 0 }, code)); // tabIndex: the keyboard can scroll long lines
}

let highlighter = null, fetching = null;

/** Fetches the syntax highlighter and colours all code blocks of the page. Called for the first code block. Until the
 *  highlighter is there, code has no colours. */
export function load() {
  return (fetching ??= import("./vendor/highlight.min.js").then((module) => {
    highlighter = module.default;
    for (const block of document.querySelectorAll(".code")) {
      const code = block.querySelector("code");
      code.replaceChildren(...coloured(code.textContent, block.querySelector("span").textContent));
    }
  }));
}

/** Returns the nodes that show `text` with the colours of a language. `language` may be any of the language's names.
 *  Returns the plain text if the language is unknown, or until the highlighter is loaded. The highlighter's tree
 *  becomes span elements; its HTML output is not used. */
function coloured(text, language) {
  if (!highlighter) load();
  if (!text || !highlighter?.getLanguage(language)) return [text];
  const nodeOf = (found) =>
    typeof found === "string" ? found : make("span", { className: `hl-${found.scope?.split(/[.:]/)[0]}` }, ...found.children.map(nodeOf));
  return highlighter.highlight(text, { language, ignoreIllegals: true })._emitter.rootNode.children.map(nodeOf);
}
