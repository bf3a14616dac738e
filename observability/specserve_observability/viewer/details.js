// All of one span: attributes, what became of each request, events, and where its links lead.

import { resourceSpans } from "./api.js";
import { facts, make, time } from "./dom.js";
import { accepted, drafted, modelOf, requestOf } from "./model.js";

const MAX_LINKED_TRACES = 16; // fetched to name what a span links to
const linked = new Map(); // traceId -> Promise of its model; undefined where it is not here

export function details(span, model) {
  const parts = [
    make("dl", { class: "facts" }, ...facts([
      ["Service", span.service || "–"], ["Begins at", time(span.start)], ["Takes", time(span.end - span.start)], ["Span", span.id],
    ])),
    span.error === undefined ? undefined : make("p", { class: "failure" }, `Failed: ${span.error}`),
    ...outcomes(span.outcomes),
    ...list("Attributes", span.attributes),
    ...span.events.flatMap((event) => list(`Event ${event.name} at ${time(event.at)}`, event.attributes)),
    ...links(span, model),
    ...list("Process", span.resource),
  ];
  return make("div", { class: "details" }, ...parts);
}

function shown(value) {
  if (Array.isArray(value)) return value.map(shown).join(", ");
  if (typeof value === "object") return JSON.stringify(value);
  return typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(6))) : String(value);
}

function list(title, attributes) {
  const pairs = Object.entries(attributes).sort(([a], [b]) => (a < b ? -1 : 1));
  if (!pairs.length) return [];
  const rows = pairs.map(([key, value]) => make("div", {}, make("dt", {}, key), make("dd", {}, shown(value))));
  return [make("h4", {}, title), make("dl", { class: "attributes" }, ...rows)];
}

const COLUMNS = [
  ["Request", requestOf],
  ["Tokens in", (of) => of["specserve.batch.tokens"]],
  ["Drafter", (of) => of["specserve.spec.drafter"]],
  ["Drafted", drafted],
  ["Accepted", accepted],
  ["Predicted", (of) => of["specserve.spec.predicted_accepted_tokens"]?.toFixed(2)],
  ["Tokens out", (of) => of["specserve.generated_tokens"]],
  ["No guesses because", (of) => of["specserve.spec.no_draft_reason"]],
];

function outcomes(rows) {
  if (!rows.length) return [];
  const head = make("tr", {}, ...COLUMNS.map(([title]) => make("th", { scope: "col" }, title)));
  const body = rows.map((of) => make("tr", {}, ...COLUMNS.map(([, value]) => make("td", {}, String(value(of) ?? "–")))));
  return [make("h4", {}, "Requests of this step"), make("table", { class: "outcomes" }, make("thead", {}, head), make("tbody", {}, ...body))];
}

// ---- links -------------------------------------------------------------------------------------

function links(span, model) {
  if (!span.links.length) return [];
  const items = make("ul", { class: "links" });
  for (const link of span.links) {
    const anchor = make("a", { href: `#trace=${link.traceId}&span=${link.spanId}` }, `span ${link.spanId}`);
    items.append(make("li", {}, anchor));
    const traces = [...new Set(span.links.map((one) => one.traceId))];
    if (traces.indexOf(link.traceId) < MAX_LINKED_TRACES) name(anchor, link, span, model);
  }
  return [make("h4", {}, `Links (${span.links.length})`), items];
}

async function name(anchor, link, span, model) {
  const other = link.traceId === model.traceId ? model : await traceOf(link.traceId);
  const target = other?.byId.get(link.spanId);
  if (!target) {
    anchor.textContent = `span ${link.spanId}, which is not in the file (yet)`;
    return;
  }
  anchor.textContent = [described(target), mine(target, span)].filter(Boolean).join(": ");
}

function traceOf(traceId) {
  if (!linked.has(traceId)) {
    if (linked.size > 4 * MAX_LINKED_TRACES) linked.clear();
    linked.set(traceId, resourceSpans(traceId).then((found) => modelOf(traceId, found), () => undefined));
  }
  return linked.get(traceId);
}

export const forget = () => linked.clear();

function described(span) {
  const of = span.attributes;
  const index = of["specserve.step.index"] ?? of["specserve.window.index"];
  const request = of["specserve.request.id"];
  return `${span.name}${index === undefined ? "" : ` #${index}`}${request ? ` of ${request}` : ""}, ${time(span.end - span.start)}`;
}

// What the step made of this request, if the link leads from a request to a step.
function mine(step, span) {
  const request = span.attributes["specserve.request.id"];
  const of = step.outcomes.find((one) => requestOf(one) === request);
  return of && `${accepted(of)} of ${drafted(of)} accepted, ${of["specserve.generated_tokens"] ?? 0} tokens`;
}
