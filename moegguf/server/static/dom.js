// Elements of the page.

const SVG = "http://www.w3.org/2000/svg";

export const at = (id) => document.getElementById(id);

/** A new element with properties and children. */
export function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** A button with one of the pictures of index.html. */
export function iconButton(name, label, onClick) {
  const picture = document.createElementNS(SVG, "svg"), use = document.createElementNS(SVG, "use");
  picture.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#icon-${name}`);
  picture.append(use);
  return button(label, onClick, { className: "tool icon", title: label, ariaLabel: label }, picture);
}

/** A button with a text, or with `content`. */
export function button(label, onClick, properties = {}, content = label) {
  const element = make("button", { type: "button", ...properties }, content);
  element.addEventListener("click", onClick);
  return element;
}

/** Gives a text field the height of its text. */
export function grow(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

/** Copies a text, also where the browser has no clipboard for a page without TLS, and marks the button for a while. */
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
  at("status").textContent = "Copied"; // for a screen reader
  setTimeout(() => from.classList.remove("done"), 1500);
}
