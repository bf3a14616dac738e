// The page: what is searched for, which trace is shown, and keeping up with a file that grows.

import { operations, resourceSpans, services, status, summaries } from "./api.js";
import { byId, clock, facts, make, percent, place, time } from "./dom.js";
import { forget } from "./details.js";
import { guesses, modelOf, timeByPhase } from "./model.js";
import { colourOf, key, reveal, show } from "./waterfall.js";

const POLL_MS = 1000;
const NAMES = { service: "service", operation: "operation", tags: "tags", "min-duration": "minDuration", "max-duration": "maxDuration", limit: "limit" };

let found = []; // summaries, as listed
let model; // of the trace that is shown
let seen = ""; // how much of the files the page knows
let searching; // AbortController of the search under way
let opening = 0; // counts, so that a slow answer does not replace a later choice

// ---- searching ---------------------------------------------------------------------------------

function wanted() {
  return Object.fromEntries(Object.entries(NAMES).map(([id, name]) => [name, byId(id).value]));
}

async function search() {
  searching?.abort();
  searching = new AbortController();
  try {
    const answer = await summaries(wanted(), searching.signal);
    found = answer.map((one) => ({
      ...one,
      start: Number(BigInt(one.minStartTimeUnixNano) / 1000n) / 1e3,
      took: Number(BigInt(one.maxEndTimeUnixNano) - BigInt(one.minStartTimeUnixNano)) / 1e3,
    }));
    if (byId("order").value === "longest") found.sort((a, b) => b.took - a.took);
    list();
    byId("found").classList.remove("failure");
    byId("found").textContent = found.length ? `${found.length} traces${found.length >= Number(byId("limit").value) ? ", and perhaps more" : ""}` : "No trace matches.";
  } catch (error) {
    if (error.name === "AbortError") return;
    byId("found").classList.add("failure");
    byId("found").textContent = error.message;
  }
}

function list() {
  const longest = Math.max(1, ...found.map((one) => one.took));
  const focused = document.activeElement?.closest?.("#results a")?.hash;
  byId("results").replaceChildren(...found.map((one) => make("li", {}, result(one, longest))));
  if (focused) document.querySelector(`#results a[href="${focused}"]`)?.focus();
}

function result(one, longest) {
  const counts = [`${one.spanCount} spans`, clock(one.start).slice(11)];
  const link = make("a", { href: `#trace=${one.traceId}`, "aria-current": one.traceId === model?.traceId ? "true" : undefined },
    make("span", { class: "title" }, make("b", {}, one.rootOperationName || "(no root)"), make("span", { class: "long" }, time(one.took))),
    make("span", { class: "quiet" }, `${one.rootServiceName} · ${counts.join(" · ")}`),
    make("span", { class: "length" }, place(make("span", {}), 0, (100 * one.took) / longest)));
  if (one.errorSpanCount) link.querySelector(".quiet").append(make("span", { class: "failed" }, `${one.errorSpanCount} failed`));
  return link;
}

async function learnServices() {
  offer("service", await services());
}

function offer(id, names) {
  const select = byId(id);
  const chosen = select.value;
  select.replaceChildren(make("option", { value: "" }, "any"), ...names.map((name) => make("option", { value: name }, name)));
  if (names.includes(chosen)) select.value = chosen;
}

// ---- one trace ---------------------------------------------------------------------------------

async function openFromAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const traceId = asked.get("trace");
  if (!traceId) return;
  const spanId = asked.get("span") ?? undefined;
  if (traceId === model?.traceId) {
    if (spanId) reveal(spanId);
    return;
  }
  await open(traceId, spanId);
}

async function open(traceId, spanId, keep = false) {
  const turn = ++opening;
  try {
    const next = modelOf(traceId, await resourceSpans(traceId));
    if (turn !== opening) return;
    model = next;
    head();
    byId("trace").hidden = false;
    byId("hint").hidden = true;
    show(model, spanId, keep);
  } catch (error) {
    if (turn !== opening) return;
    model = undefined;
    byId("trace").hidden = true;
    byId("hint").hidden = false;
    byId("trace-title").textContent = `Trace ${traceId}: ${error.message}`;
  }
  list();
}

function head() {
  const [root] = model.roots;
  byId("trace-title").textContent = model.roots.length > 1 ? `${root.name} and ${model.roots.length - 1} more` : root.name;
  document.title = `${root.name} · specserve traces`;
  byId("facts").replaceChildren(...facts(factsOf(root)));
  const times = timeByPhase(model);
  const sum = times.reduce((all, [, us]) => all + us, 0) || 1;
  const strip = make("div", { class: "strip" });
  let left = 0;
  for (const [name, us] of times) {
    strip.append(place(make("div", { class: `part ${colourOf(name)}`, title: `${name} ${time(us)}` }), left, (100 * us) / sum));
    left += (100 * us) / sum;
  }
  const words = times.slice(0, 9).map(([name, us]) => make("li", {}, make("span", { class: `dot ${colourOf(name)}` }), `${name} ${time(us)} (${percent(us, sum)})`));
  byId("phases").replaceChildren(strip, make("ul", { class: "legend", "aria-label": "Where its time went" }, ...words));
}

function factsOf(root) {
  const decodes = model.spans.filter((span) => span.name === "decode");
  const steps = model.spans.filter((span) => span.name === "engine.step");
  const { drafted, accepted, drafters } = guesses(decodes.length ? decodes : steps);
  const failed = model.spans.filter((span) => span.error !== undefined).length;
  const of = decodes[0]?.attributes ?? {};
  const pairs = [
    ["Began", clock(model.begin)], ["Took", time(model.end)], ["Spans", String(model.spans.length)],
    ["Service", [...new Set(model.spans.map((span) => span.service))].join(", ")],
  ];
  if (of["specserve.request.id"] !== undefined) pairs.push(["Request", of["specserve.request.id"]]);
  if (of["gen_ai.usage.output_tokens"] !== undefined) pairs.push(["Tokens in, out", `${of["gen_ai.usage.input_tokens"]}, ${of["gen_ai.usage.output_tokens"]}`]);
  if (of["specserve.latency.ttft"] !== undefined) pairs.push(["First token after", time(of["specserve.latency.ttft"] * 1e6)]);
  if (root.attributes["specserve.window.steps"] !== undefined) pairs.push(["Steps, shown", `${root.attributes["specserve.window.steps"]}, ${steps.length}`]);
  if (decodes.length || steps.length) pairs.push(["Guesses accepted", `${accepted} of ${drafted} (${percent(accepted, drafted)})`]);
  if (of["specserve.spec.acceptance_length"] !== undefined) pairs.push(["Tokens per step", of["specserve.spec.acceptance_length"].toFixed(2)]);
  if (drafters.size) pairs.push(["Drafters", [...drafters].join(", ")]);
  if (failed) pairs.push(["Failed spans", String(failed)]);
  return pairs;
}

// ---- keeping up --------------------------------------------------------------------------------

async function keepUp() {
  try {
    const said = await status();
    const left = said.evictedTraces ? `, ${said.evictedTraces} older ones left out (--memory-mb)` : "";
    const bad = said.badLines ? `, ${said.badLines} lines could not be read` : "";
    byId("status").textContent = `${said.files.join(", ")}: ${said.spans} spans in ${said.traces} traces, ${said.megabytes} MB${left}${bad}`;
    const now = `${said.spans} ${said.evictedTraces}`;
    if (now !== seen && (byId("follow").checked || !seen)) {
      seen = now;
      forget();
      await learnServices();
      await search();
      await grow();
    }
  } catch {
    byId("status").textContent = "The viewer cannot be reached: is it still running?";
  }
  setTimeout(keepUp, document.hidden ? 5 * POLL_MS : POLL_MS);
}

async function grow() {
  const now = found.find((one) => one.traceId === model?.traceId);
  if (now && now.spanCount !== model.spans.length) await open(model.traceId, undefined, true);
  else if (!model) await openFromAddress();
}

function step(by) {
  const at = found.findIndex((one) => one.traceId === model?.traceId);
  const next = found[at < 0 ? 0 : Math.max(0, Math.min(found.length - 1, at + by))];
  if (!next) return;
  location.hash = `trace=${next.traceId}`;
  document.querySelector(`#results a[href="#trace=${next.traceId}"]`)?.scrollIntoView({ block: "nearest" });
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, select, textarea");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "/") byId("tags").focus();
  else if (event.key === "j") step(1);
  else if (event.key === "k") step(-1);
  else if (!model || !key(event.key)) return;
  event.preventDefault();
});
byId("search").addEventListener("submit", (event) => {
  event.preventDefault();
  search();
});
byId("service").addEventListener("change", async (event) => {
  byId("operation").value = "";
  offer("operation", event.target.value ? await operations(event.target.value) : []);
  search();
});
for (const id of ["operation", "order"]) byId(id).addEventListener("change", search);
window.addEventListener("hashchange", openFromAddress);

openFromAddress();
keepUp();
