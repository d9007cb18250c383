/** Figures of an answer, and what its race says. */
"use strict";

const GUARANTEES = {
  exact: "the target’s own output",
  "exact-text": "the target’s, its server tokenizes it again",
  judged: "the target approved what it did not write",
  lossy: "the rule may change the answer",
};
const NEXT = {
  // what to do about a reason for which nothing was speculated
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

function setFigure(id, value, basis) {
  const small = document.createElement("small");
  small.textContent = basis;
  $(id).replaceChildren(value, small);
}

/** `isDone`: nothing more comes, whether there is a result or not. */
function drawFigures(run, isDone) {
  const { result, started } = run;
  const yet = isDone ? "" : " yet";
  const drafted = run.numDrafted
    ? `${run.numAccepted} of ${count(run.numDrafted, "drafted token")}`
    : `nothing drafted${yet}`;
  setFigure("acceptance", percent(run.acceptance), drafted);
  setFigure(
    "tokens-a-round",
    isNumber(run.meanAcceptanceLength) ? run.meanAcceptanceLength.toFixed(2) : "–",
    roundsOf(run, yet),
  );
  setFigure(
    "first-text",
    seconds(result?.timings?.first_text_s ?? run.firstText_s),
    run.total_s ? `of ${seconds(run.total_s)}${isDone ? " in all" : " so far"}` : `no text${yet}`,
  );
  const isPriced = isNumber(result?.cost?.target);
  $("pace-name").textContent = isPriced ? "Cost" : "Tokens a second";
  setFigure("pace", ...(isPriced ? costOf(result.cost) : paceOf(run, yet)));
  setFigure(
    "guarantee",
    result?.strategy ?? started?.strategy ?? "–",
    guaranteeOf(result?.guarantee ?? started?.guarantee, yet),
  );
}

function roundsOf({ result, rounds }, yet) {
  const numRounds = result?.metrics?.num_rounds ?? rounds.length;
  if (numRounds) return count(numRounds, "round");
  return result ? "not in rounds" : `no rounds${yet}`;
}

const guaranteeOf = (name, yet) =>
  name ? `${name}: ${GUARANTEES[name] ?? "see the documentation"}` : `not known${yet}`;

function costOf(cost) {
  const against = isNumber(cost.saving)
    ? `, ${money(Math.abs(cost.saving))} ${cost.saving < 0 ? "more" : "less"} than plain`
    : "";
  const wasted = isNumber(cost.wasted) ? `${money(cost.wasted)} wasted` : "the target’s part";
  return [money(cost.target + (cost.draft ?? 0)), wasted + against];
}

function paceOf(run, yet) {
  const pace = perSecond(run);
  return pace === null
    ? ["–", run.text ? "number of tokens not told" : `no tokens${yet}`]
    : [String(pace), `${count(run.numTokens, "token")} in ${seconds(run.total_s)}`];
}

function drawLegend(run) {
  const totals = { accepted: 0, correction: 0, bonus: 0, plain: 0 };
  for (const round of run.rounds) {
    const parts = partsOf(round);
    totals.accepted += parts.accepted;
    totals[parts.origin] += parts.own;
  }
  for (const slot of document.querySelectorAll("#legend [data-origin]")) {
    slot.textContent = run.rounds.length ? totals[slot.dataset.origin] : "";
  }
}

function drawNotices(run) {
  $("notices").hidden = !run.notices.length;
  if ($("notices").childElementCount === run.notices.length) return;
  $("notices").replaceChildren(
    ...run.notices.map(({ t, text }) => {
      const item = document.createElement("li");
      item.textContent = `${text} (at ${seconds(t)})`;
      return item;
    }),
  );
}

function drawReasoning(run) {
  $("reasoning").hidden = !run.reasoning;
  const slot = $("reasoning").querySelector("pre");
  if (slot.textContent.length !== run.reasoning.length) slot.textContent = run.reasoning;
}

/** What the races of a turn say in large, and what that rests on. */
function verdictOf(turn) {
  if (turn.comparable.length) return verdictOfRaces(turn);
  const { draft, alone } = turn.middle;
  const { result, total_s } = draft;
  if (result?.plain_text)
    return { large: "No speculation", basis: `Why: ${result.plain_text}. ${NEXT[result.plain_reason] ?? ""}`.trim() };
  if (alone)
    return {
      large: seconds(total_s),
      rest: " with the draft",
      basis: "The target alone has not answered, so there is nothing to compare.",
    };
  if (result?.speedup_range)
    return { ...rangeInWords(result.speedup_range), basis: `Against the target alone: ${result.speedup_basis}.` };
  return {
    large: seconds(total_s),
    basis: turn.canRace ? "Race this answer to compare it with the target alone." : "",
  };
}

function verdictOfRaces(turn) {
  const { draft, alone } = turn.middle;
  const isSame = draft.text === alone.text;
  const numRaces = turn.recorded?.num_races ?? turn.comparable.length;
  const times = `${seconds(draft.total_s)} with the draft, ${seconds(alone.total_s)} alone, one after the other, by the server’s clock.`;
  return {
    ...inWords(turn.speedup),
    rest: `${numRaces === 1 ? " in one run" : `, median of ${numRaces}`}, ${isSame ? "same" : "another"} text`,
    basis: [
      numRaces > 1 ? `${spreadOf(turn)} Shown is the middle one: ${times}` : times,
      isSame ? "" : differenceOf(draft, alone),
    ]
      .join(" ")
      .trim(),
  };
}

function spreadOf({ recorded, comparable }) {
  if (recorded)
    return `Half of the ${recorded.num_races} recorded races lie between ${ratio(recorded.quartiles[0])} and ${ratio(recorded.quartiles[1])}.`;
  return `The races: ${comparable.map((race) => ratio(speedupOf(race))).join(", ")}.`;
}

function inWords(speedup) {
  if (Math.abs(speedup - 1) < 0.03) return { large: "As soon" };
  return speedup > 1
    ? { large: `${ratio(speedup)} sooner`, kind: "sooner" }
    : { large: `${ratio(1 / speedup)} later`, kind: "later" };
}

function rangeInWords([least, most]) {
  return { large: `${ratio(least)} to ${ratio(most)} as fast`, kind: least > 1 ? "sooner" : most < 1 ? "later" : "" };
}

function differenceOf(draft, alone) {
  const [ours, theirs] = [draft.text, alone.text]; // put together once
  let at = 0;
  while (ours[at] === theirs[at]) at++;
  const reason =
    draft.result?.same_text === false ? `: ${draft.result.strategy} does not promise the same text here` : "";
  return `The texts differ from character ${at + 1}${reason}.`;
}
