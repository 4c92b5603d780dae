// The calculator of the cover: the formulas of book/_ext/calculator.py, for whatever is typed.
"use strict";

const BISECTIONS = 60;

// The tokens of a pass over k drafts, each accepted with probability a.
function tokensAPass(a, k) {
  return a === 1 ? k + 1 : (1 - a ** (k + 1)) / (1 - a);
}

// The share of drafts at which k of them bring the tokens that a pass costs; null if none do.
function breakEven(k, cost) {
  if (k + 1 <= cost) return null;
  if (cost <= 1) return 0;
  let low = 0, high = 1;
  for (let i = 0; i < BISECTIONS; i++) {
    const share = (low + high) / 2;
    if (tokensAPass(share, k) > cost) high = share;
    else low = share;
  }
  return high;
}

// Every result by its name; null where there is no such number.
function figures({ weights_m, weight_bytes, memory_gb_s, gflop_s, k, acceptance, draft_cost }) {
  const bytes = 1e6 * weights_m * weight_bytes;
  const passes = (1e9 * memory_gb_s) / bytes;
  const most = (1e9 * gflop_s) / (2e6 * weights_m);
  const knee = most / passes;
  const price = (rows) => Math.max(1, rows / knee);
  const tokens = tokensAPass(acceptance / 100, k);
  const cost = price(k + 1) / price(1) + k * draft_cost;
  const least = breakEven(k, cost);
  const worth = tokens - k * draft_cost; // what is left of a pass once its drafts are paid
  const users = worth > 1 ? (knee * worth) / (k + 1) : 0; // drafts that bring nothing pay nobody
  return {
    weights_gb: bytes / 1e9,
    passes_s: passes,
    tokens_s: most,
    knee_rows: knee,
    tokens_pass: tokens,
    speedup: tokens / cost,
    break_even: least === null ? null : 100 * least,
    users: users >= 1 ? users : null,
  };
}

// Three digits, or all of a larger number's.
function short(value) {
  if (value >= 100) return value.toFixed(0).replace(/\B(?=(\d{3})+$)/g, ",");
  return String(Number(value.toPrecision(3)));
}

function show(form) {
  const inputs = [...form.querySelectorAll("input")];
  const complete = inputs.every((input) => input.validity.valid && Number.isFinite(input.valueAsNumber));
  const values = Object.fromEntries(inputs.map((input) => [input.name, input.valueAsNumber]));
  const results = complete ? figures(values) : {};
  for (const output of form.querySelectorAll("output")) {
    const value = results[output.dataset.result];
    const number = value !== null && Number.isFinite(value);
    output.textContent = number ? short(value) : complete ? output.dataset.empty : "–";
    output.nextElementSibling.hidden = !number;
  }
}

if (typeof module !== "undefined") module.exports = { figures, short };
else {
  document.addEventListener("DOMContentLoaded", () => {
    for (const form of document.querySelectorAll("[data-calculator]")) {
      form.addEventListener("input", () => show(form));
      form.addEventListener("submit", (event) => event.preventDefault());
      show(form);
    }
  });
}
