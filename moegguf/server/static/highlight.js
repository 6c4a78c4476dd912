// Colours of code, as elements: the highlighter's tree of scopes becomes spans, its HTML is not used. It is fetched with the
// first block of code, which is plain until then.

import { make } from "./dom.js";

let highlighter = null, fetching = null;

/** Resolves when code can be coloured. */
export function load() {
  return (fetching ??= import("./vendor/highlight.min.js").then((module) => {
    highlighter = module.default;
    for (const block of document.querySelectorAll(".code")) {
      const code = block.querySelector("code");
      code.replaceChildren(...coloured(code.textContent, block.querySelector("span").textContent));
    }
  }));
}

/** The nodes of `text` in a language, by any of its names; the text where it is unknown. */
export function coloured(text, language) {
  if (!highlighter) load();
  if (!text || !highlighter?.getLanguage(language)) return [text];
  return highlighter.highlight(text, { language, ignoreIllegals: true })._emitter.rootNode.children.map(nodeOf);
}

function nodeOf(found) {
  if (typeof found === "string") return found;
  return make("span", { className: `hl-${found.scope?.split(/[.:]/)[0]}` }, ...found.children.map(nodeOf));
}
