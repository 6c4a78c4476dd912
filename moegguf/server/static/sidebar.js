// The list of conversations: beside the chat on a wide screen, before it on a narrow one.

import { at, iconButton, make } from "./dom.js";
import { list, load, remove, save } from "./conversations.js";

const OPEN = "moegguf.list";
const WIDE = matchMedia("(min-width: 1100px)");

export class Sidebar {
  /** `onRemove(id)`, `onRename(id, title)`: of any conversation. Choosing one changes the address of the page. */
  constructor({ onRemove, onRename }) {
    Object.assign(this, { onRemove, onRename, element: at("conversations"), current: null });
    at("open-list").addEventListener("click", () => this.toggle());
    at("close-list").addEventListener("click", () => this.element.close());
    at("filter").addEventListener("input", () => this.draw());
    this.element.addEventListener("click", ({ target }) => target.closest("a") && this.leave());
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

  /** Closes the list where it hides the chat. */
  leave() {
    if (!WIDE.matches) this.element.close();
  }

  /** Reads the conversations, of which `current` is shown. `error`: why none are kept. */
  async refresh(current = this.current, error = undefined) {
    this.current = current;
    if (!this.element.open && !error) return;
    try {
      if (error) throw error;
      this.heads = await list();
      at("list-note").textContent = this.heads.length ? "" : "No conversations yet.";
    } catch (problem) {
      this.heads ??= [];
      at("list-note").textContent = `This browser keeps no conversations: ${problem.message}`;
    }
    this.draw();
  }

  draw() {
    const wanted = at("filter").value.trim().toLowerCase();
    const shown = this.heads.filter(({ title }) => title.toLowerCase().includes(wanted));
    const drawn = JSON.stringify([this.current, ...shown.map(({ id, title }) => [id, title])]);
    if (drawn === this.drawn) return; // the focus stays where it is
    this.drawn = drawn;
    at("list").replaceChildren(...shown.map((head) => this.item(head)));
    const link = at("list").querySelector(`a[href="#${this.current}"]`);
    if (link) link.ariaCurrent = "page";
  }

  item(head) {
    const { id, title } = head, link = make("a", { href: `#${id}`, title }, title);
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
