// The map of experts: one cell each, layers by experts, painted pixel by pixel so that edges are sharp at any size.
//
// Experts in memory are grey, those in VRAM more so than those in RAM, under a fading colour: one for experts used since
// the snapshot before, another for those fetched. The longer side of the map is horizontal.

import { ABSENT, LOADING, Cells } from "./cells.js";

const FRAME_MS = 40; // leaves the processor to the model
const SHADES = 64;
const GUTTER = { left: 26, bottom: 18 };
const MAX_CELL_WIDTH = 26;
const MAX_CELL_ASPECT = 1.8; // times its width
const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class ExpertMap {
  /** `swatches`: elements whose background is the colour of absent, loading, ram, vram, hit and loaded cells;
   *  `onPoint(cell)` is called with the info of the pointed cell, or null. */
  constructor(canvas, swatches, onPoint) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.swatches = swatches;
    this.onPoint = onPoint;
    this.cells = null;
    this.pointed = null;
    this.frame = 0;
    this.painted = 0;
    new ResizeObserver(() => this.resize()).observe(canvas.parentElement);
    this.listen();
    this.readColours();
  }

  clear() {
    this.cells = null;
    this.point(null);
    this.resize();
  }

  /** Shows a snapshot; another model shape starts a new map. */
  update(snapshot) {
    if (!this.cells?.matches(snapshot)) {
      this.point(null);
      this.cells = new Cells(snapshot);
      this.resize();
    }
    this.cells.update(snapshot);
    if (this.pointed !== null) this.onPoint(this.cells.info(this.pointed));
    this.wake();
  }

  readColours() {
    const rgb = (element) => getComputedStyle(element).backgroundColor.match(/[\d.]+/g).slice(0, 3).map(Number);
    const { absent, loading, ram, vram, hit, loaded } = this.swatches;
    this.base = [rgb(absent), rgb(loading), rgb(ram), rgb(vram)];
    this.hitColour = rgb(hit);
    this.loadColour = rgb(loaded);
    this.shades = this.base.map((from) => [this.hitColour, this.loadColour].map((to) => shades(from, to)));
    const { color, fontFamily } = getComputedStyle(this.canvas);
    this.ink = color;
    this.font = fontFamily;
    this.wake();
  }

  /** Fits the cells into the frame, in whole device pixels where there are enough. */
  resize() {
    const { canvas, cells } = this, dpr = devicePixelRatio || 1;
    canvas.hidden = !cells;
    if (!cells) return;
    const frame = canvas.parentElement.clientWidth, available = Math.floor((frame - GUTTER.left) * dpr);
    this.across = cells.nExpert >= cells.layers.length; // experts are columns
    [this.columns, this.rows] = this.across ? [cells.nExpert, cells.layers.length] : [cells.layers.length, cells.nExpert];
    const pitch = Math.min(available / this.columns, MAX_CELL_WIDTH * dpr);
    this.pitchX = pitch >= 2 ? Math.floor(pitch) : pitch;
    const maxHeight = (innerWidth <= 860 ? 150 : Math.min(360, innerHeight * 0.37)) * dpr;
    this.pitchY = Math.max(2, Math.floor(Math.min(Math.max(this.pitchX * MAX_CELL_ASPECT, 5 * dpr), maxHeight / this.rows)));
    this.dpr = dpr;
    this.left = Math.round(GUTTER.left * dpr);
    this.width = Math.ceil(this.pitchX * this.columns);
    this.height = this.pitchY * this.rows;
    canvas.width = Math.round(frame * dpr);
    canvas.height = this.height + Math.round(GUTTER.bottom * dpr);
    canvas.style.height = `${canvas.height / dpr}px`;
    this.image = this.context.createImageData(this.width, this.height);
    this.glow = new OffscreenCanvas(this.columns, this.rows);
    this.glowImage = new ImageData(this.columns, this.rows);
    this.wake();
  }

  wake() {
    if (this.frame || !this.cells) return;
    this.frame = setTimeout(() => requestAnimationFrame((now) => this.step(now)), FRAME_MS);
  }

  step(now) {
    this.frame = 0;
    if (!this.cells) return;
    const hot = this.cells.cool(now, Math.min((now - this.painted) / 1000, 0.25));
    this.painted = now;
    this.paint();
    if (hot) this.wake();
  }

  index(column, row) {
    return this.across ? row * this.cells.nExpert + column : column * this.cells.nExpert + row;
  }

  position(i) {
    const il = Math.floor(i / this.cells.nExpert), expert = i % this.cells.nExpert;
    return this.across ? [expert, il] : [il, expert];
  }

  /** Cells into an image, light around them, numbers of layers and experts, and a frame around the pointed cell. */
  paint() {
    const { context, canvas } = this;
    this.paintCells();
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.putImageData(this.image, this.left, 0);
    if (this.pitchX >= 5 * this.dpr) this.paintGlow();
    this.paintNumbers();
    if (this.pointed !== null) this.paintPointer();
  }

  paintCells() {
    const { pitchX, pitchY, width, columns, rows, dpr } = this, pixels = new Uint32Array(this.image.data.buffer);
    const thin = pitchX >= 3 && pitchY >= 3 ? Math.max(1, Math.round(dpr / 2)) : 0;
    const gap = pitchX >= 12 * dpr ? Math.round(2 * dpr) : thin;
    const radius = Math.min(Math.round(4 * dpr), Math.round((pitchX - gap) / 6));
    const high = pitchY - gap;
    for (let row = 0; row < rows; row += 1) {
      const from = row * pitchY * width;
      for (let column = 0; column < columns; column += 1) {
        const start = Math.round(column * pitchX), end = Math.max(start + 1, Math.round((column + 1) * pitchX) - gap);
        pixels.fill(this.colour(this.index(column, row)), from + start, from + end);
      }
      for (let y = 1; y < high; y += 1) pixels.copyWithin(from + y * width, from, from + width);
      if (!radius) continue;
      this.hollowLoading(pixels, row, high, gap);
      this.roundCorners(pixels, from, high, gap, radius);
    }
  }

  colour(i) {
    const { state, hit, load } = this.cells, loading = load[i] > hit[i];
    return this.shades[state[i]][loading ? 1 : 0][Math.round((loading ? load[i] : hit[i]) * SHADES)];
  }

  /** Experts that are loading are hollow. */
  hollowLoading(pixels, row, high, gap) {
    const inside = pixel(this.base[ABSENT]), edge = Math.round(1.5 * this.dpr);
    for (let column = 0; column < this.columns; column += 1) {
      const i = this.index(column, row);
      if (this.cells.state[i] !== LOADING || this.cells.isHot(i)) continue;
      const left = column * this.pitchX + edge, right = (column + 1) * this.pitchX - gap - edge;
      for (let y = edge; y < high - edge; y += 1) {
        const line = (row * this.pitchY + y) * this.width;
        pixels.fill(inside, line + left, line + right);
      }
    }
  }

  roundCorners(pixels, from, high, gap, radius) {
    for (let y = 0; y < radius; y += 1) {
      const inset = radius - Math.sqrt(radius ** 2 - (radius - y - 0.5) ** 2), whole = Math.floor(inset);
      const edge = Math.round(255 * (1 - (inset - whole))) << 24;
      for (const line of [from + y * this.width, from + (high - 1 - y) * this.width]) {
        for (let column = 0; column < this.columns; column += 1) {
          const start = line + column * this.pitchX, end = start + this.pitchX - gap - 1;
          for (let x = 0; x < whole; x += 1) pixels[start + x] = pixels[end - x] = 0;
          pixels[start + whole] = (pixels[start + whole] & 0xffffff) | edge;
          pixels[end - whole] = (pixels[end - whole] & 0xffffff) | edge;
        }
      }
    }
  }

  /** Heat, one pixel per cell, scaled up smoothly: a glow that extends over neighbours. */
  paintGlow() {
    const { data } = this.glowImage, { hit, load } = this.cells;
    for (let row = 0, at = 0; row < this.rows; row += 1) {
      for (let column = 0; column < this.columns; column += 1, at += 4) {
        const i = this.index(column, row);
        data.set(load[i] > hit[i] ? this.loadColour : this.hitColour, at);
        data[at + 3] = 120 * Math.max(load[i], hit[i]) ** 1.5;
      }
    }
    this.glow.getContext("2d").putImageData(this.glowImage, 0, 0);
    this.context.drawImage(this.glow, this.left, 0, this.width, this.height);
  }

  paintNumbers() {
    const { context, dpr } = this, { layers } = this.cells;
    const [columnName, rowName] = this.across ? [(e) => e, (il) => layers[il]] : [(il) => layers[il], (e) => e];
    context.fillStyle = this.ink;
    context.font = `${11 * dpr}px ${this.font}`;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const row of ticks(this.rows, (18 * dpr) / this.pitchY)) {
      context.fillText(rowName(row), this.left - 8 * dpr, Math.max((row + 0.5) * this.pitchY, 6 * dpr));
    }
    context.textAlign = "center";
    context.textBaseline = "alphabetic";
    for (const column of ticks(this.columns, (34 * dpr) / this.pitchX)) {
      context.fillText(columnName(column), this.left + (column + 0.5) * this.pitchX, this.canvas.height - 3 * dpr);
    }
  }

  paintPointer() {
    const { context, dpr, pitchX, pitchY } = this, [column, row] = this.position(this.pointed);
    const grow = dpr + Math.max(0, 5 * dpr - pitchX) / 2; // visible also around the smallest cell
    context.strokeStyle = this.ink;
    context.lineWidth = 1.5 * dpr;
    context.strokeRect(this.left + column * pitchX - grow, row * pitchY - grow, pitchX + 2 * grow - dpr, pitchY + 2 * grow - dpr);
  }

  point(i) {
    if (i === this.pointed) return;
    this.pointed = i;
    this.onPoint(i === null ? null : this.cells.info(i));
    this.wake();
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointermove", (event) => this.point(this.under(event)));
    canvas.addEventListener("pointerdown", (event) => this.point(this.under(event)));
    canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.point(null));
    canvas.addEventListener("blur", () => this.point(null));
    canvas.addEventListener("keydown", (event) => this.move(event));
  }

  under(event) {
    const column = Math.floor((event.offsetX * this.dpr - this.left) / this.pitchX);
    const row = Math.floor((event.offsetY * this.dpr) / this.pitchY);
    const inside = column >= 0 && column < this.columns && row >= 0 && row < this.rows;
    return inside ? this.index(column, row) : null;
  }

  move(event) {
    const step = STEPS[event.key];
    if (!step || !this.cells) return;
    event.preventDefault();
    const [column, row] = this.pointed === null ? [0, 0] : this.position(this.pointed);
    const clamp = (value, n) => Math.min(Math.max(value, 0), n - 1);
    this.point(this.index(clamp(column + step[0], this.columns), clamp(row + step[1], this.rows)));
  }
}

/** From one colour to another, by heat. */
function shades(from, to) {
  const heat = (step) => pixel(from.map((value, channel) => value + ((to[channel] - value) * step) / SHADES));
  return Uint32Array.from({ length: SHADES + 1 }, (_, step) => heat(step));
}

/** A colour as ImageData stores it on a little-endian machine. */
function pixel([r, g, b]) {
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

/** Multiples below n of the smallest power of two that is at least `apart`. */
function ticks(n, apart) {
  let every = 1;
  while (every < apart) every *= 2;
  return Array.from({ length: Math.ceil(n / every) }, (_, i) => i * every);
}
