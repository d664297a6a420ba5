// Reads the settings form as fields of a request, and shows the models. Empty fields are omitted.

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

/** The fields of the request and the system message, or null if a field is invalid. */
export function readSettings(form) {
  const { answer_as: as, schema, tools, must_call: mustCall, system } = form.elements;
  schema.required = as.value === "schema";
  const wanted = {};
  const schemaValue = readJson(schema);
  const toolList = readJson(tools);
  if (as.value === "json") wanted.response_format = { type: "json_object" };
  if (as.value === "schema") {
    wanted.response_format = { type: "json_schema", json_schema: { name: "answer", schema: schemaValue, strict: true } };
  }
  if (toolList) Object.assign(wanted, { tools: [toolList].flat(), tool_choice: mustCall.checked ? "required" : "auto" });
  if ([...NUMBERS.map((name) => form.elements[name]), schema, tools].some((input) => !input.checkValidity())) return null;
  const given = NUMBERS.filter((name) => form.elements[name].value !== "");
  for (const name of given) wanted[name] = form.elements[name].valueAsNumber;
  return { wanted, system: system.value.trim() };
}

function readJson(field) {
  field.setCustomValidity("");
  if (!field.value.trim()) return undefined;
  try {
    return JSON.parse(field.value);
  } catch (error) {
    field.setCustomValidity(`This is not JSON: ${error.message}`);
  }
}

/** Fill the list of models, and keep the chosen model if it still exists. */
export function showModels(select, models) {
  const chosen = select.value;
  select.replaceChildren(...models.map((model) => new Option(model.id, model.id)));
  if (models.length === 0) select.append(new Option("no model yet", ""));
  if (models.some((model) => model.id === chosen)) select.value = chosen;
  select.disabled = models.length < 2;
}

/** One line about a model: its workers, and whether it accepts images. */
export function describeModel(model) {
  if (!model) return "no worker yet";
  const workers = `${model.num_workers} worker${model.num_workers === 1 ? "" : "s"}`;
  const worked = model.num_workers === 0 ? "no worker now: questions wait" : workers;
  return model.supports_images ? worked : `${worked}, text only`;
}
