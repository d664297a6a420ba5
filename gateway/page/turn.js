// One turn on the page: the question, and the answer as it grows.

import { toCopyButton } from "./copy.js";
import { toZoomable } from "./images.js";
import { MarkdownView, toCodeBlock } from "./markdown.js";
import { showTimings } from "./timings.js";

export class Turn {
  /** `onAsk` receives a question that replaces this one, `onResults` the results of calls. Both return whether it was sent. */
  constructor(template, exchange, { onAsk, onResults }) {
    this.exchange = exchange;
    this.onAsk = onAsk;
    this.onResults = onResults;
    this.element = template.content.firstElementChild.cloneNode(true);
    this.answer = this.element.querySelector(".answer");
    this.view = new MarkdownView(this.answer.querySelector(".text"));
    this.frame = null; // the animation frame that will show the new text
    this.showQuestion();
    this.listen();
  }

  find(selector) {
    return this.element.querySelector(selector);
  }

  listen() {
    const { question } = this.exchange;
    const form = this.find(".edit-form");
    this.find(".edit").addEventListener("click", () => this.edit());
    this.find(".cancel").addEventListener("click", () => this.stopEditing());
    this.find(".again").addEventListener("click", () => this.onAsk(question));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = form.elements.text.value.trim();
      if (text && !this.onAsk({ ...question, text })) form.elements.text.focus();
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stopEditing();
    });
    this.find(".calls").addEventListener("submit", (event) => {
      event.preventDefault();
      this.sendResults();
    });
    for (const each of [form, this.find(".calls")]) submitOnEnter(each);
  }

  showQuestion() {
    const { text, images, results } = this.exchange.question;
    const list = this.find(".question .images");
    this.find(".question .text").textContent = results ? results.map(({ name, content }) => `${name}: ${content}`).join("\n") : text;
    this.find(".edit").hidden = Boolean(results);
    list.hidden = images.length === 0;
    for (const image of images) {
      const item = document.createElement("li");
      item.append(toZoomable(image));
      list.append(item);
    }
  }

  edit() {
    const field = this.find(".edit-form").elements.text;
    field.value = this.exchange.question.text;
    this.showEditing(true);
    field.focus();
  }

  stopEditing() {
    this.showEditing(false);
    this.find(".edit").focus();
  }

  showEditing(isEditing) {
    this.find(".edit-form").hidden = !isEditing;
    this.find(".question .text").hidden = isEditing;
    this.find(".edit").hidden = isEditing;
    this.find(".question").classList.toggle("edited", isEditing);
  }

  /** Show the changed answer in the next animation frame. */
  update() {
    this.frame ??= requestAnimationFrame(() => this.show());
  }

  show() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    const { answer, thought, calls, isJson } = this.exchange;
    if (isJson && answer) this.find(".answer .text").replaceChildren(toCodeBlock(indent(answer), "json"));
    else this.view.show(answer);
    this.find(".thought p").textContent = thought;
    this.find(".thought").hidden = !thought;
    const blocks = calls.map((call) => toCodeBlock(indent(call.function.arguments), call.function.name));
    this.find(".calls").replaceChildren(...blocks);
  }

  /** Show a field for the result of each call, and a button that sends all results. */
  askForResults() {
    const form = this.find(".calls");
    const names = this.exchange.calls.map((call) => call.function.name);
    for (const [place, block] of [...form.children].entries()) {
      const label = document.createElement("label");
      const field = document.createElement("textarea");
      Object.assign(field, { name: "result", rows: 1, required: true, spellcheck: false, placeholder: "JSON or text", enterKeyHint: "send" });
      label.append(`Result of ${names[place]}`, field);
      block.after(label);
    }
    const send = document.createElement("button");
    Object.assign(send, { type: "submit", className: "primary", textContent: names.length > 1 ? "Send results" : "Send result" });
    form.append(send);
  }

  sendResults() {
    const fields = [...this.find(".calls").querySelectorAll("textarea")];
    const results = this.exchange.calls.map(({ id, function: { name } }, place) => ({ id, name, content: fields[place].value.trim() }));
    if (!this.onResults(results)) fields[0].focus();
  }

  /** Show that the exchange is complete, stopped or failed. */
  end() {
    const { answer, note, isError, measured } = this.exchange;
    const line = this.answer.querySelector(".note");
    this.show();
    this.answer.ariaBusy = "false";
    line.textContent = note;
    line.classList.toggle("error", isError);
    line.hidden = !note;
    this.find(".again").textContent = isError ? "Try again" : "Regenerate";
    if (measured?.reason === "tool_calls") this.askForResults();
    if (answer) this.find(".again").before(toCopyButton("Copy answer", () => this.exchange.answer));
    if (measured?.timings) showTimings(this.answer.querySelector("footer"), measured);
  }
}

function submitOnEnter(form) {
  form.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.target.matches("button")) return;
    event.preventDefault();
    form.requestSubmit();
  });
}

/** Indent JSON. Incomplete JSON is returned unchanged. */
function indent(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
