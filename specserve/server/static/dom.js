// Elements are only ever made here, and text is only ever text: what a model says is not trusted.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== undefined));
  return element;
}

export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function byId(id) { return document.getElementById(id); }

// [[name, text]] as a list of facts.
export function facts(pairs) {
  return pairs.map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text)));
}

export function percent(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)} %` : "–";
}
