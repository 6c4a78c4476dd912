// The panel beside the chat: map, charts and totals, from the snapshots of the selected model.

import { Budget } from "./budget.js";
import { IN_RAM, IN_VRAM } from "./cells.js";
import { Chart } from "./chart.js";
import { at, make } from "./dom.js";
import { count, digits, duration, percent, size } from "./format.js";
import { Live } from "./live.js";
import { ExpertMap } from "./map.js";

const WINDOW = 8; // snapshots per point of a chart
const PAUSE_MS = 1500;
const FOLDED = "moegguf.map"; // "folded" or "open", once it was chosen; else folded on a phone
const NOTHING = { tokens: 0, lookups: 0, hits_ready: 0, hits_late: 0, bytes_read: 0 }; // of a model that was just loaded

export class Panel {
  /** `onLoaded(names)` is called with the models in memory. */
  constructor(onLoaded) {
    const [absent, loading, loaded, ram, vram, hit] = document.querySelectorAll(".legend .key");
    this.map = new ExpertMap(at("map"), { absent, loading, ram, vram, hit, loaded }, showCell);
    this.charts = {
      hit: new Chart(at("hit-chart"), { max: 1, format: (value) => percent(value).join(" ") }),
      bytes: new Chart(at("bytes-chart"), { format: joinedSize }),
      speed: new Chart(at("speed-chart"), { format: (value) => `${digits(value)} t/s` }),
    };
    this.onLoaded = onLoaded;
    this.budget = new Budget();
    this.live = new Live({ onLine: (line) => this.take(line), onLost: (error) => this.disconnect(error) });
    this.recent = [];
    this.begin = null;
    showCell(null);
    this.addFoldButton();
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
    if (line.loaded_models) this.onLoaded(line.loaded_models);
    if (line.loaded_models && !line.loaded_models.includes(this.model)) {
      this.reset("Not in memory. The next message loads it.");
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
    showTiers([], false);
    showStaging({});
  }

  show(snapshot) {
    const { stats } = snapshot;
    at("map-note").textContent = snapshot.layers.length ? "" : "This model has no experts.";
    if (snapshot.layers.length) this.map.update(snapshot);
    const all = this.map.cells?.state.length ?? 0, where = all ? this.where(stats) : "";
    at("resident").textContent = where && `${where}, ${joinedSize(stats.pool_bytes)}`;
    at("map").setAttribute("aria-label", `Map of experts: ${all} experts in ${snapshot.layers.length} layers, ${where}. Arrow keys move from cell to cell.`);
    showTiers(stats.tiers ?? [], all > 0 && this.map.cells.count(IN_VRAM) > 0);
    showStaging(stats);
    this.findBegin(snapshot);
    this.plot(snapshot);
    this.showSpeed(snapshot);
    this.showTotals(snapshot);
    this.budget.show(snapshot.loaded);
    this.last = snapshot;
  }

  /** How many experts are in VRAM, and in RAM only. */
  where({ tiers }) {
    const { cells } = this.map, nRam = cells.count(IN_RAM), all = count(cells.state.length);
    const nVram = cells.count(IN_VRAM);
    if (tiers?.[0]?.name === "VRAM") return `${count(nVram)} of ${all} in VRAM, ${count(nRam)} in RAM only`;
    return nVram ? `${count(nRam)} of ${all} in RAM, ${count(nVram)} in VRAM` : `${count(nRam)} of ${all} in memory`;
  }

  /** Keeps the statistics from before the current answer: the numbers beside the charts cover this answer, as the line
   *  below it does. */
  findBegin(snapshot) {
    if (!this.begin) this.begin = snapshot.stats; // it began before this page was opened
    else if (snapshot.stats.tokens < this.begin.tokens) this.begin = NOTHING; // reloaded
    else if (snapshot.busy && this.last && !this.last.busy) this.begin = this.last.stats;
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
    const tokens = stats.tokens - before.tokens, lookups = stats.lookups - before.lookups;
    if (lookups > 0) this.charts.hit.push((hits(stats) - hits(before)) / lookups);
    if (tokens > 0) this.charts.bytes.push((stats.bytes_read - before.bytes_read) / tokens);
    if (speed > 0) this.charts.speed.push(speed);
  }

  /** The speed while an answer is written, and then that of the whole answer, as the line below it and /api/ps have it. */
  showSpeed({ busy, tokens_per_s: speed, loaded }) {
    const { last_answer_tokens: tokens, last_answer_s: seconds } = loaded ?? {};
    if (seconds && seconds !== this.last?.loaded?.last_answer_s) showValue("speed", [digits(tokens / seconds), "t/s"]);
    else if (busy && speed > 0) showValue("speed", [digits(speed), "t/s"]);
  }

  showTotals({ stats, loaded }) {
    const { begin } = this, lookups = stats.lookups - begin.lookups, tokens = stats.tokens - begin.tokens;
    if (lookups > 0) showValue("hit", percent((hits(stats) - hits(begin)) / lookups));
    if (tokens > 0) showValue("bytes", size((stats.bytes_read - begin.bytes_read) / tokens));
    at("total-tokens").textContent = count(stats.tokens);
    at("total-read").textContent = joinedSize(stats.bytes_read);
    at("total-stall").textContent = duration(stats.stall_s);
    at("total-queue").textContent = count(loaded?.queue ?? 0);
  }

  addFoldButton() {
    const button = at("fold"), panel = button.closest(".panel");
    const fold = (folded) => {
      panel.classList.toggle("folded", folded);
      button.setAttribute("aria-expanded", String(!folded));
    };
    button.addEventListener("click", () => {
      fold(!panel.classList.contains("folded"));
      localStorage.setItem(FOLDED, panel.classList.contains("folded") ? "folded" : "open");
    });
    const chosen = localStorage.getItem(FOLDED);
    fold(chosen ? chosen === "folded" : matchMedia("(max-width: 860px)").matches);
  }
}

/** Shows the number beside a chart. */
function showValue(name, [number, unit]) {
  at(`${name}-value`).replaceChildren(number, make("small", {}, unit));
}

/** A line for each tier where layers compute in VRAM, and what cells look like, also those of whole layers there. */
function showTiers(tiers, anyInVram) {
  const inVram = tiers[0]?.name === "VRAM";
  at("tiers").hidden = !inVram;
  at("vram-key").hidden = !inVram && !anyInVram;
  at("ram-name").textContent = inVram || anyInVram ? "in RAM" : "in memory";
  at("tiers").tBodies[0].replaceChildren(...(inVram ? tiers : []).map((tier) => {
    const received = tier.bytes_missed + tier.bytes_prefetched;
    const rate = tier.lookups ? percent(hits(tier) / tier.lookups).join(" ") : "–";
    const slots = `${count(tier.slots_used)} of ${count(tier.n_slots)}`;
    const texts = [tier.name, slots, rate, joinedSize(received), count(tier.evictions), duration(tier.stall_s)];
    return make("tr", {}, ...texts.map((text) => make("td", {}, text)));
  }));
}

/** What prompts copied into staging tensors, part of the VRAM budget, and how much of it while layers computed. */
function showStaging({ staging_bytes: memory, bytes_staged: copied, staging_overlap: overlap }) {
  at("staging").hidden = !memory;
  const meanwhile = copied ? `, ${percent(overlap).join(" ")} of the time while computing` : "";
  at("staging").textContent = memory ? `Prompts staged: ${joinedSize(copied)} through ${joinedSize(memory)}${meanwhile}` : "";
}

function joinedSize(n) {
  return size(n).join(" ");
}

function hits(stats) {
  return stats.hits_ready + stats.hits_late;
}

/** Shows the state of a cell below the map. */
function showCell(cell) {
  if (!cell) return at("cell").replaceChildren();
  const name = make("b", {}, `Layer ${cell.il}, expert ${cell.expert}`);
  const text = `: ${cell.stateName}, used ${count(cell.used)}×, fetched ${count(cell.fetched)}×`;
  at("cell").replaceChildren(name, text, make("small", {}, " while you watch"));
}
