// Makes elements of the page, and formats numbers with their units.

const SVG = "http://www.w3.org/2000/svg";

export const at = (id) => document.getElementById(id);

/** Returns a new element with these properties and children. */
export function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Returns an element that shows the icon `name`, which index.html defines as a symbol. */
export function icon(name) {
  const picture = document.createElementNS(SVG, "svg"), use = document.createElementNS(SVG, "use");
  picture.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#icon-${name}`);
  picture.append(use);
  return picture;
}

/** Returns a button that shows an icon. */
export function iconButton(name, label, onClick) {
  return button(label, onClick, { className: "tool icon", title: label, ariaLabel: label }, icon(name));
}

/** Returns a button that shows `content` (default: the text `label`). */
export function button(label, onClick, properties = {}, content = label) {
  const element = make("button", { type: "button", ...properties }, content);
  element.addEventListener("click", onClick);
  return element;
}

/** Sets the height of a text field to the height of its text. */
export function grow(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

/** Copies a text to the clipboard, and marks the clicked button for 1.5 seconds. If the browser offers no clipboard, as
 *  on a page without TLS, copies by way of a text field. */
export async function copy(text, { currentTarget: from }) {
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else {
    const field = make("textarea", { className: "unseen", value: text });
    from.after(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    from.focus();
  }
  from.classList.add("done");
  at("status").textContent = "Copied"; // screen readers read this aloud
  setTimeout(() => from.classList.remove("done"), 1500);
}

/** Removes earlier highlights, and highlights `words` (in lower case) in the text nodes of an element without changing
 *  the nodes. If `element` is null, only removes the highlights. */
export function mark(element, words) {
  CSS.highlights?.delete("found");
  if (!element || !CSS.highlights) return;
  const ranges = [], texts = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode, text = node.data.toLowerCase();
    for (let i = text.indexOf(words); i >= 0; i = text.indexOf(words, i + words.length)) {
      const range = new Range();
      range.setStart(node, Math.min(i, node.length)); // the text in lower case may be longer
      range.setEnd(node, Math.min(i + words.length, node.length));
      ranges.push(range);
    }
  }
  CSS.highlights.set("found", new Highlight(...ranges));
}

export function count(n) {
  return n.toLocaleString("en-US");
}

/** Formats a number of bytes in decimal units: "3.42 MB". */
export function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; bytes >= 999.5 && unit < units.length - 1; unit += 1) bytes /= 1000;
  return `${unit ? digits(bytes) : Math.round(bytes)} ${units[unit]}`;
}

/** Formats a number with two decimal places below 10, one below 100, and none from 100 on: 1,700, 61.3, 4.20. */
export function digits(value) {
  if (value >= 1000) return count(Math.round(value));
  return value.toFixed(value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2);
}

/** Formats a share as a percentage, rounded down to one decimal place: "98.4 %". A share of 1 or more is "100 %". */
export function percent(share) {
  return `${share >= 1 ? "100" : (Math.floor(share * 1000) / 10).toFixed(1)} %`;
}

export function duration(seconds) {
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  return seconds < 60 ? `${seconds.toFixed(1)} s` : `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}
