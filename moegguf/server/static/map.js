// The map of experts. It has one cell for each expert: a row is a layer, a column is an expert's number.
//
// A cell's background shows the expert's state; the grey is stronger in VRAM than in RAM. After a snapshot with uses or
// fetches of the expert, a colour that fades lies over the background. One colour means used. Another colour means
// fetched; it is shown if there were more than half as many fetches as uses. Cell i is expert i % nExpert in row
// floor(i / nExpert).

import { bytes } from "./api.js";

export const ABSENT = 0, LOADING = 1, IN_RAM = 2, IN_VRAM = 3;

const STATE_NAMES = ["on disk", "loading", "in RAM", "in VRAM"];
const HIT = 0, LOAD = 1; // indices of the colours that fade: used, fetched
const DECAY_S = [0.45, 0.9]; // seconds in which a colour fades to 37 %: used, fetched
const COLD = 0.012;
const SHADES = 64;
const FRAME_MS = 40; // minimum milliseconds between two frames; few frames leave the processor to the model
const GUTTER = { left: 26, bottom: 18 };
const MAX_CELL_WIDTH = 26;
const MAX_CELL_ASPECT = 1.8; // preferred height of a cell, as a multiple of its width
const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

export class ExpertMap {
  /** `swatches`: elements of the legend. Their backgrounds are the colours of cells: first of the four states, then of
   *  used and of fetched experts. `onPoint(cell)` is called with the result of `info` for the cell under the pointer,
   *  or with null. */
  constructor(canvas, swatches, onPoint) {
    Object.assign(this, { canvas, swatches, onPoint, context: canvas.getContext("2d"), layers: null, pointed: null, timer: 0, cooled: 0 });
    new ResizeObserver(() => this.resize()).observe(canvas.parentElement);
    for (const kind of ["pointermove", "pointerdown"]) canvas.addEventListener(kind, (event) => this.point(this.under(event)));
    canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.point(null));
    canvas.addEventListener("blur", () => this.point(null));
    canvas.addEventListener("keydown", (event) => this.move(event));
    this.readColours();
  }

  clear() {
    this.point(null);
    this.layers = null;
    this.resize();
  }

  /** Returns the number of cells in the state `wanted`, or of all cells if `wanted` is undefined. */
  count(wanted) {
    if (!this.layers) return 0;
    return wanted === undefined ? this.state.length : this.state.reduce((n, state) => n + (state === wanted), 0);
  }

  /** Shows a snapshot of the experts. If the layers or the number of experts differ from the last snapshot, the counts
   *  of uses and fetches begin again at 0. */
  update({ layers, n_expert: nExpert, state, uses, loads }) {
    this.state = bytes(state);
    if (this.nExpert !== nExpert || this.layers?.join() !== layers.join()) {
      this.point(null);
      const n = layers.length * nExpert;
      Object.assign(this, { layers, nExpert, used: new Uint32Array(n), fetched: new Uint32Array(n), heat: new Float32Array(n), kind: new Uint8Array(n) });
      this.resize();
    }
    if (reducedMotion.matches) this.heat.fill(0);
    const used = bytes(uses), fetched = bytes(loads);
    for (let i = 0; i < used.length; i += 1) {
      if (!used[i] && !fetched[i]) continue;
      this.used[i] += used[i];
      this.fetched[i] += fetched[i];
      this.kind[i] = 2 * fetched[i] > used[i] ? LOAD : HIT; // one colour for each cell, because mixed colours are hard to read
      this.heat[i] = 1;
    }
    if (this.pointed !== null) this.onPoint(this.info(this.pointed));
    this.wake();
  }

  /** Lets the colours of recent uses and fetches fade for `seconds`. Returns true if any colour is left. If the user
   *  prefers reduced motion, the colours stay until the next snapshot, and false is returned. */
  cool(seconds) {
    if (reducedMotion.matches) return false;
    const { heat, kind } = this, factors = DECAY_S.map((decay) => Math.exp(-seconds / decay));
    for (let i = 0; i < heat.length; i += 1) heat[i] = heat[i] > COLD ? heat[i] * factors[kind[i]] : 0;
    return heat.some((left) => left > 0);
  }

  readColours() {
    const colours = this.swatches.map((element) => getComputedStyle(element).backgroundColor);
    const { color, fontFamily } = getComputedStyle(this.canvas);
    Object.assign(this, { states: colours.slice(0, 4), heats: colours.slice(4), ink: color, font: fontFamily });
    this.redraw();
  }

  /** Computes the size of the cells so that the map fits the width of its frame. A cell is a whole number of device
   *  pixels wide if the width suffices for 2 pixels per cell. Without a snapshot the map is hidden. */
  resize() {
    const { canvas, layers, nExpert } = this, dpr = devicePixelRatio || 1;
    canvas.hidden = !layers;
    if (!layers) return;
    const frame = canvas.parentElement.clientWidth;
    const pitch = Math.min(Math.floor((frame - GUTTER.left) * dpr) / nExpert, MAX_CELL_WIDTH * dpr);
    this.pitchX = pitch >= 2 ? Math.floor(pitch) : pitch;
    const maxHeight = (innerWidth <= 860 ? 150 : Math.min(360, innerHeight * 0.37)) * dpr;
    this.pitchY = Math.max(2, Math.floor(Math.min(Math.max(this.pitchX * MAX_CELL_ASPECT, 5 * dpr), maxHeight / layers.length)));
    const thin = this.pitchX >= 3 && this.pitchY >= 3 ? Math.max(1, Math.round(dpr / 2)) : 0;
    this.gap = this.pitchX >= 12 * dpr ? Math.round(2 * dpr) : thin;
    this.dpr = dpr;
    this.left = Math.round(GUTTER.left * dpr);
    canvas.width = Math.round(frame * dpr);
    canvas.height = this.pitchY * layers.length + Math.round(GUTTER.bottom * dpr);
    canvas.style.height = `${canvas.height / dpr}px`;
    this.redraw();
  }

  /** Paints the whole map again. */
  redraw() {
    if (!this.layers) return;
    this.painted = new Int16Array(this.heat.length).fill(-1); // the state and colour painted in each cell; -1: nothing yet
    this.paintNumbers();
    this.wake();
  }

  wake() {
    if (this.timer || !this.layers) return;
    this.timer = setTimeout(() => requestAnimationFrame((now) => this.step(now)), FRAME_MS);
  }

  step(now) {
    this.timer = 0;
    if (!this.layers) return;
    const hot = this.cool(Math.min((now - this.cooled) / 1000, 0.25));
    this.cooled = now;
    for (let i = 0; i < this.heat.length; i += 1) this.paintCell(i);
    if (this.pointed !== null) this.paintPointer();
    if (hot) this.wake();
  }

  /** Returns the column and the row of cell `i`. */
  position(i) {
    return [i % this.nExpert, Math.floor(i / this.nExpert)];
  }

  /** Paints cell `i` if its state or its colour has changed since it was painted. A cell without a fading colour whose
   *  expert is loading is hollow if the cell is wide enough. */
  paintCell(i) {
    const step = Math.round(this.heat[i] * SHADES), state = this.state[i], shade = (state * 2 + this.kind[i]) * (SHADES + 1) + step;
    if (shade === this.painted[i]) return;
    this.painted[i] = shade;
    const [column, row] = this.position(i), { context, gap } = this;
    const x = this.left + Math.round(column * this.pitchX), y = row * this.pitchY;
    const width = Math.max(1, Math.round((column + 1) * this.pitchX) - Math.round(column * this.pitchX) - gap), height = this.pitchY - gap;
    const fill = (colour, alpha = 1, edge = 0) => {
      context.globalAlpha = alpha;
      context.fillStyle = colour;
      context.beginPath();
      context.roundRect(x + edge, y + edge, width - 2 * edge, height - 2 * edge, Math.max(0, Math.min(4 * this.dpr, Math.floor(width / 6)) - edge));
      context.fill();
    };
    context.clearRect(x, y, width, height);
    fill(this.states[state]);
    const edge = Math.round(1.5 * this.dpr);
    if (step) fill(this.heats[this.kind[i]], step / SHADES);
    else if (state === LOADING && width > 3 * edge) fill(this.states[ABSENT], 1, edge);
  }

  /** Clears the canvas, and writes the numbers of some layers and experts beside the cells. */
  paintNumbers() {
    const { context, dpr, layers, canvas } = this;
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.globalAlpha = 1;
    context.fillStyle = this.ink;
    context.font = `${11 * dpr}px ${this.font}`;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const row of ticks(layers.length, (18 * dpr) / this.pitchY)) {
      context.fillText(layers[row], this.left - 8 * dpr, Math.max((row + 0.5) * this.pitchY, 6 * dpr));
    }
    context.textAlign = "center";
    context.textBaseline = "alphabetic";
    for (const column of ticks(this.nExpert, (34 * dpr) / this.pitchX)) {
      context.fillText(column, this.left + (column + 0.5) * this.pitchX, canvas.height - 3 * dpr);
    }
  }

  paintPointer() {
    const { context, dpr, pitchX, pitchY } = this, [column, row] = this.position(this.pointed);
    const grow = dpr + Math.max(0, 5 * dpr - pitchX) / 2; // the frame is wider than a small cell, so that it is visible
    context.globalAlpha = 1;
    context.strokeStyle = this.ink;
    context.lineWidth = 1.5 * dpr;
    context.strokeRect(this.left + column * pitchX - grow, row * pitchY - grow, pitchX + 2 * grow - dpr, pitchY + 2 * grow - dpr);
  }

  /** Returns the layer, the expert, the state and the counts of cell `i`. */
  info(i) {
    const [expert, row] = this.position(i);
    return { il: this.layers[row], expert, stateName: STATE_NAMES[this.state[i]], used: this.used[i], fetched: this.fetched[i] };
  }

  point(i) {
    if (i === this.pointed) return;
    this.pointed = i;
    this.onPoint(i === null ? null : this.info(i));
    this.redraw(); // removes the frame around the previous cell
  }

  under(event) {
    const column = Math.floor((event.offsetX * this.dpr - this.left) / this.pitchX);
    const row = Math.floor((event.offsetY * this.dpr) / this.pitchY);
    const inside = column >= 0 && column < this.nExpert && row >= 0 && row < this.layers.length;
    return inside ? row * this.nExpert + column : null;
  }

  move(event) {
    const step = STEPS[event.key];
    if (!step || !this.layers) return;
    event.preventDefault();
    const [column, row] = this.pointed === null ? [0, 0] : this.position(this.pointed);
    const clamp = (value, n) => Math.min(Math.max(value, 0), n - 1);
    this.point(clamp(row + step[1], this.layers.length) * this.nExpert + clamp(column + step[0], this.nExpert));
  }
}

/** Returns the multiples below `n` of the smallest power of two that is at least `apart`. */
function ticks(n, apart) {
  let every = 1;
  while (every < apart) every *= 2;
  return Array.from({ length: Math.ceil(n / every) }, (_, i) => i * every);
}
