// A trace as a tree of spans with times in microseconds from its beginning.

const OUTCOME = "specserve.request_outcome";
const OUTSIDE = "outside these";
const ORDER = ["plan", "draft", "target_forward", "verify", "commit"];

function plain(value = {}) {
  if ("arrayValue" in value) return (value.arrayValue.values ?? []).map(plain);
  if ("kvlistValue" in value) return attributes(value.kvlistValue.values);
  if ("intValue" in value) return Number(value.intValue);
  return value.stringValue ?? value.boolValue ?? value.doubleValue ?? value.bytesValue ?? "";
}

const attributes = (pairs = []) => Object.fromEntries(pairs.map((pair) => [pair.key, plain(pair.value)]));

function spanOf(raw, resource, begin) {
  const at = (nanoseconds) => Number(BigInt(nanoseconds ?? 0) - begin) / 1e3;
  const events = (raw.events ?? []).map((event) => ({
    name: event.name ?? "", at: at(event.timeUnixNano), attributes: attributes(event.attributes),
  }));
  return {
    id: raw.spanId.toLowerCase(),
    parentId: (raw.parentSpanId ?? "").toLowerCase(),
    name: raw.name,
    service: resource["service.name"] ?? "",
    resource,
    start: at(raw.startTimeUnixNano),
    end: Math.max(at(raw.startTimeUnixNano), at(raw.endTimeUnixNano)),
    attributes: attributes(raw.attributes),
    outcomes: events.filter((event) => event.name === OUTCOME).map((event) => event.attributes),
    events: events.filter((event) => event.name !== OUTCOME),
    links: (raw.links ?? []).map((link) => ({ traceId: link.traceId.toLowerCase(), spanId: link.spanId.toLowerCase() })),
    error: raw.status?.code === 2 ? raw.status.message || "error" : undefined,
    children: [],
    level: 1,
  };
}

export function modelOf(traceId, resourceSpans) {
  const raws = resourceSpans.flatMap(({ resource, scopeSpans }) => {
    const about = attributes(resource?.attributes);
    return (scopeSpans ?? []).flatMap((scope) => (scope.spans ?? []).map((raw) => [raw, about]));
  });
  const starts = raws.map(([raw]) => BigInt(raw.startTimeUnixNano));
  const begin = starts.reduce((least, start) => (start < least ? start : least), starts[0]);
  const spans = raws.map(([raw, about]) => spanOf(raw, about, begin));
  const byId = new Map(spans.map((span) => [span.id, span]));
  const roots = [];
  for (const span of spans) {
    const parent = byId.get(span.parentId);
    if (parent && parent !== span) parent.children.push(span);
    else roots.push(span);
  }
  sortTree(roots, 1);
  const end = spans.reduce((latest, span) => Math.max(latest, span.end), 0);
  return { traceId, begin: Number(begin / 1000n) / 1e3, end, spans, roots, byId };
}

function sortTree(spans, level) {
  const rank = (span) => ORDER.indexOf(span.name);
  spans.sort((a, b) => a.start - b.start || rank(a) - rank(b));
  for (const span of spans) {
    span.level = level;
    sortTree(span.children, level + 1);
  }
}

// Each moment belongs to the shortest span that covers it, so that the sum is the trace's time:
// [[name, us]], longest first. Spans inside a decode count as the decode; what only spans with
// children cover is OUTSIDE. As in trace_facts.py, so that page and terminal say the same.
export function timeByPhase(model) {
  const spans = model.spans.filter((span) => model.byId.get(span.parentId)?.name !== "decode");
  const parents = new Set(spans.map((span) => span.parentId));
  const isParent = (span) => parents.has(span.id);
  const begins = spans.toSorted((a, b) => a.start - b.start);
  const moments = [...new Set(spans.flatMap((span) => [span.start, span.end]))].sort((a, b) => a - b);
  const sums = new Map();
  let covering = [];
  let begun = 0;
  for (let idx = 0; idx + 1 < moments.length; idx++) {
    while (begun < begins.length && begins[begun].start <= moments[idx]) covering.push(begins[begun++]);
    covering = covering.filter((span) => span.end > moments[idx]);
    if (!covering.length) continue;
    const order = (a, b) => a.end - a.start - (b.end - b.start) || isParent(a) - isParent(b);
    const shortest = covering.reduce((least, span) => (order(span, least) < 0 ? span : least));
    const name = isParent(shortest) ? OUTSIDE : shortest.name;
    sums.set(name, (sums.get(name) ?? 0) + moments[idx + 1] - moments[idx]);
  }
  return [...sums].sort((a, b) => b[1] - a[1]);
}

// Sums of guesses: a decode span has its request's own, a step those of its rows.
export function guesses(spans) {
  const sum = { drafted: 0, accepted: 0, drafters: new Set() };
  for (const { attributes: of } of spans) {
    if (of["specserve.spec.draft_tokens"] === undefined) continue;
    sum.drafted += of["specserve.spec.draft_tokens"];
    sum.accepted += of["specserve.spec.accepted_tokens"] ?? 0;
    for (const name of of["specserve.spec.drafters"] ?? []) sum.drafters.add(name);
  }
  return sum;
}

export const drafted = (of) => of["specserve.spec.draft_tokens"] ?? 0;
export const accepted = (of) => of["specserve.spec.accepted_tokens"] ?? 0;
export const requestOf = (of) => of["specserve.request.id"] ?? "?";
