// The dialog that asks for the API key.

import { setKey } from "./api.js";

const dialog = document.querySelector("#key-dialog");
const input = document.querySelector("#key");
const problem = document.querySelector("#key-error");

let asking = null;
let slot = null; // where this tab keeps the key, if it does
let storage = null;

/** Use the key that was last entered on this page in this tab, and store the next one. Keys of other pages have other roles. */
export function rememberKey(page) {
  slot = `vlm-key-${page}`;
  try {
    storage = sessionStorage;
  } catch {
    return; // the browser keeps nothing for this site
  }
  useKey(storage.getItem(slot) ?? "");
}

export function forgetKey() {
  storage?.removeItem(slot);
}

/** Resolves when the user has entered a key. With a key already set, the gateway has refused it. */
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

// Escape does not close the dialog, as the page is empty without a key.
dialog.addEventListener("close", () => asking && dialog.showModal());
