// Checks a model's limits before a request is sent. The gateway enforces them in any case.

import { isAnswered, textOf } from "./conversation.js";
import { kindOf } from "./images.js";

const NAMES = { image: ["image", "images"], video: ["video", "videos"], audio: ["audio clip", "audio clips"] };

/** A message if the gateway would refuse `question` after the `earlier` exchanges; "" if it would accept it. */
export function findProblem(model, earlier, question, system = "") {
  const limits = model?.limits ?? {};
  const { max_text_chars: maxChars } = limits;
  const questions = [...earlier.filter(isAnswered).map(({ question: asked }) => asked), question];
  const files = questions.flatMap(({ images }) => images);
  for (const [kind, [one, many]] of Object.entries(NAMES)) {
    const count = files.filter((file) => kindOf(file) === kind).length;
    const most = limits[`max_${kind}s`];
    if (count && model && !model.input_modalities?.includes(kind)) {
      return `${model.id} does not support ${many}. Remove them, start a new chat, or choose another model.`;
    }
    if (count > most) {
      return `A conversation has at most ${most} ${most === 1 ? one : many}; with these it has ${count}. Remove some, or start a new chat.`;
    }
  }
  const maxBytes = (file) => limits[`max_${kindOf(file)}_bytes`];
  const large = question.images.find((file) => countBytes(file.url) > maxBytes(file));
  if (large) return `${large.name} is too large: ${formatMb(countBytes(large.url))}, at most ${formatMb(maxBytes(large))} are allowed.`;
  const answers = earlier.map(({ answer }) => answer);
  const numChars = [system, ...questions.map(textOf), ...answers].reduce((sum, text) => sum + text.length, 0);
  if (numChars > maxChars) {
    return `The conversation has ${format(numChars)} characters; at most ${format(maxChars)} are allowed. Shorten the question, or start a new chat.`;
  }
  return "";
}

function countBytes(url) {
  return ((url.length - url.indexOf(",") - 1) * 3) / 4;
}

function format(number) {
  return number.toLocaleString("en");
}

function formatMb(bytes) {
  return `${(bytes / 2 ** 20).toFixed(1)} MiB`;
}
