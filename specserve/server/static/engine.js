// What the engine does, live, from /specserve/events; comes back by itself.

import { ApiError, ask, events } from "./api.js";
import { line, positions, stacked } from "./charts.js";
import { byId, percent } from "./dom.js";

const MINUTE = 60_000;
const SILENCE = 10_000; // the server says something every two seconds
const PHASES = { plan: "planning", draft: "guessing", target_forward: "model", verify: "verifying", commit: "commit" };

let windows = []; // [{at, ...window}], of the last minute

const sum = (list, value) => list.reduce((total, one) => total + value(one), 0);
const say = (id, text) => { byId(id).textContent = text; };

function addUp(name) {
  const total = [];
  for (const one of windows) one[name].forEach((count, idx) => { total[idx] = (total[idx] ?? 0) + count; });
  return total;
}

function show(window) {
  const now = performance.now();
  windows = [...windows, { at: now, ...window }].filter((one) => now - one.at < MINUTE);
  const recent = windows.filter((one) => now - one.at < 2000);
  const seconds = sum(recent, (one) => one.seconds) || 1;
  say("running", window.running);
  say("waiting", window.waiting);
  say("rate", (sum(recent, (one) => one.tokens) / seconds).toFixed(1));
  say("step-rate", (sum(recent, (one) => one.steps) / seconds).toFixed(1));
  say("preemptions", sum(windows, (one) => one.preemptions));
  showPool(window);
  showGuesses();
  showPhases();
  const dropped = sum(windows, (one) => one.dropped);
  say("dropped", dropped ? `${dropped} steps are missing here: this page read too slowly.` : "");
}

function showPool({ blocks_live: live, blocks_cached: cached, blocks_free: free }) {
  const words = `${live} blocks in use, ${cached} cached, ${free} free`;
  byId("pool").replaceChildren(stacked([["bar", live], ["bar-other", cached], ["bar-back", free]], words));
  say("pool-text", words);
}

function showGuesses() {
  const rates = windows.map((one) => (one.seconds ? one.tokens / one.seconds : 0));
  byId("rate-chart").replaceChildren(line(rates, 240, `now ${Math.round(rates.at(-1))} tokens per second`));
  const working = windows.filter((one) => one.rows_by_k.length);
  const means = working.map((one) => sum(one.rows_by_k.map((rows, k) => rows * k), Number) / sum(one.rows_by_k, Number));
  byId("k-chart").replaceChildren(line(means, 240, `now ${(means.at(-1) ?? 0).toFixed(1)} guesses per row`));
  byId("position-chart").replaceChildren(positions(addUp("drafted_per_position"), addUp("accepted_per_position")));
  const rows = sum(working, (one) => sum(one.rows_by_k, Number));
  say("per-row", rows ? (sum(working, (one) => one.tokens) / rows).toFixed(2) : "–");
  const named = {};
  for (const { drafter, drafted, accepted } of windows.flatMap((one) => one.drafters)) {
    const [before, right] = named[drafter] ?? [0, 0];
    named[drafter] = [before + drafted, right + accepted];
  }
  say("drafters", Object.entries(named)
    .map(([name, [drafted, accepted]]) => `${name}: ${accepted} of ${drafted} guesses right (${percent(accepted, drafted)})`)
    .join("; "));
}

function showPhases() {
  const totals = Object.keys(PHASES).map((name) => [name, sum(windows, (one) => one.phase_seconds[name])]);
  const whole = sum(totals, ([, seconds]) => seconds);
  if (!whole) return;
  const words = totals.map(([name, seconds]) => `${PHASES[name]} ${percent(seconds, whole)}`).join(", ");
  const kinds = { target_forward: "bar", draft: "bar-other" };
  byId("phases").replaceChildren(stacked(totals.map(([name, seconds]) => [kinds[name] ?? "bar-back", seconds]), words));
  say("phases-text", words);
}

// One connection, from its first event to its end.
async function listen() {
  const control = new AbortController();
  let alarm = setTimeout(() => control.abort(), SILENCE);
  const stop = () => { if (document.hidden) control.abort(); };
  document.addEventListener("visibilitychange", stop);
  try {
    for await (const data of events(await ask("/specserve/events", { signal: control.signal }))) {
      clearTimeout(alarm);
      alarm = setTimeout(() => control.abort(), SILENCE);
      const window = JSON.parse(data);
      say("link", window.engine_up ? "live" : "the engine has failed");
      show(window);
    }
  } finally {
    clearTimeout(alarm);
    document.removeEventListener("visibilitychange", stop);
  }
}

let wake = () => undefined;

// A key was given, or somebody looks at the page again: do not wait for the next try.
export function connectNow() { wake(); }

export async function follow() {
  document.addEventListener("visibilitychange", () => { if (!document.hidden) connectNow(); });
  for (let wait = 500; ; wait = Math.min(2 * wait, 8000)) {
    const began = performance.now();
    let why = "the connection to the engine is lost, trying again";
    try {
      await listen();
    } catch (error) {
      if (error instanceof ApiError) why = error.message;
    }
    say("link", document.hidden ? "paused" : why);
    if (performance.now() - began > SILENCE) wait = 500;
    await new Promise((resolve) => { wake = resolve; setTimeout(resolve, wait); });
    while (document.hidden) await new Promise((resolve) => { wake = resolve; });
  }
}
