// The list of conversations: beside the chat on a wide screen, before it on a narrow one.

import { at, iconButton, make } from "./dom.js";
import { list, load, remove, save, search } from "./conversations.js";

const OPEN = "moegguf.list";
const TYPING_MS = 150; // messages are searched when no key was pressed for so long
const BEFORE = 24, AFTER = 60; // characters around the words that were found
const WIDE = matchMedia("(min-width: 1100px)");

export class Sidebar {
  /** `onRemove(id)`, `onRename(id, title)`: of any conversation. `onFound(words)` is called when the shown one is chosen again; to
   *  choose another one changes the address of the page. */
  constructor({ onRemove, onRename, onFound }) {
    Object.assign(this, { onRemove, onRename, onFound, element: at("conversations"), current: null, found: new Map() });
    at("open-list").addEventListener("click", () => this.toggle());
    at("close-list").addEventListener("click", () => this.element.close());
    at("filter").addEventListener("input", () => {
      clearTimeout(this.typing);
      this.typing = setTimeout(() => this.search(), TYPING_MS);
    });
    this.element.addEventListener("click", ({ target }) => target.closest("a") && this.choose(target.closest("a")));
    this.element.addEventListener("close", () => this.onToggle());
    WIDE.addEventListener("change", () => this.element.close());
    addEventListener("focus", () => this.refresh()); // another tab may have changed them
    if (WIDE.matches && localStorage.getItem(OPEN)) this.toggle();
  }

  toggle() {
    if (this.element.open) return this.element.close();
    if (WIDE.matches) this.element.show();
    else this.element.showModal();
    this.onToggle();
    return this.refresh();
  }

  onToggle() {
    at("open-list").setAttribute("aria-expanded", String(this.element.open));
    if (WIDE.matches) localStorage.setItem(OPEN, this.element.open ? "open" : "");
  }

  /** The words that are searched for. */
  get words() {
    return at("filter").value.trim().toLowerCase();
  }

  /** Opens the list to search in it. */
  find() {
    if (!this.element.open) this.toggle();
    at("filter").focus();
    at("filter").select();
  }

  async search() {
    const { words } = this;
    const found = words ? await search(words).catch(() => new Map()) : new Map();
    if (words !== this.words) return; // another search goes on
    this.found = found;
    this.draw();
  }

  choose(link) {
    this.leave();
    if (link.hash === `#${this.current}`) this.onFound(this.words);
  }

  /** Closes the list where it hides the chat. */
  leave() {
    if (!WIDE.matches) this.element.close();
  }

  /** Reads the conversations and shows `current`. `error` says why none are kept. */
  async refresh(current = this.current, error = undefined) {
    this.current = current;
    if (!this.element.open && !error) return;
    try {
      if (error) throw error;
      this.heads = await list();
      this.note = this.heads.length ? "" : "No conversations yet.";
    } catch (problem) {
      this.heads ??= [];
      this.note = `This browser keeps no conversations: ${problem.message}`;
    }
    if (this.words) this.search();
    else this.draw();
  }

  draw() {
    const { words, found } = this;
    const shown = this.heads.filter(({ id, title }) => title.toLowerCase().includes(words) || found.has(id));
    at("list-note").textContent = this.heads.length && !shown.length ? "Nothing found." : this.note;
    const drawn = JSON.stringify([this.current, words, ...shown.map(({ id, title }) => [id, title, found.has(id)])]);
    if (drawn === this.drawn) return; // the focus stays where it is
    this.drawn = drawn;
    at("list").replaceChildren(...shown.map((head) => this.item(head)));
    const link = at("list").querySelector(`a[href="#${this.current}"]`);
    if (link) link.ariaCurrent = "page";
  }

  item(head) {
    const { id, title } = head, place = this.found.get(id);
    const link = make("a", { href: `#${id}`, title }, title, ...(place ? [excerpt(place, this.words)] : []));
    const rename = iconButton("edit", `Rename “${title}”`, () => this.rename(head));
    return make("li", {}, link, rename, iconButton("delete", `Delete “${title}”`, () => this.remove(head)));
  }

  async rename(head) {
    const title = prompt("Title", head.title)?.trim();
    if (!title || title === head.title) return;
    await save({ ...(await load(head.id)), title });
    this.onRename(head.id, title);
    await this.refresh();
    at("list").querySelector(`a[href="#${head.id}"]`)?.focus();
  }

  async remove({ id, title }) {
    if (!confirm(`Delete “${title}”? It is kept in this browser only.`)) return;
    this.onRemove(id);
    await remove(id);
    await this.refresh();
    at("filter").focus();
  }
}

/** Returns the text around words that were found. */
function excerpt({ text, begin }, words) {
  const end = begin + words.length, before = text.slice(Math.max(0, begin - BEFORE), begin);
  const start = begin > BEFORE ? `…${before.replace(/^\S*\s/, "")}` : before;
  return make("small", {}, start, make("mark", {}, text.slice(begin, end)), text.slice(end, end + AFTER));
}
