// What is known of each expert: where it lies, how often it was used, and the heat of what happened just now.
//
// Cell i is expert i % nExpert of layer number floor(i / nExpert).

import { bytes } from "./live.js";

export const ABSENT = 0, ARRIVING = 1, THERE = 2;

const HIT_FADES_S = 0.45;
const LOAD_FADES_S = 0.9;
const COLD = 0.012;
const LONGEST_GAP_MS = 400;
const PLACES = ["on disk", "on its way", "in memory"];
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Cells {
  constructor({ layers, n_expert: nExpert }) {
    const n = layers.length * nExpert;
    this.layers = layers;
    this.nExpert = nExpert;
    this.state = new Uint8Array(n);
    this.used = new Uint32Array(n);
    this.fetched = new Uint32Array(n);
    for (const name of ["hit", "load", "nextHit", "nextLoad"]) this[name] = new Float32Array(n);
    this.due = new Float64Array(n);
    this.updated = performance.now();
  }

  /** Whether a view is of the same layers and experts. */
  suits(view) {
    return this.nExpert === view.n_expert && this.layers.join() === view.layers.join();
  }

  get there() {
    return this.state.reduce((n, state) => n + (state === THERE), 0);
  }

  update(view) {
    this.state = bytes(view.state);
    const uses = bytes(view.uses), loads = bytes(view.loads);
    const mostUses = Math.log1p(largest(uses)), mostLoads = Math.log1p(largest(loads));
    const now = performance.now(), since = Math.min(now - this.updated, LONGEST_GAP_MS);
    this.updated = now;
    if (still.matches) this.forget();
    for (let i = 0; i < uses.length; i += 1) {
      if (!uses[i] && !loads[i]) continue;
      this.used[i] += uses[i];
      this.fetched[i] += loads[i];
      const missed = 2 * loads[i] > uses[i]; // one colour per cell: two would mix to mud
      this.nextHit[i] = missed ? 0 : 0.3 + 0.7 * (Math.log1p(uses[i]) / mostUses);
      this.nextLoad[i] = missed ? 0.4 + 0.6 * (Math.log1p(loads[i]) / mostLoads) : 0;
      if (still.matches) {
        this.hit[i] = this.nextHit[i];
        this.load[i] = this.nextLoad[i];
        continue;
      }
      // A view tells of the time since the view before: cells light up somewhere in it, not all at one beat.
      this.due[i] = now + Math.random() * since;
    }
  }

  /** All heat is gone at once. */
  forget() {
    for (const values of [this.hit, this.load, this.due]) values.fill(0);
  }

  /** Lets heat fade and due cells light up; whether any heat is left. */
  cool(now, seconds) {
    if (still.matches) return false; // nothing moves between views
    const { hit, load, nextHit, nextLoad, due } = this;
    const hitKeeps = Math.exp(-seconds / HIT_FADES_S), loadKeeps = Math.exp(-seconds / LOAD_FADES_S);
    let hot = false;
    for (let i = 0; i < hit.length; i += 1) {
      hit[i] = hit[i] > COLD ? hit[i] * hitKeeps : 0;
      load[i] = load[i] > COLD ? load[i] * loadKeeps : 0;
      if (due[i] && due[i] <= now) {
        hit[i] = nextHit[i] && Math.max(hit[i], nextHit[i]);
        load[i] = nextLoad[i] && Math.max(load[i], nextLoad[i]);
        due[i] = 0;
      }
      hot ||= hit[i] > 0 || load[i] > 0 || due[i] > 0;
    }
    return hot;
  }

  isHot(i) {
    return this.hit[i] > 0 || this.load[i] > 0;
  }

  /** What is known of a cell, in words and numbers. */
  told(i) {
    return {
      il: this.layers[Math.floor(i / this.nExpert)],
      expert: i % this.nExpert,
      place: PLACES[this.state[i]],
      used: this.used[i],
      fetched: this.fetched[i],
    };
  }
}

function largest(values) {
  return values.reduce((a, b) => Math.max(a, b), 0);
}
