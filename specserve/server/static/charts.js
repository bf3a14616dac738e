// Small charts as SVG. Each says its numbers in words, too.

import { draw } from "./dom.js";

const WIDTH = 300;

function chart(height, words, children) {
  const box = { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": words };
  return draw("svg", box, ...children);
}

function bar(kind, x, y, width, height) {
  return draw("rect", { class: kind, x, y, width: Math.max(0, width), height: Math.max(0, height) });
}

// parts: [[class, amount]], side by side on one line.
export function stacked(parts, words) {
  const whole = parts.reduce((sum, [, amount]) => sum + amount, 0) || 1;
  let x = 0;
  const bars = parts.map(([kind, amount]) => {
    const width = (WIDTH * amount) / whole;
    x += width;
    return bar(kind, x - width, 0, width, 14);
  });
  return chart(14, words, bars);
}

// values: newest last; most: how many fit.
export function line(values, most, words) {
  const top = Math.max(1, ...values);
  const at = (value, idx) => {
    const x = WIDTH - ((values.length - 1 - idx) * WIDTH) / (most - 1);
    return `${x.toFixed(1)},${(46 - (40 * value) / top).toFixed(1)}`;
  };
  return chart(48, words, [
    draw("line", { class: "chart-line", x1: 0, x2: WIDTH, y1: 47, y2: 47, opacity: 0.3 }),
    draw("polyline", { class: "chart-line", points: values.map(at).join(" ") }),
    draw("text", { x: 0, y: 9 }, String(Math.round(top))),
  ]);
}

// steps: [{drafted, accepted}], one bar each: guesses behind, accepted ones before.
export function guesses(steps, words) {
  const shown = steps.slice(-100);
  const top = Math.max(1, ...shown.map((step) => step.drafted));
  const width = WIDTH / Math.max(40, shown.length);
  const bars = shown.flatMap((step, idx) => {
    const behind = (46 * step.drafted) / top;
    const before = (46 * step.accepted) / top;
    const x = idx * width;
    return [
      bar("bar-back", x, 47 - behind, width * 0.85, behind),
      bar("bar", x, 47 - before, width * 0.85, before),
    ];
  });
  bars.push(draw("line", { class: "chart-line", x1: 0, x2: WIDTH, y1: 47.5, y2: 47.5, opacity: 0.3 }));
  return chart(48, words, bars);
}

// One bar per position: the share of its guesses that were accepted.
export function positions(drafted, accepted) {
  const words = drafted.map((count, idx) => `position ${idx + 1}: ${accepted[idx] ?? 0} of ${count}`);
  const width = WIDTH / Math.max(8, drafted.length);
  const bars = drafted.flatMap((count, idx) => {
    const share = count ? (accepted[idx] ?? 0) / count : 0;
    const middle = { x: (idx + 0.45) * width, "text-anchor": "middle" };
    return [
      bar("bar-back", idx * width, 12, width * 0.9, 40),
      bar("bar", idx * width, 52 - 40 * share, width * 0.9, 40 * share),
      draw("text", { ...middle, y: 9 }, count && width > 28 ? `${Math.round(100 * share)}%` : ""),
      draw("text", { ...middle, y: 63 }, String(idx + 1)),
    ];
  });
  return chart(66, words.join(", ") || "no guesses yet", bars);
}
