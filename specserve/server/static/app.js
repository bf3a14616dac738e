// The page: what is asked, how often, and what is kept of the conversation.

import { ApiError, ask, chat, useKey } from "./api.js";
import { byId, make } from "./dom.js";
import { connectNow, follow } from "./engine.js";
import { Reply, verdict } from "./reply.js";
import { hide } from "./tokens.js";

let history = []; // messages of finished turns
let running; // AbortController of the turn under way

const mode = () => document.querySelector("input[name=mode]:checked").value;
const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));

// ---- what this server can do -------------------------------------------------------------------

async function learn() {
  try {
    const models = await (await ask("/v1/models")).json();
    byId("model").textContent = models.data[0].id;
    const { SpeculationBody } = (await (await ask("/openapi.json")).json()).components.schemas;
    offer(SpeculationBody.properties);
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) askForKey(error.message);
  }
}

function offer({ drafter, max_draft_tokens: most }) {
  const names = drafter.enum.filter((name) => name && name !== "none");
  names.sort((a, b) => (b === "auto") - (a === "auto"));
  byId("drafter").replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  byId("k").max = most.maximum;
  for (const radio of document.querySelectorAll("input[name=mode]")) {
    radio.disabled = radio.value !== "off" && !names.length;
    if (radio.value === "off" && !names.length) radio.checked = true;
  }
}

function askForKey(message) {
  byId("settings").open = true;
  byId("link").textContent = message;
  byId("key").focus();
}

// ---- one turn ----------------------------------------------------------------------------------

function bodyOf(messages, seed, speculation, alone) {
  return {
    messages,
    seed,
    speculation,
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    return_token_origins: true,
    // Costs a little: left out where times are compared. Two runs that shared a salt would help each
    // other, by cached prompts and by what drafters remember.
    ...(alone ? { logprobs: true } : { cache_salt: crypto.getRandomValues(new Uint32Array(4)).join("-") }),
  };
}

function asked() {
  return { drafter: byId("drafter").value || undefined, max_draft_tokens: number("k") };
}

async function run(reply, body, signal) {
  for await (const chunk of chat(body, signal)) {
    const low = window.innerHeight + window.scrollY > document.body.scrollHeight - 80;
    reply.add(chunk);
    if (low) window.scrollTo(0, document.body.scrollHeight);
  }
  reply.end();
}

async function turn(text) {
  const seed = number("seed") ?? Math.floor(Math.random() * 2 ** 31);
  const messages = [...history, { role: "user", content: text }];
  const replies = make("div", { class: "replies" });
  const element = make("section", { class: "turn", "aria-label": "Turn" }, make("p", { class: "asked" }, text), replies);
  byId("empty").hidden = true;
  byId("log").append(element);
  const compare = mode() === "compare";
  const plans = [["Speculation on", asked()], ["Speculation off", { drafter: "none" }]];
  const chosen = compare ? plans : plans.slice(mode() === "off" ? 1 : 0).slice(0, 1);
  // One after the other: beside each other they would share steps, and neither would show its speed.
  const done = [];
  for (const [title, speculation] of chosen) {
    const reply = new Reply(`${title}, seed ${seed}`);
    replies.append(reply.element);
    try {
      await run(reply, bodyOf(messages, seed, speculation, !compare), running.signal);
    } catch (error) {
      stopped(reply, error, () => { element.remove(); start(text); });
      break;
    }
    done.push(reply);
  }
  if (compare && done.length === 2) element.append(verdict(...done));
  if (done.length) history = [...messages, { role: "assistant", content: done[0].text }];
}

function stopped(reply, error, again) {
  if (running.signal.aborted) return reply.fail("Stopped.", again);
  if (error instanceof ApiError) {
    if (error.status === 401) askForKey(error.message);
    return reply.fail(error.message, again);
  }
  return reply.fail(`The server cannot be reached (${error.message}).`, again);
}

async function start(text) {
  if (running || !text.trim()) return;
  running = new AbortController();
  setBusy(true);
  try {
    await turn(text);
  } finally {
    running = undefined;
    setBusy(false);
  }
}

function setBusy(busy) {
  byId("send").disabled = busy;
  byId("clear").disabled = busy;
  byId("stop").disabled = !busy;
}

// ---- the controls ------------------------------------------------------------------------------

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("prompt").value;
  if (running || !text.trim()) return;
  byId("prompt").value = "";
  start(text);
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  hide();
  running?.abort();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  history = [];
  byId("log").replaceChildren(byId("empty"));
  byId("empty").hidden = false;
  byId("prompt").focus();
});
byId("show-rejected").addEventListener("change", (event) => {
  document.body.classList.toggle("show-rejected", event.target.checked);
});
byId("key").addEventListener("change", (event) => {
  useKey(event.target.value);
  learn();
  connectNow();
});

learn();
follow();
