// The search view: adds images, searches by text or image, and shows results. Images are stored only in this page.

import { ApiError } from "./api.js";
import { embedImage, embedWords, Gallery, MAX_IMAGES } from "./gallery.js";
import { describeModel, showModels } from "./settings.js";

const MAX_SHOWN = 24;
const SAMPLES = [
  "page/samples/search/first-aid.png",
  "page/samples/search/flag.png",
  "page/samples/search/night.png",
  "page/samples/search/party.png",
  "page/samples/search/sea.png",
  "page/samples/search/toys.png",
  "page/samples/search/traffic-light.png",
  "page/samples/search/wreath.png",
];
const find = (selector) => document.querySelector(selector);

export class SearchView {
  /** `onKeyRefused`: asks for another key, and resolves when the user has entered one. */
  constructor(onKeyRefused) {
    this.onKeyRefused = onKeyRefused;
    this.gallery = new Gallery(() => this.show());
    this.models = [];
    this.modelKey = ""; // name and version of the model that computed the vectors
    this.query = null; // {text | file, label, vector, thumbnail}
    this.embedding = null; // the AbortController of `embedAll` while it runs
    this.asking = null; // the AbortController of the current query
    this.listen();
  }

  listen() {
    find("#search-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const text = find("#words").value.trim();
      if (text) this.ask({ text, label: text });
      else this.stopAsking();
    });
    find("#words").addEventListener("input", ({ target }) => target.value || this.stopAsking());
    find("#search-model").addEventListener("change", () => this.follow());
    find("#search-stop").addEventListener("click", () => this.stop());
    find("#search-go").addEventListener("click", () => this.embedAll());
    find("#search-clear").addEventListener("click", () => this.clear());
    find("#search-samples").addEventListener("click", () => this.addSamples());
    for (const id of ["#gallery-files", "#gallery-folder"]) {
      find(id).addEventListener("change", ({ target }) => {
        this.add([...target.files]);
        target.value = "";
      });
    }
    find("#query-file").addEventListener("change", ({ target }) => {
      this.askByImage(target.files[0]);
      target.value = "";
    });
  }

  /** Offer the gateway's models that embed images and texts in one space. */
  showModels(models) {
    this.models = models.filter(({ tasks, supports_images: sees }) => tasks?.includes("embed") && sees);
    showModels(find("#search-model"), this.models);
    this.follow();
  }

  get model() {
    return this.models.find(({ id }) => id === find("#search-model").value);
  }

  /** Embed all images again if another model, or a new version of the model, is chosen. */
  follow() {
    const key = this.model ? `${this.model.id}@${this.model.digest}` : "";
    find("#search-fleet").textContent = this.model ? describeModel(this.model) : "";
    if (key && key !== this.modelKey) {
      this.modelKey = key;
      this.stop();
      this.gallery.forgetVectors();
      if (this.query) this.ask(this.query);
      this.embedAll();
    }
    this.show();
  }

  // --- images ---------------------------------------------------------------------------------------------------------

  add(files) {
    const numLeft = this.gallery.add(files);
    const isEmpty = files.length > 0 && !this.gallery.images.length;
    if (numLeft) this.hint(`This page holds ${MAX_IMAGES} images; ${numLeft} were left out.`);
    else this.hint(isEmpty ? "There is no image among these files." : "");
    this.show();
    this.embedAll();
    find("#words").focus();
  }

  async addSamples() {
    const blobs = await Promise.all(SAMPLES.map(async (path) => (await fetch(path)).blob()));
    this.add(blobs.map((blob, index) => toFile(blob, SAMPLES[index])));
  }

  async embedAll() {
    if (this.embedding || !this.model) return;
    const controller = (this.embedding = new AbortController());
    const { id } = this.model;
    this.show();
    await this.try((signal) => this.gallery.embedAll(id, signal), controller.signal);
    if (this.embedding !== controller) return; // stopped
    this.stop();
    tell(find("#announcer"), this.describe());
  }

  stop() {
    this.embedding?.abort();
    this.embedding = null;
    this.show();
  }

  clear() {
    this.stop();
    this.stopAsking();
    this.gallery.empty();
    this.hint("");
    this.show();
    find("#gallery-folder").focus();
  }

  // --- questions ------------------------------------------------------------------------------------------------------

  askByImage(file) {
    if (file) this.ask({ file, label: file.name || "the pasted image" });
  }

  /** Search by a text or an image. */
  async ask(query) {
    this.asking?.abort();
    if (!this.model) return;
    this.asking = new AbortController();
    const { id, prompts = [] } = this.model;
    await this.try(async (signal) => {
      const found = query.text
        ? { vector: await embedWords(query.text, id, prompts, signal), thumbnail: "" }
        : await embedImage(query.file, id, signal);
      this.query = { ...query, ...found };
      this.hint("");
      this.show();
    }, this.asking.signal);
  }

  stopAsking() {
    this.asking?.abort();
    this.query = null;
    find("#words").value = "";
    this.show();
  }

  /** Run `action`. If the key is refused, ask for another key and retry once. Other errors are shown. */
  async try(action, signal) {
    try {
      await action(signal).catch(async (error) => {
        if (error.status !== 401) throw error;
        await this.onKeyRefused();
        await action(signal);
      });
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof ApiError) && error.constructor !== Error) throw error;
      this.hint(error.message + (error.retryAfter ? ` Try again in ${error.retryAfter} s.` : ""));
    }
  }

  // --- what is shown --------------------------------------------------------------------------------------------------

  show() {
    const { images, numDone } = this.gallery;
    const isEmpty = images.length === 0;
    const isBusy = this.embedding !== null;
    find("#search-none").hidden = this.models.length > 0;
    find("#search-welcome").hidden = this.models.length === 0;
    find("#search-intro").hidden = !isEmpty;
    find("#search-found").hidden = isEmpty;
    find("#search-progress").hidden = !isBusy;
    find("#search-progress").max = images.length || 1;
    find("#search-progress").value = numDone;
    find("#search-stop").hidden = !isBusy;
    find("#search-go").hidden = isBusy || isEmpty || numDone === images.length;
    tell(find("#search-status"), this.describe());
    this.showQuery();
    this.showHits();
  }

  describe() {
    const { images, numDone, skipped, problem } = this.gallery;
    const isBusy = this.embedding !== null;
    const words = [isBusy ? `${numDone} of ${count(images.length, "image")}` : count(numDone, "image")];
    if (isBusy && problem) words.push(problem);
    if (!isBusy && numDone < images.length) words.push(`${images.length - numDone} not embedded yet`);
    if (skipped.length) words.push(`${count(skipped.length, "file")} left out: ${skipped.slice(0, 3).join(", ")}`);
    return words.join(" \u00b7 ");
  }

  showQuery() {
    const tray = find("#query-tray");
    tray.hidden = !this.query?.thumbnail;
    if (tray.hidden) return;
    const remove = toButton("\u00d7", `Remove ${this.query.label}`, () => this.stopAsking());
    tray.replaceChildren(toItem(toImage(this.query.thumbnail, this.query.label), remove));
  }

  showHits() {
    const list = find("#hits");
    const hits = this.query
      ? this.gallery.nearest(this.query.vector, MAX_SHOWN)
      : this.gallery.images.filter(({ thumbnail }) => thumbnail).slice(0, MAX_SHOWN).map((image) => ({ image }));
    const focused = list.contains(document.activeElement) ? document.activeElement : null;
    list.replaceChildren(...hits.map((hit) => this.toHit(hit)));
    focused?.focus({ preventScroll: true }); // hits keep their elements
    const answer = this.query && hits.length ? `Nearest to ${this.query.label}: ${hits[0].image.name}` : "";
    if (answer) tell(find("#announcer"), answer);
  }

  /** A result: image, name and score. A click on the image searches for similar ones. */
  toHit({ image, score }) {
    image.element ??= toItem(
      toButton(toImage(image.thumbnail, image.name), `More like ${image.name}`, () => this.askByImage(image.file)),
      Object.assign(document.createElement("span"), { className: "name", textContent: image.name, title: image.name }),
      Object.assign(document.createElement("span"), { className: "score" }),
    );
    image.element.querySelector(".score").textContent = score === undefined ? "" : score.toFixed(3);
    return image.element;
  }

  hint(message) {
    tell(find("#search-hint"), message);
  }
}

/** Set a text only if it differs, because screen readers announce a live region after each change. */
function tell(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function toFile(blob, path) {
  return new File([blob], path.split("/").pop(), { type: blob.type, lastModified: 0 });
}

function count(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

function toImage(url, name) {
  return Object.assign(document.createElement("img"), { src: url, alt: name });
}

function toButton(content, label, onClick) {
  const button = Object.assign(document.createElement("button"), { type: "button", ariaLabel: label });
  button.append(content);
  button.addEventListener("click", onClick);
  return button;
}

function toItem(...content) {
  const item = document.createElement("li");
  item.append(...content);
  return item;
}
