// The API reference: every operation and schema of the gateway's OpenAPI document.

import { ApiError, read } from "./api.js";
import { element } from "./elements.js";
import { askForKey } from "./key_dialog.js";

const BOUNDS = {
  minimum: "at least", maximum: "at most", exclusiveMinimum: "above", exclusiveMaximum: "below", minLength: "min. characters",
  maxLength: "max. characters", minItems: "min. items", maxItems: "max. items", maxProperties: "max. entries",
};
const find = (selector) => document.querySelector(selector);

async function start() {
  for (;;) {
    try {
      return show(await read("openapi.json"));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status !== 401) {
        find("#problem").textContent = error.message;
        return;
      }
      await askForKey();
    }
  }
}

function show({ info, paths, components }) {
  find("#version").textContent = `vlm-fleet ${info.version}`;
  const operations = Object.entries(paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({ path, method, ...operation })),
  );
  for (const [tag, found] of Map.groupBy(operations, ({ tags }) => tags[0])) {
    find("#operations").append(element("h2", tag), ...found.map(toOperation));
  }
  find("#schemas").append(...Object.entries(components.schemas).map(([name, schema]) => toSchema(name, schema)));
  openTarget();
}

function toOperation({ path, method, summary, description, parameters = [], requestBody, responses }) {
  const parts = [element("p", description ?? "")];
  if (parameters.length) {
    parts.push(toTable("Parameters", parameters.map(({ name, in: place, schema, description: text }) => [name, [place, ", ", ...typeOf(schema)], text])));
  }
  if (requestBody) parts.push(toTable("Body", [toContent("body", requestBody)]));
  parts.push(toTable("Answers", Object.entries(responses).map(([status, response]) => toContent(status, response))));
  return toDetails([element("code", `${method.toUpperCase()} ${path}`), ` ${summary ?? ""}`], parts);
}

function toContent(name, { description, content = {} }) {
  const types = Object.entries(content).flatMap(([kind, { schema }]) => [element("code", kind), " ", ...typeOf(schema), " "]);
  return [name, types, description];
}

function toSchema(name, schema) {
  const fields = Object.entries(schema.properties ?? {});
  const rows = fields.map(([field, value]) => [
    schema.required?.includes(field) ? `${field} (required)` : field, typeOf(value), value.description,
  ]);
  const parts = [element("p", schema.description ?? "")];
  parts.push(fields.length ? toTable("Fields", rows) : element("p", ...typeOf(schema)));
  const details = toDetails([element("code", name)], parts);
  details.id = `schema-${name}`;
  return details;
}

/** Describe a schema in one line: text, and links to named schemas. */
function typeOf(schema = {}) {
  if (schema.$ref) {
    const name = schema.$ref.split("/").at(-1);
    const link = element("a", name);
    link.href = `docs#schema-${name}`;
    return [link];
  }
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return choices.flatMap((each, place) => [...(place ? [" or "] : []), ...typeOf(each)]);
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(", ")];
  const bounds = Object.keys(BOUNDS).filter((key) => Math.abs(schema[key]) <= Number.MAX_SAFE_INTEGER).map((key) => `${BOUNDS[key]} ${schema[key]}`);
  const words = bounds.length ? ` (${bounds.join(", ")})` : "";
  if (schema.type === "array") return ["array of ", ...typeOf(schema.items), words];
  return [(schema.type ?? "any value") + words];
}

function toTable(caption, rows) {
  const table = element("table", element("caption", caption));
  for (const [name, type, text] of rows) {
    const row = table.insertRow();
    row.append(element("td", element("code", name)), element("td", ...type), element("td", text ?? ""));
  }
  return table;
}

function toDetails(summary, parts) {
  return element("details", element("summary", ...summary), ...parts);
}

/** Open the schema in the URL's fragment. */
function openTarget() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  target.open = true;
  target.scrollIntoView();
}

addEventListener("hashchange", openTarget);
start();
