/** The wire: server-sent events in, chunks out; and errors in words. */
"use strict";

/** What went wrong; `status` and `code` are the server's. `isConnection`: it did not answer, or not to the end. */
class ServerError extends Error {
  constructor(message, { status = null, code = null, retryAfter_s = null, isConnection = false } = {}) {
    super(message);
    Object.assign(this, { status, code, retryAfter_s, isConnection });
  }
}

const OWN_WORDS = new Map([
  // of an error's code, where the server's words are for programs
  [
    "insufficient_quota",
    "The budget of this API key is used up, or too little of it is left for this request. Ask whoever runs the server for more.",
  ],
  ["budget_in_use", "Other answers hold what is left of this key’s budget. Run again when they have ended."],
]);
const BUSY = [429, 503, 529];

/** A short state, and one line: what happened, what the server said of it, what to do. */
function explain(error) {
  const { message, status = null, code = null, retryAfter_s = null } = error;
  if (error.isConnection) return { state: "No connection.", line: message };
  if (status === 401) return { state: "An API key is needed.", line: askForKey() };
  if (OWN_WORDS.has(code)) return { state: "Refused.", line: OWN_WORDS.get(code) };
  if (status === null) return { state: "Failed.", line: `The answer failed: ${message}` };
  const state = status < 500 || BUSY.includes(status) ? "Refused." : "Failed.";
  const retry = isNumber(retryAfter_s) ? `. Try again in ${retryAfter_s} s.` : "";
  return { state, line: `${leadOf(status)}: ${message} (HTTP ${status})${retry}` };
}

function leadOf(status) {
  if (BUSY.includes(status)) return "The server cannot answer now";
  if (status === 403) return "The server does not allow this";
  return status < 500 ? "The server refused the request" : "The server failed";
}

function askForKey() {
  if ($("key").value.trim()) return "The server does not know this API key. Check it, and enter it again.";
  return "This server needs an API key. Enter it under “API key”. Only this page’s memory keeps it.";
}

/** The data of each event. A carriage return at the end of what has come may be half a line's end: it waits. */
async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "",
    data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        throw brokenBy(error);
      });
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

/** Whoever aborts knows why; anything else is the network. */
const brokenBy = (error) =>
  error.name === "AbortError"
    ? error
    : new ServerError("The connection broke before the answer was complete.", { isConnection: true });

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
    throw new ServerError(
      "The server cannot be reached. Check that it runs and that this device is connected, then run again.",
      { isConnection: true },
    );
  }
  if (response.ok) return response;
  const { message, code } = (await response.json().catch(() => null))?.error ?? {};
  const retryAfter_s = parseInt(response.headers.get("Retry-After"), 10);
  throw new ServerError(message ?? (response.statusText || "no reason given"), {
    status: response.status,
    code,
    retryAfter_s,
  });
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
    if (chunk.error) throw new ServerError(chunk.error.message ?? "no reason given", { code: chunk.error.code });
    run.receive(chunk);
    changed();
  }
  throw new ServerError("The connection closed before the answer was complete.", { isConnection: true });
}
