// The heat map, drawn once per window; reading a cell moves an outline only.

import { arrow, setText, sized } from "./elements.js";

const BOX = { left: 32, top: 22, bottom: 22 };
const RANGE = Math.log2(1.6);

export class Heat {
  constructor(place, read, legend, scale) {
    Object.assign(this, { place, read, legend, scale, heat: null, pointed: null });
    [this.canvas, this.cross] = place.children;
    this.listen();
  }

  draw(heat = this.heat) {
    this.heat = heat;
    const isEmpty = !heat?.percent.some(Boolean);
    this.place.hidden = this.legend.hidden = isEmpty;
    if (isEmpty) return setText(this.read, heat ? "The latest window had no traffic." : "No window has closed yet.");
    const { percent } = heat, rows = percent.length;
    const columns = Math.ceil(heat.num_ranks / heat.ranks_per_column);
    const width = this.place.clientWidth, rowHeight = Math.max(5, Math.min(44, Math.floor(330 / rows)));
    const context = sized(this.canvas, width, BOX.top + rows * rowHeight + BOX.bottom);
    const cell = (width - BOX.left) / columns;
    this.cells = { rows, columns, cell, rowHeight };
    // Tiles never touch: a tenth of a narrow one is between them.
    const gap = (size) => size > 8 ? 1.5 : size / 10;
    const style = getComputedStyle(document.documentElement), color = colors(style);
    context.font = `11.5px ${style.fontFamily}`;
    context.textBaseline = "middle";
    this.worst = null;
    const shades = new Map();
    percent.forEach((row, layer) => (row ?? []).forEach((value, column) => {
      if (!shades.has(value)) shades.set(value, color(value / 100));
      const [fill, over] = shades.get(value);
      const left = BOX.left + column * cell, up = BOX.top + layer * rowHeight;
      context.fillStyle = fill;
      context.fillRect(left, up, cell - gap(cell), rowHeight - gap(rowHeight));
      if (cell > 40 && rowHeight > 17) {
        context.fillStyle = over;
        context.textAlign = "center";
        context.fillText((value / 100).toFixed(2), left + cell / 2, up + rowHeight / 2);
      }
      if (!this.worst || value > percent[this.worst[0]][this.worst[1]]) this.worst = [layer, column];
    }));
    this.drawAxes(context, style);
    this.canvas.setAttribute("aria-label", `Load of ${rows} layers on ${heat.num_ranks} ranks in window ${heat.window}; the busiest is ${this.words(...this.worst)}. Arrow keys read cells.`);
    if (this.pointed && (this.pointed[0] >= rows || this.pointed[1] >= columns)) this.pointed = null;
    this.show();
    this.drawScale(style, color);
  }

  drawAxes(context, style) {
    const { rows, columns, cell, rowHeight } = this.cells, { percent, nodes, ranks_per_column: per } = this.heat;
    const bottom = BOX.top + rows * rowHeight, above = BOX.top / 2 - 1;
    context.fillStyle = style.getPropertyValue("--soft");
    context.textAlign = "left";
    context.fillText("layer", 1, above);
    context.fillText("rank", 1, bottom + 13);
    for (let layer = 0; layer < rows; layer++) {
      if (!percent[layer] && rowHeight > 11) context.fillText("no data", BOX.left + 4, BOX.top + (layer + 0.5) * rowHeight);
    }
    context.textAlign = "right";
    for (let layer = 0; layer < rows; layer += Math.ceil(14 / rowHeight)) {
      context.fillText(layer, BOX.left - 7, BOX.top + (layer + 0.5) * rowHeight);
    }
    context.textAlign = "center";
    // Names of nodes only where all fit.
    const edges = [...nodes.map(([first]) => BOX.left + first / per * cell), BOX.left + columns * cell];
    const room = ([, name], i) => edges[i + 1] - edges[i] - context.measureText(name).width;
    if (nodes.length > 1 && nodes.every((node, i) => room(node, i) > 8)) {
      nodes.forEach(([, name], i) => context.fillText(name, (edges[i] + edges[i + 1]) / 2, above));
    }
    const byNode = nodes.length > 1 && nodes.length < columns;
    for (const [first] of byNode ? nodes.slice(1) : []) {
      context.fillStyle = style.getPropertyValue("--node");
      context.fillRect(BOX.left + first / per * cell - 0.5, BOX.top - 5, 1, rows * rowHeight + 10);
    }
    // Every rank where there is room, else the first of each node.
    const everyRank = Array.from({ length: columns }, (_, column) => column);
    const ticks = byNode && cell < 26 ? nodes.map(([first]) => first / per) : everyRank;
    context.fillStyle = style.getPropertyValue("--soft");
    let labelled = -99;
    for (const column of ticks) {
      const at = BOX.left + (column + 0.5) * cell;
      if (at - labelled < 25) continue;
      context.fillText(Math.round(column * per), Math.max(at, BOX.left + 5), bottom + 13);
      labelled = at;
    }
  }

  words(layer, column) {
    const { percent, ranks_per_column: per, num_ranks, nodes } = this.heat;
    const first = column * per, last = Math.min(first + per, num_ranks) - 1;
    const ranks = first === last ? `rank ${first}` : `busiest of ranks ${first} to ${last}`;
    const node = nodes.length > 1 ? ` on ${nodes.findLast(([start]) => start <= first)[1]}` : "";
    const times = percent[layer] ? `${(percent[layer][column] / 100).toFixed(2)} × mean` : "no data";
    return `layer ${layer}, ${ranks}${node}: ${times}`;
  }

  show() {
    const [layer, column] = this.pointed ?? this.worst, { cell, rowHeight } = this.cells;
    setText(this.read, `${this.pointed ? "" : "busiest: "}${this.words(layer, column)}`);
    this.cross.hidden = !this.pointed;
    const size = Math.max(cell, 4);
    Object.assign(this.cross.style, {
      left: `${BOX.left + (column + 0.5) * cell - size / 2}px`, top: `${BOX.top + layer * rowHeight}px`,
      width: `${size}px`, height: `${rowHeight}px`,
    });
  }

  point(cell) {
    this.pointed = cell;
    if (!this.place.hidden) this.show();
  }

  listen() {
    this.canvas.addEventListener("pointermove", (event) => {
      const { rows, columns, cell, rowHeight } = this.cells;
      const column = Math.floor((event.offsetX - BOX.left) / cell), layer = Math.floor((event.offsetY - BOX.top) / rowHeight);
      const isIn = column >= 0 && column < columns && layer >= 0 && layer < rows;
      this.point(isIn ? [layer, column] : null);
    });
    this.canvas.addEventListener("pointerleave", () => document.activeElement === this.canvas || this.point(null));
    this.canvas.addEventListener("blur", () => this.point(null));
    this.canvas.addEventListener("keydown", (event) => {
      const step = arrow(event);
      if (!step) return event.key === "Escape" && this.point(null);
      event.preventDefault();
      const { rows, columns } = this.cells, [layer, column] = this.pointed ?? this.worst;
      this.point(this.pointed ? [(layer + step[0] + rows) % rows, (column + step[1] + columns) % columns] : this.worst);
    });
  }

  drawScale(style, color) {
    const canvas = this.scale, width = canvas.clientWidth;
    if (!width) return;
    const context = sized(canvas, width, 30);
    for (let x = 0; x < width; x++) {
      [context.fillStyle] = color(2 ** ((x / (width - 1) * 2 - 1) * RANGE));
      context.fillRect(x, 0, 1, 12);
    }
    context.fillStyle = style.getPropertyValue("--soft");
    context.font = `11px ${style.fontFamily}`;
    for (const value of width > 200 ? [0.63, 0.8, 1, 1.25, 1.6] : [0.63, 1, 1.6]) {
      const at = (Math.log2(value) / RANGE + 1) / 2;
      context.textAlign = at < 0.1 ? "left" : at > 0.9 ? "right" : "center";
      context.fillText(`${value}×`, Math.min(width, Math.max(0, at * width)), 25);
    }
  }
}

// From a ratio to a colour, and to one legible on it. In OKLab: equal steps look equal.
function colors(style) {
  const [low, mid, high] = ["low", "mid", "high"].map((end) => oklab(style.getPropertyValue(`--heat-${end}`).trim()));
  return (ratio) => {
    const part = ratio > 0 ? Math.max(-1, Math.min(1, Math.log2(ratio) / RANGE)) : -1;
    const end = part < 0 ? low : high;
    const [l, a, b] = mid.map((value, i) => value + (end[i] - value) * Math.abs(part));
    return [`oklab(${l} ${a} ${b})`, l > 0.62 ? "#111" : "#fff"];
  };
}

function oklab(hex) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
    .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s];
}
