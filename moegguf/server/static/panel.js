// The panel beside the chat: map, charts and totals, from the snapshots of the selected model.

import { Live } from "./api.js";
import { Budget } from "./budget.js";
import { at, count, digits, duration, make, percent, size } from "./dom.js";
import { ExpertMap, IN_RAM, IN_VRAM } from "./map.js";

const WINDOW = 8; // snapshots per point of a chart
const PAUSE_MS = 1500;
const CHART_LENGTH = 90; // the picture's width is one less, its height is 1
const FOLDED = "moegguf.map"; // "folded" or "open", once it was chosen; else folded on a phone
const NOTHING = { tokens: 0, lookups: 0, hits_ready: 0, hits_late: 0, bytes_read: 0 }; // counts just after a load

export class Panel {
  /** `onLoaded(names, loading)` is called with the models in memory, and with the share that was read of those being loaded. */
  constructor(onLoaded) {
    const [absent, loading, loaded, ram, vram, hit] = document.querySelectorAll(".legend .key");
    this.map = new ExpertMap(at("map"), [absent, loading, ram, vram, hit, loaded], showCell);
    this.charts = {
      hit: new Chart(at("hit-chart"), percent, 1),
      bytes: new Chart(at("bytes-chart"), size),
      speed: new Chart(at("speed-chart"), (value) => `${digits(value)} t/s`),
    };
    this.onLoaded = onLoaded;
    this.budget = new Budget();
    this.live = new Live({ onLine: (line) => this.take(line), onLost: (error) => this.disconnect(error) });
    showCell(null);
    const chosen = localStorage.getItem(FOLDED);
    fold(chosen ? chosen === "folded" : matchMedia("(max-width: 860px)").matches);
    at("fold").addEventListener("click", () => localStorage.setItem(FOLDED, fold() ? "folded" : "open"));
  }

  /** Selects a model; its map appears when it is in memory. */
  watch(model) {
    this.model = model;
    this.reset("Not in memory yet. The first message loads it.");
    this.live.watch(model);
  }

  take(line) {
    if (line.state !== undefined) return this.show(line);
    if (line.error) return this.disconnect(new Error(line.error));
    const { loaded_models: names, loading = {} } = line, share = loading[this.model];
    if (names) this.onLoaded(names, loading);
    if (names && !names.includes(this.model)) {
      this.reset(share === undefined ? "Not in memory. The next message loads it." : `Loading: ${Math.floor(100 * share)} %`);
      this.begin = NOTHING;
    }
  }

  disconnect(error) {
    this.reset(error.status === 401 ? "The server requires an API key." : "The server is not reachable. Trying again.");
  }

  reset(note) {
    at("map-note").textContent = note;
    this.recent = [];
    this.begin = this.last = null;
    this.map.clear();
    Object.values(this.charts).forEach((chart) => chart.clear());
    document.querySelectorAll(".panel output, .totals dd").forEach((element) => (element.textContent = "–"));
    at("resident").textContent = "";
    this.budget.show(null);
    showTiers([], {}, false);
  }

  show(snapshot) {
    const { stats, layers, busy, loaded, tokens_per_s: speed } = snapshot, tiers = stats.tiers ?? [];
    at("map-note").textContent = layers.length ? "" : "This model has no experts.";
    if (layers.length) this.map.update(snapshot);
    const all = this.map.count(), where = all ? this.where(tiers) : "";
    at("resident").textContent = where && `${where}, ${size(stats.pool_bytes)}`;
    at("map").setAttribute("aria-label", `Map of experts: ${all} experts in ${layers.length} layers, ${where}. Arrow keys move from cell to cell.`);
    showTiers(tiers, stats, this.map.count(IN_VRAM) > 0);
    // Numbers beside the charts cover the current answer, as the line below it does: `begin` is from before it.
    if (!this.begin) this.begin = stats; // it began before this page was opened
    else if (stats.tokens < this.begin.tokens) this.begin = NOTHING; // reloaded
    else if (busy && this.last && !this.last.busy) this.begin = this.last.stats;
    this.plot(snapshot);
    const { hitRate, bytesPerToken } = figures(this.begin, stats);
    if (hitRate !== undefined) showValue("hit", percent(hitRate));
    if (bytesPerToken !== undefined) showValue("bytes", size(bytesPerToken));
    // The speed while an answer is written, and then the speed of the whole answer, as /api/ps has it.
    const { last_answer_tokens: tokens, last_answer_s: seconds, queue = 0 } = loaded ?? {};
    if (seconds && seconds !== this.last?.loaded?.last_answer_s) showValue("speed", `${digits(tokens / seconds)} t/s`);
    else if (busy && speed > 0) showValue("speed", `${digits(speed)} t/s`);
    const totals = { tokens: count(stats.tokens), read: size(stats.bytes_read), stall: duration(stats.stall_s), queue: count(queue) };
    for (const [name, text] of Object.entries(totals)) at(`total-${name}`).textContent = text;
    this.budget.show(loaded);
    this.last = snapshot;
  }

  /** Returns the number of experts in VRAM, and the number in RAM only. */
  where([first]) {
    const [all, inRam, inVram] = [undefined, IN_RAM, IN_VRAM].map((state) => count(this.map.count(state)));
    if (first?.name === "VRAM") return `${inVram} of ${all} in VRAM, ${inRam} in RAM only`;
    return this.map.count(IN_VRAM) ? `${inRam} of ${all} in RAM, ${inVram} in VRAM` : `${inRam} of ${all} in memory`;
  }

  /** Adds a point to each chart if the model computed since the snapshot before. A point covers the last WINDOW
   *  snapshots: bytes of a token may be in one snapshot and the token in the next. */
  plot({ stats, tokens_per_s: speed }) {
    const last = this.recent.at(-1), now = performance.now();
    if (last && stats.tokens === last.stats.tokens && stats.lookups === last.stats.lookups) return;
    if (last && stats.tokens < last.stats.tokens) this.recent = []; // reloaded
    else if (last && now - last.at > PAUSE_MS) this.recent = [last]; // another answer
    const before = this.recent[0]?.stats;
    this.recent.push({ stats, at: now });
    if (this.recent.length > WINDOW) this.recent.shift();
    if (!before) return;
    const { hitRate, bytesPerToken } = figures(before, stats);
    if (hitRate !== undefined) this.charts.hit.push(hitRate);
    if (bytesPerToken !== undefined) this.charts.bytes.push(bytesPerToken);
    if (speed > 0) this.charts.speed.push(speed);
  }
}

/** A line over time, one point per snapshot in which the model computed. `plot`: an element with a label at the top, a picture of an
 *  area, a line and a dot, and a label at zero; `max`: top of the scale, by default a round number not below the largest point;
 *  `format(value)` labels it. */
class Chart {
  constructor(plot, format, max) {
    [this.top, { children: this.shapes }, this.zero] = plot.children;
    Object.assign(this, { max, format });
    this.clear();
  }

  clear() {
    this.points = [];
    this.draw();
  }

  push(value) {
    this.points = [...this.points, value].slice(-CHART_LENGTH);
    this.draw();
  }

  draw() {
    const { points } = this, max = this.max ?? roundUp(Math.max(...points)), begin = CHART_LENGTH - points.length;
    const line = points.map((value, i) => [begin + i, 1 - value / max]), last = line.slice(-1);
    this.top.textContent = points.length ? this.format(max).replace(/\.0+(?!\d)/, "") : "";
    this.zero.textContent = points.length ? "0" : "";
    [[[begin, 1], ...line, [CHART_LENGTH - 1, 1]], line, [...last, ...last]].forEach((places, i) => {
      this.shapes[i].setAttribute("points", places.join(" "));
    });
  }
}

/** The smallest of 1, 2, 5, 10, 20, 50, ... not below the value. */
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * ([1, 2, 5].find((n) => n * power >= value) ?? 10);
}

function hits(stats) {
  return stats.hits_ready + stats.hits_late;
}

/** Returns the figures between two snapshots. A figure is missing where nothing was computed. */
function figures(before, stats) {
  const lookups = stats.lookups - before.lookups, tokens = stats.tokens - before.tokens;
  return {
    hitRate: lookups > 0 ? (hits(stats) - hits(before)) / lookups : undefined,
    bytesPerToken: tokens > 0 ? (stats.bytes_read - before.bytes_read) / tokens : undefined,
  };
}

/** Shows the number beside a chart, "61.3 t/s". */
function showValue(name, text) {
  const [number, unit] = text.split(" ");
  at(`${name}-value`).replaceChildren(number, make("small", {}, unit));
}

/** Folds the panel or unfolds it, by default the other of them; returns whether it is folded now. */
function fold(folded) {
  const now = at("fold").closest(".panel").classList.toggle("folded", folded);
  at("fold").setAttribute("aria-expanded", String(!now));
  return now;
}

/** Shows a line for each tier where layers compute in VRAM, and the legend of the cells. A further line has the bytes that
 *  prompts copied into staging tensors, and the share of them that was copied while layers computed. */
function showTiers(tiers, { staging_bytes: memory, bytes_staged: copied, staging_overlap: overlap }, anyInVram) {
  const inVram = tiers[0]?.name === "VRAM";
  at("tiers").hidden = !inVram;
  at("vram-key").hidden = !inVram && !anyInVram;
  at("ram-name").textContent = inVram || anyInVram ? "in RAM" : "in memory";
  at("tiers").tBodies[0].replaceChildren(...(inVram ? tiers : []).map((tier) => {
    const rate = tier.lookups ? percent(hits(tier) / tier.lookups) : "–", slots = `${count(tier.slots_used)} of ${count(tier.n_slots)}`;
    const texts = [tier.name, slots, rate, size(tier.bytes_missed + tier.bytes_prefetched), count(tier.evictions), duration(tier.stall_s)];
    return make("tr", {}, ...texts.map((text) => make("td", {}, text)));
  }));
  const meanwhile = copied ? `, ${percent(overlap)} of the time while computing` : "";
  at("staging").hidden = !memory;
  at("staging").textContent = memory ? `Prompts staged: ${size(copied)} through ${size(memory)}${meanwhile}` : "";
}

/** Shows the state of a cell below the map. */
function showCell(cell) {
  if (!cell) return at("cell").replaceChildren();
  const name = make("b", {}, `Layer ${cell.il}, expert ${cell.expert}`);
  const text = `: ${cell.stateName}, used ${count(cell.used)}×, fetched ${count(cell.fetched)}×`;
  at("cell").replaceChildren(name, text, make("small", {}, " while you watch"));
}
