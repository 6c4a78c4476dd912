// The choice of a model: those in memory first.

import { json } from "./api.js";
import { at, make } from "./dom.js";

const LAST = "moegguf.model";

export class Models {
  /** `onChange(model)` is called when another one is selected, with its entry of /api/tags. */
  constructor(onChange) {
    Object.assign(this, { onChange, select: at("model"), all: [], entries: [], loaded: [] });
    this.select.addEventListener("change", () => {
      localStorage.setItem(LAST, this.name);
      this.shown = this.name;
      onChange(this.selected);
    });
  }

  get name() {
    return this.select.value;
  }

  /** The entry of the selected model; undefined without one. */
  get selected() {
    return this.entries.find(({ name }) => name === this.name);
  }

  has(name) {
    return this.entries.some((entry) => entry.name === name);
  }

  can(capability) {
    return this.selected?.capabilities.includes(capability) ?? false;
  }

  /** Reads the list. The selected model stays, if it is still there; the first one selected is `wanted`, or one in memory, or the
   *  last one used. Throws ApiError. */
  async refresh(wanted) {
    const [tags, ps] = await Promise.all(["api/tags", "api/ps"].map((path) => json(path)));
    this.all = tags.models;
    this.entries = this.all.filter(({ capabilities: all }) => !all.length || all.includes("completion"));
    this.loaded = ps.models.map(({ name }) => name);
    const last = localStorage.getItem(LAST), before = this.name;
    this.list();
    const known = (name) => this.has(name);
    const inMemory = this.loaded.includes(last) ? last : this.loaded.find(known);
    this.choose([before, wanted, inMemory, last, this.entries[0]?.name].find(known));
  }

  /** Selects a model, if it is there. */
  choose(name) {
    if (!this.has(name)) return;
    this.select.value = name;
    if (name !== this.shown) this.onChange(this.selected);
    this.shown = name;
  }

  /** Selects a model for the user. */
  pick(name) {
    this.select.value = name;
    this.select.dispatchEvent(new Event("change"));
  }

  /** Says which models are in memory. */
  mark(loaded) {
    if (loaded.join() === this.loaded.join()) return;
    this.loaded = loaded;
    this.list();
  }

  /** Says why there is no list. */
  fail(error) {
    this.all = this.entries = [];
    this.list(error.message);
  }

  list(problem = "No models yet") {
    const { select, name, loaded, entries } = this;
    const groups = [true, false].map((inMemory) => {
      const options = entries.filter((entry) => loaded.includes(entry.name) === inMemory).map((entry) => new Option(entry.name));
      return make("optgroup", { label: inMemory ? "In memory" : "On disk", hidden: !options.length }, ...options);
    });
    select.replaceChildren(...(entries.length ? groups : [new Option(problem)]));
    if (entries.length) select.value = name;
    select.disabled = !entries.length;
  }
}
