// The memory for a model's experts in each tier (RAM, VRAM): shows its size, and a slider that changes the size, even
// while the model answers.

import { json } from "./api.js";
import { at, count, size } from "./dom.js";

const SETTLE_MS = 2000; // milliseconds for which new snapshots do not remove the message about a refused change
const TIERS = { ram: "expert_cache", vram: "vram_cache" };

export class Budget {
  constructor() {
    for (const tier of Object.keys(TIERS)) {
      const slider = at(`${tier}-budget`);
      slider.addEventListener("input", () => this.label(tier));
      slider.addEventListener("change", () => this.change(tier));
    }
  }

  /** Shows the budgets of the model. `loaded` is the model's state in a snapshot, or null if the model is not loaded.
   *  While a change is sent, the sliders keep their positions. */
  show(loaded) {
    at("budgets").hidden = !loaded?.slot_bytes;
    if (!loaded) this.now = at("budget-note").textContent = ""; // no model is loaded, so the numbers and the message no longer apply
    if (loaded && !this.changing && keyOf(loaded) !== keyOf(this.now)) this.draw(loaded);
  }

  draw(now) {
    if (performance.now() - this.refusedAt > SETTLE_MS) at("budget-note").textContent = "";
    this.now = now;
    for (const [tier, name] of Object.entries(TIERS)) {
      const staged = tier === "vram" ? now.staging_bytes : 0, most = Math.floor((now[`max_${name}_bytes`] - staged) / now.slot_bytes);
      at(`for-${tier}-budget`).hidden = !(most > 0);
      const slider = at(`${tier}-budget`);
      slider.max = most;
      slider.value = Math.floor((now[`${name}_bytes`] - staged) / now.slot_bytes);
      this.label(tier);
    }
    at("ram-budget-label").textContent = at("for-vram-budget").hidden ? "Memory for experts" : "Memory for experts in RAM";
  }

  label(tier) {
    const { n_experts: all, slot_bytes: slot } = this.now, n = Number(at(`${tier}-budget`).value);
    const text = `${count(n)} of ${count(all)} experts, ${size(n * slot)}`;
    at(`${tier}-budget-value`).textContent = text;
    at(`${tier}-budget`).setAttribute("aria-valuetext", text);
  }

  /** Sends the value of the slider of tier `moved` to the server. If sliders are moved before the reply, then sends
   *  the value of the slider that was moved last. */
  async change(moved) {
    this.moved = moved;
    if (this.changing) return;
    this.changing = true;
    at("budget-note").textContent = "";
    try {
      while (this.moved && this.now) {
        const tier = this.moved, { model, slot_bytes: slot, staging_bytes: staged } = this.now;
        this.moved = null;
        const body = { model, [TIERS[tier]]: Number(at(`${tier}-budget`).value) * slot + (tier === "vram" ? staged : 0) };
        const changed = await json("budget", { method: "PUT", body });
        this.now &&= { ...this.now, ...changed };
      }
    } catch (error) {
      this.refusedAt = performance.now();
      at("budget-note").textContent = error.message;
    }
    this.changing = false;
    if (this.now) this.draw(this.now);
  }
}

function keyOf({ pid, expert_cache_bytes: inRam, vram_cache_bytes: inVram }) {
  return [pid, inRam, inVram].join();
}
