// The panel beside the chat. It shows a map, charts and totals from the snapshots of the selected model.

import { Live } from "./api.js";
import { Budget } from "./budget.js";
import { at, count, digits, duration, make, percent, size } from "./dom.js";
import { ExpertMap, IN_RAM, IN_VRAM } from "./map.js";

const WINDOW = 8; // maximum number of snapshots that a point of a chart covers
const PAUSE_MS = 1500;
// Maximum number of points in a chart. In index.html, the `viewBox` of a chart's picture is CHART_LENGTH - 1 wide and 1
// high.
const CHART_LENGTH = 90;
const FOLDED = "moegguf.map"; // key in localStorage: "folded" or "open"; without it, the panel is folded on a narrow screen
const NOTHING = { tokens: 0, lookups: 0, hits_ready: 0, hits_late: 0, bytes_read: 0 }; // the statistics of a model that was just loaded

export class Panel {
  /** `onLoaded(names, loading)` is called with the names of the models in memory, and with {name: share that was read}
   *  of the models that are being loaded. */
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

  /** Shows the model with this name. Its map appears when the model is in memory. */
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
    document.body.classList.toggle("dense", !layers.length);
    at("map-note").textContent = layers.length ? "" : "This model has no experts.";
    if (layers.length) this.map.update(snapshot);
    const all = this.map.count(), where = all ? this.where(tiers) : "";
    at("resident").textContent = where && `${where}, ${size(stats.pool_bytes)}`;
    at("map").setAttribute("aria-label", `Map of experts: ${all} experts in ${layers.length} layers, ${where}. Arrow keys move from cell to cell.`);
    showTiers(tiers, stats, this.map.count(IN_VRAM) > 0);
    // While an answer is written, the numbers beside the charts cover the part that is written. `begin` has the
    // statistics from before this answer.
    if (!this.begin) this.begin = stats; // the answer may have begun before the page showed the model
    else if (stats.tokens < this.begin.tokens) this.begin = NOTHING; // the model was loaded again
    else if (busy && this.last && !this.last.busy) this.begin = this.last.stats;
    this.plot(snapshot);
    const { last_answer_tokens: tokens, last_answer_s: seconds, last_answer_stats: ofAnswer, queue = 0 } = loaded ?? {};
    if (seconds && seconds !== this.last?.loaded?.last_answer_s) {
      // The answer has ended. These are the numbers below its text.
      showFigures(ofAnswer.lookups ? { hitRate: ofAnswer.hit_rate, bytesPerToken: ofAnswer.bytes_per_token } : {}, tokens / seconds);
    } else if (busy && stats.tokens !== this.last?.stats.tokens) showFigures(figures(this.begin, stats), speed);
    const totals = { tokens: count(stats.tokens), read: size(stats.bytes_read), stall: duration(stats.stall_s), queue: count(queue) };
    for (const [name, text] of Object.entries(totals)) at(`total-${name}`).textContent = text;
    this.budget.show(loaded);
    this.last = snapshot;
  }

  /** Returns a string with the number of experts in each tier, such as "5 of 8 in VRAM, 2 in RAM only". `first`: the
   *  first tier of the statistics. */
  where([first]) {
    const [all, inRam, inVram] = [undefined, IN_RAM, IN_VRAM].map((state) => count(this.map.count(state)));
    if (first?.name === "VRAM") return `${inVram} of ${all} in VRAM, ${inRam} in RAM only`;
    return this.map.count(IN_VRAM) ? `${inRam} of ${all} in RAM, ${inVram} in VRAM` : `${inRam} of ${all} in memory`;
  }

  /** Adds a point to each chart that has a new value, if the model has computed since the last snapshot. A point covers
   *  up to WINDOW snapshots, because a token's bytes and the token itself may be counted in different snapshots. */
  plot({ stats, tokens_per_s: speed }) {
    const last = this.recent.at(-1), now = performance.now();
    if (last && stats.tokens === last.stats.tokens && stats.lookups === last.stats.lookups) return;
    if (last && stats.tokens < last.stats.tokens) this.recent = []; // the model was loaded again
    else if (last && now - last.at > PAUSE_MS) this.recent = [last]; // a pause: the next point belongs to another answer
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

/** A chart of the last CHART_LENGTH values. `plot`: an element whose children are the label at the top, the picture (an
 *  area, a line and a dot), and the label at zero. `format(value)` returns the text of the top label. `max`: top of the
 *  scale; by default a round number that is not below the largest point. */
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
    const { points } = this, max = this.max ?? roundUp(Math.max(0, ...points)), begin = CHART_LENGTH - points.length;
    const line = points.map((value, i) => [begin + i, 1 - value / (max || 1)]), last = line.slice(-1);
    this.top.textContent = points.length && max ? this.format(max).replace(/\.0+(?!\d)/, "") : "";
    this.zero.textContent = points.length ? "0" : "";
    [[[begin, 1], ...line, [CHART_LENGTH - 1, 1]], line, [...last, ...last]].forEach((places, i) => {
      this.shapes[i].setAttribute("points", places.join(" "));
    });
  }
}

/** Returns the smallest of 1, 2, 5, 10, 20, 50, ... (or 0.5, 0.2, 0.1, ...) that is not below `value`. Returns 0 if
 *  `value` is 0. */
function roundUp(value) {
  if (!value) return 0;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * ([1, 2, 5].find((n) => n * power >= value) ?? 10);
}

function hits(stats) {
  return stats.hits_ready + stats.hits_late;
}

/** Returns the hit rate and the bytes read per token between two snapshots. A number is undefined if nothing was
 *  computed for it. */
function figures(before, stats) {
  const lookups = stats.lookups - before.lookups, tokens = stats.tokens - before.tokens;
  return {
    hitRate: lookups > 0 ? (hits(stats) - hits(before)) / lookups : undefined,
    bytesPerToken: tokens > 0 ? (stats.bytes_read - before.bytes_read) / tokens : undefined,
  };
}

/** Shows the numbers beside the charts. A number that is undefined, and a speed of 0, change nothing. */
function showFigures({ hitRate, bytesPerToken }, speed) {
  if (hitRate !== undefined) showValue("hit", percent(hitRate));
  if (bytesPerToken !== undefined) showValue("bytes", size(bytesPerToken));
  if (speed > 0) showValue("speed", `${digits(speed)} t/s`);
}

/** Shows a number with its unit beside a chart, such as "61.3 t/s". */
function showValue(name, text) {
  const [number, unit] = text.split(" ");
  at(`${name}-value`).replaceChildren(number, make("small", {}, unit));
}

/** Folds the panel if `folded` is true, unfolds it if false, and changes its state if undefined. Returns true if the
 *  panel is then folded. */
function fold(folded) {
  const now = at("fold").closest(".panel").classList.toggle("folded", folded);
  at("fold").setAttribute("aria-expanded", String(!now));
  return now;
}

/** Shows the statistics of each tier if layers compute from slots in VRAM, and adapts the legend of the map. If prompts
 *  are staged, also shows the bytes that were copied into staging tensors, and the share of the copying time in which
 *  no layer waited. */
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

/** Shows the state and the counts of a cell below the map. `cell` is null if no cell is pointed at. */
function showCell(cell) {
  if (!cell) return at("cell").replaceChildren();
  const name = make("b", {}, `Layer ${cell.il}, expert ${cell.expert}`);
  const text = `: ${cell.stateName}, used ${count(cell.used)}×, fetched ${count(cell.fetched)}×`;
  at("cell").replaceChildren(name, text, make("small", {}, " while you watch"));
}
