// Images on their way into a message: reading, shrinking, and the tray that shows what will be sent.

const ACCEPTED = ["image/png", "image/jpeg", "image/webp"];
const MAX_BYTES = 2 * 1024 * 1024; // every follow-up sends the image again
const MAX_SIDE = 2048;
const JPEG_QUALITY = 0.9;

/** A file as `{name, url}` with a data URL that the gateway takes. Throws Error with words for people. */
export async function readImage(blob, name) {
  if (ACCEPTED.includes(blob.type) && blob.size <= MAX_BYTES) return { name, url: await toDataUrl(blob) };
  return { name, url: await redraw(blob, name) };
}

/** Draw an image anew: turned upright, no side above MAX_SIDE, as JPEG or, where it may be see-through, PNG. */
async function redraw(blob, name) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(blob);
  } catch {
    throw new Error(`${name} is not an image that this browser can read.`);
  }
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return blob.type === "image/jpeg" ? canvas.toDataURL("image/jpeg", JPEG_QUALITY) : canvas.toDataURL("image/png");
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
