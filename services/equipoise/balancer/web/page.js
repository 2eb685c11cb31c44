// Renders the events of /events, a stream for each pool in view. Keeps nothing, changes nothing.

import { clock, healthTone, make, setText, tone } from "./elements.js";
import { View } from "./view.js";

const byId = (id) => document.getElementById(id);
const shown = { fleet: null, views: [] };
const SILENT_MS = 15_000;

// Streams -----------------------------------------------------------------------------------------

class Stream {
  constructor(name) {
    this.view = new View(name);
    this.heardAt = 0;
    this.refusal = "";
    this.open();
  }

  get url() {
    return `events?pool=${encodeURIComponent(this.view.name)}`;
  }

  // How long nothing has been heard, or the answer to this attempt.
  get silentMs() {
    return Date.now() - Math.max(this.heardAt, this.openedAt);
  }

  get isLive() {
    return this.source.readyState === EventSource.OPEN && Date.now() - this.heardAt < SILENT_MS;
  }

  open() {
    this.close();
    this.openedAt = Date.now();
    this.source = new EventSource(this.url);
    const draw = {
      fleet: (fleet) => drawFleet(fleet),
      pool: (pool) => this.drawPool(pool),
      heat: (heat) => this.view.heat.draw(heat),
      beat: () => {},
    };
    for (const [name, show] of Object.entries(draw)) {
      this.source.addEventListener(name, (event) => {
        this.heardAt = Date.now();
        this.refusal = "";
        show(JSON.parse(event.data));
        showLive();
      });
    }
    // A browser does not reconnect after an error response, such as 503 for too many viewers.
    this.source.onerror = () => {
      if (this.source.readyState === EventSource.CLOSED) this.ask();
      showLive();
    };
  }

  // Ask why there is no stream, which EventSource does not tell, and try again when told to.
  async ask() {
    const asking = new AbortController();
    let pauseS = 5;
    clearTimeout(this.timer);
    try {
      const response = await fetch(this.url, { signal: AbortSignal.any([asking.signal, AbortSignal.timeout(SILENT_MS)]) });
      if (!response.ok) {
        this.refusal = (await response.text()).trim();
        pauseS = Number(response.headers.get("Retry-After")) || pauseS;
      }
    } catch {  // The balancer is away.
      this.refusal = "";
    }
    asking.abort();
    if (!this.isClosed) this.timer = setTimeout(() => this.open(), 1000 * pauseS);
    showLive();
  }

  drawPool(pool) {
    if (!this.view.name) {  // The first of the balancer's pools, which may be another one later.
      this.view.name = pool.pool;
      this.open();
    }
    this.view.draw(pool);
    arrange();
    if (this === shown.views[0]) document.title = `${pool.pool} ${pool.balancedness ? pool.balancedness.toFixed(2) : pool.health} · Equipoise`;
    markCurrent();
  }

  close() {
    clearTimeout(this.timer);
    this.source?.close();
  }

  remove() {
    this.isClosed = true;
    this.close();
    this.view.article.remove();
  }
}

function chosen() {
  try {
    return decodeURIComponent(location.hash.match(/^#pool=(.*)$/)?.[1] ?? "");
  } catch {  // Not what this page writes.
    return "";
  }
}

const hashOf = (name) => `#pool=${encodeURIComponent(name)}`;

// A prefill pool and a decode pool that understand each other's latents are seen together, prefill
// first; if several would fit, nothing says which.
function inView(name, pools) {
  const pool = pools.find((one) => one.pool === name) ?? pools[0];
  const other = { prefill: "decode", decode: "prefill" }[pool?.phase];
  const partners = pools.filter((one) => one.phase === other && one.latent_forms.some((form) => pool.latent_forms.includes(form)));
  const both = partners.length === 1 ? [pool, ...partners] : [pool];
  return both.filter(Boolean).sort((a, b) => (b.phase === "prefill") - (a.phase === "prefill")).map((one) => one.pool);
}

function arrange() {
  const pools = shown.fleet?.pools.filter((pool) => !pool.unreadable) ?? [];
  if (!pools.length && shown.views.some((one) => one.view.pool)) return start();
  // A stream without a name shows the balancer's first pool, and names it.
  if (!pools.length || !shown.views.every((one) => one.view.name)) return;
  const names = inView(chosen() || shown.views[0].view.name, pools);
  if (shown.views.map((one) => one.view.name).join("\0") === names.join("\0")) return;
  const kept = names.map((name) => shown.views.find((one) => one.view.name === name) ?? new Stream(name));
  for (const one of shown.views) if (!kept.includes(one)) one.remove();
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

// Says the same until something changes: it is announced to those who listen to the page.
function showLive() {
  const late = shown.views.filter((one) => !one.isLive);
  const isKnown = shown.fleet !== null;
  const since = Math.min(...late.map((one) => one.heardAt).filter(Boolean));
  const words = late.find((one) => one.refusal)?.refusal ?? (Number.isFinite(since) ? `no update since ${clock(since / 1000)}` : "connecting");
  byId("live").dataset.state = late.length ? isKnown ? "off" : "wait" : "on";
  setText(byId("live"), late.length ? words : shown.fleet?.leads === false ? "live (from a follower)" : "live");
}

// A connection may be gone without a word, after a laptop slept or a NAT forgot it.
function reopenSilent() {
  for (const one of shown.views) if (one.source.readyState !== EventSource.CLOSED && one.silentMs > SILENT_MS) one.open();
  showLive();
}

function redraw() {
  for (const one of shown.views) one.view.redraw();
}

function start() {
  for (const one of shown.views) one.remove();
  shown.views = [new Stream(chosen())];
  byId("views").replaceChildren(shown.views[0].view.article);
}

addEventListener("hashchange", () => {
  if (location.hash.startsWith("#pool=")) arrange();
});
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
start();
setInterval(reopenSilent, 1000);
