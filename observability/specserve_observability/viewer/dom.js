// Elements are only ever made here, and text is only ever text: a trace file is not trusted.

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);

// [[name, text]] as a list of facts.
export function facts(pairs) {
  return pairs.map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text)));
}

// By the page's own style rules: the policy allows no style in markup.
export function place(element, left, width) {
  element.style.left = `${left}%`;
  element.style.width = `${width}%`;
  return element;
}

// Three digits, whatever the unit.
export function time(us) {
  for (const [unit, size] of [["s", 1e6], ["ms", 1e3]]) {
    const amount = us / size;
    if (amount >= 0.9995) return `${amount.toFixed(amount >= 99.95 ? 0 : amount >= 9.995 ? 1 : 2)} ${unit}`;
  }
  return `${us.toFixed(us >= 9.95 || us === 0 ? 0 : 1)} µs`;
}

export function clock(ms) {
  const at = new Date(ms);
  const part = (value, digits = 2) => String(value).padStart(digits, "0");
  const day = `${at.getFullYear()}-${part(at.getMonth() + 1)}-${part(at.getDate())}`;
  return `${day} ${part(at.getHours())}:${part(at.getMinutes())}:${part(at.getSeconds())}.${part(at.getMilliseconds(), 3)}`;
}

export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
