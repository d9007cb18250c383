/** Figures of an answer, and what its race says. */
"use strict";

function setFigure(id, value, basis) {
  const small = document.createElement("small");
  small.textContent = basis;
  $(id).replaceChildren(value, small);
}

function drawFigures(run) {
  const { result, started } = run;
  const drafted = run.numDrafted ? `${run.numAccepted} of ${count(run.numDrafted, "drafted token")}` : "nothing drafted yet";
  setFigure("acceptance", percent(run.acceptance), result && !run.numDrafted ? "nothing drafted" : drafted);
  setFigure("tokens-a-round", isNumber(run.meanAcceptanceLength) ? run.meanAcceptanceLength.toFixed(2) : "–", roundsOf(run));
  setFigure("first-text", seconds(result?.timings?.first_text_s ?? run.firstText_s), run.total_s ? `of ${seconds(run.total_s)}${result ? " in all" : " so far"}` : "time to the first text");
  const isPriced = isNumber(result?.cost?.target);
  $("pace-name").textContent = isPriced ? "Cost" : "Tokens a second";
  setFigure("pace", ...(isPriced ? costOf(result.cost) : paceOf(run)));
  setFigure("guarantee", result?.strategy ?? started?.strategy ?? "–", guaranteeOf(result?.guarantee ?? started?.guarantee));
}

function roundsOf({ result, rounds }) {
  const numRounds = result?.metrics?.num_rounds ?? rounds.length;
  if (numRounds) return count(numRounds, "round");
  return result ? "not in rounds" : "no rounds yet";
}

const guaranteeOf = (name) => (name ? `${name}: ${GUARANTEES[name] ?? "see the documentation"}` : "and its guarantee");

function costOf(cost) {
  const against = isNumber(cost.saving) ? `, ${money(Math.abs(cost.saving))} ${cost.saving < 0 ? "more" : "less"} than plain` : "";
  const wasted = isNumber(cost.wasted) ? `${money(cost.wasted)} wasted` : "the target’s part";
  return [money(cost.target + (cost.draft ?? 0)), wasted + against];
}

function paceOf(run) {
  const pace = perSecond(run);
  return pace === null ? ["–", "no price known"] : [String(pace), `${count(run.numTokens, "token")} in ${seconds(run.total_s)}`];
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
  $("notices").replaceChildren(...run.notices.map(({ t, text }) => {
    const item = document.createElement("li");
    item.textContent = `${text} (at ${seconds(t)})`;
    return item;
  }));
}

function drawReasoning(run) {
  $("reasoning").hidden = !run.reasoning;
  const slot = $("reasoning").querySelector("pre");
  if (slot.textContent.length !== run.reasoning.length) slot.textContent = run.reasoning;
}

// ---- The verdict ----------------------------------------------------------------------------------------------------

/** What the race says in large, and what that rests on. */
function verdictOf(run, alone) {
  const { result } = run;
  if (result?.plain_text) return { large: "No speculation", basis: `Why: ${result.plain_text}. ${NEXT[result.plain_reason] ?? ""}`.trim() };
  if (alone?.result) return verdictOfRace(run, alone);
  if (result?.speedup_range) return { ...rangeInWords(result.speedup_range), basis: `Against the target alone: ${result.speedup_basis}.` };
  return { large: seconds(run.total_s), basis: "Race the target alone to compare the times." };
}

function verdictOfRace(run, alone) {
  const isSame = run.text === alone.text;
  const runs = page.numRuns === 1 ? "one run each" : `the fastest of ${page.numRuns} runs each`;
  const times = `${seconds(run.total_s)} with the draft, ${seconds(alone.total_s)} alone: ${runs}, one after the other, by the server’s clock.`;
  return {
    ...inWords(alone.total_s / run.total_s),
    rest: isSame ? ", same text" : ", another text",
    basis: isSame ? times : `${times} ${differenceOf(run, alone)}`,
  };
}

function inWords(speedup) {
  if (Math.abs(speedup - 1) < 0.03) return { large: "As soon" };
  return speedup > 1 ? { large: `${ratio(speedup)} sooner`, kind: "sooner" } : { large: `${ratio(1 / speedup)} later`, kind: "later" };
}

function rangeInWords([least, most]) {
  return { large: `${ratio(least)} to ${ratio(most)} as fast`, kind: least > 1 ? "sooner" : most < 1 ? "later" : "" };
}

function differenceOf(run, alone) {
  const [ours, theirs] = [run.text, alone.text]; // put together once
  let at = 0;
  while (ours[at] === theirs[at]) at++;
  const reason = run.result?.same_text === false ? `: ${run.result.strategy} does not promise the same text here` : "";
  return `The texts differ from character ${at + 1}${reason}.`;
}

function showVerdict({ large, rest = "", basis, kind = "" }) {
  const figure = document.createElement("b");
  figure.textContent = large;
  $("headline").replaceChildren(figure, rest);
  $("headline").className = kind;
  $("basis").textContent = basis;
  $("verdict").hidden = false;
}

