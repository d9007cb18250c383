/** Figures as short text. */
"use strict";

const $ = (id) => document.getElementById(id);
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const sum = (items, name) => items.reduce((total, item) => total + (item[name] ?? 0), 0);
const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
const capitalized = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function seconds(value) {
  if (!isNumber(value)) return "–";
  return value < 0.9995
    ? `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`
    : `${value.toFixed(value < 9.995 ? 2 : 1)} s`;
}
const percent = (value) => (isNumber(value) ? `${Math.round(value * 100)} %` : "–");
const ratio = (value) => (isNumber(value) ? `${value.toFixed(value < 9.995 ? 2 : 1)}x` : "–");
const grouped = (value) => value.toLocaleString("en-US");
const money = (value) => (isNumber(value) ? String(Number(value.toPrecision(3))) : "–");
const perSecond = (run) => (run.numTokens && run.total_s ? Math.round(run.numTokens / run.total_s) : null);
