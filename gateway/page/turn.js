// One turn on the page: the question, and the answer as it grows. Text is only ever text.

import { toImage } from "./images.js";
import { showTimings } from "./timings.js";

export class Turn {
  constructor(template, question) {
    this.element = template.content.firstElementChild.cloneNode(true);
    this.answer = this.element.querySelector(".answer");
    this.text = this.answer.querySelector(".text");
    this.again = this.answer.querySelector(".again");
    this.showQuestion(question);
  }

  showQuestion({ text, images }) {
    const asked = this.element.querySelector(".question");
    const list = asked.querySelector(".images");
    asked.querySelector(".text").textContent = text;
    list.hidden = images.length === 0;
    for (const image of images) {
      const item = document.createElement("li");
      item.append(toImage(image));
      list.append(item);
    }
  }

  append(text) {
    this.text.append(text);
  }

  /** The answer is all there; `measured` is what `showTimings` takes. */
  finish(measured, reason) {
    this.answer.ariaBusy = "false";
    if (reason === "length") this.note("Cut at the longest length that is allowed.");
    if (measured.timings) showTimings(this.answer.querySelector("footer"), measured);
  }

  stop() {
    this.answer.ariaBusy = "false";
    this.note("Stopped.");
  }

  /** It failed: say why, offer to ask again. */
  fail(message, onAgain) {
    this.answer.ariaBusy = "false";
    this.note(message, true);
    this.again.hidden = false;
    this.again.addEventListener("click", onAgain);
  }

  note(message, isError = false) {
    const note = this.answer.querySelector(".note");
    note.textContent = message;
    note.classList.toggle("error", isError);
    note.hidden = false;
  }
}
