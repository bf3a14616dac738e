// The ordinary API, as any client uses it. The key lives in this page's memory only.

let key = "";

export function useKey(text) { key = text.trim(); }

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// path -> the response, once it is known to be a good one. ApiError says what the server said.
export async function ask(path, { body, signal } = {}) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const options = { headers, signal, cache: "no-store" };
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    headers["content-type"] = "application/json";
  }
  const response = await fetch(path, options);
  if (response.ok) return response;
  throw new ApiError(await messageOf(response), response.status);
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

// Data of each server-sent event. By fetch: EventSource can send no API key.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const line = block.split("\n").find((one) => one.startsWith("data: "));
      if (line) yield line.slice(6);
    }
  }
}

// Chunks of a reply; ApiError where it ends before its end.
export async function* chat(body, signal) {
  const response = await ask("/v1/chat/completions", { body: { ...body, stream: true }, signal });
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, response.status);
    yield chunk;
  }
  throw new ApiError("the connection ended before the reply did", response.status);
}
