// One reply as it arrives: its tokens, its numbers, and what it was in the end.

import { guesses, positions } from "./charts.js";
import { facts, make, percent } from "./dom.js";
import { TokenView } from "./tokens.js";

export class Reply {
  constructor(title) {
    this.steps = [];
    this.text = ""; // what the API calls the content
    this.firstAt = undefined;
    const tokens = make("div", { class: "text", role: "group", "aria-label": `Tokens, ${title}` });
    this.view = new TokenView(tokens);
    this.facts = make("dl", { class: "facts" });
    this.kChart = make("div");
    this.positionChart = make("div");
    this.charts = make("div", { class: "charts" },
      make("div", {}, make("h4", {}, "Guesses in each step (K), and how many were right"), this.kChart),
      make("div", {}, make("h4", {}, "Acceptance by position"), this.positionChart));
    this.element = make(
      "article",
      { class: "reply", "aria-label": title, "aria-busy": "true" },
      make("h3", {}, title),
      tokens,
      this.facts,
      this.charts,
    );
  }

  get ids() { return this.steps.flatMap((step) => step.tokens.map((token) => token.id)); }

  // A chunk of the stream.
  add(chunk) {
    if (chunk.metrics) this.metrics = chunk.metrics;
    const choice = chunk.choices[0];
    if (!choice) return;
    this.text += choice.delta.content ?? "";
    this.finish = choice.finish_reason ?? this.finish;
    const logprobs = [...(choice.logprobs?.content ?? [])];
    for (const step of choice.token_origins ?? []) {
      this.steps.push(step);
      this.view.add(step, logprobs.splice(0, step.tokens.length));
    }
    this.show(performance.now());
  }

  show(now) {
    const tokens = this.ids.length;
    if (tokens && this.firstAt === undefined) [this.firstAt, this.numFirst] = [now, tokens];
    const drafted = this.steps.reduce((sum, step) => sum + step.drafted, 0);
    const accepted = this.steps.reduce((sum, step) => sum + step.accepted, 0);
    this.facts.replaceChildren(...facts([
      ["Tokens", String(tokens)],
      ["Tokens/s", this.rate(now)?.toFixed(1) ?? "–"],
      ["Tokens per step", this.steps.length ? (tokens / this.steps.length).toFixed(2) : "–"],
      ["Guesses accepted", drafted ? `${accepted} of ${drafted} (${percent(accepted, drafted)})` : "none made"],
    ]));
    this.charts.hidden = !drafted;
    this.kChart.replaceChildren(guesses(this.steps, `${drafted} guesses in ${this.steps.length} steps, ${accepted} accepted`));
    this.positionChart.replaceChildren(positions(...this.byPosition()));
  }

  // Behind the first token: by the engine's clock once it is known, by this page's before.
  rate(now) {
    if (this.decodeSeconds) return (this.ids.length - 1) / this.decodeSeconds;
    const seconds = (now - this.firstAt) / 1000;
    return seconds > 0.2 ? (this.ids.length - this.numFirst) / seconds : undefined;
  }

  get decodeSeconds() { return this.metrics?.specserve.decode_seconds; }

  byPosition() {
    if (this.metrics) {
      const { drafted_per_position: drafted, accepted_per_position: accepted } = this.metrics.specserve;
      return [drafted, accepted];
    }
    const count = (name) => {
      const most = Math.max(0, ...this.steps.map((step) => step.drafted));
      return Array.from({ length: most }, (_, at) => this.steps.filter((step) => step[name] > at).length);
    };
    return [count("drafted"), count("accepted")];
  }

  end() {
    this.element.setAttribute("aria-busy", "false");
    this.show(performance.now());
  }

  fail(message, again) {
    this.end();
    const button = make("button", { type: "button" }, "Try again");
    button.addEventListener("click", again);
    this.element.append(make("p", { class: "failure", role: "alert" }, message), button);
  }
}

// What two replies to the same seed say of each other.
export function verdict(on, off) {
  const [ours, plain] = [on.ids, off.ids];
  const at = ours.findIndex((id, idx) => id !== plain[idx]);
  if (at >= 0 || ours.length !== plain.length) {
    const place = at >= 0 ? at : ours.length;
    return make("p", { class: "verdict different" },
      `The texts differ from token ${place + 1} on${on.metrics?.specserve.lossy ? ": this server verifies by a lossy rule" : ""}.`);
  }
  const [fast, slow] = [on.decodeSeconds, off.decodeSeconds];
  const times = slow / fast;
  const compared = times >= 1 ? `${times.toFixed(2)} times as fast` : `${(1 / times).toFixed(2)} times as slow`;
  const speed = fast > 0 && slow > 0
    ? `With speculation ${compared}: ${fast.toFixed(2)} s against ${slow.toFixed(2)} s from the first token to the last, ` +
      `${on.steps.length} steps against ${off.steps.length}. One run each: what else the machine did meanwhile counts, too.`
    : "It is too short to say how fast it was.";
  return make("p", { class: "verdict" }, `Identical text, all ${ours.length} tokens. ${speed}`);
}
