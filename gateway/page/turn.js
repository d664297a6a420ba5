// One turn on the page: the question, and the answer as it grows.

import { toCopyButton } from "./copy.js";
import { toZoomable } from "./images.js";
import { MarkdownView, toCodeBlock } from "./markdown.js";
import { showTimings } from "./timings.js";

export class Turn {
  /** `onAsk` gets a question to ask in place of this one; it returns whether it was asked. */
  constructor(template, exchange, onAsk) {
    this.exchange = exchange;
    this.onAsk = onAsk;
    this.element = template.content.firstElementChild.cloneNode(true);
    this.answer = this.element.querySelector(".answer");
    this.view = new MarkdownView(this.answer.querySelector(".text"));
    this.frame = null; // the animation frame that will show what has come
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
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.target.matches("button")) return;
      event.preventDefault();
      form.requestSubmit();
    });
  }

  showQuestion() {
    const { text, images } = this.exchange.question;
    const list = this.find(".question .images");
    this.find(".question .text").textContent = text;
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

  /** The answer has grown: show it with the next frame. */
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

  /** The exchange is complete, stopped or failed. */
  end() {
    const { answer, note, isError, measured } = this.exchange;
    const line = this.answer.querySelector(".note");
    this.show();
    this.answer.ariaBusy = "false";
    line.textContent = note;
    line.classList.toggle("error", isError);
    line.hidden = !note;
    this.find(".again").textContent = isError ? "Try again" : "Regenerate";
    if (answer) this.find(".again").before(toCopyButton("Copy answer", () => this.exchange.answer));
    if (measured?.timings) showTimings(this.answer.querySelector("footer"), measured);
  }
}

/** JSON over several lines; what is not complete stays as it is. */
function indent(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
