// The list of conversations. It is beside the chat on a wide screen, and covers the chat on a narrow screen.

import { at, iconButton, make } from "./dom.js";
import { list, load, remove, save, search } from "./conversations.js";

const OPEN = "moegguf.list";
const TYPING_MS = 150; // milliseconds after the last key before messages are searched
const BEFORE = 24, AFTER = 60; // maximum number of characters that are shown before and after the words that were found
const WIDE = matchMedia("(min-width: 1100px)");

export class Sidebar {
  /** `onRemove(id)` and `onRename(id, title)` are called when a conversation is removed or renamed. `onFound(words)` is
   *  called when the shown conversation is chosen again. Choosing another conversation only changes the page's
   *  address. */
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
    addEventListener("focus", () => this.refresh()); // another tab may have changed conversations
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

  /** The words in the search field, in lower case. */
  get words() {
    return at("filter").value.trim().toLowerCase();
  }

  /** Opens the list and moves the focus to its search field. */
  find() {
    if (!this.element.open) this.toggle();
    at("filter").focus();
    at("filter").select();
  }

  async search() {
    const { words } = this;
    const found = words ? await search(words).catch(() => new Map()) : new Map();
    if (words !== this.words) return; // the user has typed other words, so another search follows
    this.found = found;
    this.draw();
  }

  choose(link) {
    this.leave();
    if (link.hash === `#${this.current}`) this.onFound(this.words);
  }

  /** Closes the list on a narrow screen, where it hides the chat. */
  leave() {
    if (!WIDE.matches) this.element.close();
  }

  /** Reads the list of conversations if it is open, and marks the conversation with id `current`. `error`: the reason
   *  why the browser stores no conversations; it is shown. */
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
    if (drawn === this.drawn) return; // nothing has changed, so the list keeps its focus
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

/** Returns an element with the words that were found, and the text around them. */
function excerpt({ text, begin }, words) {
  const end = begin + words.length, before = text.slice(Math.max(0, begin - BEFORE), begin);
  const start = begin > BEFORE ? `…${before.replace(/^\S*\s/, "")}` : before;
  return make("small", {}, start, make("mark", {}, text.slice(begin, end)), text.slice(end, end + AFTER));
}
