// Copy buttons.

const SHOWN_MS = 2000;

/** A button that copies the result of `getText`, and announces the outcome in `announcer`. */
export function toCopyButton(label, getText, announcer = document.querySelector("#announcer")) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet copy";
  button.textContent = "Copy";
  button.ariaLabel = label;
  button.addEventListener("click", async () => {
    const isCopied = await copy(getText());
    button.textContent = isCopied ? "Copied" : "Not copied";
    announcer.textContent = isCopied ? "Copied." : "The browser does not allow this page to copy.";
    setTimeout(() => (button.textContent = "Copy"), SHOWN_MS);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // the clipboard API exists only on https and localhost
  }
}

function copyBySelection(text) {
  const holder = document.createElement("textarea");
  const focused = document.activeElement;
  holder.value = text;
  holder.className = "unseen";
  (focused.closest("dialog") ?? document.body).append(holder); // elements outside an open dialog cannot get the focus
  holder.select();
  const isCopied = document.execCommand("copy");
  holder.remove();
  focused.focus();
  return isCopied;
}
