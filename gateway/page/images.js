// Images on their way into a message: reading, shrinking, and the tray that shows what will be sent.

const ACCEPTED = ["image/png", "image/jpeg", "image/webp"];
const CHAT_SIZE = { maxBytes: 2 * 1024 * 1024, maxSide: 2048 }; // every follow-up sends the image again
const JPEG_QUALITY = 0.9;

/** A file as `{name, url}` with a data URL that the gateway takes. Throws Error with words for people. */
export async function readImage(blob, name, { maxBytes, maxSide } = CHAT_SIZE) {
  const isFine = ACCEPTED.includes(blob.type) && blob.size <= maxBytes;
  return { name, url: isFine ? await toDataUrl(blob) : await redraw(blob, name, maxSide) };
}

/** Draw an image anew: turned upright, no side above `maxSide`, as JPEG or, where it may be see-through, PNG. */
async function redraw(blob, name, maxSide) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(blob);
  } catch {
    throw new Error(`${name} is not an image that this browser can read.`);
  }
  const canvas = draw(bitmap, maxSide);
  bitmap.close();
  return blob.type === "image/jpeg" ? canvas.toDataURL("image/jpeg", JPEG_QUALITY) : canvas.toDataURL("image/png");
}

/** The data URL of a small copy, for showing. */
export async function makeThumbnail(url, maxSide) {
  const image = new Image();
  image.src = url;
  await image.decode();
  if (Math.max(image.width, image.height) <= maxSide) return url;
  return draw(image, maxSide).toDataURL("image/webp", JPEG_QUALITY);
}

function draw(image, maxSide) {
  const scale = Math.min(1, maxSide / Math.max(image.width, image.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(image.width * scale));
  canvas.height = Math.max(1, Math.round(image.height * scale));
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas;
}

function toDataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("The image cannot be read."));
    reader.readAsDataURL(blob);
  });
}

/** An image as an `<img>`. */
export function toImage(image) {
  const element = document.createElement("img");
  element.src = image.url;
  element.alt = image.name;
  return element;
}

/** The files of a drop, those within folders too. Call it while the event lasts. */
export async function filesIn(dataTransfer) {
  const entries = [...dataTransfer.items].map((item) => item.webkitGetAsEntry());
  if (!entries.every(Boolean)) return [...dataTransfer.files]; // made by a script
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

/** The images of the next message, shown in `list`. `onChange` is called after each change. */
export class ImageTray {
  constructor(list, onChange) {
    this.images = [];
    this.list = list;
    this.onChange = onChange;
  }

  async add(blob, name) {
    this.images.push(await readImage(blob, name || "image"));
    this.show();
  }

  /** Empty the tray; returns what was in it. */
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
    item.append(toImage(image), remove);
    return item;
  }
}
