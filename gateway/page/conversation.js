// The exchanges of a conversation, and the messages that a request sends. No HTTP, no DOM.

import { kindOf } from "./images.js";

/** Questions with their answers. Questions without any answer (failed or stopped) are not sent again. */
export class Conversation {
  constructor({ id = toId(), exchanges = [] } = {}) {
    this.id = id;
    this.exchanges = exchanges;
  }

  /** The exchanges before `exchange`, or all exchanges if it is null. */
  before(exchange) {
    return exchange ? this.exchanges.slice(0, this.exchanges.indexOf(exchange)) : this.exchanges;
  }

  /** Append a question. With `instead`, it replaces this exchange and all later ones. Returns the new exchange. */
  add(question, { instead = null, isJson = false } = {}) {
    if (instead) this.exchanges.length = this.exchanges.indexOf(instead);
    const exchange = { question, answer: "", thought: "", calls: [], isJson, note: "", isError: false, measured: null };
    this.exchanges.push(exchange);
    return exchange;
  }

  /** The messages of a request: the answered exchanges, and the last question. */
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

/** Append the function call deltas of a chunk to `calls`. */
export function addCalls(calls, pieces) {
  for (const { index, id, function: { name = "", arguments: text = "" } } of pieces) {
    calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } };
    calls[index].function.name += name;
    calls[index].function.arguments += text;
  }
}

/** A random id. `crypto.randomUUID` exists only on https and localhost. */
function toId() {
  return [...crypto.getRandomValues(new Uint32Array(4))].map((word) => word.toString(36)).join("-");
}

/** The text of a question or of tool results. */
export function textOf({ text, results = [] }) {
  return [text, ...results.map(({ content }) => content)].join("");
}

/** The messages of a question: a user message, with images first as in training, or a tool message per result. */
function toMessages({ text, images, results }) {
  if (results) return results.map(({ id, content }) => ({ role: "tool", tool_call_id: id, content }));
  const parts = images.map((image) => {
    const kind = `${kindOf(image)}_url`;
    return { type: kind, [kind]: { url: image.url } };
  });
  return [{ role: "user", content: [...parts, { type: "text", text }] }];
}

/** The conversation as Markdown, with embedded images. */
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
