// Elements, and numbers as text.

// Text becomes text nodes only: nothing that a worker says is ever markup.
export function make(name, attributes = {}, ...children) {
  const element = name.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children.filter((child) => child !== "").map((child) => child instanceof Node ? child : String(child)));
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function sized(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return context;
}

export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString("en-GB");
export const tone = (value) => value ? value >= 0.9 ? "good" : value >= 0.8 ? "fair" : "bad" : "";
export const healthTone = (health) => ({ serving: "good", waiting: "fair" })[health] ?? "bad";
// A name that is too long loses its middle, because both ends matter.
export const shortened = (name, most) => name.length > most ? `${name.slice(0, (most - 1) >> 1)}…${name.slice(-(most >> 1))}` : name;
export const count = (number, thing) => `${number.toLocaleString("en")} ${thing}${number === 1 ? "" : "s"}`;
export const ms = (s) => Number((1e3 * s).toPrecision(3)).toLocaleString("en");
export const seconds = (s) => s < 1 ? `${(s * 1e3).toFixed(1)} ms` : s < 100 ? `${s.toFixed(2)} s` : `${Math.round(s).toLocaleString("en")} s`;

export function bytes(size) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const unit = Math.min(units.length - 1, Math.floor(Math.log2(Math.max(1, size)) / 10));
  return `${(size / 1024 ** unit).toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

// What an arrow key moves, [down, right]; undefined for other keys.
export const arrow = (event) => ({ ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] })[event.key];
