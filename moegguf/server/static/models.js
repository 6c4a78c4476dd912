// The menu in which the user selects a model. Models in memory come first.

import { json } from "./api.js";
import { at, make } from "./dom.js";

const LAST = "moegguf.model";

export class Models {
  /** `onChange(model)` is called when another model is selected. `model` is the model's entry in /api/tags. */
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

  /** The entry of the selected model in /api/tags, or undefined if no model is selected. */
  get selected() {
    return this.entries.find(({ name }) => name === this.name);
  }

  has(name) {
    return this.entries.some((entry) => entry.name === name);
  }

  can(capability) {
    return this.selected?.capabilities.includes(capability) ?? false;
  }

  /** Reads the list of models. Selects the first of these that the menu has: the selected model, `wanted`, a model in
   *  memory, the model that the user selected last, the first model of the menu. Throws ApiError. */
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

  /** Selects a model. Does nothing if the list does not have it. */
  choose(name) {
    if (!this.has(name)) return;
    this.select.value = name;
    if (name !== this.shown) this.onChange(this.selected);
    this.shown = name;
  }

  /** Selects a model as if the user had selected it in the menu, so that the page remembers it. */
  pick(name) {
    this.select.value = name;
    this.select.dispatchEvent(new Event("change"));
  }

  /** Shows which models are in memory. `loaded`: their names. */
  mark(loaded) {
    if (loaded.join() === this.loaded.join()) return;
    this.loaded = loaded;
    this.list();
  }

  /** Shows the error in place of the list of models. */
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
