// Renders the events of /events. Keeps nothing, changes nothing.

const byId = (id) => document.getElementById(id);
const shown = { fleet: null, pool: null, heat: null, heardAt: 0, source: null };

// Events -----------------------------------------------------------------------------------------

function listen() {
  shown.source?.close();
  shown.pool = shown.heat = null;
  shown.name = chosen();
  const source = new EventSource(`events?pool=${encodeURIComponent(shown.name)}`);
  for (const name of ["fleet", "pool", "heat", "beat"]) {
    source.addEventListener(name, (event) => {
      shown.heardAt = Date.now();
      if (name !== "beat") {
        shown[name] = JSON.parse(event.data);
        draw[name]();
      }
      showLive();
    });
  }
  source.onerror = showLive;
  shown.source = source;
}

const chosen = () => decodeURIComponent(location.hash.match(/^#pool=(.*)$/)?.[1] ?? "");
const hashOf = (name) => `#pool=${encodeURIComponent(name)}`;

function showLive() {
  const silent = (Date.now() - shown.heardAt) / 1000;
  const isOn = shown.source.readyState === EventSource.OPEN && silent < 15;
  const words = shown.heardAt ? `no update for ${Math.round(silent)} s` : "connecting";
  byId("live").dataset.state = isOn ? "on" : shown.heardAt ? "off" : "wait";
  setText(byId("live"), isOn ? (shown.fleet?.leads === false ? "live (from a follower)" : "live") : words);
  // A browser does not reconnect after an error response, such as 503 for too many viewers.
  if (shown.source.readyState === EventSource.CLOSED && silent > 5) listen();
}

// What is drawn -----------------------------------------------------------------------------------

const draw = {
  fleet() {
    const { pools, leads, words, leader } = shown.fleet;
    const notice = byId("notice");
    const troubles = pools.map((pool) => pool.unreadable).filter(Boolean);
    notice.hidden = leads && pools.length > 0 && !troubles.length;
    const state = pools.length || !leads ? words : "No pools yet: a pool is created when its first worker connects.";
    notice.replaceChildren([state, ...troubles].filter(Boolean).join(" · "));
    const link = leads ? "" : leaderPage(leader);
    if (link) notice.append(" ", make("a", { href: link }, "Open the leader's page (if it is served on the same port)"), ".");
    byId("pools").hidden = pools.length < 2;
    byId("pools").replaceChildren(...pools.map((pool) => {
      const link = make("a", { href: hashOf(pool.pool) },
        make("b", {}, pool.pool), make("span", { class: healthTone(pool.health) }, pool.health),
        make("small", {}, `${pool.phase ? `${pool.phase} · ` : ""}${pool.ranks_serving} of ${pool.num_ranks} ranks · generation ${pool.generation}`),
        make("span", { class: `n ${tone(pool.balancedness)}` }, pool.balancedness ? pool.balancedness.toFixed(2) : "–"));
      if (pool.pool === (shown.pool?.pool ?? chosen())) link.setAttribute("aria-current", "true");
      return link;
    }));
  },

  pool() {
    const pool = shown.pool;
    byId("pool").hidden = false;
    document.title = `${pool.pool} ${pool.balancedness ? pool.balancedness.toFixed(2) : pool.health} · Equipoise`;
    setText(byId("name"), pool.pool);
    setText(byId("health"), pool.health);
    byId("health").className = `pill ${healthTone(pool.health)}`;
    setText(byId("why"), [pool.health_reason, holdWords(pool.hold)].filter(Boolean).join(" · "));
    drawFigures(pool);
    drawChart();
    drawRanks(pool);
    drawDecisions(pool);
    drawEvents(pool);
    for (const link of byId("pools").children) {
      const isThis = link.hash === hashOf(pool.pool);
      isThis ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
    }
    if (!pool.windows.length) shown.heat = null;
    draw.heat();
  },

  heat() {
    drawHeat();
    drawScale();
  },
};

function drawFigures(pool) {
  const busiest = Math.max(0, ...pool.ranks.map((rank) => rank.load_share)) * pool.num_ranks;
  const rollout = pool.rollout;
  const figures = [
    ["balancedness", pool.balancedness?.toFixed(3) ?? "no data", "", tone(pool.balancedness)],
    ["worst layer", pool.balancedness_min_layer?.toFixed(3) ?? "no data", "", tone(pool.balancedness_min_layer)],
    ...(pool.imbalance ? [["imbalance costs", `${pool.imbalance.is_measured ? "" : "≤ "}${(100 * pool.imbalance.share).toFixed(0)} %`,
      pool.imbalance.step_s ? ` · ${(1e3 * pool.imbalance.cost_s).toPrecision(3)} of ${(1e3 * pool.imbalance.step_s).toPrecision(3)} ms a step` : " of a step", "", pool.imbalance.reason]] : []),
    ["busiest rank", busiest ? busiest.toFixed(2) : "–", busiest ? " × mean" : ""],
    ...engines(pool).map((engine) => ["engine", engine, ""]),
    ["ranks", pool.num_ranks, [pool.phase, pool.model && `${pool.model.num_layers} layers`].filter(Boolean).map((one) => ` · ${one}`).join("")],
    ["generation", pool.generation, ` · epoch ${pool.epoch}`],
    ["rollouts", pool.rollouts_completed, pool.rollouts_aborted ? ` · ${pool.rollouts_aborted} aborted` : ""],
    ["now", rollout ? rollout.state : "idle", rollout ? ` → ${rollout.generation}, ${count(rollout.moves, "move")}` : ""],
  ];
  byId("figures").replaceChildren(...figures.map(([name, value, more, kind, reason]) =>
    make("div", reason ? { title: reason } : {}, make("dt", {}, name), make("dd", { class: kind ?? "" }, String(value), make("small", {}, more)))));
}

const CHART = { left: 38, right: 12, top: 18, bottom: 22, height: 200 };

function drawChart(pointed = null) {
  const pool = shown.pool;
  const windows = pool?.windows.filter((window) => window.assignments) ?? [];
  const place = byId("chart");
  if (!windows.length) {
    place.replaceChildren(make("p", { class: "soft" }, "No window with traffic has closed yet."));
    return;
  }
  const width = Math.max(280, place.clientWidth);
  const { left, right, top, bottom, height } = CHART;
  const from = windows[0].closed_unix_s, to = Math.max(windows.at(-1).closed_unix_s, from + pool.interval_s);
  const low = Math.min(0.9, Math.floor(Math.min(...windows.map((window) => window.balancedness)) * 10) / 10);
  const x = (time) => left + (time - from) / (to - from) * (width - left - right);
  const y = (value) => top + (1 - value) / (1 - low) * (height - top - bottom);
  const svg = make("svg:svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": chartWords(pool, windows) });
  const steps = (1 - low) > 0.35 ? 0.2 : (1 - low) > 0.15 ? 0.1 : 0.05;
  for (let value = 1; value >= low - 1e-9; value -= steps) {
    svg.append(make("svg:line", { class: "guide", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      make("svg:text", { x: left - 7, y: y(value) + 4, "text-anchor": "end" }, value.toFixed(steps < 0.1 ? 2 : 1)));
  }
  const many = Math.max(1, Math.min(6, Math.floor(width / 150)));
  for (let i = 0; i <= many; i++) {
    const at = from + (to - from) * i / many;
    svg.append(make("svg:text", { x: x(at), y: height - 5, "text-anchor": i === 0 ? "start" : i === many ? "end" : "middle" }, clock(at)));
  }
  const line = windows.map((window, i) => `${i ? "L" : "M"}${x(window.closed_unix_s).toFixed(1)} ${y(window.balancedness).toFixed(1)}`).join("");
  svg.append(make("svg:path", { class: "area", d: `${line}L${x(windows.at(-1).closed_unix_s)} ${y(low)}L${x(from)} ${y(low)}Z` }));
  let labelled = -99;
  for (const change of switches(pool.switches, from)) {
    const at = x(Math.min(change.time_unix_s, to));
    svg.append(make("svg:line", { class: "mark", x1: at, x2: at, y1: top - 3, y2: y(low) }));
    if (at - labelled > 30 && at < width - 20) {
      svg.append(make("svg:text", { x: at, y: top - 7, "text-anchor": "middle" }, String(change.generation)));
      labelled = at;
    }
  }
  svg.append(make("svg:path", { class: "now", d: line }));
  for (const window of windows.filter((one) => one.shift_detected)) {
    const at = x(window.closed_unix_s), foot = y(low);
    svg.append(make("svg:path", { class: "shift", d: `M${at} ${foot - 6}l5 5l-5 5l-5 -5z` }));
  }
  const read = pointed ?? windows.at(-1);
  svg.append(make("svg:circle", { class: "dot", cx: x(read.closed_unix_s), cy: y(read.balancedness), r: 4.5 }));
  setText(byId("balance-read"), `${clock(read.closed_unix_s)} · ${read.balancedness.toFixed(3)} · max/mean ${read.max_over_mean.toFixed(2)} · generation ${read.generation} · ${read.assignments.toLocaleString("en")} assignments`);
  svg.addEventListener("pointermove", (event) => {
    const at = from + (event.offsetX * width / place.clientWidth - left) / (width - left - right) * (to - from);
    const near = windows.reduce((a, b) => Math.abs(b.closed_unix_s - at) < Math.abs(a.closed_unix_s - at) ? b : a);
    if (near !== read) drawChart(near);
  });
  svg.addEventListener("pointerleave", () => pointed && drawChart());
  place.replaceChildren(svg);
}

// Waves of one rollout come close together: the last of them stands for all.
function switches(all, from) {
  const oldestFirst = all.filter((one) => one.time_unix_s >= from).sort((a, b) => a.generation - b.generation);
  const gap = shown.pool.interval_s / 3;
  return oldestFirst.filter((one, i) => !(oldestFirst[i + 1]?.time_unix_s - one.time_unix_s < gap));
}

function chartWords(pool, windows) {
  const values = windows.map((window) => window.balancedness);
  return `Balancedness of ${windows.length} windows: lowest ${Math.min(...values).toFixed(2)}, now ${values.at(-1).toFixed(2)}; ${pool.rollouts_completed} rollouts completed.`;
}

const HEAT = { left: 26, bottom: 20, range: Math.log2(1.6) };

function drawHeat(pointed = null) {
  const canvas = byId("heat").firstElementChild;
  const heat = shown.heat;
  byId("heat").hidden = !heat;
  if (!heat) return setText(byId("heat-read"), "No window has closed yet.");
  const rows = heat.percent.length, columns = heat.percent[0].length;
  const width = byId("heat").clientWidth, rowHeight = Math.max(5, Math.min(44, Math.floor(330 / rows)));
  const context = sized(canvas, width, rows * rowHeight + HEAT.bottom);
  const cell = (width - HEAT.left) / columns, gap = cell > 8 && rowHeight > 8 ? 1.5 : 0;
  const style = getComputedStyle(document.documentElement), ink = style.getPropertyValue("--soft");
  const color = colors(style);
  context.font = `11.5px ${style.fontFamily}`;
  context.textBaseline = "middle";
  let worst = [0, 0];
  heat.percent.forEach((row, layer) => row.forEach((percent, column) => {
    const [fill, over] = color(percent / 100);
    context.fillStyle = fill;
    const left = HEAT.left + column * cell, up = layer * rowHeight;
    context.fillRect(left, up, Math.max(cell - gap, 1), rowHeight - gap);
    if (cell > 40 && rowHeight > 17) {
      context.fillStyle = over;
      context.textAlign = "center";
      context.fillText((percent / 100).toFixed(2), left + (cell - gap) / 2, up + (rowHeight - gap) / 2);
    }
    if (percent > heat.percent[worst[0]][worst[1]]) worst = [layer, column];
  }));
  context.fillStyle = ink;
  context.textAlign = "right";
  for (let layer = 0; layer < rows; layer += Math.ceil(14 / rowHeight)) context.fillText(layer, HEAT.left - 7, (layer + 0.5) * rowHeight);
  context.textAlign = "center";
  for (let column = 0; column < columns; column += Math.ceil(30 / cell)) context.fillText(column * heat.ranks_per_column, HEAT.left + (column + 0.5) * cell, rows * rowHeight + 11);
  const words = cellWords(heat, ...(pointed ?? worst));
  setText(byId("heat-read"), pointed ? words : `busiest: ${words}`);
  canvas.setAttribute("aria-label", `Load of ${rows} layers on ${heat.num_ranks} ranks in window ${heat.window}; the busiest is ${cellWords(heat, ...worst)}. Arrow keys read cells.`);
  shown.cells = { rows, columns, cell, rowHeight, pointed };
}

function cellWords(heat, layer, column) {
  const first = column * heat.ranks_per_column, last = Math.min(first + heat.ranks_per_column, heat.num_ranks) - 1;
  const ranks = first === last ? `rank ${first}` : `busiest of ranks ${first} to ${last}`;
  return `layer ${layer}, ${ranks}: ${(heat.percent[layer][column] / 100).toFixed(2)} × mean`;
}

function readHeat() {
  const canvas = byId("heat").firstElementChild;
  canvas.addEventListener("pointermove", (event) => {
    const { rows, columns, cell, rowHeight } = shown.cells;
    const column = Math.floor((event.offsetX - HEAT.left) / cell), layer = Math.floor(event.offsetY / rowHeight);
    const isIn = column >= 0 && column < columns && layer >= 0 && layer < rows;
    drawHeat(isIn ? [layer, column] : null);
  });
  canvas.addEventListener("pointerleave", () => drawHeat());
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const { rows, columns, pointed } = shown.cells, [layer, column] = pointed ?? [0, 0];
    drawHeat([(layer + step[0] + rows) % rows, (column + step[1] + columns) % columns]);
  });
}

function drawScale() {
  const canvas = byId("scale"), width = canvas.clientWidth;
  if (!width) return;
  const context = sized(canvas, width, 30);
  const style = getComputedStyle(document.documentElement), color = colors(style);
  for (let x = 0; x < width; x++) {
    [context.fillStyle] = color(2 ** ((x / (width - 1) * 2 - 1) * HEAT.range));
    context.fillRect(x, 0, 1, 12);
  }
  context.fillStyle = style.getPropertyValue("--soft");
  context.font = `11px ${style.fontFamily}`;
  for (const value of width > 200 ? [0.63, 0.8, 1, 1.25, 1.6] : [0.63, 1, 1.6]) {
    const at = (Math.log2(value) / HEAT.range + 1) / 2;
    context.textAlign = at < 0.1 ? "left" : at > 0.9 ? "right" : "center";
    context.fillText(`${value}×`, Math.min(width, Math.max(0, at * width)), 25);
  }
}

function engines(pool) {
  return [...new Set(pool.ranks.map((rank) => rank.engine).filter(Boolean))].sort();
}

function drawRanks(pool) {
  setText(byId("ranks-read"), pool.ranks.length < pool.num_ranks ? `showing ${pool.ranks.length} of ${pool.num_ranks}` : "");
  byId("ranks").replaceChildren(...pool.ranks.map((rank) => {
    const times = rank.load_share * pool.num_ranks;
    const bar = make("span", { class: "bar" }, make("i"));
    bar.firstChild.style.width = `${Math.min(100, times * 50)}%`;
    const state = rank.state === "connected" ? "" : make("span", { class: "bad" }, ` ${rank.state}`);
    const idle = rank.idle ? make("span", { class: "soft" }, " idle") : "";
    const trouble = rank.trouble ? make("span", { class: "trouble" }, rank.trouble) : "";
    const staged = rank.staged_generation ? `→${rank.staged_generation}` : "";
    const queued = rank.queued_requests ? `+${rank.queued_requests}` : "";
    return make("tr", {}, make("td", { class: "n" }, rank.rank), make("td", {}, rank.worker, state, idle, trouble),
      make("td", { class: "extra soft" }, rank.node), make("td", {}, bar, times.toFixed(2)),
      make("td", { class: "n extra" }, `${rank.generation}${staged}`),
      make("td", { class: "n" }, rank.median_step_us ? duration(rank.median_step_us) : "–"),
      make("td", { class: "n" }, `${rank.active_requests}${queued}`));
  }));
}

function drawDecisions(pool) {
  setText(byId("policy"), pool.policy ? `policy ${pool.policy.hash}${pool.policy.rejection ? ": the newest version was rejected" : ""}` : "");
  const items = pool.decisions.map((one) => {
    const ms = (seconds) => (1e3 * seconds).toPrecision(3);
    const steps = one.step_s_proposed ? ` · ${ms(one.step_s_current)} → ${ms(one.step_s_realised || one.step_s_proposed)} ms a step` : "";
    const facts = one.kind === "outcome"
      ? `balancedness ${one.balancedness_proposed.toFixed(2)} expected, ${one.balancedness_realised.toFixed(2)} realised${steps}${steps && `, ${ms(one.step_s_proposed)} expected`}`
      : one.kind === "plan" && one.balancedness_proposed
      ? `${one.balancedness_current.toFixed(2)} → ${one.balancedness_proposed.toFixed(2)}${steps} · ${count(one.moves, "move")} · ${bytes(one.bytes)} · ${one.plan_ms.toFixed(0)} ms to plan`
      : one.kind;
    return item(`${one.accepted ? "yes" : "no"}`, one.accepted ? "good" : "soft", one.time_unix_s, one.reason, facts, one.sequence);
  });
  byId("decisions").replaceChildren(...(items.length ? items : [make("li", { class: "soft" }, "None yet.")]));
}

function drawEvents(pool) {
  const events = [
    ...pool.switches.map((one) => [one.time_unix_s, "switch", "", `generation ${one.generation} at step ${one.step.toLocaleString("en")}`, `${count(one.moves, "move")} staged in ${one.staging_s.toFixed(2)} s · longest stall ${duration(one.max_stall_us)}`]),
    ...pool.gains.filter((one) => one.judged_unix_s).map((one) => [one.judged_unix_s, "gain", one.outcome === "kept" ? "good" : "fair", `generation ${one.generation}: ${one.outcome.replace("_", " ")}`, `balancedness ${one.balancedness_expected.toFixed(3)} expected, ${one.balancedness_realised.toFixed(3)} realised`]),
    ...pool.epochs.map((one) => [one.opened_unix_s, "epoch", "fair", `epoch ${one.epoch}: ${one.reason}`, one.serving_after_s ? `${one.workers.length} ranks served after ${one.serving_after_s.toFixed(1)} s` : `${one.workers.length} ranks, not serving yet`]),
    ...pool.audit.map((one) => [one.time_unix_s, one.accepted ? "request" : "rejected", one.accepted ? "good" : "fair", `${one.who}: ${one.what}`, one.outcome]),
  ].sort((a, b) => b[0] - a[0]).slice(0, 40).map(([time, word, kind, text, facts]) => item(word, kind, time, text, facts));
  const counted = [
    ...pool.timeouts.filter((one) => one.reached).map((one) => item(`${one.reached} × timeout`, "bad", 0, one.latest, `${one.name}, after ${one.timeout_s} s`)),
    ...pool.rejections.map((one) => item(`${one.count} × rejected`, "fair", 0, one.latest, one.kind)),
  ];
  const items = [...counted, ...events];
  byId("events").replaceChildren(...(items.length ? items : [make("li", { class: "soft" }, "Nothing.")]));
}

function item(word, kind, time, text, facts, number = "") {
  return make("li", {},
    make("div", { class: "top" }, make("b", { class: kind }, word), make("span", { class: "soft" }, number), time ? make("time", {}, clock(time)) : ""),
    make("div", {}, text), facts ? make("div", { class: "facts" }, facts) : "");
}

// Words and colours -------------------------------------------------------------------------------

const clock = (unix) => new Date(unix * 1000).toLocaleTimeString("en-GB");
const tone = (value) => value ? value >= 0.9 ? "good" : value >= 0.8 ? "fair" : "bad" : "";
const healthTone = (health) => ({ serving: "good", waiting: "fair" })[health] ?? "bad";

function holdWords(hold) {
  if (!hold) return "";
  return [hold.paused && `paused by ${hold.paused}`, hold.pinned && `pinned by ${hold.pinned}`].filter(Boolean).join(" · ");
}

const count = (number, thing) => `${number.toLocaleString("en")} ${thing}${number === 1 ? "" : "s"}`;
const duration = (us) => us < 1e6 ? `${(us / 1e3).toFixed(1)} ms` : `${(us / 1e6).toFixed(2)} s`;

function bytes(size) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const unit = Math.min(units.length - 1, Math.floor(Math.log2(Math.max(1, size)) / 10));
  return `${(size / 1024 ** unit).toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

function leaderPage(leader) {
  const host = leader.slice(0, leader.lastIndexOf(":"));
  return host && host !== location.hostname ? `http://${host}:${location.port}/` : "";
}

// From a ratio to a colour, and to one that is legible on it. In OKLab, so that equal steps look equal.
function colors(style) {
  const [low, mid, high] = ["low", "mid", "high"].map((end) => oklab(style.getPropertyValue(`--heat-${end}`).trim()));
  return (ratio) => {
    const part = ratio > 0 ? Math.max(-1, Math.min(1, Math.log2(ratio) / HEAT.range)) : -1;
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

// Elements ----------------------------------------------------------------------------------------

// Text becomes text nodes only: nothing that a worker says is ever markup.
function make(name, attributes = {}, ...children) {
  const element = name.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children.filter((child) => child !== "").map((child) => child instanceof Node ? child : String(child)));
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function sized(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return context;
}

function redraw() {
  if (shown.pool) drawChart();
  draw.heat();
}

addEventListener("hashchange", () => chosen() !== shown.name && listen());
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
readHeat();
listen();
setInterval(showLive, 1000);
