/** What the page shows and when: races, replays, the conversation. */
"use strict";

const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
const page = {
  lanes: [new Lane("draft-lane"), new Lane("alone-lane")],
  timeline: null,
  turn: null,
  race: null,
  turns: [],
  controller: null,
  replay: null,
};

const lanesInRace = () => page.lanes.filter((lane) => !lane.element.hidden);
const longest = () => Math.max(1e-4, ...lanesInRace().map((lane) => lane.run.total_s));

/** Tells how it stands; `unseen` is for those who hear the page, and stands in large letters on it. */
function setStatus(text, unseen = "") {
  const span = document.createElement("span");
  span.className = "unseen";
  span.textContent = unseen && ` ${unseen}`;
  $("status").replaceChildren(text, span);
}

function showError(error) {
  const { state, line } = explain(error);
  setStatus(state);
  $("alert").textContent = line;
  $("alert").hidden = false;
  if (error.status !== 401) return;
  $("key-box").open = true;
  $("key").focus();
}

function setTitle(slowdown = 1) {
  const title = lanesInRace().length === 2 ? "Race" : "Answer";
  $("race-title").textContent = slowdown === 1 ? title : `${title}, ${slowdown} times slower`;
}

function setButtons() {
  const isRunning = page.controller !== null;
  const isOver = lanesInRace().every((lane) => lane.run.deltas.length);
  const orders = [$("run"), $("again"), $("send"), ...$("turns").querySelectorAll("button")];
  const disable = (node, isDisabled) => node.setAttribute("aria-disabled", String(isDisabled));
  disable($("stop"), !isRunning && !page.replay);
  disable($("replay"), isRunning || !isOver);
  for (const node of orders) disable(node, isRunning);
  $("again").hidden = !page.turns.includes(page.turn) || !page.turn.canRace;
  $("again").textContent = raceWords(page.turn);
}

const raceWords = (turn) => (turn.comparable.length ? "Race twice more" : "Race this answer");

/** Calls `draw` before the next frame, however often it is asked to until then. */
function onceAFrame(draw) {
  let frame = null;
  return {
    ask() {
      frame ??= requestAnimationFrame(() => {
        frame = null;
        draw();
      });
    },
    now() {
      cancelAnimationFrame(frame);
      frame = null;
      draw();
    }, // the last, also where a hidden page has no frames
  };
}

// ---- The card of one race -------------------------------------------------------------------------------------------

function drawLanes() {
  for (const lane of lanesInRace()) lane.draw(longest());
}

function drawRace(isDone = false) {
  const { run } = page.lanes[0];
  drawLanes();
  page.timeline.draw(run, isDone);
  drawFigures(run, isDone);
  drawLegend(run);
  drawNotices(run);
  drawReasoning(run);
}

/** Clears the card for a race of a turn. What was not speculated is no race: it is the target alone. */
function openRace(turn, race) {
  Object.assign(page, { turn, race });
  const isPlain = Boolean(race.draft.result?.plain_text);
  const first = isPlain ? [ALONE, race.draft.started?.target ?? ""] : turn.runners[0];
  const later = "Runs next. The two do not run at once, because they would slow each other down.";
  page.lanes[0].open(first, race.draft, "The answer appears here.");
  page.lanes[1].open(turn.runners[1], race.alone ?? new Run(), later);
  page.lanes[1].element.hidden = isPlain || !race.alone;
  page.timeline = new Timeline($("timeline"));
  $("notices").replaceChildren();
  $("asked").lastElementChild.textContent = turn.prompt.trim().replace(/\s*\n\s*/g, " ⏎ ");
  $("alert").hidden = true;
  $("badge").hidden = !turn.recorded;
  setTitle();
  showVerdict({ large: "…", basis: "" });
}

/** Shows a turn that is over: the race of its median. */
function showTurn(turn) {
  if (page.race !== turn.middle || turn.middle.draft.result?.plain_text) openRace(turn, turn.middle);
  showVerdict(verdictOf(turn));
  setTitle();
  drawRace(true);
  drawConversation();
  setButtons();
}

function showVerdict({ large, rest = "", basis, kind = "" }) {
  const figure = document.createElement("b");
  figure.textContent = large;
  $("headline").replaceChildren(figure, rest);
  $("headline").className = kind;
  $("basis").textContent = basis;
  $("verdict").hidden = false;
}

function startReplay() {
  if (page.controller || $("replay").getAttribute("aria-disabled") === "true") return;
  page.replay?.end();
  setTitle(slowdownOf(longest()));
  page.replay = new Replay(lanesInRace(), longest(), () => {
    page.replay = null;
    setTitle();
    setButtons();
  });
  page.replay.start();
  setButtons();
}

function readRun(lane) {
  const run = new Run();
  for (const chunk of chunksOf(lane)) run.receive(chunk);
  run.isDone = true;
  return run;
}

function readRecording() {
  const recording = JSON.parse($("recording").textContent);
  const { prompt, draft, target, lanes } = recording;
  const request = { messages: [{ content: prompt }] };
  const turn = new Turn({
    request,
    runners: [
      [WITH_DRAFT, draft],
      [ALONE, target],
    ],
    recorded: recording,
  });
  turn.races = [{ draft: readRun(lanes[0]), alone: readRun(lanes[1]) }];
  showTurn(turn);
  setStatus("The built-in pair, recorded on a 2-core machine. Press Run for your own.");
  if (!reducedMotion.matches) startReplay();
}

// ---- Running --------------------------------------------------------------------------------------------------------

async function start() {
  if (page.controller) return;
  if (!form.models.length && !(await loadModels())) return;
  if (!areSettingsValid() || !$("form").reportValidity()) return;
  await runRaces(readTurn($("prompt").value, []), 1, $("alone").checked);
}

/** One turn more: the settings are those of the form, without an example's. */
async function reply() {
  if (page.controller || !$("reply").reportValidity()) return;
  leaveExample();
  if (!areSettingsValid()) return;
  const isDone = await runRaces(readTurn($("reply").value, page.turns), 1, $("alone").checked);
  if (isDone) $("reply-form").reset();
}

function areSettingsValid() {
  const wrong = $("settings").querySelector(":invalid");
  if (!wrong) return true;
  $("settings").open = true;
  return wrong.reportValidity();
}

function raceAgain(turn) {
  if (!page.controller) runRaces(turn, turn.comparable.length ? 2 : 1, true);
}

/** Runs a request, or so many races of it; whether all of them came to their end. */
async function runRaces(turn, numRaces, isRace) {
  page.replay?.end();
  page.controller = new AbortController();
  let error = null;
  for (let number = 1; number <= numRaces && !error; number++) {
    const race = turn.beginRace(isRace && turn.canRace);
    openRace(turn, race);
    $("lanes").classList.add("fresh");
    drawRace();
    setButtons();
    showCard();
    error = await runSides(turn, race, numRaces > 1 ? `Race ${number} of ${numRaces}: ` : "");
  }
  page.controller = null;
  $("lanes").classList.remove("fresh");
  finish(turn, error);
  return !error;
}

/** Runs the sides that have not run, one after the other. Each is first by turns: the second finds caches. */
async function runSides(turn, race, number) {
  const [draft, alone] = page.lanes;
  const sides = [[draft, turn.strategy, drawRace, race.alone ? "running with the draft." : "running."]];
  if (race.alone) sides.push([alone, "plain", drawLanes, "running the target alone."]);
  if (turn.races.length % 2 === 0) sides.reverse();
  for (const [lane, strategy, draw, words] of sides) {
    if (lane.run.isDone || (lane === alone && race.draft.result?.plain_text)) continue;
    setStatus(number ? number + words : capitalized(words));
    const error = await follow(turn.request, strategy, lane.run, draw);
    if (error) return error;
    const seed = lane.run.result?.seed;
    if (isNumber(seed)) turn.request = { ...turn.request, seed };
    if (lane === draft && sides.at(-1)[0] === alone) {
      const basis = "Now running the target alone, for comparison.";
      showVerdict({ large: seconds(draft.run.total_s), rest: " with the draft", basis });
    }
  }
  return null;
}

/** Asks, and draws as the answer comes; the error that ended it, if any. */
async function follow(request, strategy, run, draw) {
  const frames = onceAFrame(draw);
  run.isOpen = true;
  try {
    await ask(request, strategy, run, frames.ask, page.controller.signal);
    run.isDone = true;
    return null;
  } catch (error) {
    return error;
  } finally {
    run.isOpen = false;
    frames.now();
  }
}

function finish(turn, error) {
  loadBudget();
  const stopped_s = Math.max(...lanesInRace().map((lane) => lane.run.reached_s));
  turn.dropUnanswered();
  if (turn.races.length) {
    if (!page.turns.includes(turn)) page.turns = [...turn.history, turn];
    showTurn(turn);
  } else {
    $("verdict").hidden = true;
    drawRace(true);
    drawConversation();
    setButtons();
  }
  if (!error) return finishDone();
  page.lanes[0].text.dataset.empty = "Nothing came.";
  page.lanes[1].text.dataset.empty = page.lanes[0].run.isDone ? "Nothing came." : "Did not run.";
  if (error.name === "AbortError")
    setStatus(stopped_s ? `Stopped after ${seconds(stopped_s)}. What came is shown.` : "Stopped before anything came.");
  else showError(error);
}

function finishDone() {
  setStatus(summaryOf(page.lanes[0].run), `${$("headline").textContent}. ${$("basis").textContent}`);
  if (lanesInRace().length === 2 && slowdownOf(longest()) > 1 && !reducedMotion.matches) startReplay();
}

function summaryOf(run) {
  const tokens =
    run.numTokens || run.rounds.length
      ? `${count(run.numTokens, "token")} in ${seconds(run.total_s)}`
      : seconds(run.total_s);
  return `Done: ${tokens}${run.finishReason === "length" ? ", up to max tokens" : ""}.`;
}

/** Where the answer is out of sight, as on a phone, it comes into view. */
function showCard() {
  const { top } = $("race").getBoundingClientRect();
  if (top >= 0 && top < innerHeight / 3) return;
  $("race").scrollIntoView({ behavior: reducedMotion.matches ? "auto" : "smooth", block: "start" });
}

function stop() {
  page.controller?.abort();
  page.replay?.end();
}

// ---- The conversation -----------------------------------------------------------------------------------------------

function drawConversation() {
  $("conversation").hidden = !page.turns.length;
  $("turns").replaceChildren(
    ...page.turns.map((turn, index) => {
      const [item, title] = [document.createElement("li"), document.createElement("p")];
      const { large, rest = "" } = verdictOf(turn);
      title.className = "muted";
      title.textContent = large + rest;
      item.append(
        quote("You", turn.prompt),
        quote("Answer", turn.answer),
        title,
        button("Show", index, () => look(turn)),
      );
      if (turn.canRace) item.append(button(raceWords(turn), index, () => raceAgain(turn)));
      if (turn === page.turn) item.setAttribute("aria-current", "true");
      return item;
    }),
  );
}

function quote(name, text) {
  const [paragraph, label, words] = ["p", "b", "span"].map((kind) => document.createElement(kind));
  paragraph.className = "said";
  label.textContent = name;
  words.textContent = text;
  words.tabIndex = 0; // it scrolls
  paragraph.append(label, words);
  return paragraph;
}

function button(name, index, act) {
  const node = document.createElement("button");
  node.type = "button";
  node.textContent = name;
  node.setAttribute("aria-label", `${name}: answer ${index + 1}`);
  node.addEventListener("click", act);
  return node;
}

function look(turn) {
  if (page.controller) return;
  page.replay?.end();
  showTurn(turn);
  showCard();
}

// ---- Events ---------------------------------------------------------------------------------------------------------

function onKey(event) {
  if (event.isComposing) return;
  if (event.key === "Escape") stop();
  if (event.key !== "Enter") return;
  const isOrder = event.ctrlKey || event.metaKey;
  if (!isOrder && event.target !== $("key")) return;
  event.preventDefault();
  if (!isOrder) enterKey();
  else if (event.target === $("reply")) reply();
  else start();
}

async function enterKey() {
  if (await loadModels()) $("prompt").focus();
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  start();
});
$("reply-form").addEventListener("submit", (event) => {
  event.preventDefault();
  reply();
});
$("stop").addEventListener("click", stop);
$("replay").addEventListener("click", startReplay);
$("again").addEventListener("click", () => raceAgain(page.turn));
$("model").addEventListener("change", chooseModel);
$("prompt").addEventListener("input", leaveExample);
for (const id of ["temperature", "seed"])
  $(id).addEventListener("input", () => {
    form.sampling[id] = $(id).value;
  });
$("key").addEventListener("change", loadModels);
document.addEventListener("keydown", onKey);
new ResizeObserver(() => page.timeline.draw(page.lanes[0].run, !page.controller)).observe($("timeline-box"));
if (/Mac|iPhone|iPad/.test(navigator.platform)) $("run").querySelector("kbd").textContent = "⌘ ↵";
$("settings").open = matchMedia("(min-width: 821px)").matches;
readRecording();
loadModels();
