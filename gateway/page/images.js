// Images, videos and audio of a message: reads and shrinks them, and shows the tray of files to send.

const ACCEPTED = ["image/png", "image/jpeg", "image/webp"];
const CHAT_SIZE = { maxBytes: 2 * 1024 * 1024, maxSide: 2048 }; // every follow-up sends the image again
const QUALITY = 0.9;

/** Read an image as `{name, url}`. The gateway accepts the data URL. Throws Error with a message for the user. */
export async function readImage(blob, name, { maxBytes, maxSide, maxPixels = Infinity } = CHAT_SIZE) {
  const image = await decode(blob, name);
  const { width, height } = image;
  const scale = Math.min(1, maxSide / Math.max(width, height), Math.sqrt(maxPixels / (width * height)));
  const isFine = ACCEPTED.includes(blob.type) && blob.size <= maxBytes && scale === 1;
  const url = isFine ? await toDataUrl(blob) : encode(draw(image, scale), blob.type, maxBytes);
  image.close?.();
  return { name, url };
}

/** Decode an image and apply its EXIF rotation. Throws Error with a message for the user. */
async function decode(blob, name) {
  try {
    return await (blob.type === "image/svg+xml" ? decodeDrawing(blob) : createImageBitmap(blob));
  } catch {
    throw new Error(`${name} is not an image that this browser can read.`);
  }
}

async function decodeDrawing(blob) {
  const image = new Image();
  image.src = await toDataUrl(blob);
  await image.decode();
  return image;
}

/** JPEG stays JPEG. Images that may be transparent become PNG, or WebP if PNG is too large. */
function encode(canvas, type, maxBytes) {
  if (type === "image/jpeg") return canvas.toDataURL("image/jpeg", QUALITY);
  const url = canvas.toDataURL("image/png");
  return (url.length * 3) / 4 <= maxBytes ? url : canvas.toDataURL("image/webp", QUALITY);
}

/** The data URL of a thumbnail. */
export async function makeThumbnail(url, maxSide) {
  const image = new Image();
  image.src = url;
  await image.decode();
  const scale = maxSide / Math.max(image.width, image.height);
  return scale >= 1 ? url : draw(image, scale).toDataURL("image/webp", QUALITY);
}

function draw(image, scale) {
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.floor(image.width * scale));
  canvas.height = Math.max(1, Math.floor(image.height * scale));
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas;
}

function toDataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("The file cannot be read."));
    reader.readAsDataURL(blob);
  });
}

/** The kind of `{url}`: "image", "video" or "audio". */
export function kindOf({ url }) {
  return /^data:(video|audio)\//.exec(url)?.[1] ?? "image";
}

/** The `<img>`, `<video>` or `<audio>` element of an image, video or audio. */
export function toImage(image) {
  const kind = kindOf(image);
  const element = document.createElement(kind === "image" ? "img" : kind);
  element.src = image.url;
  if (kind === "image") element.alt = image.name;
  else element.ariaLabel = image.name;
  element.muted = kind === "video";
  return element;
}

/** A button that enlarges an image or video, or plays audio. Audio is shown by its name. */
export function toZoomable(image) {
  const isAudio = kindOf(image) === "audio";
  const button = document.createElement("button");
  button.type = "button";
  button.className = isAudio ? "zoomable heard" : "zoomable";
  button.ariaLabel = `${isAudio ? "Listen to" : "Enlarge"} ${image.name}`;
  button.append(isAudio ? `\u266a ${image.name}` : toImage(image));
  button.addEventListener("click", () => zoom(image));
  return button;
}

function zoom(image) {
  const dialog = document.querySelector("#zoom");
  const size = dialog.querySelector(".size");
  const showSize = (isFull) => {
    dialog.classList.toggle("full", isFull);
    size.textContent = isFull ? "Fit the window" : "Full size";
  };
  const shown = toImage(image);
  shown.controls = kindOf(image) !== "image";
  dialog.querySelector(".frame").replaceChildren(shown);
  dialog.querySelector(".name").textContent = image.name;
  size.onclick = () => showSize(!dialog.classList.contains("full"));
  dialog.querySelector(".close").onclick = () => dialog.close();
  showSize(false);
  dialog.showModal();
}

/** The dropped files, including files in folders. Must be called during the drop event. */
export async function filesIn(dataTransfer) {
  const entries = [...dataTransfer.items].map((item) => item.webkitGetAsEntry());
  if (!entries.every(Boolean)) return [...dataTransfer.files]; // a script created the event
  return (await Promise.all(entries.map(readEntry))).flat();
}

async function readEntry(entry) {
  if (entry.isFile) return [await new Promise((resolve, reject) => entry.file(resolve, reject))];
  const reader = entry.createReader();
  const files = [];
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject)); // at most 100 at a time
    if (!some.length) return files;
    files.push(...(await Promise.all(some.map(readEntry))).flat());
  }
}

/** The images, videos and audio of the next message, shown in `list`. `onChange` is called after each change. */
export class ImageTray {
  constructor(list, onChange) {
    this.images = [];
    this.list = list;
    this.onChange = onChange;
  }

  /** Add a file. `maxPixels`: limit of an image. Returns the added item. */
  async add(blob, name, maxPixels) {
    const [kind] = blob.type.split("/");
    const added = kind === "video" || kind === "audio"
      ? { name: name || kind, url: await toDataUrl(blob) }
      : await readImage(blob, name || "image", { ...CHAT_SIZE, maxPixels });
    this.images.push(added);
    this.show();
    return added;
  }

  /** Empty the tray. Returns its items. */
  take() {
    const taken = this.images;
    this.images = [];
    this.show();
    return taken;
  }

  show() {
    this.list.replaceChildren(...this.images.map((image) => this.toItem(image)));
    this.list.hidden = this.images.length === 0;
    this.onChange();
  }

  toItem(image) {
    const item = document.createElement("li");
    const remove = document.createElement("button");
    remove.type = "button";
    remove.textContent = "\u00d7";
    remove.ariaLabel = `Remove ${image.name}`;
    remove.addEventListener("click", () => {
      this.images = this.images.filter((other) => other !== image);
      this.show();
    });
    remove.className = "remove";
    item.append(toZoomable(image), remove);
    return item;
  }
}
