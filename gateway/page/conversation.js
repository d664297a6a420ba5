// What has been said, and the request that it makes. Knows no HTTP and no page.

import { kindOf } from "./images.js";

/** Questions with their answers; one without an answer (failed, stopped at once) is not told to the model again. */
export class Conversation {
  constructor({ id = toId(), exchanges = [] } = {}) {
    this.id = id;
    this.exchanges = exchanges;
  }

  /** The exchanges before one, or all of them. */
  before(exchange) {
    return exchange ? this.exchanges.slice(0, this.exchanges.indexOf(exchange)) : this.exchanges;
  }

  /** Take a question in place of `instead` and all that came after it, or at the end; returns its exchange. */
  add(question, { instead = null, isJson = false } = {}) {
    if (instead) this.exchanges.length = this.exchanges.indexOf(instead);
    const exchange = { question, answer: "", thought: "", calls: [], isJson, note: "", isError: false, measured: null };
    this.exchanges.push(exchange);
    return exchange;
  }

  /** The messages that ask the last question, after all that was answered before. */
  toMessages(system) {
    const answered = this.exchanges.slice(0, -1).filter(isAnswered);
    const turns = answered.flatMap(({ question, answer, calls }) => [
      ...toMessages(question),
      { role: "assistant", content: answer || null, ...(calls.length && { tool_calls: calls }) },
    ]);
    const opening = system ? [{ role: "system", content: system }] : [];
    return [...opening, ...turns, ...toMessages(this.exchanges.at(-1).question)];
  }
}

export function isAnswered({ answer, calls }) {
  return Boolean(answer || calls.length);
}

/** Add what a chunk brings of calls of functions: their parts come piece by piece. */
export function addCalls(calls, pieces) {
  for (const { index, id, function: { name = "", arguments: text = "" } } of pieces) {
    calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } };
    calls[index].function.name += name;
    calls[index].function.arguments += text;
  }
}

/** Unlike any other; `crypto.randomUUID` is there on https and localhost alone. */
function toId() {
  return [...crypto.getRandomValues(new Uint32Array(4))].map((word) => word.toString(36)).join("-");
}

/** All that a question says, but its images. */
export function textOf({ text, results = [] }) {
  return [text, ...results.map(({ content }) => content)].join("");
}

/** `{text, images}` as a user's turn, images first, as models were trained; or `{results}` of the calls before. */
function toMessages({ text, images, results }) {
  if (results) return results.map(({ id, content }) => ({ role: "tool", tool_call_id: id, content }));
  const parts = images.map((image) => {
    const kind = `${kindOf(image)}_url`;
    return { type: kind, [kind]: { url: image.url } };
  });
  return [{ role: "user", content: [...parts, { type: "text", text }] }];
}

/** The conversation as Markdown, with its images in it. */
export function toMarkdown(exchanges) {
  const parts = exchanges.flatMap(({ question, answer, calls }) => [
    "## Question",
    ...question.images.map((image) => `${kindOf(image) === "image" ? "!" : ""}[${image.name.replace(/[[\]]/g, "")}](${image.url})`),
    textOf(question),
    "## Answer",
    answer,
    ...calls.map((call) => `\`\`\`json ${call.function.name}\n${call.function.arguments}\n\`\`\``),
  ]);
  return `${parts.filter(Boolean).join("\n\n")}\n`;
}
