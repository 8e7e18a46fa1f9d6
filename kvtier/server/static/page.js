// The status page: asks api/status every few seconds and draws what it says. History lies in the server, so a reload
// loses nothing.

import { bar, chart, element, nothing, table } from "./charts.js";

const EVERY_MS = 5000, COLUMNS = 60;
const byId = (id) => document.getElementById(id);

const view = { range: "hour", past: { times_s: [], series: {} }, latest: null, timer: 0, asked: 0 };

// ---- numbers as text

const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const count = (n) => (Math.abs(n) < 1e6 ? number.format(n) : short.format(n));
const percent = (share) => `${(100 * share).toFixed(1)} %`;

function scaled(value, units, base) {
  let unit = 0;
  while (Math.abs(value) >= base && unit < units.length - 1) { value /= base; unit += 1; }
  return `${value.toFixed(value && Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 && unit ? 1 : 0)} ${units[unit]}`;
}
const bytes = (n) => scaled(n, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024);
const rate = (n) => scaled(n, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"], 1000);
function seconds(s) {
  if (s === 0) return "0 s";
  if (s < 1e-3) return `${(s * 1e6).toFixed(0)} µs`;
  if (s < 1) return `${(s * 1e3).toFixed(s < 0.01 ? 2 : 0)} ms`;
  return s < 600 ? `${s.toFixed(1)} s` : s < 36000 ? `${(s / 60).toFixed(0)} min` : `${(s / 3600).toFixed(1)} h`;
}
const twoDigits = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
const minute = (t) => new Date(t * 1000).toLocaleTimeString("en", twoDigits);
const clock = (t) => new Date(t * 1000).toLocaleTimeString("en", { ...twoDigits, second: "2-digit" });

// ---- series: now, and over the time that is shown

function labelsOf(key) {
  const labels = {};
  for (const [, name, value] of key.matchAll(/(\w+)="([^"]*)"/g)) labels[name] = value;
  return labels;
}

// [[labels, key], ...] of every series of that name.
const familyOf = (name) => Object.keys(view.latest.series)
  .filter((key) => key === name || key.startsWith(`${name}{`)).map((key) => [labelsOf(key), key]);
const tiers = () => familyOf("kvtier_tier_capacity_bytes").map(([labels]) => labels.tier);
const now = (key) => view.latest.series[key] ?? 0;

// What a counter grew by between two rows of the past; what was not there yet was 0.
function grown(key, from, to) {
  const values = view.past.series[key];
  return values ? Math.max(0, (values[to] ?? 0) - (values[from] ?? 0)) : 0;
}
const rows = () => view.past.times_s.length;
const overall = (key) => (rows() > 1 ? grown(key, 0, rows() - 1) : 0);
const span = () => (rows() > 1 ? view.past.times_s[rows() - 1] - view.past.times_s[0] : 0);
const perSecond = (key) => (span() ? overall(key) / span() : 0);
const total = (keys) => keys.reduce((sum, [, key]) => sum + overall(key), 0);

// Bytes that left a tier: read by other tiers, and out of the first one by the engine, or by clients of the server.
const OUT_OF_FIRST = ['kvtier_cold_bytes_total{direction="onboard"}', "kvtier_server_sent_bytes_total"];
const outOf = (tier) => [`kvtier_tier_get_bytes_total{tier="${tier}"}`, ...(tier === tiers()[0] ? OUT_OF_FIRST : [])];

// The past cut into columns: pairs of rows, and the time at which each ends.
function columns() {
  const last = rows() - 1, step = Math.max(1, Math.ceil(last / COLUMNS)), cut = [];
  for (let to = last; to > 0; to -= step) cut.unshift([Math.max(0, to - step), to]);
  return cut;
}
function overTime(figure, lines, options) {
  const cut = columns();
  if (!cut.length) { nothing(figure, "Two samples are needed, five seconds apart."); return; }
  chart(figure, {
    xs: cut.map(([, to]) => view.past.times_s[to]), xText: clock, tickText: minute, xName: "Time", ...options,
    lines: lines.map(({ name, value }) => ({ name, values: cut.map(([from, to]) => value(from, to)) })),
  });
}
const length = (from, to) => view.past.times_s[to] - view.past.times_s[from];

// ---- sections

function drawSummary() {
  const lookups = overall("kvtier_lookups_total"), hits = total(familyOf("kvtier_hits_total"));
  const hot = now('kvtier_hot_bytes_total{direction="offload"}'), cold = now('kvtier_cold_bytes_total{direction="offload"}');
  const errors = total(familyOf("kvtier_errors_total")) + overall("kvtier_load_failures_total");
  const saved = view.latest.series.kvtier_ttft_saved_seconds_total;
  const known = view.latest.series.kvtier_prefill_seconds_per_token > 0;
  const tile = (name, value, detail, bad = false) => element("div", bad ? { class: "bad" } : {},
    element("dt", {}, name), element("dd", {}, value, element("small", {}, detail)));
  byId("summary").replaceChildren(
    tile("Hit rate", lookups ? percent(hits / lookups) : "–", `${count(hits)} of ${count(lookups)} pages`),
    tile("Time to first token saved", known ? seconds(overall("kvtier_ttft_saved_seconds_total")) : "–",
      known ? `${seconds(saved)} since the start` : "the prefill speed is not known"),
    tile("Restored", bytes(overall('kvtier_hot_bytes_total{direction="onboard"}')), "as it lies in the engine's cache"),
    tile("Compression", cold ? `${(hot / cold).toFixed(2)}×` : "–", `${bytes(cold)} stored of ${bytes(hot)}`),
    tile("Errors", count(errors), errors ? "see Errors below" : "none", errors > 0));
}

function drawTiers() {
  const hits = total(familyOf("kvtier_hits_total"));
  const head = ["Tier", "Used", "", "Capacity", "Pages", "Share of hits", "In", "Out", "Evicted"];
  byId("tiers").replaceChildren(table("Rates and shares are of the time shown.", head, tiers().map((tier) => {
    const of = (name) => `${name}{tier="${tier}"}`;
    const used = now(of("kvtier_tier_used_bytes")), capacity = now(of("kvtier_tier_capacity_bytes"));
    return [tier, `${bytes(used)} (${percent(capacity ? used / capacity : 0)})`, bar(capacity ? used / capacity : 0), bytes(capacity),
      count(now(of("kvtier_tier_resident_pages"))), hits ? percent(overall(of("kvtier_hits_total")) / hits) : "–",
      rate(perSecond(of("kvtier_tier_put_bytes_total"))), rate(outOf(tier).reduce((sum, key) => sum + perSecond(key), 0)),
      `${count(overall(of("kvtier_tier_evicted_pages_total")))} pages`];
  })));
}

function drawHits() {
  const lookups = overall("kvtier_lookups_total");
  if (!lookups) { nothing(byId("hits"), "No page was looked up in this time."); return; }
  overTime(byId("hits"), familyOf("kvtier_hits_total").map(([labels, key]) => ({
    name: labels.tier,
    value: (from, to) => { const n = grown("kvtier_lookups_total", from, to); return n ? grown(key, from, to) / n : null; },
  })), {
    stacked: true, maximum: 1, yText: percent,
    summary: `Share of pages found, by the tier they came from; ${percent(total(familyOf("kvtier_hits_total")) / lookups)} overall.`,
  });
}

function drawMisses() {
  const reasons = familyOf("kvtier_misses_total").map(([labels, key]) => [labels.reason, overall(key)]);
  const all = reasons.reduce((sum, [, n]) => sum + n, 0);
  const age = overall("kvtier_evicted_age_seconds_count");
  const caption = `${count(all)} pages were not found.`
    + (age ? ` Those evicted had been gone for ${seconds(overall("kvtier_evicted_age_seconds_sum") / age)} on average.` : "");
  byId("misses").replaceChildren(table(caption, ["Reason", "Pages", "Share", ""],
    reasons.sort((a, b) => b[1] - a[1]).map(([reason, n]) => [reason, count(n), all ? percent(n / all) : "–", bar(all ? n / all : 0, 1)])));
}

const FORMS = { stored: "as stored now", raw: "16 bits a value", fp8: "FP8", nvfp4: "NVFP4" };

function drawGhosts() {
  const ghosts = view.latest.ghosts, place = byId("ghosts");
  if (!ghosts || !ghosts.lookups) { place.replaceChildren(element("p", { class: "note" }, "Nothing was looked up yet.")); return; }
  for (const tier of Object.keys(ghosts.ratios)) {
    let figure = place.querySelector(`[data-tier="${tier}"]`);
    if (!figure) {
      if (!place.querySelector("figure")) place.replaceChildren();
      figure = element("figure", { "data-tier": tier });
      place.append(element("div", {}, element("h3", {}, tier), figure));
    }
    const forms = Object.entries(ghosts.ratios[tier]);
    const at = ghosts.sizes.indexOf(1), said = at < 0 ? "" : ` ${percent(ghosts.ratios[tier].stored[at])} at its own size.`;
    chart(figure, {
      xs: ghosts.sizes, xText: (x) => `${Number(x.toPrecision(2))}×`, xName: "Size", yText: percent, maximum: 1,
      lines: forms.map(([form, values]) => ({ name: FORMS[form] || form, values })),
      summary: `Share of pages found with ${tier} at other sizes, the tiers above it included.${said}`,
    });
  }
}

function drawCodec() {
  const line = (op) => {
    const of = (part) => `kvtier_codec_seconds_${part}{op="${op}"}`;
    return { name: op, value: (from, to) => { const n = grown(of("count"), from, to); return n ? grown(of("sum"), from, to) / n : null; } };
  };
  const mean = (op) => {
    const n = overall(`kvtier_codec_seconds_count{op="${op}"}`);
    return n ? `${op} ${seconds(overall(`kvtier_codec_seconds_sum{op="${op}"}`) / n)} (${count(n)} calls)` : `${op} none`;
  };
  overTime(byId("codec"), ["encode", "decode", "verify"].map(line), {
    yText: seconds, summary: `Mean time of one call on a batch of pages: ${["encode", "decode", "verify"].map(mean).join(", ")}.`,
  });
}

function drawTraffic() {
  const lines = tiers().flatMap((tier) => [["in", [`kvtier_tier_put_bytes_total{tier="${tier}"}`]], ["out", outOf(tier)]].map(
    ([name, keys]) => ({
      name: `${tier} ${name}`,
      value: (from, to) => keys.reduce((sum, key) => sum + grown(key, from, to), 0) / length(from, to),
    })));
  overTime(byId("traffic"), lines, { yText: rate, summary: "Bytes written into and read from each tier, per second." });
}

function drawQuality() {
  const layers = new Map();
  for (const [labels, key] of familyOf("kvtier_relative_error_count")) {
    const n = now(key), sum = now(key.replace("_count{", "_sum{"));
    if (n) layers.set(labels.role, [...(layers.get(labels.role) || []), [Number(labels.layer), sum / n, n]]);
  }
  if (!layers.size) {
    byId("quality-note").textContent = "";
    nothing(byId("quality"), "No page was measured: quality_sample says which share is.");
    return;
  }
  const all = [...layers.values()].flat(), xs = [...new Set(all.map(([layer]) => layer))].sort((a, b) => a - b);
  const worst = all.reduce((a, b) => (b[1] > a[1] ? b : a));
  byId("quality-note").textContent = "Relative error of sampled pages since the start, mean of each layer.";
  chart(byId("quality"), {
    xs, xText: (layer) => `layer ${layer}`, tickText: String, xName: "Layer", yText: (v) => `${(100 * v).toFixed(2)} %`,
    lines: [...layers].map(([role, found]) => ({ name: role, values: xs.map((x) => (found.find(([layer]) => layer === x) || [0, null])[1]) })),
    summary: `Mean relative error by layer; the largest is ${(100 * worst[1]).toFixed(2)} % in layer ${worst[0]}.`,
  });
}

function drawEvictions() {
  const all = total(familyOf("kvtier_tier_evicted_pages_total"));
  overTime(byId("evictions"), tiers().map((tier) => ({
    name: tier, value: (from, to) => grown(`kvtier_tier_evicted_pages_total{tier="${tier}"}`, from, to) / length(from, to),
  })), { stacked: true, yText: (v) => `${v < 10 ? v.toFixed(1) : count(v)}/s`, summary: `Pages evicted per second, by tier; ${count(all)} in all.` });
}

function drawErrors() {
  const found = [["load failed after its start", "kvtier_load_failures_total"],
    ...familyOf("kvtier_errors_total").map(([labels, key]) => [`caught in ${labels.site}`, key]),
    ...familyOf("kvtier_tier_quarantined_pages_total").map(([labels, key]) => [`bad pages removed from ${labels.tier}`, key]),
    ...familyOf("kvtier_spill_pages_total").filter(([labels]) => ["failed", "full", "deadline"].includes(labels.status))
      .map(([labels, key]) => [`not written to ${labels.tier}: ${labels.status}`, key])];
  const devices = familyOf("kvtier_nvme_state").filter(([labels, key]) => now(key) && labels.state !== "serving")
    .map(([labels]) => [`${labels.directory} is ${labels.state.replace("_", " ")}`, "–", "now"]);
  byId("errors").replaceChildren(table("Every one caught is in the log.", ["What", "In this time", "Since the start"],
    [...devices, ...found.map(([name, key]) => [name, count(overall(key)), count(now(key))])]));
}

function drawConfig() {
  const flat = [];
  const walk = (name, value) => {
    if (value !== null && typeof value === "object" && Object.keys(value).length) {
      for (const [key, inner] of Object.entries(value)) walk(Array.isArray(value) ? `${name}[${key}]` : name ? `${name}.${key}` : key, inner);
    } else flat.push([name, value === null ? "not set" : typeof value === "object" ? "none" : String(value)]);
  };
  if (view.latest.config) walk("", view.latest.config);
  const place = byId("config");
  if (!flat.length) { place.replaceChildren(element("p", { class: "note" }, "Opened without a configuration.")); return; }
  if (place.querySelectorAll("tbody tr").length === flat.length) return;
  place.replaceChildren(table("In effect, defaults included; secrets are ***.", ["Option", "Value"], flat));
  for (const cell of place.querySelectorAll("td")) cell.className = "text";
}

function draw() {
  for (const section of [drawSummary, drawTiers, drawHits, drawMisses, drawGhosts, drawCodec, drawTraffic, drawQuality,
    drawEvictions, drawErrors, drawConfig]) section();
  const up = seconds(view.latest.now_s - view.latest.started_s);
  byId("about").textContent = `kvtier ${view.latest.version}, up for ${up}.`;
}

// ---- asking

function merge(past) {
  const times = view.past.times_s, before = times.length;
  for (const key of Object.keys(past.series)) view.past.series[key] ??= new Array(before).fill(null);
  times.push(...past.times_s);
  for (const [key, values] of Object.entries(view.past.series)) {
    values.push(...(past.series[key] ?? new Array(past.times_s.length).fill(null)));
  }
  const oldest = view.latest.now_s - (view.range === "day" ? 86400 : 3600);
  const drop = times.findIndex((t) => t >= oldest);
  if (drop > 0) { times.splice(0, drop); for (const values of Object.values(view.past.series)) values.splice(0, drop); }
}

function say(text, down = false) {
  const state = byId("state");
  if (state.textContent !== text) state.textContent = text;
  state.classList.toggle("down", down);
}

async function refresh() {
  clearTimeout(view.timer);
  const asked = ++view.asked, since = view.past.times_s.at(-1) ?? 0;
  try {
    const answer = await fetch(`api/status?range=${view.range}&since=${since}`, { cache: "no-store" });
    if (!answer.ok) throw new Error((await answer.text()).trim() || `status ${answer.status}`);
    const status = await answer.json();
    if (asked !== view.asked) return;
    if (view.latest && status.started_s !== view.latest.started_s && since) {
      view.past = { times_s: [], series: {} };  // another process: its counters began at 0
      view.latest = null;
      return void refresh();
    }
    view.latest = status;
    merge(status.history);
    draw();
    say("Connected");
  } catch (error) {
    if (asked === view.asked) say(`Not connected: ${error.message}`, true);
  } finally {
    if (asked === view.asked && byId("auto").checked) view.timer = setTimeout(refresh, EVERY_MS);
  }
}

byId("range").addEventListener("change", (event) => {
  view.range = event.target.value;
  view.past = { times_s: [], series: {} };
  refresh();
});
byId("auto").addEventListener("change", (event) => (event.target.checked ? refresh() : clearTimeout(view.timer)));
byId("controls").addEventListener("submit", (event) => event.preventDefault());

byId("explain-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const request = byId("explain-id").value.trim(), place = byId("explain");
  if (!request) return;
  try {
    const answer = await fetch(`api/explain?request=${encodeURIComponent(request)}`, { cache: "no-store" });
    const record = await answer.json();
    if (!answer.ok) throw new Error(record.error);
    place.replaceChildren(table(record.summary, ["Page", "Where it was", "Bytes", "There after"], record.pages.map((page) => [
      `${page.index} ${page.key}`, page.outcome, page.bytes ? bytes(page.bytes) : "–", page.ready_s === null ? "–" : seconds(page.ready_s)])));
  } catch (error) {
    place.replaceChildren(element("p", { class: "note" }, error.message));
  }
});

refresh();
