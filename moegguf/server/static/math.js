// LaTeX formulas in Markdown: finds where a formula begins and ends, and shows it with KaTeX.

import { make } from "./dom.js";

const CLOSING = { $$: "$$", "\\[": "\\]", "\\(": "\\)", $: "$" };
const APART = ["$$", "\\["]; // a formula that begins with one of these is shown on its own line
const LONGEST = 4000; // largest number of characters in a formula
const BLANK_LINE = /\n[ \t]*\n/;
const MAX_BLOCK_LINES = 100;
const CODE_OR_MARK = /(`+)[^`]+(\1|$)|\\[^]|\$\$?/g;
const MAX_DEPTH = 200; // largest depth of nested elements; browsers limit the depth of a layout, and a formula in a book has 40
const OPTIONS = { throwOnError: true, strict: "ignore", trust: false, maxSize: 20, maxExpand: 200 };

/** Returns the formula that begins at position `start`: its source, its end, `apart` (true if it gets its own line),
 *  and its opening mark. `end` is undefined if the closing mark is missing. Returns undefined if there is no formula,
 *  as at "$5". */
function formulaAt(text, start) {
  const opening = Object.keys(CLOSING).find((mark) => text.startsWith(mark, start));
  if (!opening) return undefined;
  const begin = start + opening.length, close = indexOfMark(text, CLOSING[opening], begin);
  const source = text.slice(begin, close < 0 ? text.length : close);
  if (source.length > LONGEST || BLANK_LINE.test(source)) return undefined;
  const end = close < 0 ? undefined : close + opening.length;
  if (end ? !source.trim() : isProse(source)) return undefined;
  if (opening === "$" && !isBetweenDollars(source, text[start - 1], end && (text[end] ?? ""))) return undefined;
  return { source, end, apart: APART.includes(opening), opening };
}

/** Returns true if `source` consists of words without any sign of a formula, such as the text between the dollar signs
 *  of "$5 or 10$". */
function isProse(source) {
  return /[a-z]{2}/i.test(source) && /\s/.test(source) && !/[\\^_={}]/.test(source);
}

/** Returns true if `source`, between single dollar signs, is a formula. `before` and `after` are the characters around
 *  the dollar signs. `after` is undefined if the closing dollar sign is missing. */
function isBetweenDollars(source, before, after) {
  if (/[\w$]/.test(before ?? "") || /^\s|\n/.test(source) || isProse(source)) return false;
  if (after === undefined) return true;
  const isVariable = /^[a-z]{2}/i.test(source) && /[a-z]/.test(after); // variables of a shell ("$path/$file"), but not "$n$th"
  return !isVariable && !/\s$/.test(source) && !/[\dA-Z_$]/.test(after);
}

/** Returns the index of the first `mark`, from index `from` on, that no backslash escapes. Returns -1 if there is
 *  none. */
function indexOfMark(text, mark, from) {
  let i = text.indexOf(mark, from);
  while (i >= 0 && isEscaped(text, i)) i = text.indexOf(mark, i + 1);
  return i;
}

function isEscaped(text, i) {
  let n = 0;
  while (text[i - 1 - n] === "\\") n += 1;
  return n % 2 === 1;
}

/** Returns an unfinished text without the formula at its end, if that formula may still change. A formula "$x$" at the
 *  very end may change, because the next character decides if it is a formula. */
export function withoutOpenFormula(text) {
  const marks = new RegExp(CODE_OR_MARK);
  marks.lastIndex = text.lastIndexOf("\n\n") + 1;
  for (let found; (found = marks.exec(text)); ) {
    const formula = formulaAt(text, found.index);
    if (formula && (!formula.end || (formula.opening === "$" && formula.end === text.length))) return text.slice(0, found.index);
    if (formula) marks.lastIndex = formula.end;
  }
  return text;
}

/** Adds rules to a markdown-it parser that turn each formula into a token of type "formula". */
export function addFormulas(parser) {
  const push = (state, { source, apart, opening }) =>
    Object.assign(state.push("formula", "", 0), { content: source, block: apart, markup: opening });
  parser.inline.ruler.before("escape", "formula", (state, silent) => {
    const formula = formulaAt(state.src, state.pos);
    if (!formula?.end) return false;
    if (!silent) push(state, formula);
    state.pos = formula.end;
    return true;
  });
  const block = (state, first, last, silent) => {
    const begin = state.bMarks[first] + state.tShift[first];
    if (!APART.includes(state.src.slice(begin, begin + 2))) return false;
    const text = state.getLines(first, Math.min(last, first + MAX_BLOCK_LINES), state.blkIndent, false).trimStart();
    const formula = formulaAt(text, 0);
    if (!formula?.end || /^[^\n]*\S/.test(text.slice(formula.end))) return false;
    if (silent) return true;
    state.line = first + text.slice(0, formula.end).split("\n").length;
    push(state, formula).map = [first, state.line];
    return true;
  };
  parser.block.ruler.before("fence", "formula", block, { alt: ["paragraph", "reference", "blockquote", "list"] });
}

let katex = null, fetching = null;
const waiting = []; // functions that each draw a formula once KaTeX is loaded

/** Returns an element that shows a formula. Until KaTeX is loaded, and if the formula cannot be drawn, the element
 *  shows the formula's source. */
export function formulaView({ content: source, block: apart, markup: opening }) {
  const shown = make("code", {}, opening + source + CLOSING[opening]);
  const element = make("span", apart ? { className: "formula apart", tabIndex: 0 } : { className: "formula" }, shown); // tabIndex: the keyboard can scroll a wide formula
  const draw = () => {
    try {
      const drawn = make("span");
      katex.render(source, drawn, { ...OPTIONS, displayMode: apart });
      if (depthOf(drawn) > MAX_DEPTH) throw new Error("The formula is nested too deeply.");
      element.replaceChildren(...drawn.childNodes);
    } catch (error) {
      shown.title = error.message;
      element.replaceChildren(shown);
    }
  };
  if (katex) draw();
  else {
    waiting.push(draw);
    load();
  }
  return element;
}

function depthOf(element) {
  return 1 + Math.max(0, ...Array.from(element.children, depthOf));
}

/** Fetches KaTeX and its style sheet, then draws the formulas that wait for it. Called for the first formula. */
export function load() {
  return (fetching ??= Promise.all([import("./vendor/katex.min.js"), style()]).then(() => {
    ({ katex } = globalThis); // the file sets a global variable, because it is not a module
    waiting.splice(0).forEach((draw) => draw());
  }));
}

function style() {
  const link = make("link", { rel: "stylesheet", href: "page/vendor/katex.min.css" });
  document.head.append(link);
  return new Promise((resolve) => link.addEventListener("load", resolve));
}
