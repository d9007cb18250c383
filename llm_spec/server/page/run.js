/** One answer as it arrives, and the races of an answer. */
"use strict";

const ORIGINS = ["accepted", "correction", "bonus", "plain"];

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
  isDone = false; // came to its end

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
    if (trace.fallback)
      this.notices.push({ t: trace.fallback.t, text: `The draft was abandoned: ${trace.fallback.reason}` });
    if (trace.retry)
      this.notices.push({
        t: trace.retry.t,
        text: `The target was called again after ${seconds(trace.retry.wait_s)}: ${trace.retry.reason}`,
      });
    if (trace.result) this.result = trace.result;
  }

  #receiveChoice({ delta = {}, finish_reason: finishReason }, trace) {
    if (delta.reasoning_content) this.reasoning += delta.reasoning_content;
    if (delta.content) {
      this.firstText_s ??= trace.t ?? null;
      this.deltas.push({
        t: this.reached_s,
        text: delta.content,
        origin: ORIGINS.includes(trace.origin) ? trace.origin : "plain",
      });
    }
    this.finishReason = finishReason ?? this.finishReason;
  }

  get text() {
    return this.deltas.map((delta) => delta.text).join("");
  }
  get total_s() {
    return this.result?.timings?.total_s ?? this.reached_s;
  }
  get numTokens() {
    return this.usage?.completion_tokens ?? sum(this.rounds, "num_emitted_tokens");
  }
  get numDrafted() {
    return this.result?.draft_tokens ?? sum(this.rounds, "num_draft_tokens");
  }
  get numAccepted() {
    return this.result?.accepted_tokens ?? sum(this.rounds, "num_accepted_tokens");
  }
  get acceptance() {
    return this.result ? this.result.acceptance_rate : this.numDrafted ? this.numAccepted / this.numDrafted : null;
  }

  /** 1 + accepted / rounds in which something was drafted: the correction or bonus counts. */
  get meanAcceptanceLength() {
    if (this.result) return this.result.metrics?.mean_acceptance_length ?? null;
    const numSpecSteps = this.rounds.filter((round) => round.num_draft_tokens).length;
    return numSpecSteps ? 1 + this.numAccepted / numSpecSteps : null;
  }
}

/** One request, its answer, and its races: `{ draft, alone }` are runs, and `alone` is null without a race. */
class Turn {
  races = [];

  /** `runners`: a name and a model for each side; `history`: the turns before; `strategy`: null for the model's own. */
  constructor({ request, strategy = null, runners, history = [], canRace = false, recorded = null }) {
    Object.assign(this, { request, strategy, runners, history, canRace, recorded });
  }

  get prompt() {
    return this.request.messages.at(-1).content;
  }
  get answer() {
    return this.races[0].draft.text;
  }

  /** The races that both sides have ended, the slowest draft first. */
  get comparable() {
    const isComparable = ({ draft, alone }) => draft.isDone && !draft.result?.plain_text && alone?.isDone;
    return this.races.filter(isComparable).sort((a, b) => speedupOf(a) - speedupOf(b));
  }

  get speedup() {
    const [below, above] = [this.middle, this.comparable[this.comparable.length >> 1]];
    return (speedupOf(below) + speedupOf(above)) / 2;
  }

  /** The race of the median, or the last one if there is nothing to compare. */
  get middle() {
    return this.comparable[(this.comparable.length - 1) >> 1] ?? this.races.at(-1);
  }

  /** The race to run next: one that only lacks the target alone, or a new one. */
  beginRace(isRace) {
    const last = this.races.at(-1);
    if (last && !last.alone?.isDone && !last.draft.result?.plain_text) last.alone = new Run();
    else this.races.push({ draft: new Run(), alone: isRace ? new Run() : null });
    return this.races.at(-1);
  }

  dropUnanswered() {
    this.races = this.races.filter(({ draft }) => draft.isDone);
  }
}

const speedupOf = ({ draft, alone }) => alone.total_s / draft.total_s;

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

/** The chunks of a recorded lane, as its server sent them, less what the page does not read. */
function* chunksOf({ events, usage, result }) {
  for (const [t_ms, ...event] of events) {
    const t = t_ms / 1000;
    if (typeof event[0] === "string") {
      yield { choices: [{ delta: { content: event[0] } }], llm_spec: { t, origin: ORIGINS[event[1]] } };
    } else {
      const [index, num_draft_tokens, num_accepted_tokens, num_emitted_tokens, draft_ms, verify_ms] = event;
      yield {
        llm_spec: {
          round: {
            t,
            index,
            num_draft_tokens,
            num_accepted_tokens,
            num_emitted_tokens,
            draft_s: draft_ms / 1000,
            verify_s: verify_ms / 1000,
          },
        },
      };
    }
  }
  yield { usage, llm_spec: { result } };
}
