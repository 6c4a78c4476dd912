// A small line chart over time, one point per snapshot in which the model computed.

const LENGTH = 90;

export class Chart {
  /** `max`: top of the scale, by default a round number not below the largest point; `format(value)` labels it. */
  constructor(canvas, { max, format }) {
    this.canvas = canvas;
    this.max = max;
    this.format = format;
    this.points = [];
    new ResizeObserver(() => this.draw()).observe(canvas);
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
    const { canvas, points } = this, dpr = devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight, context = canvas.getContext("2d");
    canvas.width = Math.round(width * dpr);
    canvas.height = Math.round(height * dpr);
    context.scale(dpr, dpr);
    const { color, borderColor, outlineColor, fontFamily } = getComputedStyle(canvas);
    const tall = height > 40, top = tall ? 13 : 2, bottom = height - 2, right = width - 4;
    context.fillStyle = borderColor;
    context.fillRect(0, bottom, width, 1);
    if (!points.length) return;
    const max = this.max ?? roundUp(Math.max(...points));
    if (tall) {
      context.fillRect(0, top, width, 1);
      context.font = `11px ${fontFamily}`;
      context.textAlign = "right";
      context.fillStyle = outlineColor;
      context.fillText(this.format(max), width, top - 4);
    }
    const step = right / (LENGTH - 1), y = (value) => bottom - (value / max) * (bottom - top);
    const x = (i) => right - (points.length - 1 - i) * step;
    this.line(context, points, x, y, bottom, color);
  }

  line(context, points, x, y, bottom, color) {
    const last = points.length - 1;
    context.beginPath();
    points.forEach((value, i) => context.lineTo(x(i), y(value)));
    context.strokeStyle = context.fillStyle = color;
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(x(last), bottom);
    context.lineTo(x(0), bottom);
    context.globalAlpha = 0.09;
    context.fill();
    context.globalAlpha = 1;
    context.beginPath();
    context.arc(x(last), y(points[last]), 2.5, 0, 2 * Math.PI);
    context.fill();
  }
}

/** The smallest of 1, 2, 5, 10, 20, 50, ... not below the value. */
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * ([1, 2, 5].find((n) => n * power >= value) ?? 10);
}
