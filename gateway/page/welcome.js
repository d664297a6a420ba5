// The sample images and questions of an empty page, for the built-in model "shapes".

const SAMPLES = [
  { path: "page/samples/shapes.png", name: "Sample: star, circle and square on white" },
  { path: "page/samples/night.png", name: "Sample: ring and cross on black" },
  { path: "page/samples/crowd.png", name: "Sample: triangle, star, circle and cross on gray" },
];
const SUGGESTIONS = ["Describe the image.", "How many shapes are there?", "What is in the center?"];

/** Fill the lists. `onImage` receives a blob and its name. `onQuestion` receives a text, once there is an image. */
export function showWelcome({ images, questions }, { hasImage, onImage, onQuestion }) {
  const take = async ({ path, name }) => onImage(await (await fetch(path)).blob(), name);
  const ask = async (text) => {
    if (!hasImage()) await take(SAMPLES[0]);
    onQuestion(text);
  };
  images.replaceChildren(...SAMPLES.map((sample) => toButton(toImage(sample), () => take(sample))));
  questions.replaceChildren(...SUGGESTIONS.map((text) => toButton(text, () => ask(text))));
}

function toImage({ path, name }) {
  const image = document.createElement("img");
  image.src = path;
  image.alt = name;
  return image;
}

function toButton(content, onClick) {
  const item = document.createElement("li");
  const button = document.createElement("button");
  button.type = "button";
  button.append(content);
  button.addEventListener("click", onClick);
  item.append(button);
  return item;
}
