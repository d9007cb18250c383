/** Short text, the wire, and one answer as it arrives. */
"use strict";
const $ = (id) => document.getElementById(id);
const ORIGINS = ["accepted", "correction", "bonus", "plain"];
const GUARANTEES = {
  exact: "the target’s own output",
  "exact-text": "the target’s, its server tokenizes it again",
  judged: "the target approved what it did not write",
  lossy: "the rule may change the answer",
};
const NEXT = { // what to do about a reason for which nothing was speculated
  configured: "Choose another strategy under Settings to use the draft.",
  no_draft: "Give this model a draft in the server’s config.",
  seed: "Leave the seed empty, or set the temperature to 0.",
  discovery: "Run it again.",
  baseline: "Run it again.",
  not_measured: "Run it again.",
  not_verified: "Allow a longer answer.",
  not_worthwhile: "Choose a strategy under Settings to use it anyway.",
  retried: "Run it again.",
};
const BUILTIN_EXAMPLES = [ // their answers end by themselves, at these settings
  { name: "Register a codec", prompt: "def getregentry():" },
  { name: "Test a missing file", prompt: "def test_open_missing_file(self):\n    # A file that does not exist cannot be opened", temperature: 0.7, seed: 10 },
  { name: "Box of a widget", prompt: 'def bbox(self, index):\n    """Return a tuple of x1,y1,x2,y2 which is the bounding box."""', temperature: 0.4, seed: 6 },
  { name: "Test a folder", prompt: "def test_mkdir(self):", temperature: 0.7, seed: 8 },
];
const CHAT_EXAMPLES = [
  { name: "Edit code", prompt: "Rename the variable d to orders and add type hints. Answer with the code alone.\n\ndef total(d):\n    s = 0\n    for o in d:\n        if o.is_paid and not o.is_refunded:\n            s += o.price * o.quantity\n    return s\n" },
  { name: "Fill in JSON", prompt: "List the eight planets of the solar system as a JSON array of objects with the keys name, diameter_km and num_moons. Answer with the JSON alone." },
  { name: "Explain", prompt: "Why is the sky blue? Answer in one paragraph for a ten-year-old." },
];
const [WITH_DRAFT, ALONE] = ["With the draft", "The target alone"];
const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

/** Figures of an answer, and what its race says. */as text ------------------------------------------------------------------------------------------------

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const sum = (items, name) => items.reduce((total, item) => total + (item[name] ?? 0), 0);
const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
const capitalized = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function seconds(value) {
  if (!isNumber(value)) return "–";
  return value < 0.9995 ? `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms` : `${value.toFixed(value < 9.995 ? 2 : 1)} s`;
}
const percent = (value) => (isNumber(value) ? `${Math.round(value * 100)} %` : "–");
const ratio = (value) => (isNumber(value) ? `${value.toFixed(value < 9.995 ? 2 : 1)}x` : "–");
const money = (value) => (isNumber(value) ? String(Number(value.toPrecision(3))) : "–");
const perSecond = (run) => (run.numTokens && run.total_s ? Math.round(run.numTokens / run.total_s) : null);

// ---- The wire: server-sent events in, chunks out --------------------------------------------------------------------

class ServerError extends Error {
  constructor(message, status = null) {
    super(message);
    this.status = status;
  }
}

/** The data of each event. A carriage return at the end of what has come may be half a line's end: it waits. */
async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        if (line || !data.length) continue;
        yield data.join("\n");
        data = [];
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // whoever leaves early closes the connection; a broken one is closed already
  }
}

function headers(more = {}) {
  const key = $("key").value.trim();
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function fetchOk(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(`The server cannot be reached: ${error.message}`);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? (response.statusText || "no reason given");
  throw new ServerError(`${message} (HTTP ${response.status})`, response.status);
}

/** Sends the request and tells `run` each chunk; `changed` is called after each. */
async function ask(request, strategy, run, changed, signal) {
  const trace = { "Content-Type": "application/json", "x-llm-spec-trace": "1" };
  if (strategy) trace["x-llm-spec-strategy"] = strategy;
  const body = JSON.stringify(request);
  const response = await fetchOk("v1/chat/completions", { method: "POST", headers: headers(trace), body, signal });
  for await (const data of readEvents(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message ?? "The answer failed.");
    run.receive(chunk);
    changed();
  }
  throw new ServerError("The connection closed before the answer was done.");
}

// ---- One answer as it arrives ---------------------------------------------------------------------------------------

class Run {
  deltas = [];
  reasoning = "";
  rounds = [];
  upstreams = [];
  notices = [];
  started = null;
  result = null;
  usage = null;
  finishReason = null;
  firstText_s = null;
  reached_s = 0; // the latest time the server has told
  isOpen = false;

  receive(chunk) {
    const trace = chunk.llm_spec ?? {};
    const choice = chunk.choices?.[0];
    const times = [trace.t, trace.round?.t, trace.upstream?.ended_s, trace.fallback?.t, trace.retry?.t];
    this.reached_s = Math.max(this.reached_s, ...times.filter(isNumber));
    if (trace.started) this.started = trace.started;
    if (choice) this.#receiveChoice(choice, trace);
    if (chunk.usage) this.usage = chunk.usage;
    if (trace.round) this.rounds.push(trace.round);
    if (trace.upstream) this.upstreams.push(trace.upstream);
    if (trace.fallback) this.notices.push({ t: trace.fallback.t, text: `The draft was abandoned: ${trace.fallback.reason}` });
    if (trace.retry) this.notices.push({ t: trace.retry.t, text: `The target was called again after ${seconds(trace.retry.wait_s)}: ${trace.retry.reason}` });
    if (trace.result) this.result = trace.result;
  }

  #receiveChoice({ delta = {}, finish_reason: finishReason }, trace) {
    if (delta.reasoning_content) this.reasoning += delta.reasoning_content;
    if (delta.content) {
      this.firstText_s ??= trace.t ?? null;
      this.deltas.push({ t: this.reached_s, text: delta.content, origin: ORIGINS.includes(trace.origin) ? trace.origin : "plain" });
    }
    this.finishReason = finishReason ?? this.finishReason;
  }

  get text() { return this.deltas.map((delta) => delta.text).join(""); }
  get total_s() { return this.result?.timings?.total_s ?? this.reached_s; }
  get numTokens() { return this.usage?.completion_tokens ?? sum(this.rounds, "num_emitted_tokens"); }
  get numDrafted() { return this.result?.draft_tokens ?? sum(this.rounds, "num_draft_tokens"); }
  get numAccepted() { return this.result?.accepted_tokens ?? sum(this.rounds, "num_accepted_tokens"); }
  get acceptance() { return this.result ? this.result.acceptance_rate : this.numDrafted ? this.numAccepted / this.numDrafted : null; }

  /** 1 + accepted / rounds in which something was drafted: the correction or bonus counts. */
  get meanAcceptanceLength() {
    if (this.result) return this.result.metrics?.mean_acceptance_length ?? null;
    const numSpecSteps = this.rounds.filter((round) => round.num_draft_tokens).length;
    return numSpecSteps ? 1 + this.numAccepted / numSpecSteps : null;
  }
}

/** What a round emitted, from below: accepted tokens, the target's own, and drafted ones that were not confirmed. */
function partsOf(round) {
  const accepted = Math.min(round.num_accepted_tokens, round.num_emitted_tokens);
  const all = round.num_accepted_tokens === round.num_draft_tokens;
  return {
    accepted,
    own: round.num_emitted_tokens - accepted,
    origin: !round.num_draft_tokens ? "plain" : all ? "bonus" : "correction",
    rejected: round.num_draft_tokens - round.num_accepted_tokens,
  };
}

