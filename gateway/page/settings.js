// The settings form as fields of a request; empty ones are left to the gateway.

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

/** The sampling fields and the system message, or null if one is out of its range. */
export function readSettings(form) {
  const wrong = NUMBERS.map((name) => form.elements[name]).find((input) => !input.checkValidity());
  if (wrong) return null;
  const given = NUMBERS.filter((name) => form.elements[name].value !== "");
  const sampling = Object.fromEntries(given.map((name) => [name, form.elements[name].valueAsNumber]));
  return { sampling, system: form.elements.system.value.trim() };
}

/** Fill the list of models, keeping the chosen one while it is there. */
export function showModels(select, models) {
  const chosen = select.value;
  select.replaceChildren(...models.map((model) => new Option(model.id, model.id)));
  if (models.length === 0) select.append(new Option("no model yet", ""));
  if (models.some((model) => model.id === chosen)) select.value = chosen;
  select.disabled = models.length < 2;
}

/** One line on a model: who works on it, and whether it sees. */
export function describeModel(model) {
  if (!model) return "no worker has come yet";
  const workers = `${model.num_workers} worker${model.num_workers === 1 ? "" : "s"}`;
  const worked = model.num_workers === 0 ? "no worker now: questions wait" : workers;
  return model.supports_images ? worked : `${worked}, text only`;
}
