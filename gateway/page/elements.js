// Helpers that create elements.

export function element(name, ...content) {
  const made = document.createElement(name);
  made.append(...content);
  return made;
}

export function toButton(text, label, onClick) {
  const button = Object.assign(element("button", text), { type: "button", className: "quiet", ariaLabel: label });
  button.addEventListener("click", onClick);
  return button;
}

/** A `<time>` element. `seconds`: epoch seconds. */
export function toTime(seconds, options = { dateStyle: "medium", timeStyle: "short" }) {
  const at = new Date(seconds * 1000);
  return Object.assign(element("time", at.toLocaleString(undefined, options)), { dateTime: at.toISOString() });
}

export function fillRows(body, rows) {
  body.replaceChildren(...rows.map((cells) => element("tr", ...cells.map((content) => element("td", content)))));
}
