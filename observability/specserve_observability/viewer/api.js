// What the page asks of the server: Jaeger's API v3, and how far the files are read.

async function ask(path, signal) {
  const reply = await fetch(path, { signal });
  const said = await reply.json();
  if (!reply.ok) throw new Error(said.error?.message ?? `${reply.status} for ${path}`);
  return said;
}

export const status = () => ask("/viewer/status");
export const services = async () => (await ask("/api/v3/services")).services;

export async function operations(service) {
  const found = (await ask(`/api/v3/operations?${new URLSearchParams({ service })}`)).operations;
  return [...new Set(found.map((operation) => operation.name))];
}

// wanted: {service, operation, tags, minDuration, maxDuration, limit}
export async function summaries(wanted, signal) {
  const query = new URLSearchParams();
  const give = (name, value) => value && query.set(`query.${name}`, value);
  give("serviceName", wanted.service);
  give("operationName", wanted.operation);
  give("durationMin", wanted.minDuration);
  give("durationMax", wanted.maxDuration);
  give("searchDepth", wanted.limit);
  give("attributes", tagsAsJson(wanted.tags));
  return (await ask(`/api/v3/trace-summaries?${query}`, signal)).summaries;
}

// key=value key="two words", as in Jaeger's own form.
function tagsAsJson(text) {
  if (!text.trim()) return "";
  const tags = {};
  const rest = text.replace(/([^\s=]+)=(?:"((?:[^"\\]|\\.)*)"|(\S*))/g, (_, key, quoted, word) => {
    tags[key] = quoted === undefined ? word : quoted.replace(/\\(.)/g, "$1");
    return "";
  });
  if (rest.trim()) throw new Error(`Tags are key=value: “${rest.trim()}” is not.`);
  return JSON.stringify(tags);
}

export async function resourceSpans(traceId, signal) {
  return (await ask(`/api/v3/traces/${encodeURIComponent(traceId)}`, signal)).result.resourceSpans;
}
