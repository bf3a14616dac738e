// What the openai npm package makes of a server's replies: `with_openai.mjs URL KEY BUSY_KEY`.
import OpenAI from "openai";

const [baseURL, apiKey, busyKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const ADD = {
  type: "function",
  function: {
    name: "add",
    description: "Adds.",
    parameters: {
      type: "object",
      properties: { a: { type: "number" }, b: { type: "number" } },
      required: ["a", "b"],
    },
  },
};
const SCHEMA = {
  type: "object",
  properties: { kind: { enum: ["tree", "shrub"] }, sure: { type: "boolean" } },
  required: ["kind", "sure"],
  additionalProperties: false,
};

const user = (content) => [{ role: "user", content }];
const ask = (content, more = {}, from = client) =>
  from.chat.completions.create({ model: "test", messages: user(content), temperature: 0, ...more });
const called = ({ name, arguments: text }) => [name, JSON.parse(text)];
const counts = (usage) => [usage.prompt_tokens, usage.completion_tokens];

async function chat() {
  const reply = await ask("say");
  const [{ message, finish_reason: reason }] = reply.choices;
  const { content: text, reasoning_content: reasoning } = message;
  return { text, reasoning, reason, usage: counts(reply.usage) };
}

async function stream() {
  const said = { text: "", reasoning: "", reason: null, usage: null };
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await ask("say", options)) {
    if (chunk.usage) said.usage = counts(chunk.usage);
    for (const { delta, finish_reason: reason } of chunk.choices) {
      said.text += delta.content ?? "";
      said.reasoning += delta.reasoning_content ?? "";
      said.reason = reason ?? said.reason;
    }
  }
  return said;
}

async function tools() {
  const { message } = (await ask("add", { tools: [ADD] })).choices[0];
  const runner = client.chat.completions.stream({
    model: "test",
    messages: user("add"),
    tools: [ADD],
    temperature: 0,
  });
  const streamed = (await runner.finalChatCompletion()).choices[0].message;
  const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "3" };
  const messages = [...user("add"), message, result];
  return {
    call: called(message.tool_calls[0].function),
    streamed: called(streamed.tool_calls[0].function),
    after: (await ask("", { messages, tools: [ADD] })).choices[0].message.content,
  };
}

async function structured() {
  const response_format = { type: "json_schema", json_schema: { name: "kind", schema: SCHEMA } };
  return JSON.parse((await ask("describe", { response_format })).choices[0].message.content);
}

async function responses() {
  const reply = await client.responses.create({ model: "test", input: "say" });
  const events = [];
  for await (const event of await client.responses.create({ model: "test", input: "say", stream: true }))
    events.push(event.type);
  return { text: reply.output_text, last: events.at(-1) };
}

async function breaks() {
  let text = "";
  try {
    for await (const chunk of await ask("break", { stream: true }))
      text += chunk.choices[0].delta.content ?? "";
  } catch (error) {
    return [text, error.constructor.name];
  }
  return [text, "nothing was raised"];
}

async function refusals(asks) {
  const raised = {};
  for (const [status, one] of Object.entries(asks)) {
    try {
      await one();
    } catch (error) {
      raised[status] = error.constructor.name;
    }
  }
  return raised;
}

const withKey = (key) => new OpenAI({ baseURL, apiKey: key, maxRetries: 0 });
const report = {
  chat: await chat(),
  stream: await stream(),
  tools: await tools(),
  structured: await structured(),
  responses: await responses(),
  breaks: await breaks(),
  models: (await client.models.list()).data.map(({ id }) => id),
  refusals: await refusals({
    400: () => ask("say", { temperature: 3 }),
    "400, too long": () => ask("a".repeat(2000)),
    401: () => ask("say", {}, withKey("wrong")),
    404: () => ask("say", { model: "other" }),
    429: () => ask("say", {}, withKey(busyKey)),
  }),
};
console.log(JSON.stringify(report));
