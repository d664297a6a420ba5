// Asks for the API key, once at a time.

import { setKey } from "./api.js";

const dialog = document.querySelector("#key-dialog");
const input = document.querySelector("#key");
const problem = document.querySelector("#key-error");

let asking = null;

/** Resolves when the user has given a key. Whoever asks again has been refused with the last one. */
export function askForKey() {
  asking ??= new Promise((resolve) => {
    dialog.addEventListener("submit", () => resolve(input.value.trim()), { once: true });
    dialog.showModal();
  }).then((key) => {
    setKey(key);
    input.value = "";
    problem.textContent = "The gateway did not take that key.";
    asking = null;
  });
  return asking;
}

// Without a key there is nothing to see: Escape does not help.
dialog.addEventListener("close", () => asking && dialog.showModal());
