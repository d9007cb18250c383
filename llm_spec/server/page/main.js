/** The form, the races, and what happens when. */
"use strict";

const page = { models: [], lanes: [new Lane("draft-lane"), new Lane("alone-lane")], timeline: null, numRuns: 1, controller: null, replay: null };

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
  $("alert").textContent = error instanceof ServerError ? error.message : `The answer broke off: ${error.message}`;
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
  const isOver = lanesInRace().every((lane) => lane.run?.deltas.length);
  $("run").setAttribute("aria-disabled", String(isRunning));
  $("stop").setAttribute("aria-disabled", String(!isRunning && !page.replay));
  $("replay").setAttribute("aria-disabled", String(isRunning || !isOver));
}

/** Calls `draw` before the next frame, however often it is asked to until then. */
function onceAFrame(draw) {
  let frame = null;
  return {
    ask() { frame ??= requestAnimationFrame(() => { frame = null; draw(); }); },
    now() { cancelAnimationFrame(frame); frame = null; draw(); }, // the last, also where a hidden page has no frames
  };
}

function drawLanes() {
  for (const lane of lanesInRace()) lane.draw(longest());
}

function drawRace(isDone = false) {
  const { run } = page.lanes[0];
  drawLanes();
  page.timeline.draw(run, isDone);
  drawFigures(run);
  drawLegend(run);
  drawNotices(run);
  drawReasoning(run);
}

/** Clears the card for one or two `runners`, each a name and its model. */
function openRace(prompt, [first, second], numRuns = 1) {
  page.numRuns = numRuns;
  page.lanes[0].open(first, "The answer appears here.");
  page.lanes[1].open(second ?? [ALONE, ""], "Runs next. The two do not run at once, because they would slow each other down.");
  page.lanes[1].element.hidden = !second;
  page.timeline = new Timeline($("timeline"));
  $("asked").lastElementChild.textContent = prompt.trim().replace(/\s*\n\s*/g, " ⏎ ");
  $("alert").hidden = $("badge").hidden = true;
  showVerdict({ large: "…", basis: "" });
}

function endRace() {
  const [draft, alone] = page.lanes;
  if (draft.run.result?.plain_text) {
    draft.rename([ALONE, draft.run.started?.target ?? ""]);
    alone.element.hidden = true;
  }
  showVerdict(verdictOf(draft.run, alone.element.hidden ? null : alone.run));
  setTitle();
  drawRace(true);
  setButtons();
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

/** Asks, draws as the answer comes, and tells how it ended: done, stopped or failed. */
async function follow(request, strategy, { run }, draw) {
  const frames = onceAFrame(draw);
  run.isOpen = true;
  try {
    await ask(request, strategy, run, frames.ask, page.controller.signal);
    return "done";
  } catch (error) {
    if (error.name === "AbortError") return "stopped";
    showError(error);
    return "failed";
  } finally {
    run.isOpen = false;
    frames.now();
  }
}

function readRequest() {
  const request = {
    model: $("model").value,
    messages: [{ role: "user", content: $("prompt").value }],
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: $("max-tokens").valueAsNumber,
    temperature: $("temperature").valueAsNumber,
  };
  return $("seed").value === "" ? request : { ...request, seed: $("seed").valueAsNumber };
}

async function start() {
  if (page.controller) return;
  if ($("settings").querySelector(":invalid")) $("settings").open = true;
  if (!$("form").reportValidity()) return;
  page.replay?.end();
  page.controller = new AbortController();
  const { draft, target, strategy: own } = aboutModel();
  const chosen = $("strategy").value;
  const isRace = $("alone").checked && canRace() && chosen !== "plain";
  openRace($("prompt").value, isRace ? [[WITH_DRAFT, draft], [ALONE, target]] : [draft ? [WITH_DRAFT, draft] : [ALONE, target ?? ""]]);
  setTitle();
  $("lanes").classList.add("fresh");
  drawRace();
  setButtons();
  showRace();
  const outcome = await runLanes(readRequest(), chosen === own ? null : chosen, isRace);
  page.controller = null;
  finish(outcome);
}

/** One after the other: at once they would share the machine, and a server with one place makes the second wait. */
async function runLanes(request, strategy, isRace) {
  const [draft, alone] = page.lanes;
  setStatus(isRace ? "Running with the draft." : "Running.");
  const outcome = await follow(request, strategy, draft, drawRace);
  if (outcome !== "done" || !isRace || draft.run.result?.plain_text) return outcome;
  setStatus("Running the target alone.");
  showVerdict({ large: seconds(draft.run.total_s), rest: " with the draft", basis: "Now running the target alone, for comparison." });
  const seed = draft.run.result?.seed ?? request.seed;
  return follow(isNumber(seed) ? { ...request, seed } : request, "plain", alone, drawLanes);
}

function finish(outcome) {
  $("lanes").classList.remove("fresh");
  endRace();
  if (outcome === "done") return finishDone();
  $("verdict").hidden = true;
  for (const { text } of page.lanes) text.dataset.empty = "Nothing came.";
  setStatus(outcome === "failed" ? "Failed." : `Stopped after ${seconds(longest())}.`);
}

function finishDone() {
  setStatus(summaryOf(page.lanes[0].run), `${$("headline").textContent}. ${$("basis").textContent}`);
  if (lanesInRace().length === 2 && slowdownOf(longest()) > 1 && !reducedMotion.matches) startReplay();
}

function summaryOf(run) {
  const tokens = run.numTokens || run.rounds.length ? `${count(run.numTokens, "token")} in ${seconds(run.total_s)}` : seconds(run.total_s);
  return `Done: ${tokens}${run.finishReason === "length" ? ", up to max tokens" : ""}.`;
}

/** Where the answer is below the form, as on a phone, it comes into view. */
function showRace() {
  const { top } = $("race").getBoundingClientRect();
  if (top >= 0 && top < innerHeight / 3) return;
  $("race").scrollIntoView({ behavior: reducedMotion.matches ? "auto" : "smooth", block: "start" });
}

function stop() {
  page.controller?.abort();
  page.replay?.end();
}

function fill(select, names) {
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(chosen)) select.value = chosen;
}

const aboutModel = () => page.models.find((model) => model.id === $("model").value)?.llm_spec ?? {};

/** There is a draft to race with, and the model may be asked without it. */
const canRace = () => Boolean(aboutModel().draft) && (aboutModel().strategies ?? []).includes("plain");

function chooseModel() {
  const about = aboutModel();
  $("alone").closest("label").hidden = !canRace();
  fill($("strategy"), about.strategies ?? ["auto"]);
  if (about.strategies?.includes(about.strategy)) $("strategy").value = about.strategy;
  $("pair").textContent = about.target ? `${about.draft ?? "no draft"} → ${about.target}` : "";
  const isBuiltin = about.target?.startsWith("builtin:") ?? false;
  $("builtin").hidden = !isBuiltin;
  offerExamples(isBuiltin ? BUILTIN_EXAMPLES : CHAT_EXAMPLES);
}

function offerExamples(examples) {
  const isUntouched = !$("prompt").value || $("examples").querySelector("[aria-pressed=true]");
  $("examples").replaceChildren(...examples.map((example) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = example.name;
    button.addEventListener("click", () => chooseExample(example));
    return button;
  }));
  if (isUntouched) chooseExample(examples[0]);
  else markExample();
}

function chooseExample({ name, prompt, temperature = 0, seed = "" }) {
  $("prompt").value = prompt;
  $("temperature").value = temperature;
  $("seed").value = seed;
  markExample(name);
}

function markExample(chosen) {
  for (const button of $("examples").children) button.setAttribute("aria-pressed", String(button.textContent === chosen));
}

async function loadModels() {
  try {
    const response = await fetchOk("v1/models", { headers: headers() });
    page.models = (await response.json()).data ?? [];
    $("alert").hidden = true;
    fill($("model"), page.models.map((model) => model.id));
    chooseModel();
  } catch (error) {
    showError(error);
  }
}

function onKey(event) {
  if (event.isComposing) return;
  if (event.key === "Escape") stop();
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  start();
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); start(); });
$("stop").addEventListener("click", stop);
$("replay").addEventListener("click", startReplay);
$("model").addEventListener("change", chooseModel);
$("prompt").addEventListener("input", () => markExample());
$("key").addEventListener("change", () => { if (!page.models.length) loadModels(); });
document.addEventListener("keydown", onKey);
new ResizeObserver(() => page.timeline.draw(page.lanes[0].run, !page.controller)).observe($("timeline-box"));
if (/Mac|iPhone|iPad/.test(navigator.platform)) $("run").querySelector("kbd").textContent = "⌘ ↵";
$("settings").open = matchMedia("(min-width: 821px)").matches;
openRace("", [[WITH_DRAFT, ""], [ALONE, ""]]);
readRecording();
loadModels();
