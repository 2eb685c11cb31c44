// One pool: its figures, balance, heat map, ranks, decisions and events.

import { Balance } from "./balance.js";
import { bytes, clock, count, healthTone, make, ms, seconds, setText, shortened, tone } from "./elements.js";
import { Heat } from "./heat.js";

// Columns of the table of ranks: [key, title, class, value to sort by, largest first].
const COLUMNS = [
  ["rank", "rank", "n", (rank) => rank.rank, false],
  ["worker", "worker", "", (rank) => rank.worker, false],
  ["node", "node", "extra", (rank) => rank.node, false],
  ["load", "load, × mean", "", (rank) => rank.load_share ?? 0, true],
  ["generation", "generation", "n extra", (rank) => rank.generation, false],
  ["step", "step", "n", (rank) => rank.median_step_us, true],
  ["requests", "requests", "n", (rank) => rank.active_requests + rank.queued_requests, true],
];

// Ranks beside which there is room for other events.
const FEW = 12;

export class View {
  constructor(name) {
    this.name = name;
    this.article = document.getElementById("view").content.firstElementChild.cloneNode(true);
    this.part = (part) => this.article.querySelector(`[data-part="${part}"]`);
    this.balance = new Balance(this.part("chart"), this.part("balance-read"), this.part("chart-legend"));
    this.heat = new Heat(this.part("heat"), this.part("heat-read"), this.part("heat-legend"), this.part("scale"));
    this.pool = null;
    this.drawn = {};
    this.sorted = null;
    this.drawHead();
  }

  draw(pool) {
    this.pool = pool;
    this.article.hidden = false;
    this.article.dataset.phase = pool.phase;
    this.once("labels", pool.pool, () => this.label());
    setText(this.part("name"), pool.pool);
    const paused = pool.hold?.paused ? `paused by ${pool.hold.paused}` : pool.policy?.is_paused && "paused by the policy";
    const pinned = pool.hold?.pinned && `pinned by ${pool.hold.pinned}`;
    const pills = [
      [pool.health, healthTone(pool.health)], paused && ["paused", "fair"], pinned && ["pinned", "fair"],
      pool.quarantined.length && [`${pool.quarantined.length} quarantined`, "bad"],
    ].filter(Boolean);
    this.part("pills").replaceChildren(...pills.map(([word, kind]) => make("span", { class: `pill ${kind}` }, word)));
    setText(this.part("why"), [pool.health_reason, paused, pinned].filter(Boolean).join(" · "));
    this.drawFigures();
    this.balance.draw(pool);
    this.drawRanks();
    this.once("decisions", [pool.decisions, pool.policy], () => this.drawDecisions());
    this.once("events", [pool.switches, pool.gains, pool.epochs, pool.audit, pool.timeouts, pool.rejections, pool.quarantined, pool.poison_requests], () => this.drawEvents());
    if (!pool.windows.length) this.heat.draw(null);
  }

  // With two pools in view, each landmark needs a name of its own.
  label() {
    this.article.setAttribute("aria-label", `Pool ${this.pool.pool}`);
    for (const one of this.article.querySelectorAll("section, [role=region]")) {
      one.setAttribute("aria-label", `${one.getAttribute("aria-label")}, pool ${this.pool.pool}`);
    }
  }

  redraw() {
    if (!this.pool) return;
    this.balance.draw();
    this.heat.draw();
  }

  // Only if its data changed, so that a selection or a focus in it survives.
  once(part, data, draw) {
    const text = JSON.stringify(data);
    if (this.drawn[part] !== text) draw();
    this.drawn[part] = text;
  }

  drawFigures() {
    const pool = this.pool, rollout = pool.rollout;
    const busiest = Math.max(...pool.ranks.map((rank) => rank.load_share ?? 0), 0) * pool.num_ranks;
    const intended = pool.intended_ranks > pool.num_ranks ? ` of ${pool.intended_ranks}` : "";
    const engines = [...new Set(pool.ranks.map((rank) => rank.engine).filter(Boolean))].sort();
    const figures = [
      ["balancedness", pool.balancedness?.toFixed(3) ?? "no data", "", tone(pool.balancedness)],
      ["worst layer", pool.balancedness_min_layer?.toFixed(3) ?? "no data", "", tone(pool.balancedness_min_layer)],
      ...(pool.imbalance ? [costOf(pool.imbalance)] : []),
      ...(pool.node_traffic ? [betweenNodes(pool.node_traffic)] : []),
      ["busiest rank", busiest ? busiest.toFixed(2) : "no data", busiest ? " × mean" : ""],
      ...engines.map((engine) => ["engine", engine, ""]),
      ...(pool.advice?.ranks ? [["ranks advised", pool.advice.ranks, ` · load of ${pool.advice.needed.toFixed(1)}`, "", pool.advice.reason]] : []),
      ...handoversOf(pool.handovers),
      ["ranks", pool.num_ranks, intended + (pool.phase && ` · ${pool.phase}`), intended && "bad"],
      ...(pool.model ? [["MoE layers", pool.model.num_layers, ` · ${expertsOf(pool.model)}`]] : []),
      ["generation", pool.generation, ` · epoch ${pool.epoch}`],
      ["rollouts", pool.rollouts_completed, pool.rollouts_aborted ? ` · ${pool.rollouts_aborted} aborted` : ""],
      ["rollout now", rollout ? rollout.state : "none", rollout ? ` → ${rollout.generation}, ${count(rollout.moves, "move")}` : ""],
    ];
    const part = this.part("figures"), focused = [...part.children].indexOf(document.activeElement);
    part.replaceChildren(...figures.map(([name, value, more, kind, reason]) =>
      make("div", reason ? { class: "explained", tabindex: 0 } : {}, make("dt", {}, name),
        make("dd", { class: kind ?? "" }, String(value), make("small", {}, more)), reason ? make("dd", { class: "reason" }, reason) : "")));
    part.children[focused]?.focus({ preventScroll: true });
  }

  drawHead() {
    this.part("ranks-head").replaceChildren(...COLUMNS.map(([key, title, kind, , largest]) => {
      const button = make("button", { type: "button" }, title);
      button.addEventListener("click", () => {
        const again = this.sorted?.key === key;
        this.sorted = { key, largest: again ? !this.sorted.largest : largest };
        this.drawRanks();
      });
      return make("th", { class: kind, "data-key": key, scope: "col" }, button);
    }));
  }

  // Worst first, until a column is chosen: not connected, in trouble, then by load.
  inOrder(ranks) {
    const worst = (rank) => [rank.state !== "connected", Boolean(rank.trouble), rank.load_share ?? 0];
    const value = COLUMNS.find(([key]) => key === this.sorted?.key)?.[3];
    const keys = value ? (rank) => [value(rank)] : worst;
    const sign = !this.sorted || this.sorted.largest ? -1 : 1;
    const compare = (a, b) => a < b ? -1 : a > b ? 1 : 0;
    return [...ranks].sort((a, b) => {
      const [left, right] = [keys(a), keys(b)];
      const at = left.findIndex((one, i) => compare(one, right[i]));
      return at < 0 ? a.rank - b.rank : sign * compare(left[at], right[at]);
    });
  }

  drawRanks() {
    const pool = this.pool;
    const order = this.sorted ? `by ${this.sorted.key}` : "worst first";
    const few = pool.ranks.length < pool.num_ranks ? `, ${pool.ranks.length} of ${pool.num_ranks}` : "";
    setText(this.part("ranks-read"), pool.ranks.length ? order + few : "");
    for (const head of this.part("ranks-head").children) {
      const isSorted = head.dataset.key === this.sorted?.key;
      head.setAttribute("aria-sort", isSorted ? this.sorted.largest ? "descending" : "ascending" : "none");
    }
    const rows = this.inOrder(pool.ranks).map((rank) => this.row(rank));
    const none = make("tr", {}, make("td", { colspan: COLUMNS.length, class: "soft" }, "No worker has a rank yet: see why above."));
    this.part("ranks").replaceChildren(...(rows.length ? rows : [none]));
    this.part("columns").classList.toggle("few", rows.length <= FEW);
  }

  row(rank) {
    const times = rank.load_share === null ? null : rank.load_share * this.pool.num_ranks;
    const state = rank.state === "connected" ? "" : make("span", { class: "bad" }, ` ${rank.state}`);
    const idle = rank.idle ? make("span", { class: "soft" }, " idle") : "";
    const trouble = rank.trouble ? make("span", { class: "trouble" }, rank.trouble) : "";
    const staged = rank.staged_generation ? `→${rank.staged_generation}` : "";
    const queued = rank.queued_requests ? `+${rank.queued_requests}` : "";
    return make("tr", {}, make("td", { class: "n" }, rank.rank),
      make("td", {}, make("span", { class: "name", title: rank.worker }, shortened(rank.worker, 32)), state, idle, trouble),
      make("td", { class: "extra soft", title: rank.node }, shortened(rank.node, 22)),
      times === null ? make("td", { class: "soft" }, "no data") : make("td", {}, barOf(times), times.toFixed(2)),
      make("td", { class: "n extra" }, `${rank.generation}${staged}`),
      make("td", { class: "n" }, rank.median_step_us ? seconds(rank.median_step_us / 1e6) : "–"),
      make("td", { class: "n" }, `${rank.active_requests}${queued}`));
  }

  drawDecisions() {
    const pool = this.pool;
    setText(this.part("policy"), pool.policy ? `policy ${pool.policy.hash}${pool.policy.rejection && ` stays in force, the newest was rejected: ${pool.policy.rejection}`}` : "");
    const items = pool.decisions.map((one) =>
      item(one.accepted ? "yes" : "no", one.accepted ? "good" : "soft", one.time_unix_s, one.reason, factsOf(one), one.sequence));
    this.list("decisions", items, "No decision yet. The first follows the first window with enough traffic.");
  }

  drawEvents() {
    const pool = this.pool;
    const events = [
      ...pool.switches.map((one) => [one.time_unix_s, "switch", "", `generation ${one.generation} at step ${one.step.toLocaleString("en")}`, `${count(one.moves, "move")} staged in ${seconds(one.staging_s)} · longest stall ${seconds(one.max_stall_us / 1e6)}`]),
      ...pool.gains.filter((one) => one.judged_unix_s).map((one) => [one.judged_unix_s, "gain", one.outcome === "kept" ? "good" : "fair", `generation ${one.generation}: ${one.outcome.replace("_", " ")}`, `balancedness ${one.balancedness_expected.toFixed(3)} expected, ${one.balancedness_realised.toFixed(3)} realised`]),
      ...pool.epochs.map((one) => [one.opened_unix_s, "epoch", "fair", `epoch ${one.epoch}: ${one.reason}`, one.serving_after_s ? `${one.workers.length} ranks served after ${seconds(one.serving_after_s)}` : `${one.workers.length} ranks, not serving yet`]),
      ...pool.audit.map((one) => [one.time_unix_s, one.accepted ? "request" : "rejected", one.accepted ? "good" : "fair", `${one.who}: ${one.what}`, one.outcome]),
    ].sort((a, b) => b[0] - a[0]).slice(0, 40).map(([time, word, kind, text, facts]) => item(word, kind, time, text, facts));
    const counted = [
      ...pool.quarantined.map((one) => item("quarantined", "bad", one.since_unix_s, `${one.worker}: ${one.reason}`, one.until_restart ? "until it restarts" : "until it fits the pool")),
      ...(pool.poison_requests ? [item(`${pool.poison_requests} × poison`, "fair", 0, "requests that gateways rejected: ranks failed while running them")] : []),
      ...pool.timeouts.filter((one) => one.reached).map((one) => item(`${one.reached} × timeout`, "bad", 0, one.latest, `${one.name}, after ${seconds(one.timeout_s)}`)),
      ...pool.rejections.map((one) => item(`${one.count} × rejected`, "fair", 0, one.latest, one.kind)),
    ];
    this.list("events", [...counted, ...events], "None yet: no switch, no timeout, no rejection, no request.");
  }

  list(part, items, none) {
    this.part(part).replaceChildren(...(items.length ? items : [make("li", { class: "soft" }, none)]));
  }
}

// What a decision weighed, as far as there was traffic and a plan.
function factsOf(one) {
  const steps = one.step_s_proposed && `${ms(one.step_s_current)} → ${ms(one.step_s_realised || one.step_s_proposed)} ms a step`;
  const facts = one.kind === "outcome" ? [
    `balancedness ${one.balancedness_proposed.toFixed(2)} expected, ${one.balancedness_realised.toFixed(2)} realised`,
    steps && `${steps}, ${ms(one.step_s_proposed)} expected`,
  ] : one.kind === "plan" ? [
    one.balancedness_current && `balancedness ${one.balancedness_current.toFixed(2)}${one.moves && one.balancedness_proposed ? ` → ${one.balancedness_proposed.toFixed(2)}` : ""}`,
    one.moves && steps, one.moves && `${count(one.moves, "move")} · ${bytes(one.bytes)}`,
    one.plan_ms && `planned in ${seconds(one.plan_ms / 1e3)}`,
  ] : [one.kind];
  return facts.filter(Boolean).join(" · ");
}

// Ends at twice the mean; what is above the mean stands out.
function barOf(times) {
  const bar = make("span", { class: "bar" }, make("i"), make("i", { class: "over" }));
  bar.firstChild.style.width = `${Math.min(times, 1) * 50}%`;
  bar.lastChild.style.width = `${Math.min(Math.max(times - 1, 0), 1) * 50}%`;
  return bar;
}

function expertsOf({ num_experts, has_shared_expert }) {
  return has_shared_expert ? `${count(num_experts - 1, "expert")} and the shared one` : count(num_experts, "expert");
}

function handoversOf({ held_prompts, held_tokens, handed_over_prompts, handed_over_tokens, missing_tokens }) {
  const arrived = handed_over_tokens ? Math.floor(1000 * (1 - missing_tokens / handed_over_tokens)) / 10 : 100;
  return [
    ...(held_prompts ? [["prompts handed over", held_prompts.toLocaleString("en"), held_tokens ? ` · ${held_tokens.toLocaleString("en")} tokens held now` : ""]] : []),
    ...(handed_over_prompts ? [["prompts received", handed_over_prompts.toLocaleString("en"), ` · ${arrived} % of their latents`, arrived < 90 ? "fair" : ""]] : []),
  ];
}

function costOf({ is_measured, share, cost_s, step_s, reason }) {
  const steps = step_s ? ` · ${ms(cost_s)} of ${ms(step_s)} ms a step` : " of a step";
  return ["imbalance costs", `${is_measured ? "" : "≤ "}${(100 * share).toFixed(0)} %`, steps, "", reason];
}

function betweenNodes({ sent_rows, sent_outputs, nodes, most_nodes, is_two_hop, direct_rows, remote_nodes }) {
  const [way, other, would] = is_two_hop ? ["two hops", "one hop", direct_rows] : ["one hop", "two hops", remote_nodes];
  const reason = `per token and layer by ${way}; ${other} would send ${would.toFixed(2)} rows; ${sent_outputs.toFixed(2)} outputs return; a token reaches ${nodes.toFixed(2)} nodes on average`;
  return ["rows between nodes", sent_rows.toFixed(2), ` by ${way}, ≤ ${count(most_nodes, "node")}`, "", reason];
}

function item(word, kind, time, text, facts, number = "") {
  return make("li", {},
    make("div", { class: "top" }, make("b", { class: kind }, word), make("span", { class: "soft" }, number), time ? make("time", {}, clock(time)) : ""),
    make("div", {}, text), facts ? make("div", { class: "facts" }, facts) : "");
}
