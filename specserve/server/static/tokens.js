// One reply's tokens: coloured by origin, told about on hover and focus, walked by arrow keys.

import { byId, make } from "./dom.js";

const REASONS = {
  prefill: "the prompt was read in it",
  no_room: "there was no room for any",
  no_proposal: "no drafter had one",
  not_worth_it: "it would not have paid",
};

const shown = (text) => (text === "" ? "no text of its own" : `“${text}”`);
const chance = (probability) =>
  probability === undefined ? "" : ` The drafter gave it ${Math.round(100 * probability)} %.`;

function origin(token, step) {
  const own = "The model’s own token";
  switch (token.origin) {
    case "accepted":
      return `Accepted: guess ${token.position + 1} of ${step.drafted} by ${step.drafter}.${chance(token.probability)}`;
    case "corrected":
      return `Corrected: ${own}, guess ${step.accepted + 1} of ${step.drafted} by ${step.drafter} was wrong.`;
    case "bonus":
      return `Bonus: ${own}, behind ${step.accepted} guesses by ${step.drafter} that were all right.`;
    default:
      return `Plain: ${own}, nothing was guessed in this step${step.reason ? `, ${REASONS[step.reason] ?? step.reason}` : ""}.`;
  }
}

function fate(guess, step) {
  const name = `Rejected: guess ${guess.position + 1} by ${step.drafter}.${chance(guess.probability)}`;
  if (guess.position > step.accepted) return `${name} It stood behind a wrong guess.`;
  const chosen = step.tokens[guess.position];
  return chosen ? `${name} The model chose ${shown(chosen.text)}.` : name;
}

const PLACE = (step, id) => `Step ${step.step + 1} of this reply, token id ${id}.`;

export class TokenView {
  // root: the element that holds the tokens
  constructor(root) {
    this.root = root;
    this.facts = new WeakMap();
    root.addEventListener("keydown", (event) => this.walk(event));
    root.addEventListener("focusin", (event) => this.tell(event.target));
    root.addEventListener("mouseover", (event) => this.tell(event.target));
    root.addEventListener("focusout", hide);
    root.addEventListener("mouseleave", hide);
  }

  // logprobs: of the step's tokens, in order, where the server was asked for them
  add(step, logprobs = []) {
    const own = step.tokens.length > step.accepted ? step.tokens.length - 1 : step.tokens.length;
    step.tokens.forEach((token, idx) => {
      if (idx === own) this.addRejected(step);
      const lines = [shown(token.text), origin(token, step)];
      const logprob = logprobs[idx]?.logprob;
      if (logprob !== undefined) lines.push(`The model gives it ${(100 * Math.exp(logprob)).toFixed(1)} %.`);
      lines.push(PLACE(step, token.id));
      this.put(make("span", { class: `token ${token.origin}${token.text ? "" : " silent"}` }, token.text), lines);
    });
    if (own === step.tokens.length) this.addRejected(step);
  }

  addRejected(step) {
    for (const guess of step.rejected) {
      const lines = [shown(guess.text), fate(guess, step), PLACE(step, guess.id)];
      this.put(make("del", { class: "token rejected" }, guess.text), lines);
    }
  }

  put(element, lines) {
    element.tabIndex = this.root.querySelector(".token:not(.rejected)") ? -1 : 0; // one stop of Tab per reply
    this.facts.set(element, lines);
    this.root.append(element);
  }

  walk(event) {
    if (event.key === "Escape") return hide();
    const tokens = [...this.root.querySelectorAll(".token")].filter((one) => one.getClientRects().length);
    const at = tokens.indexOf(event.target);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (to === undefined || at < 0 || !tokens[to]) return undefined;
    event.preventDefault();
    for (const one of this.root.querySelectorAll("[tabindex='0']")) one.tabIndex = -1;
    tokens[to].tabIndex = 0;
    return tokens[to].focus();
  }

  tell(element) {
    const lines = this.facts.get(element);
    if (!lines) return;
    hide();
    const details = byId("details");
    details.replaceChildren(...lines.map((text) => make("p", {}, text)));
    details.hidden = false;
    element.setAttribute("aria-describedby", "details");
    place(details, element.getClientRects()[0] ?? element.getBoundingClientRect());
  }
}

function place(details, token) {
  const { width, height } = details.getBoundingClientRect();
  const left = Math.min(token.left, window.innerWidth - width - 8);
  const above = token.top - height - 6;
  details.style.left = `${Math.max(8, left)}px`;
  details.style.top = `${above > 0 ? above : token.bottom + 6}px`;
}

export function hide() {
  byId("details").hidden = true;
  document.querySelector("[aria-describedby='details']")?.removeAttribute("aria-describedby");
}
