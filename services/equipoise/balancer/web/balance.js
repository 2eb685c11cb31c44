// The chart of balancedness over time. What is read stays read while windows are added.

import { arrow, clock, make, setText } from "./elements.js";

const BOX = { left: 38, right: 12, top: 18, bottom: 22, height: 200 };

export class Balance {
  constructor(place, read, legend) {
    Object.assign(this, { place, read, legend, pool: null, windows: [], pointed: null });
  }

  draw(pool = this.pool) {
    this.pool = pool;
    this.windows = pool?.windows.filter((window) => window.assignments) ?? [];
    this.legend.hidden = !this.windows.length;
    if (!this.windows.length) {
      setText(this.read, "");
      return this.place.replaceChildren(make("p", { class: "soft" }, "No window with traffic has closed yet. The first closes about one interval after requests begin."));
    }
    const hadFocus = this.place.contains(document.activeElement);
    this.svg = this.drawn();
    this.place.replaceChildren(this.svg);
    if (hadFocus) this.svg.focus({ preventScroll: true });
    this.show();
  }

  drawn() {
    const { pool, windows } = this, { left, right, top, bottom, height } = BOX;
    const width = Math.max(280, this.place.clientWidth);
    const from = windows[0].closed_unix_s, to = Math.max(pool.windows.at(-1).closed_unix_s, from + pool.interval_s);
    const axis = axisOf(Math.min(...windows.map((window) => window.balancedness)));
    const x = (time) => left + (time - from) / (to - from) * (width - left - right);
    const y = (value) => top + (1 - value) / (1 - axis.low) * (height - top - bottom);
    this.place_of = (window) => [x(window.closed_unix_s), y(window.balancedness)];
    const svg = make("svg:svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0, "aria-label": wordsOf(pool, windows) });
    for (const value of axis.ticks) {
      svg.append(make("svg:line", { class: "guide", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
        make("svg:text", { x: left - 7, y: y(value) + 4, "text-anchor": "end" }, value.toFixed(axis.step < 0.1 ? 2 : 1)));
    }
    for (const [at, text] of timesOf(from, to, width / 120)) {
      const anchor = x(at) < left + 24 ? "start" : x(at) > width - right - 24 ? "end" : "middle";
      svg.append(make("svg:text", { class: "time", x: x(at), y: height - 5, "text-anchor": anchor }, text));
    }
    for (const run of runsOf(windows)) {
      const points = [run[0], ...run].map(this.place_of);
      const ground = [points.at(-1), points[0]].map(([x]) => [x, y(axis.low)]);
      svg.append(make("svg:polygon", { class: "area", points: [...points, ...ground].join(" ") }),
        make("svg:polyline", { class: "now", points: points.join(" ") }));
    }
    let labelled = -99;
    for (const change of switches(pool, from)) {
      const at = x(Math.min(change.time_unix_s, to));
      svg.append(make("svg:line", { class: "mark", x1: at, x2: at, y1: top - 3, y2: y(axis.low) }));
      if (at - labelled > 30 && at < width - 20) {
        svg.append(make("svg:text", { x: at, y: top - 7, "text-anchor": "middle" }, String(change.generation)));
        labelled = at;
      }
    }
    for (const window of windows.filter((one) => one.shift_detected)) {
      svg.append(make("svg:path", { class: "shift", d: `M${x(window.closed_unix_s)} ${y(axis.low) - 6}l5 5l-5 5l-5 -5z` }));
    }
    this.dot = svg.appendChild(make("svg:circle", { class: "dot", r: 4.5 }));
    const pick = (event) => {
      const at = from + (event.offsetX * width / this.place.clientWidth - left) / (width - left - right) * (to - from);
      this.point(this.windows.reduce((a, b) => Math.abs(b.closed_unix_s - at) < Math.abs(a.closed_unix_s - at) ? b : a));
    };
    svg.addEventListener("pointermove", pick);
    svg.addEventListener("pointerleave", () => document.activeElement === svg || this.point(null));
    svg.addEventListener("blur", () => svg.isConnected && this.point(null));
    svg.addEventListener("keydown", (event) => {
      const step = arrow(event)?.[1];
      if (!step) return event.key === "Escape" && this.point(null);
      event.preventDefault();
      const next = this.windows[this.windows.indexOf(this.shown()) + step];
      if (next) this.point(next);
    });
    return svg;
  }

  point(window) {
    this.pointed = window?.window ?? null;
    this.show();
  }

  shown() {
    return this.windows.find((window) => window.window === this.pointed) ?? this.windows.at(-1);
  }

  show() {
    const window = this.shown(), [x, y] = this.place_of(window);
    this.dot.setAttribute("cx", x);
    this.dot.setAttribute("cy", y);
    setText(this.read, `${clock(window.closed_unix_s)} · ${window.balancedness.toFixed(3)} · max/mean ${window.max_over_mean.toFixed(2)} · generation ${window.generation} · ${window.assignments.toLocaleString("en")} assignments`);
  }
}

// Windows without traffic interrupt the line.
function runsOf(windows) {
  const starts = windows.flatMap((one, i) => one.window === windows[i - 1]?.window + 1 ? [] : [i]);
  return starts.map((start, i) => windows.slice(start, starts[i + 1]));
}

// Every tick is a multiple of the step, and the lowest is where the axis starts.
function axisOf(lowest) {
  const step = [0.02, 0.05, 0.1, 0.2].find((one) => (1 - lowest) / one <= 5) ?? 0.2;
  const number = Math.max(2, Math.ceil((1 - lowest) / step - 1e-9));
  const ticks = Array.from({ length: number + 1 }, (_, i) => 1 - i * step);
  return { step, ticks, low: ticks.at(-1) };
}

// Round times of day, at most as many as fit.
function timesOf(from, to, most) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
  const step = steps.find((one) => (to - from) / one <= most) ?? 86400;
  const offset = new Date(from * 1000).getTimezoneOffset() * 60;
  const first = Math.ceil((from - offset) / step) * step + offset;
  const times = [];
  for (let at = first; at <= to; at += step) times.push([at, clock(at).slice(0, step < 60 ? 8 : 5)]);
  return times;
}

// Waves of one rollout come close together: the last of them stands for all.
function switches(pool, from) {
  const oldestFirst = pool.switches.filter((one) => one.time_unix_s >= from).sort((a, b) => a.generation - b.generation);
  const gap = pool.interval_s / 3;
  return oldestFirst.filter((one, i) => !(oldestFirst[i + 1]?.time_unix_s - one.time_unix_s < gap));
}

function wordsOf(pool, windows) {
  const values = windows.map((window) => window.balancedness);
  return `Balancedness of ${windows.length} windows: lowest ${Math.min(...values).toFixed(2)}, now ${values.at(-1).toFixed(2)}; ${pool.rollouts_completed} rollouts completed. Arrow keys read windows.`;
}
