// The rows of a trace: names on the left, bars on the right, walked by keyboard.

import { details } from "./details.js";
import { byId, make, place, time } from "./dom.js";
import { accepted, drafted, requestOf } from "./model.js";

const MAX_ROWS = 1500; // at once; more on demand
const MAX_CHIPS = 16;
const KNOWN = ["queue", "prefill", "decode", "decode.rounds", "tokenize", "stream", "plan", "draft", "target_forward", "verify", "commit"];
const CLOSED = ["engine.step", "decode"]; // at first: their children are seen in their bars

let model;
let open; // ids of spans whose children are shown
let told; // ids of spans whose details are shown
let from;
let until; // what is seen, in microseconds
let mark = "";
let limit = MAX_ROWS;
let current; // id of the span with the keyboard

export function colourOf(name) {
  if (KNOWN.includes(name)) return `of-${name.replace(".", "-")}`;
  let hash = 0;
  for (const letter of name) hash = (hash * 31 + letter.codePointAt(0)) % 6;
  return `other-${hash}`;
}

// keep: of the same trace, which has grown
export function show(shown, spanId, keep) {
  model = shown;
  if (!keep) {
    open = new Set(model.spans.filter((span) => !CLOSED.includes(span.name)).map((span) => span.id));
    told = new Set();
    limit = MAX_ROWS;
    current = undefined;
    whole();
  }
  if (spanId && model.byId.has(spanId)) reveal(spanId);
  else draw();
}

export function reveal(spanId) {
  for (let span = model.byId.get(spanId); span; span = model.byId.get(span.parentId)) {
    if (span.id !== spanId) open.add(span.id);
  }
  told.add(spanId);
  current = spanId;
  if (visible().findIndex((span) => span.id === spanId) >= limit) limit = Infinity;
  draw();
  focus();
  rowOf(spanId)?.scrollIntoView({ block: "center" });
}

function visible(spans = model.roots, into = []) {
  for (const span of spans) {
    into.push(span);
    if (open.has(span.id)) visible(span.children, into);
  }
  return into;
}

// ---- drawing -----------------------------------------------------------------------------------

function draw() {
  const spans = visible();
  const shown = spans.slice(0, limit);
  if (!shown.some((span) => span.id === current)) current = shown[0]?.id;
  byId("rows").replaceChildren(...shown.map(row));
  const left = spans.length - shown.length;
  byId("more").hidden = left <= 0;
  byId("more").textContent = `Show ${left} more rows`;
  byId("ticks").replaceChildren(...[0, 0.25, 0.5, 0.75, 1].map(tick));
  const hits = mark ? model.spans.filter(isMarked).length : 0;
  byId("marked").textContent = mark ? `${hits} of ${model.spans.length} spans` : "";
}

function tick(share) {
  const element = make("span", {}, time(from + share * (until - from)));
  element.style.left = `${share * 100}%`;
  if (share === 1) element.className = "last";
  return element;
}

function row(span) {
  const line = make("div", { class: "line" }, nameCell(span), make("div", { class: "lane" }, ...bar(span)));
  const element = make("div", {
    role: "treeitem", id: `span-${span.id}`, class: isMarked(span) ? "span marked" : "span",
    tabindex: span.id === current ? 0 : -1, "aria-level": span.level,
    "aria-expanded": span.children.length ? String(open.has(span.id)) : undefined,
    "aria-label": label(span),
  }, line);
  if (told.has(span.id)) element.append(details(span, model));
  return element;
}

function label(span) {
  const guessed = drafted(span.attributes) ? `, ${accepted(span.attributes)} of ${drafted(span.attributes)} guesses accepted` : "";
  return `${span.name}, ${time(span.end - span.start)} at ${time(span.start)}${span.error ? ", failed" : ""}${guessed}`;
}

function nameCell(span) {
  const sign = span.children.length ? (open.has(span.id) ? "▾" : "▸") : "";
  const cell = make("div", { class: "name" }, make("span", { class: "sign", "aria-hidden": "true" }, sign),
    make("span", { class: `dot ${colourOf(span.name)}`, title: span.service }), make("span", { class: "words" }, span.name));
  cell.style.paddingLeft = `${(span.level - 1) * 0.9}rem`;
  if (span.error) cell.append(make("span", { class: "failed", title: span.error }, "failed"));
  cell.append(...hints(span));
  return cell;
}

// What a reader looks for first, beside the name.
function hints(span) {
  const of = span.attributes;
  const quiet = (text) => make("span", { class: "hint" }, text);
  if (of["specserve.queue.reason"]) return [quiet(of["specserve.queue.reason"])];
  if (of["specserve.prefill.tokens"] !== undefined) return [quiet(`${of["specserve.prefill.tokens"]} tokens`)];
  if (of["specserve.stream.blocked"]) return [quiet(`waited ${time(of["specserve.stream.blocked"] * 1e6)} for the client`)];
  if (of["specserve.window.index"] !== undefined) return [quiet(`#${of["specserve.window.index"]}, ${of["specserve.window.steps"]} steps`)];
  const index = of["specserve.step.index"] !== undefined ? [quiet(`#${of["specserve.step.index"]} ${of["specserve.step.kind"] ?? ""}`)] : [];
  if (!drafted(of)) return index;
  return [...index, make("span", { class: "guessed", title: "guesses accepted of those drafted" }, `${accepted(of)}/${drafted(of)}`)];
}

function bar(span) {
  const share = (us) => (100 * (us - from)) / (until - from);
  const left = Math.max(0, share(span.start));
  const right = Math.min(100, share(span.end));
  if (right < 0 || left > 100) return [];
  const width = Math.max(0.15, right - left);
  const whole = place(make("div", { class: `bar ${colourOf(span.name)}${span.error ? " error" : ""}` }), left, width);
  const inner = !open.has(span.id) && span.end > span.start ? span.children : [];
  for (const child of inner) {
    const within = (us) => (100 * (Math.min(Math.max(us, span.start), span.end) - span.start)) / (span.end - span.start);
    whole.append(place(make("div", { class: `part ${colourOf(child.name)}`, title: `${child.name} ${time(child.end - child.start)}` }),
      within(child.start), within(child.end) - within(child.start)));
  }
  const text = make("span", { class: "took" }, time(span.end - span.start), ...chips(span));
  text.style[left > 60 ? "right" : "left"] = left > 60 ? `calc(${100 - left}% + .4rem)` : `calc(${left + width}% + .4rem)`;
  if (left <= 60 && left + width > 60) { text.style.left = `${left}%`; text.classList.add("inside"); }
  return [whole, text];
}

// One chip per request of a step, or per step of a request: how many guesses were accepted.
function chips(span) {
  const perStep = span.attributes["specserve.spec.drafted_per_step"] ?? [];
  const right = span.attributes["specserve.spec.accepted_per_step"] ?? [];
  const all = span.outcomes.length
    ? span.outcomes.map((of) => [requestOf(of), drafted(of), accepted(of)])
    : perStep.map((count, idx) => [`step ${idx + 1}`, count, right[idx] ?? 0]);
  const shown = all.slice(0, MAX_CHIPS).map((one) => chip(...one));
  if (all.length > MAX_CHIPS) shown.push(make("span", { class: "hint" }, `+${all.length - MAX_CHIPS}`));
  return shown.length ? [make("span", { class: "chips" }, ...shown)] : [];
}

function chip(whose, guessed, right) {
  const element = make("span", { class: guessed ? "chip" : "chip none", title: `${whose}: ${right} of ${guessed} guesses accepted` });
  for (let idx = 0; idx < Math.min(guessed, 16); idx++) element.append(make("i", { class: idx < right ? "yes" : "no" }));
  return element;
}

function isMarked(span) {
  if (!mark) return false;
  span.words ??= [span.name, span.id, span.error ?? "", JSON.stringify(span.attributes), JSON.stringify(span.outcomes), JSON.stringify(span.events)].join(" ").toLowerCase();
  return span.words.includes(mark);
}

// ---- moving ------------------------------------------------------------------------------------

const rowOf = (id) => document.getElementById(`span-${id}`);

function focus() {
  rowOf(current)?.focus({ preventScroll: true });
  rowOf(current)?.scrollIntoView({ block: "nearest" });
}

function move(by) {
  const shown = visible().slice(0, limit);
  const at = shown.findIndex((span) => span.id === current);
  const next = shown[Math.max(0, Math.min(shown.length - 1, at + by))];
  if (!next) return;
  rowOf(next.id).focus({ preventScroll: true });
  rowOf(next.id).scrollIntoView({ block: "nearest" });
}

function redraw() {
  draw();
  focus();
}

function toggle(set, id, on = !set.has(id)) {
  if (on) set.add(id);
  else set.delete(id);
  redraw();
}

function zoom(span) {
  const room = Math.max(1, (span.end - span.start) * 0.05);
  from = Math.max(0, span.start - room);
  until = Math.min(model.end || 1, Math.max(span.end, span.start + 1) + room);
  redraw();
}

function whole() {
  from = 0;
  until = model.end || 1;
}

const KEYS = {
  ArrowDown: () => move(1),
  ArrowUp: () => move(-1),
  PageDown: () => move(20),
  PageUp: () => move(-20),
  Home: () => move(-Infinity),
  End: () => move(Infinity),
  ArrowRight: (span) => (span.children.length && !open.has(span.id) ? toggle(open, span.id, true) : move(1)),
  ArrowLeft: (span) => {
    if (open.has(span.id) && span.children.length) return toggle(open, span.id, false);
    if (!model.byId.has(span.parentId)) return undefined;
    current = span.parentId;
    return redraw();
  },
  Enter: (span) => toggle(told, span.id),
  " ": (span) => toggle(told, span.id),
  Escape: (span) => toggle(told, span.id, false),
  z: (span) => zoom(span),
};

function openAll(on) {
  open = new Set(on ? model.spans.map((span) => span.id) : []);
  draw();
}

export function key(name) {
  if (name === "0") { whole(); draw(); }
  else if (name === "e") openAll(true);
  else if (name === "c") openAll(false);
  else return false;
  if (byId("rows").contains(document.activeElement) || document.activeElement === document.body) focus();
  return true;
}

byId("rows").addEventListener("keydown", (event) => {
  if (event.target.getAttribute("role") !== "treeitem" || event.ctrlKey || event.metaKey || event.altKey) return;
  const act = KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  act(model.byId.get(event.target.id.slice(5)));
});
byId("rows").addEventListener("focusin", (event) => {
  if (event.target.getAttribute("role") !== "treeitem") return;
  rowOf(current)?.setAttribute("tabindex", -1);
  current = event.target.id.slice(5);
  event.target.setAttribute("tabindex", 0);
});
byId("rows").addEventListener("click", (event) => {
  if (event.target.closest(".details")) return;
  const row = event.target.closest("[role=treeitem]");
  if (!row) return;
  current = row.id.slice(5);
  toggle(event.target.closest(".sign") ? open : told, current);
});
byId("whole").addEventListener("click", () => key("0"));
byId("open-all").addEventListener("click", () => key("e"));
byId("close-all").addEventListener("click", () => key("c"));
byId("more").addEventListener("click", () => { limit += MAX_ROWS; draw(); });
byId("mark").addEventListener("input", (event) => {
  mark = event.target.value.trim().toLowerCase();
  draw();
});
