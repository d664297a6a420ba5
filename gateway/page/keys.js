// API keys: the list, and the dialogs that create, rotate and revoke them.

import { ApiError, createKey, revokeKey, rotateKey } from "./api.js";
import { toCopyButton } from "./copy.js";
import { element, toButton, toTime } from "./elements.js";

const DAY_S = 86400;
const SHOWN_ELSEWHERE = ["object", "name", "state"];
const ACTIONS = {
  Rotate: { act: rotateKey, text: "This creates a new key with the same data, limits and expiry. The current key stops working within two seconds." },
  Revoke: { act: revokeKey, text: "Its open requests fail, and within two seconds no gateway accepts it. Its name cannot be used again. This cannot be undone." },
};
const find = (selector) => document.querySelector(selector);

export class KeysView {
  /** `onChanged`: called when a key was created, rotated or revoked. */
  constructor(list, onChanged) {
    this.list = list;
    this.onChanged = onChanged;
    this.shown = "";
    this.action = null; // runs after the user has confirmed it
    this.newKey = find("#new-key");
    const told = find("#new-dialog [role=status]");
    find("#new-dialog .primary").before(toCopyButton("Copy the key", () => this.newKey.value, told));
    find("#new-dialog").addEventListener("close", () => (this.newKey.value = ""));
    find("#new-dialog").addEventListener("cancel", (event) => event.preventDefault()); // Escape would lose the key
    find("#create").addEventListener("click", () => find("#create-dialog").showModal());
    for (const [name, act] of [["create", (form) => createKey(toBody(form))], ["confirm", () => this.action()]]) {
      const dialog = find(`#${name}-dialog`);
      dialog.querySelector(".cancel").addEventListener("click", () => dialog.close());
      dialog.addEventListener("close", () => (dialog.querySelector(".hint").textContent = ""));
      dialog.addEventListener("submit", (event) => {
        event.preventDefault();
        this.send(dialog, act);
      });
    }
  }

  /** Run a dialog's action. If the gateway refuses it, the dialog stays open and shows the reason. */
  async send(dialog, act) {
    const form = dialog.querySelector("form");
    const button = form.querySelector(".primary");
    button.disabled = true;
    try {
      const { name, key } = await act(form);
      dialog.close();
      form.reset();
      if (key) this.showNew(name, key);
      else find("#announcer").textContent = `${name} is revoked.`;
      this.onChanged();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      dialog.querySelector(".hint").textContent = error.message;
      form.elements[error.param]?.focus?.();
    } finally {
      button.disabled = false;
    }
  }

  showNew(name, key) {
    find("#new-title").textContent = `The key of ${name}`;
    this.newKey.value = key;
    find("#new-dialog").showModal();
    this.newKey.select();
  }

  show(keys) {
    const state = JSON.stringify(keys);
    if (state === this.shown) return; // keeps the focus
    this.shown = state;
    const focused = document.activeElement.closest(".keys button")?.ariaLabel;
    const [active, ended] = [true, false].map((isActive) => keys.filter((key) => (key.state === "active") === isActive));
    find("#no-keys").hidden = keys.length > 0;
    this.list.replaceChildren(...active.map((key) => this.toItem(key)));
    find("#ended").hidden = ended.length === 0;
    find("#ended summary").textContent = `Revoked and expired: ${ended.length}`;
    find("#ended ul").replaceChildren(...ended.map((key) => this.toItem(key)));
    if (focused) (this.list.querySelector(`[aria-label="${focused}"]`) ?? find("#create")).focus();
  }

  toItem(key) {
    const head = element("div", element("strong", key.name), Object.assign(element("span", key.state), { className: "state" }));
    head.className = "head";
    if (key.state === "active") {
      head.append(...Object.keys(ACTIONS).map((name) => toButton(name, `${name} ${key.name}`, () => this.confirm(name, key.name))));
    }
    const hidden = [...SHOWN_ELSEWHERE, ...(key.budget ? [] : ["period"]), ...(key.changed_at === key.created_at ? ["changed_at"] : [])];
    const facts = Object.entries(key).filter(([field, value]) => value !== null && value !== "" && !hidden.includes(field));
    const list = element("dl", ...facts.map(([field, value]) => element("div", element("dt", toLabel(field)), element("dd", toText(field, value)))));
    return element("li", head, list);
  }

  confirm(name, key) {
    const { act, text } = ACTIONS[name];
    this.action = () => act(key);
    find("#confirm-title").textContent = `${name} ${key}?`;
    find("#confirm-text").textContent = text;
    find("#confirm-dialog .primary").textContent = name;
    find("#confirm-dialog").showModal();
  }
}

function toLabel(field) {
  return field.replace(/_at$/, "").replaceAll("_", " ");
}

function toText(field, value) {
  if (field.endsWith("_at")) return toTime(value);
  if (Array.isArray(value)) return value.join(", ");
  return typeof value === "number" ? value.toLocaleString("en") : String(value);
}

/** The request body of the form, without empty fields. */
function toBody(form) {
  const fields = [...form.elements].filter((field) => field.name && field.type !== "checkbox" && field.value.trim());
  const body = Object.fromEntries(fields.map((field) => [field.name, field.type === "number" ? field.valueAsNumber : field.value.trim()]));
  const { models, expires_in_days: days, ...rest } = body;
  return {
    ...rest,
    roles: [...form.querySelectorAll("[name=roles]:checked")].map(({ value }) => value),
    ...(models && { models: models.split(",").map((each) => each.trim()).filter(Boolean) }),
    ...(days && { expires_in_s: days * DAY_S }),
  };
}
