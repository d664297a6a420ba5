// Conversations stored in this browser, and the dialog that opens and removes them.

import { isAnswered, textOf, toMarkdown } from "./conversation.js";
import { toButton } from "./elements.js";

const MAX_CONVERSATIONS = 100;
const MAX_CHARS = 64_000_000; // of all conversations together, mostly for images
const MAX_TITLE_CHARS = 120;
const DOWNLOAD_MS = 60_000; // the browser has read the file by then

/** Conversations in IndexedDB. The oldest ones are removed when there are too many. */
export class KeptConversations {
  constructor({ name = "vlm-fleet", maxConversations = MAX_CONVERSATIONS, maxChars = MAX_CHARS } = {}) {
    this.maxConversations = maxConversations;
    this.maxChars = maxChars;
    this.opening = openDatabase(name);
    this.opening.catch(() => {}); // each method that needs the database reports the failure
  }

  /** `{id, title, changedAt, numChars}` of each conversation, newest first. */
  async list() {
    const entries = await this.change("readonly", ({ entries }) => entries.getAll());
    return entries.sort((one, other) => other.changedAt - one.changedAt);
  }

  /** The exchanges of a conversation; undefined if it was removed. */
  async get(id) {
    return (await this.change("readonly", ({ conversations }) => conversations.get(id)))?.exchanges;
  }

  /** Store the answered exchanges, and remove the oldest conversations over the limit. */
  async put({ id, exchanges }) {
    const answered = exchanges.filter(isAnswered);
    if (!answered.length) return;
    const title = answered[0].question.text.slice(0, MAX_TITLE_CHARS);
    const all = await this.list();
    const others = all.filter((other) => other.id !== id);
    const changedAt = Math.max(Date.now(), (all[0]?.changedAt ?? 0) + 1); // sorts first, even if the clock was set back
    const entry = { id, title, changedAt, numChars: answered.reduce((sum, each) => sum + countChars(each), 0) };
    const hasRoom = () =>
      others.length < this.maxConversations && others.reduce((sum, { numChars }) => sum + numChars, entry.numChars) <= this.maxChars;
    while (others.length && !hasRoom()) await this.remove(others.pop().id);
    for (;;) {
      try {
        return await this.change("readwrite", ({ entries, conversations }) => {
          conversations.put({ id, exchanges: answered });
          return entries.put(entry);
        });
      } catch (error) {
        if (error.name !== "QuotaExceededError" || !others.length) throw error;
        await this.remove(others.pop().id);
      }
    }
  }

  remove(id) {
    return this.change("readwrite", ({ entries, conversations }) => {
      conversations.delete(id);
      return entries.delete(id);
    });
  }

  clear() {
    return this.change("readwrite", ({ entries, conversations }) => {
      conversations.clear();
      return entries.clear();
    });
  }

  /** Run `act` in a transaction. Returns the result of its request once the transaction has completed. */
  async change(mode, act) {
    const transaction = (await this.opening).transaction(["entries", "conversations"], mode);
    const [entries, conversations] = ["entries", "conversations"].map((name) => transaction.objectStore(name));
    return new Promise((resolve, reject) => {
      const request = act({ entries, conversations });
      transaction.oncomplete = () => resolve(request.result);
      transaction.onabort = () => reject(transaction.error);
    });
  }
}

function openDatabase(name) {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(name, 1);
    request.onupgradeneeded = () => {
      for (const store of ["entries", "conversations"]) request.result.createObjectStore(store, { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function countChars({ question, answer }) {
  return question.images.reduce((sum, { url }) => sum + url.length, textOf(question).length + answer.length);
}

/** The dialog with the list. `onOpen` is called with `{id, exchanges}`, `onRemove` after the open conversation was removed. */
export class HistoryView {
  constructor(dialog, { onOpen, onRemove }) {
    this.dialog = dialog;
    this.kept = new KeptConversations();
    this.onOpen = onOpen;
    this.onRemove = onRemove;
    this.clear = dialog.querySelector(".clear");
    this.clear.addEventListener("click", () => this.clearAll());
    dialog.querySelector(".close").addEventListener("click", () => dialog.close());
    addEventListener("hashchange", () => this.setOpen(this.openId));
    this.openId = history.state?.conversation ?? null; // survives a reload of this tab
  }

  /** Open the conversation that this tab showed before it was reloaded. */
  async restore() {
    const exchanges = this.openId && (await this.kept.get(this.openId).catch(() => null));
    if (exchanges) this.onOpen({ id: this.openId, exchanges });
    else this.setOpen(null);
  }

  setOpen(id) {
    this.openId = id;
    history.replaceState({ conversation: id }, "");
  }

  /** Store a conversation. Returns a message for the user if this fails. */
  async save(conversation) {
    this.setOpen(conversation.id);
    try {
      await this.kept.put(conversation);
      return "";
    } catch {
      return "The conversation is not saved: the browser does not allow this page to store data.";
    }
  }

  async show() {
    await this.fill();
    this.dialog.showModal();
  }

  async fill() {
    const entries = await this.kept.list().catch(() => []);
    this.dialog.querySelector(".kept").replaceChildren(...entries.map((entry) => this.toItem(entry)));
    this.dialog.querySelector(".none").hidden = entries.length > 0;
    this.clear.hidden = entries.length === 0;
    this.clear.textContent = "Remove all";
    this.numShown = entries.length;
  }

  toItem({ id, title, changedAt }) {
    const item = document.createElement("li");
    const open = document.createElement("button");
    const name = document.createElement("span");
    const time = document.createElement("time");
    open.type = "button";
    open.className = "open";
    if (id === this.openId) open.setAttribute("aria-current", "true");
    name.textContent = title;
    time.dateTime = new Date(changedAt).toISOString();
    time.textContent = new Date(changedAt).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
    open.append(name, time);
    open.addEventListener("click", () => this.open(id));
    item.append(
      open,
      toButton("Save", `Save ${title} as a file`, () => this.download(id, title)),
      toButton("\u00d7", `Remove ${title}`, () => this.remove(id)),
    );
    return item;
  }

  async open(id) {
    const exchanges = await this.kept.get(id);
    if (!exchanges) return this.fill(); // removed in another tab
    this.dialog.close();
    this.setOpen(id);
    this.onOpen({ id, exchanges });
  }

  async download(id, title) {
    const exchanges = await this.kept.get(id);
    if (!exchanges) return this.fill();
    const href = URL.createObjectURL(new Blob([toMarkdown(exchanges)], { type: "text/markdown" }));
    const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "conversation";
    Object.assign(document.createElement("a"), { href, download: `${name}.md` }).click();
    setTimeout(() => URL.revokeObjectURL(href), DOWNLOAD_MS);
  }

  async remove(id) {
    await this.kept.remove(id);
    await this.fill();
    (this.dialog.querySelector(".open") ?? this.dialog.querySelector(".close")).focus();
    if (id === this.openId) this.onRemove();
  }

  /** The first click asks for confirmation, the second one removes all conversations. */
  async clearAll() {
    const question = `Remove all ${this.numShown} for good?`;
    if (this.clear.textContent !== question) {
      this.clear.textContent = question;
      return;
    }
    await this.kept.clear();
    await this.fill();
    this.dialog.querySelector(".close").focus();
    this.onRemove();
  }
}
