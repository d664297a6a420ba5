// Images with their embeddings, and search for the nearest ones. No DOM.

import { ApiError, embed } from "./api.js";
import { makeThumbnail, readImage } from "./images.js";

export const MAX_IMAGES = 5000; // their vectors and thumbnails stay in the page's memory
const SENT_SIZE = { maxBytes: 512 * 1024, maxSide: 768 }; // models scale images down further
const THUMBNAIL_SIDE = 320;
const BATCH = 8;
const MAX_REFUSALS = 5; // consecutive refusals of an overloaded gateway before giving up

export class Gallery {
  /** `onChange`: called when images or vectors were added. */
  constructor(onChange) {
    this.onChange = onChange;
    this.empty();
  }

  empty() {
    this.images = []; // {name, file, thumbnail, vector}
    this.skipped = []; // names of files that are not images
    this.problem = "";
  }

  get numDone() {
    return this.images.filter(({ vector }) => vector).length;
  }

  /** Add new images. Returns the number of images beyond the limit, which are not added. */
  add(files) {
    const known = new Set(this.images.map(({ file }) => nameOf(file)));
    const found = files.filter((file) => file.type.startsWith("image/") && !known.has(nameOf(file)));
    const taken = found.slice(0, MAX_IMAGES - this.images.length);
    this.images.push(...taken.map((file) => ({ name: file.name, file, thumbnail: "", vector: null })));
    return found.length - taken.length;
  }

  /** Remove all vectors before another model is used, because vectors of different models cannot be compared. */
  forgetVectors() {
    for (const image of this.images) image.vector = null;
  }

  /** Compute the missing vectors. Throws ApiError, or AbortError when `signal` is aborted. */
  async embedAll(model, signal) {
    let size = BATCH;
    let refusals = 0;
    for (;;) {
      const batch = await this.nextBatch(size);
      signal.throwIfAborted();
      if (!batch.length) return;
      try {
        const input = batch.map(({ url }) => ({ image: url }));
        const vectors = await embed({ model, input, service_tier: "flex" }, signal);
        batch.forEach(({ image }, index) => (image.vector = vectors[index]));
        refusals = 0;
        this.problem = "";
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        const bad = /^input\.\[(\d+)\]/.exec(error.param ?? "");
        if (error.status === 400 && bad) {
          this.skip(batch[Number(bad[1])].image);
        } else if (error.status === 413 && size > 1) {
          size >>= 1;
        } else if (error.retryAfter && ++refusals <= MAX_REFUSALS) {
          this.problem = error.message;
          this.onChange();
          await pause(error.retryAfter * 1000, signal);
        } else throw error;
      }
      this.onChange();
    }
  }

  /** Read the next images without a vector: `{image, url}`. */
  async nextBatch(size) {
    const batch = [];
    for (const image of this.images.filter(({ vector }) => !vector)) {
      if (batch.length === size) break;
      try {
        const { url } = await readImage(image.file, image.name, SENT_SIZE);
        image.thumbnail ||= await makeThumbnail(url, THUMBNAIL_SIDE);
        batch.push({ image, url });
      } catch {
        this.skip(image);
      }
    }
    return batch;
  }

  skip(image) {
    if (!this.images.includes(image)) return;
    this.images = this.images.filter((other) => other !== image);
    this.skipped.push(image.name);
  }

  /** The images nearest to a vector, best first: `{image, score}`. */
  nearest(vector, limit) {
    return this.images
      .filter((image) => image.vector)
      .map((image) => ({ image, score: dot(image.vector, vector) }))
      .sort((one, other) => other.score - one.score)
      .slice(0, limit);
  }
}

/** Embed a file with a model. Throws ApiError, AbortError, or Error with a message for the user. */
export async function embedImage(file, model, signal) {
  const { url } = await readImage(file, file.name || "image", SENT_SIZE);
  const [vector] = await embed({ model, input: [{ image: url }] }, signal);
  return { vector, thumbnail: await makeThumbnail(url, THUMBNAIL_SIDE) };
}

/** Embed a text with a model. Throws ApiError or AbortError. */
export async function embedWords(text, model, prompts, signal) {
  const prompt = ["query", "search_query"].find((name) => prompts.includes(name));
  const [vector] = await embed({ model, input: [text], truncate: true, ...(prompt && { prompt_name: prompt }) }, signal);
  return vector;
}

function nameOf({ name, size, lastModified }) {
  return `${name} ${size} ${lastModified}`;
}

function dot(one, other) {
  let sum = 0;
  for (let index = 0; index < one.length; index++) sum += one[index] * other[index];
  return sum;
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), reject(signal.reason)), { once: true });
  });
}
