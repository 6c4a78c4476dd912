// The panel beside the chat: the map, three lines over time and the totals, fed by the views of the chosen model.

import { Chart } from "./chart.js";
import { count, digits, duration, percent, size } from "./format.js";
import { Live } from "./live.js";
import { ExpertMap } from "./map.js";

const at = (id) => document.getElementById(id);
const WINDOW = 8; // views that a point on a line is about
const PAUSE_MS = 1500;

export class Panel {
  constructor() {
    const [absent, arriving, loaded, resident, hit] = document.querySelectorAll(".legend .key");
    this.map = new ExpertMap(at("map"), { absent, arriving, resident, hit, loaded }, tell);
    const joined = ([value, unit]) => `${value} ${unit}`;
    this.charts = {
      hit: new Chart(at("hit-chart"), { most: 1, name: (value) => joined(percent(value)) }),
      bytes: new Chart(at("bytes-chart"), { name: (value) => joined(size(value)) }),
      speed: new Chart(at("speed-chart"), { name: (value) => `${digits(value)} t/s` }),
    };
    this.live = new Live({ onLine: (line) => this.take(line), onLost: (error) => this.lost(error) });
    this.recent = [];
    tell(null);
    this.fold();
  }

  /** Shows another model; its map appears as soon as it is in memory. */
  watch(model) {
    this.model = model;
    this.reset("Not in memory yet. The first message loads it.");
    this.live.watch(model);
  }

  recolour() {
    this.map.readColours();
    Object.values(this.charts).forEach((chart) => chart.draw());
  }

  take(line) {
    if (line.state !== undefined) return this.show(line);
    if (line.error) return this.lost(new Error(line.error));
    if (line.loaded_models && !line.loaded_models.includes(this.model)) this.reset("Not in memory. The next message loads it.");
  }

  lost(error) {
    this.reset(error.status === 401 ? "The server asks for a key." : "The server does not answer. Trying again.");
  }

  reset(note) {
    at("map-note").textContent = note;
    this.recent = [];
    this.map.clear();
    Object.values(this.charts).forEach((chart) => chart.clear());
    document.querySelectorAll(".panel output, .totals dd").forEach((element) => (element.textContent = "–"));
    at("resident").textContent = "";
  }

  show(view) {
    const { stats } = view;
    at("map-note").textContent = view.layers.length ? "" : "This model has no experts.";
    if (view.layers.length) this.map.update(view);
    const there = this.map.cells?.there ?? 0, all = this.map.cells?.state.length ?? 0;
    at("resident").textContent = all ? `${count(there)} of ${count(all)} in memory, ${joinedSize(stats.pool_bytes)}` : "";
    at("map").setAttribute("aria-label", `Map of experts: ${all} experts in ${view.layers.length} layers, ${there} in memory. Arrow keys move from cell to cell.`);
    this.plot(view);
    this.total(view);
  }

  /** A point on each line, when something was computed since the view before: of the last moment, not of that view
   *  alone, since bytes of a token may come in one view and the token in the next. */
  plot({ stats, tokens_per_s: speed }) {
    const last = this.recent.at(-1), now = performance.now();
    if (last && stats.tokens === last.stats.tokens && stats.lookups === last.stats.lookups) return;
    if (last && stats.tokens < last.stats.tokens) this.recent = []; // loaded anew
    else if (last && now - last.at > PAUSE_MS) this.recent = [last]; // another answer
    const before = this.recent[0]?.stats;
    this.recent.push({ stats, at: now });
    if (this.recent.length > WINDOW) this.recent.shift();
    if (!before) return;
    const tokens = stats.tokens - before.tokens, lookups = stats.lookups - before.lookups;
    if (lookups > 0) this.mark("hit", (hits(stats) - hits(before)) / lookups, percent);
    if (tokens > 0) this.mark("bytes", (stats.bytes_read - before.bytes_read) / tokens, size);
    if (speed > 0) this.mark("speed", speed, (value) => [digits(value), "t/s"]);
  }

  mark(name, value, words) {
    this.charts[name].push(value);
    const [number, unit] = words(value), small = document.createElement("small");
    small.textContent = unit;
    at(`${name}-value`).replaceChildren(number, small);
  }

  total({ stats, loaded }) {
    at("total-tokens").textContent = count(stats.tokens);
    at("total-hits").textContent = stats.lookups ? percent(hits(stats) / stats.lookups).join(" ") : "–";
    at("total-read").textContent = joinedSize(stats.bytes_read);
    at("total-stall").textContent = duration(stats.stall_s);
    at("total-queue").textContent = count(loaded?.queue ?? 0);
  }

  fold() {
    const button = at("fold");
    button.addEventListener("click", () => {
      const folded = button.closest(".panel").classList.toggle("folded");
      button.setAttribute("aria-expanded", String(!folded));
    });
  }
}

function joinedSize(n) {
  return size(n).join(" ");
}

function hits(stats) {
  return stats.hits_ready + stats.hits_late;
}

/** The line below the map. */
function tell(cell) {
  const line = at("cell");
  if (!cell) {
    line.replaceChildren();
    return;
  }
  const name = document.createElement("b");
  name.textContent = `Layer ${cell.il}, expert ${cell.expert}`;
  const since = document.createElement("small");
  since.textContent = " while you watch";
  line.replaceChildren(name, `: ${cell.place}, used ${count(cell.used)}×, fetched ${count(cell.fetched)}×`, since);
}
