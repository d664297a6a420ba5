// What a model takes, said before anything is sent. The gateway holds to it in any case.

import { isAnswered, textOf } from "./conversation.js";
import { isVideo } from "./images.js";

/** Why `question` after `earlier` exchanges would be refused, in words for people; "" where it would not. */
export function findProblem(model, earlier, question, system = "") {
  const limits = model?.limits ?? {};
  const { max_images: maxImages, max_videos: maxVideos, max_text_chars: maxChars } = limits;
  const told = [...earlier.filter(isAnswered).map(({ question: asked }) => asked), question];
  const files = told.flatMap(({ images }) => images);
  const numVideos = files.filter(isVideo).length;
  const numImages = files.length - numVideos;
  if (numVideos && model && !model.input_modalities?.includes("video")) {
    return `${model.id} takes no videos. Remove them, start a new chat, or choose another model.`;
  }
  if (numVideos > maxVideos) {
    return `A conversation takes ${maxVideos} video${maxVideos === 1 ? "" : "s"}; with these it has ${numVideos}. Remove some, or start a new chat.`;
  }
  if (numImages && model && !model.supports_images) {
    return `${model.id} takes no images. Remove them, start a new chat, or choose another model.`;
  }
  if (numImages > maxImages) {
    return `A conversation takes ${maxImages} image${maxImages === 1 ? "" : "s"}; with these it has ${numImages}. Remove some, or start a new chat.`;
  }
  const maxBytes = (file) => (isVideo(file) ? limits.max_video_bytes : limits.max_image_bytes);
  const large = question.images.find((file) => countBytes(file.url) > maxBytes(file));
  if (large) return `${large.name} is too large: ${formatMb(countBytes(large.url))}, at most ${formatMb(maxBytes(large))} are taken.`;
  const answers = earlier.map(({ answer }) => answer);
  const numChars = [system, ...told.map(textOf), ...answers].reduce((sum, text) => sum + text.length, 0);
  if (numChars > maxChars) {
    return `The conversation has ${format(numChars)} characters; at most ${format(maxChars)} are taken. Shorten the question, or start a new chat.`;
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
