// Renders the events of /events, a stream for each pool in view. Keeps nothing, changes nothing.

import { healthTone, make, setText, tone } from "./elements.js";
import { View } from "./view.js";

const byId = (id) => document.getElementById(id);
const shown = { fleet: null, views: [], heardAt: 0 };

// Streams -----------------------------------------------------------------------------------------

class Stream {
  constructor(name) {
    this.view = new View(name);
    this.open();
  }

  open() {
    this.source?.close();
    this.source = new EventSource(`events?pool=${encodeURIComponent(this.view.name)}`);
    const draw = {
      fleet: (fleet) => drawFleet(fleet),
      pool: (pool) => this.drawPool(pool),
      heat: (heat) => this.view.heat.draw(heat),
      beat: () => {},
    };
    for (const [name, show] of Object.entries(draw)) {
      this.source.addEventListener(name, (event) => {
        shown.heardAt = Date.now();
        show(JSON.parse(event.data));
        showLive();
      });
    }
    this.source.onerror = showLive;
  }

  drawPool(pool) {
    this.view.name ||= pool.pool;
    this.view.draw(pool);
    arrange();
    if (this === shown.views[0]) document.title = `${pool.pool} ${pool.balancedness ? pool.balancedness.toFixed(2) : pool.health} · Equipoise`;
    markCurrent();
  }

  close() {
    this.source.close();
    this.view.article.remove();
  }
}

const chosen = () => decodeURIComponent(location.hash.match(/^#pool=(.*)$/)?.[1] ?? "");
const hashOf = (name) => `#pool=${encodeURIComponent(name)}`;

// A prefill pool and a decode pool of one fleet are seen together, prefill first.
function inView(name, pools) {
  const pool = pools.find((one) => one.pool === name) ?? pools[0];
  const other = { prefill: "decode", decode: "prefill" }[pool?.phase];
  const partner = pools.find((one) => one.phase === other);
  const both = partner ? [pool, partner] : [pool];
  return both.filter(Boolean).sort((a, b) => (b.phase === "prefill") - (a.phase === "prefill")).map((one) => one.pool);
}

function arrange() {
  const pools = shown.fleet?.pools.filter((pool) => !pool.unreadable) ?? [];
  // A stream without a name shows the balancer's first pool, and names it.
  if (!pools.length || !shown.views.every((one) => one.view.name)) return;
  const names = inView(chosen() || shown.views[0].view.name, pools);
  if (shown.views.map((one) => one.view.name).join("\0") === names.join("\0")) return;
  const kept = names.map((name) => shown.views.find((one) => one.view.name === name) ?? new Stream(name));
  for (const one of shown.views) if (!kept.includes(one)) one.close();
  shown.views = kept;
  byId("views").replaceChildren(...kept.map((one) => one.view.article));
  for (const one of kept) one.view.redraw();
  markCurrent();
}

// The fleet -----------------------------------------------------------------------------------------

function drawFleet(fleet) {
  if (JSON.stringify(shown.fleet) === JSON.stringify(fleet)) return;
  shown.fleet = fleet;
  const { pools, leads, words, leader } = fleet;
  const notice = byId("notice");
  const troubles = pools.map((pool) => pool.unreadable).filter(Boolean);
  const state = pools.length || !leads ? words : "No pools yet: a pool is created when its first worker connects.";
  notice.hidden = leads && pools.length > 0 && !troubles.length;
  notice.replaceChildren([state, ...troubles].filter(Boolean).join(" · "));
  const link = leads ? "" : leaderPage(leader);
  if (link) notice.append(" ", make("a", { href: link }, "Open the leader's page (if it is served on the same port)"), ".");
  drawPools(pools);
  arrange();
}

function drawPools(pools) {
  const nav = byId("pools"), focused = nav.contains(document.activeElement) && document.activeElement.hash;
  nav.hidden = pools.length < 2;
  nav.replaceChildren(...pools.map((pool) => make("a", { href: hashOf(pool.pool) },
    make("b", {}, pool.pool), make("span", { class: healthTone(pool.health) }, pool.health),
    make("small", {}, `${pool.phase ? `${pool.phase} · ` : ""}${pool.ranks_serving} of ${pool.num_ranks} ranks · generation ${pool.generation}`),
    make("span", { class: `n ${tone(pool.balancedness)}` }, pool.balancedness ? pool.balancedness.toFixed(2) : "–"))));
  markCurrent();
  if (focused) [...nav.children].find((link) => link.hash === focused)?.focus({ preventScroll: true });
}

function markCurrent() {
  const hashes = shown.views.map((one) => hashOf(one.view.name));
  for (const link of byId("pools").children) {
    hashes.includes(link.hash) ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
  }
}

function leaderPage(leader) {
  const host = leader.slice(0, leader.lastIndexOf(":"));
  return host && host !== location.hostname ? `http://${host}:${location.port}/` : "";
}

function showLive() {
  const silent = (Date.now() - shown.heardAt) / 1000;
  const isOn = shown.views.every((one) => one.source.readyState === EventSource.OPEN) && silent < 15;
  const words = shown.heardAt ? `no update for ${Math.round(silent)} s` : "connecting";
  byId("live").dataset.state = isOn ? "on" : shown.heardAt ? "off" : "wait";
  setText(byId("live"), isOn ? (shown.fleet?.leads === false ? "live (from a follower)" : "live") : words);
  // A browser does not reconnect after an error response, such as 503 for too many viewers.
  if (silent > 5) for (const one of shown.views) if (one.source.readyState === EventSource.CLOSED) one.open();
}

function redraw() {
  for (const one of shown.views) one.view.redraw();
}

function start() {
  for (const one of shown.views) one.close();
  shown.views = [new Stream(chosen())];
  byId("views").replaceChildren(shown.views[0].view.article);
}

addEventListener("hashchange", () => {
  if (location.hash.startsWith("#pool=")) arrange();
});
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
start();
setInterval(showLive, 1000);
