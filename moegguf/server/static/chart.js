// A small line chart over time, one point per snapshot in which the model computed.

const LENGTH = 90; // the picture's width is one less, its height is 1

export class Chart {
  /** `plot`: an element with a label and a picture of an area, a line and a dot; `max`: top of the scale, by default a
   *  round number not below the largest point; `format(value)` labels it. */
  constructor(plot, { max, format }) {
    [this.label, { children: this.shapes }] = plot.children;
    Object.assign(this, { max, format });
    this.clear();
  }

  clear() {
    this.points = [];
    this.draw();
  }

  push(value) {
    this.points.push(value);
    if (this.points.length > LENGTH) this.points.shift();
    this.draw();
  }

  draw() {
    const { points } = this, max = this.max ?? roundUp(Math.max(...points)), begin = LENGTH - points.length;
    const line = points.map((value, i) => [begin + i, 1 - value / max]), last = line.slice(-1);
    this.label.textContent = points.length ? this.format(max) : "";
    [[[begin, 1], ...line, [LENGTH - 1, 1]], line, [...last, ...last]].forEach((places, i) => {
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
