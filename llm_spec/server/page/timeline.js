/** Rounds and streams of an answer, on one axis of time. */
"use strict";

const MARGIN = { left: 30, right: 4, top: 8 };
const ROUNDS_HEIGHT = 92;
const STRIP_HEIGHT = 7;
const LANE_HEIGHT = 18;
const TOLD_LATE_S = 0.03; // a model in the server's process tells of its rounds every 25 ms

function svg(name, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
const titled = (text) => svg("title", {}, text);
const rect = (kind, x, y, width, height) => svg("rect", { class: kind, x, y, width: Math.max(width, 1e-6), height });

/** The next of 1, 2, 5, 10, … times a power of ten. */
function niceAbove(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value * 0.9999);
}

/** Rounds are drawn once, in seconds and tokens; only the scale of their group changes as time goes on. */
class Timeline {
  #numDrawn = 0;
  #mostTokens = 4;
  #reached_s = 0;
  #columns = svg("g", { class: "rounds" });
  #strip = svg("g", { class: "strip" });
  #lanes = svg("g", { class: "lanes" });
  #axis = svg("g", {});

  constructor(element) {
    this.element = element;
    element.replaceChildren(this.#axis, this.#columns, this.#strip, this.#lanes);
  }

  draw(run, isDone) {
    for (; this.#numDrawn < run.rounds.length; this.#numDrawn++) this.#addRound(run.rounds[this.#numDrawn]);
    const lanes = packLanes(run.upstreams);
    const width = this.element.clientWidth - MARGIN.left - MARGIN.right;
    const isEmpty = !run.rounds.length && !lanes.length;
    $("timeline-note").textContent = noteOn(run, isDone);
    $("key-rounds").hidden = !run.rounds.length;
    $("key-streams").hidden = !lanes.length;
    const reached_s = Math.max(run.total_s, run.reached_s, 1e-4);
    const end_s = isDone ? reached_s : niceAbove(reached_s);
    const scale = { width, end_s, perSecond: width / end_s, perToken: ROUNDS_HEIGHT / this.#mostTokens };
    const below = run.rounds.length ? this.#placeRounds(scale, run.rounds.length) : MARGIN.top;
    const bottom = this.#drawLanes(lanes, scale, below);
    this.#drawAxis(run, scale, bottom);
    this.element.setAttribute("height", isEmpty ? 0 : bottom + 20);
    this.element.setAttribute("aria-label", describe(run, lanes.length));
  }

  #addRound(round) {
    const { accepted, own, origin, rejected } = partsOf(round);
    const spent = round.draft_s + round.verify_s;
    const isToldLate = this.#reached_s && round.t - spent - this.#reached_s < TOLD_LATE_S;
    const start = Math.min(round.t, isToldLate ? this.#reached_s : Math.max(0, round.t - spent));
    const end = Math.min(round.t, start + spent);
    this.#reached_s = end;
    const column = svg(
      "g",
      { class: "round" },
      titled(
        `Round ${round.index + 1}: ${round.num_draft_tokens} drafted, ${round.num_accepted_tokens} accepted, ` +
          `${round.num_emitted_tokens} emitted; drafting ${seconds(round.draft_s)}, verifying ${seconds(round.verify_s)}`,
      ),
    );
    const stack = [
      ["accepted", accepted],
      [origin, own],
      ["rejected", rejected],
    ];
    let y = 0;
    for (const [kind, height] of stack) {
      if (height > 0) column.append(rect(kind, start, y, end - start, height));
      y += Math.max(0, height);
    }
    this.#columns.append(column);
    const verifyStart = Math.max(start, end - round.verify_s);
    if (round.draft_s) this.#strip.append(rect("draft", start, 0, verifyStart - start, STRIP_HEIGHT));
    this.#strip.append(rect("verify", verifyStart, 0, end - verifyStart, STRIP_HEIGHT));
    this.#mostTokens = Math.max(this.#mostTokens, y);
  }

  #placeRounds({ width, perSecond, perToken }, numRounds) {
    const base = MARGIN.top + ROUNDS_HEIGHT;
    this.#columns.setAttribute("transform", `translate(${MARGIN.left} ${base}) scale(${perSecond} ${-perToken})`);
    this.#strip.setAttribute("transform", `translate(${MARGIN.left} ${base + 4}) scale(${perSecond} 1)`);
    setPatterns("rounds", 1 / perSecond, 1 / perToken);
    setPatterns("strip", 1 / perSecond, 1);
    for (const group of [this.#columns, this.#strip]) group.classList.toggle("dense", numRounds * 5 > width);
    return base + STRIP_HEIGHT + 8;
  }

  #drawLanes(lanes, { perSecond }, top) {
    this.#lanes.replaceChildren();
    lanes.forEach((lane, row) =>
      lane.forEach((upstream) => {
        const x = MARGIN.left + upstream.started_s * perSecond;
        const y = top + row * LANE_HEIGHT;
        const width = (upstream.ended_s - upstream.started_s) * perSecond;
        const label = `from ${upstream.begins_at}: ${count(upstream.num_tokens, "token")}`;
        const stream = svg(
          "g",
          { class: "upstream" },
          titled(`Stream ${upstream.index + 1}, ${upstream.outcome}, ${label}`),
        );
        stream.append(rect(upstream.outcome === "emitted" ? "emitted" : "cancelled", x, y, width, LANE_HEIGHT - 4));
        if (width > 110) {
          const kind = upstream.outcome === "emitted" ? "lane-label" : "lane-label cancelled-label";
          stream.append(svg("text", { class: kind, x: x + 6, y: y + 10.5 }, label));
        }
        this.#lanes.append(stream);
      }),
    );
    return top + lanes.length * LANE_HEIGHT;
  }

  #drawAxis(run, { width, end_s, perSecond, perToken }, bottom) {
    const step = niceAbove(end_s / Math.max(2, Math.floor(width / 110)));
    const parts = [
      svg("line", { class: "axis", x1: MARGIN.left, x2: MARGIN.left + width, y1: bottom + 2, y2: bottom + 2 }),
    ];
    for (let tick = 0; tick <= end_s * 1.0001; tick += step) {
      const x = MARGIN.left + tick * perSecond;
      const anchor = tick === 0 ? "start" : x > width + MARGIN.left - 24 ? "end" : "middle";
      parts.push(svg("line", { class: "axis", x1: x, x2: x, y1: MARGIN.top, y2: bottom + 2 }));
      parts.push(
        svg(
          "text",
          { x, y: bottom + 16, "text-anchor": anchor },
          end_s < 1 ? `${Math.round(tick * 1e5) / 100} ms` : `${Math.round(tick * 100) / 100} s`,
        ),
      );
    }
    if (run.rounds.length) parts.push(...this.#tokenAxis(perToken));
    for (const { t } of run.notices.filter((notice) => isNumber(notice.t))) {
      const x = MARGIN.left + t * perSecond;
      parts.push(svg("line", { class: "notice", x1: x, x2: x, y1: MARGIN.top, y2: bottom + 2 }));
    }
    this.#axis.replaceChildren(...parts);
  }

  #tokenAxis(perToken) {
    const base = MARGIN.top + ROUNDS_HEIGHT;
    const step = Math.max(1, niceAbove(this.#mostTokens / 4));
    const parts = [];
    for (let tokens = step; tokens <= this.#mostTokens; tokens += step) {
      parts.push(
        svg("text", { x: MARGIN.left - 8, y: base - tokens * perToken + 4, "text-anchor": "end" }, String(tokens)),
      );
    }
    return parts;
  }
}

/** Patterns keep their size on a group that is scaled. */
function setPatterns(group, x, y) {
  for (const pattern of document.querySelectorAll(`pattern[id^=${group}-]`))
    pattern.setAttribute("patternTransform", `scale(${x} ${y})`);
}

function noteOn({ rounds, upstreams, result }, isDone) {
  if (upstreams.length) return "Each bar is one stream of the target. Bars in different lanes ran at the same time.";
  if (rounds.length) return "Each column is one round: its height is its tokens, its width is its time.";
  if (!isDone) return "Rounds appear here as they end.";
  return result ? "This answer did not come in rounds." : "No round has ended.";
}

/** Streams that ran at the same time lie in different lanes, each in the first that is free. */
function packLanes(upstreams) {
  const lanes = [];
  const inOrder = upstreams.toSorted((a, b) => a.started_s - b.started_s);
  for (const upstream of inOrder) {
    const free = lanes.find((lane) => lane.at(-1).ended_s <= upstream.started_s);
    if (free) free.push(upstream);
    else lanes.push([upstream]);
  }
  return lanes;
}

function describe(run, numLanes) {
  const parts = [];
  if (run.rounds.length)
    parts.push(
      `${count(run.rounds.length, "round")}: ${run.numAccepted} of ${count(run.numDrafted, "drafted token")} accepted`,
    );
  if (numLanes) {
    const numCancelled = run.upstreams.filter((upstream) => upstream.outcome !== "emitted").length;
    parts.push(
      `${count(run.upstreams.length, "upstream stream")}, up to ${numLanes} at once, ${numCancelled} cancelled`,
    );
  }
  return parts.length ? `${parts.join("; ")}; ${seconds(run.total_s)}` : "No rounds yet";
}
