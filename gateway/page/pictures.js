// Pictures on their way into a message: reading, shrinking, and the tray that shows what will be sent.

const ACCEPTED = ["image/png", "image/jpeg", "image/webp"];
const MAX_BYTES = 2 * 1024 * 1024; // every follow-up sends the picture again
const MAX_SIDE = 2048;
const JPEG_QUALITY = 0.9;

/** A file as `{name, url}` with a data URL that the gateway takes. Throws Error with words for people. */
export async function readPicture(blob, name) {
  if (ACCEPTED.includes(blob.type) && blob.size <= MAX_BYTES) return { name, url: await toDataUrl(blob) };
  return { name, url: await redraw(blob, name) };
}

/** Draw a picture anew: turned upright, no side above MAX_SIDE, as JPEG or, where it may be see-through, PNG. */
async function redraw(blob, name) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(blob);
  } catch {
    throw new Error(`${name} is not a picture that this browser can read.`);
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
    reader.onerror = () => reject(new Error("The picture cannot be read."));
    reader.readAsDataURL(blob);
  });
}

/** A picture as an `<img>`. */
export function toImage(picture) {
  const image = document.createElement("img");
  image.src = picture.url;
  image.alt = picture.name;
  return image;
}

/** The pictures of the next message, shown in `list`. `onChange` is called after each change. */
export class PictureTray {
  constructor(list, onChange) {
    this.pictures = [];
    this.list = list;
    this.onChange = onChange;
  }

  async add(blob, name) {
    this.pictures.push(await readPicture(blob, name || "picture"));
    this.show();
  }

  /** Empty the tray; returns what was in it. */
  take() {
    const taken = this.pictures;
    this.pictures = [];
    this.show();
    return taken;
  }

  show() {
    this.list.replaceChildren(...this.pictures.map((picture) => this.toItem(picture)));
    this.list.hidden = this.pictures.length === 0;
    this.onChange();
  }

  toItem(picture) {
    const item = document.createElement("li");
    const remove = document.createElement("button");
    remove.type = "button";
    remove.textContent = "\u00d7";
    remove.ariaLabel = `Remove ${picture.name}`;
    remove.addEventListener("click", () => {
      this.pictures = this.pictures.filter((other) => other !== picture);
      this.show();
    });
    item.append(toImage(picture), remove);
    return item;
  }
}
