// The deployments: versions, instances, rates and events, refreshed periodically.

import { ApiError, listApplications } from "./api.js";
import { element, fillRows, toTime } from "./elements.js";
import { askForKey, rememberKey } from "./key_dialog.js";

const PAUSE_MS = 2000;
const MAX_EVENTS = 12;
const find = (selector) => document.querySelector(selector);
const shown = new Map(); // articles by name of the deployment
const counted = new Map(); // by version: number of ended requests, and when they were counted

async function follow() {
  for (;;) {
    try {
      show(await listApplications());
      find("#problem").textContent = "";
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status === 401 || error.status === 403) {
        await askForKey();
        continue;
      }
      find("#problem").textContent = error.message;
    }
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
  }
}

function show(apps) {
  find("#none").hidden = apps.length > 0;
  const names = new Set(apps.map(({ name }) => name));
  for (const [name, article] of shown) {
    if (names.has(name)) continue;
    article.remove();
    shown.delete(name);
  }
  for (const app of apps) {
    if (!shown.has(app.name)) {
      const article = find("#app-template").content.firstElementChild.cloneNode(true);
      article.querySelector(".name").textContent = app.name;
      shown.set(app.name, article);
      find("#apps").append(article);
    }
    fill(shown.get(app.name), app);
  }
}

function fill(article, app) {
  article.setAttribute("aria-label", `${app.name}: ${app.state}`);
  article.querySelector(".state").textContent = app.state;
  article.querySelector(".state").dataset.state = app.state;
  article.querySelector(".message").textContent = app.message;
  const share = app.state === "canary" ? app.candidate.spec.canary : 0;
  const versions = [
    ["active", app.active, 1 - share],
    ["candidate", app.candidate, share],
  ].filter(([, revision]) => revision);
  fillRows(
    article.querySelector(".versions tbody"),
    versions.map(([role, revision, part]) => [
      role,
      revision.generation,
      shorten(revision.digest),
      `${Math.round(part * 100)} %`,
      role === "active" ? `${revision.num_ready} of ${app.desired}` : revision.num_ready,
      revision.num_running,
      rate(app.name, revision),
      revision.num_failed,
    ]),
  );
  fillRows(
    article.querySelector(".slots tbody"),
    app.slots.map(({ id, digest, state, phase, node }) => [
      id, shorten(digest), phase ? `${state} (${phase})` : state, node || "-",
    ]),
  );
  const events = app.events.slice(-MAX_EVENTS).reverse();
  article.querySelector(".events").replaceChildren(
    ...events.map(({ at, text }) => element("li", toTime(at, { timeStyle: "medium" }), ` ${text}`)),
  );
}

/** Requests finished per second since the last call. */
function rate(name, { digest, num_finished, num_failed }) {
  const key = `${name}@${digest}`;
  const now = { count: num_finished + num_failed, at: performance.now() / 1000 };
  const before = counted.get(key) ?? now;
  counted.set(key, now);
  const seconds = now.at - before.at;
  return seconds > 0 ? (Math.max(0, now.count - before.count) / seconds).toFixed(1) : "-";
}

function shorten(digest) {
  return digest.replace("sha256:", "").slice(0, 12);
}

rememberKey("apps");
follow();
