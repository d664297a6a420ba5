// Asks for the API key, once at a time.

import { setKey } from "./api.js";

const dialog = document.querySelector("#key-dialog");
const input = document.querySelector("#key");
const problem = document.querySelector("#key-error");

let asking = null;
let slot = null; // where this tab keeps the key, if it does
let storage = null;

/** Use the key that was given to this page in this tab before, and keep the next one. The keys of other pages have other roles. */
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

/** Resolves when the user has given a key. Whoever asks again has been refused with the last one. */
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
  if (key) problem.textContent = "The gateway did not take that key.";
}

// Without a key there is nothing to see: Escape does not help.
dialog.addEventListener("close", () => asking && dialog.showModal());
