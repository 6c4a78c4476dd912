// State of each expert: its tier, how often it was used and fetched, and the heat of recent uses and fetches.
//
// Cell i is expert i % nExpert of layer number floor(i / nExpert).

import { bytes } from "./live.js";

export const ABSENT = 0, LOADING = 1, IN_RAM = 2, IN_VRAM = 3;

const HIT_DECAY_S = 0.45;
const LOAD_DECAY_S = 0.9;
const COLD = 0.012;
const MAX_INTERVAL_MS = 400;
const STATE_NAMES = ["on disk", "loading", "in RAM", "in VRAM"];
const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

export class Cells {
  constructor({ layers, n_expert: nExpert }) {
    const n = layers.length * nExpert;
    this.layers = layers;
    this.nExpert = nExpert;
    this.state = new Uint8Array(n);
    this.used = new Uint32Array(n);
    this.fetched = new Uint32Array(n);
    for (const name of ["hit", "load", "pendingHit", "pendingLoad"]) this[name] = new Float32Array(n);
    this.due = new Float64Array(n);
    this.updated = performance.now();
  }

  /** Whether a snapshot has the same layers and experts. */
  matches(snapshot) {
    return this.nExpert === snapshot.n_expert && this.layers.join() === snapshot.layers.join();
  }

  /** How many experts are in one state. */
  count(wanted) {
    return this.state.reduce((n, state) => n + (state === wanted), 0);
  }

  update(snapshot) {
    this.state = bytes(snapshot.state);
    const uses = bytes(snapshot.uses), loads = bytes(snapshot.loads);
    const mostUses = Math.log1p(largest(uses)), mostLoads = Math.log1p(largest(loads));
    const now = performance.now(), since = Math.min(now - this.updated, MAX_INTERVAL_MS);
    this.updated = now;
    if (reducedMotion.matches) this.clearHeat();
    for (let i = 0; i < uses.length; i += 1) {
      if (!uses[i] && !loads[i]) continue;
      this.used[i] += uses[i];
      this.fetched[i] += loads[i];
      const missed = 2 * loads[i] > uses[i]; // one colour per cell: mixed colours are hard to read
      this.pendingHit[i] = missed ? 0 : 0.3 + 0.7 * (Math.log1p(uses[i]) / mostUses);
      this.pendingLoad[i] = missed ? 0.4 + 0.6 * (Math.log1p(loads[i]) / mostLoads) : 0;
      if (reducedMotion.matches) {
        this.hit[i] = this.pendingHit[i];
        this.load[i] = this.pendingLoad[i];
        continue;
      }
      // A snapshot covers the time since the one before: cells light up at random times in it, not all at once.
      this.due[i] = now + Math.random() * since;
    }
  }

  /** Clears all heat at once. */
  clearHeat() {
    for (const values of [this.hit, this.load, this.due]) values.fill(0);
  }

  /** Decays heat and applies due events; returns whether any heat is left. */
  cool(now, seconds) {
    if (reducedMotion.matches) return false; // no animation between snapshots
    const { hit, load, pendingHit, pendingLoad, due } = this;
    const hitFactor = Math.exp(-seconds / HIT_DECAY_S), loadFactor = Math.exp(-seconds / LOAD_DECAY_S);
    let hot = false;
    for (let i = 0; i < hit.length; i += 1) {
      hit[i] = hit[i] > COLD ? hit[i] * hitFactor : 0;
      load[i] = load[i] > COLD ? load[i] * loadFactor : 0;
      if (due[i] && due[i] <= now) {
        hit[i] = pendingHit[i] && Math.max(hit[i], pendingHit[i]);
        load[i] = pendingLoad[i] && Math.max(load[i], pendingLoad[i]);
        due[i] = 0;
      }
      hot ||= hit[i] > 0 || load[i] > 0 || due[i] > 0;
    }
    return hot;
  }

  isHot(i) {
    return this.hit[i] > 0 || this.load[i] > 0;
  }

  /** State and counts of a cell. */
  info(i) {
    return {
      il: this.layers[Math.floor(i / this.nExpert)],
      expert: i % this.nExpert,
      stateName: STATE_NAMES[this.state[i]],
      used: this.used[i],
      fetched: this.fetched[i],
    };
  }
}

function largest(values) {
  return values.reduce((a, b) => Math.max(a, b), 0);
}
