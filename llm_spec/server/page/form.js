/** The form: models, examples, the key and its budget, and the request that the fields say. */
"use strict";

const BUILTIN_EXAMPLES = [
  // their answers end by themselves, at these settings
  { name: "Register a codec", prompt: "def getregentry():" },
  {
    name: "Test a missing file",
    prompt: "def test_open_missing_file(self):\n    # A file that does not exist cannot be opened",
    temperature: 0.7,
    seed: 10,
  },
  {
    name: "Box of a widget",
    prompt: 'def bbox(self, index):\n    """Return a tuple of x1,y1,x2,y2 which is the bounding box."""',
    temperature: 0.4,
    seed: 6,
  },
  { name: "Test a folder", prompt: "def test_mkdir(self):", temperature: 0.7, seed: 8 },
];
const CHAT_EXAMPLES = [
  {
    name: "Edit code",
    prompt:
      "Rename the variable d to orders and add type hints. Answer with the code alone.\n\ndef total(d):\n    s = 0\n    for o in d:\n        if o.is_paid and not o.is_refunded:\n            s += o.price * o.quantity\n    return s\n",
  },
  {
    name: "Fill in JSON",
    prompt:
      "List the eight planets of the solar system as a JSON array of objects with the keys name, diameter_km and num_moons. Answer with the JSON alone.",
  },
  { name: "Explain", prompt: "Why is the sky blue? Answer in one paragraph for a ten-year-old." },
];
const [WITH_DRAFT, ALONE] = ["With the draft", "The target alone"];

/** The models of the server, and the sampling settings that the user has set, under an example, too. */
const form = { models: [], sampling: { temperature: 0, seed: "" } };

const aboutModel = () => form.models.find((model) => model.id === $("model").value)?.llm_spec ?? {};

/** There is a draft to race with, and the model may be asked without it. */
const canRace = () => Boolean(aboutModel().draft) && (aboutModel().strategies ?? []).includes("plain");

function fill(select, names) {
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(chosen)) select.value = chosen;
}

/** Reads the models and the budget of the key; whether it worked. */
async function loadModels() {
  try {
    const response = await fetchOk("v1/models", { headers: headers() });
    form.models = (await response.json()).data ?? [];
    fill(
      $("model"),
      form.models.map((model) => model.id),
    );
    chooseModel();
    loadBudget();
    if (!$("alert").hidden) setStatus("Ready.");
    $("alert").hidden = true;
    return true;
  } catch (error) {
    form.models = [];
    $("model").replaceChildren(new Option(error.status === 401 ? "Enter the API key first" : "No models", ""));
    chooseModel();
    showError(error);
    return false;
  }
}

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

// ---- The budget of the key ------------------------------------------------------------------------------------------

/** A server without limits shows nothing, and so does one that does not tell them. */
async function loadBudget() {
  const response = await fetch("v1/budget", { headers: headers(), cache: "no-store" }).catch(() => null);
  const { tokens, cost } = (response?.ok && (await response.json().catch(() => null))) || {};
  const left = [
    tokens && `${grouped(tokens.left)} of ${grouped(tokens.limit)} tokens`,
    cost && `${money(cost.left)} of ${money(cost.limit)} in money`,
  ].filter(Boolean);
  $("budget").hidden = !left.length;
  $("budget").textContent = `Left of this key’s budget: ${left.join("; ")}.`;
  $("budget").classList.toggle(
    "used-up",
    [tokens, cost].some((limit) => limit?.left === 0),
  );
}

// ---- Examples -------------------------------------------------------------------------------------------------------

function offerExamples(examples) {
  const isUntouched = !$("prompt").value || chosenExample();
  $("examples").replaceChildren(
    ...examples.map((example) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = example.name;
      button.setAttribute("aria-pressed", "false");
      button.addEventListener("click", () => chooseExample(button, example));
      return button;
    }),
  );
  if (isUntouched) chooseExample($("examples").firstElementChild, examples[0]);
}

const chosenExample = () => $("examples").querySelector("[aria-pressed=true]");

function chooseExample(button, { prompt, temperature = 0, seed = "" }) {
  chosenExample()?.setAttribute("aria-pressed", "false");
  button.setAttribute("aria-pressed", "true");
  $("prompt").value = prompt;
  setSampling({ temperature, seed });
}

/** An example's sampling settings end with its prompt. */
function leaveExample() {
  if (!chosenExample()) return;
  chosenExample().setAttribute("aria-pressed", "false");
  setSampling(form.sampling);
}

function setSampling({ temperature, seed }) {
  $("temperature").value = temperature;
  $("seed").value = seed;
}

// ---- The request ----------------------------------------------------------------------------------------------------

/** The turn that the fields ask for, after those of `history`. */
function readTurn(prompt, history) {
  const { draft, target, strategy: own } = aboutModel();
  const chosen = $("strategy").value;
  const system = $("system").value.trim() ? [{ role: "system", content: $("system").value }] : [];
  const before = history.flatMap((turn) => [
    { role: "user", content: turn.prompt },
    { role: "assistant", content: turn.answer },
  ]);
  const request = {
    model: $("model").value,
    messages: [...system, ...before, { role: "user", content: prompt }],
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: $("max-tokens").valueAsNumber,
    temperature: $("temperature").valueAsNumber,
  };
  if ($("seed").value !== "") request.seed = $("seed").valueAsNumber;
  const runners = draft
    ? [
        [WITH_DRAFT, draft],
        [ALONE, target],
      ]
    : [
        [ALONE, target ?? ""],
        [ALONE, ""],
      ];
  return new Turn({
    request,
    history,
    runners,
    strategy: chosen === own ? null : chosen,
    canRace: canRace() && chosen !== "plain",
  });
}
