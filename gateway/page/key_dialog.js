// The dialog that asks for the API key.

import { setKey } from "./api.js";

const dialog = document.querySelector("#key-dialog");
const input = document.querySelector("#key");
const problem = document.querySelector("#key-error");

let asking = null;
let slot = null; // name of the stored key in this tab; null: the key is not stored
let storage = null;

/** Use the key that was last entered on `page` in this tab, and store later ones. Pages need keys with different roles. */
export function rememberKey(page) {
  slot = `vlm-key-${page}`;
  try {
    storage = sessionStorage;
  } catch {
    return; // the browser does not allow this site to store data
  }
  useKey(storage.getItem(slot) ?? "");
}

export function forgetKey() {
  storage?.removeItem(slot);
}

/** Resolves when the user has entered a key. If a key was set before, the dialog reports that the gateway refused it. */
export function askForKey() {
  asking ??= new Promise((resolve) => {
    dialog.addEventListener("submit", () => resolve(input.value.trim()), { once: true });
    dialog.showModal();
  }).then((key) => {
    useKey(key);
    storage?.setItem(slot, key);
    input.value = "";
    asking = null;
  });
  return asking;
}

function useKey(key) {
  setKey(key);
  if (key) problem.textContent = "The gateway refused that key.";
}

// Reopen the dialog after Escape, because the page is empty without a key.
dialog.addEventListener("close", () => asking && dialog.showModal());
