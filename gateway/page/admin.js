// The admin page: fleet, keys, usage and audit log, refreshed periodically.

import { ApiError, read } from "./api.js";
import { fillRows, toTime } from "./elements.js";
import { askForKey, forgetKey, rememberKey } from "./key_dialog.js";
import { KeysView } from "./keys.js";
import { UsageView } from "./usage.js";

const PAUSE_MS = 2000;
const ROUNDS = 8; // refreshes of the fleet and requests per refresh of the other parts
const OFTEN = ["fleet", "requests"];
const find = (selector) => document.querySelector(selector);
const problems = new Map(); // error messages by part that could not be read
const usage = new UsageView(find("#usage-form"), () => load("usage"));
const keys = new KeysView(find("#keys"), () => Promise.all([load("keys"), load("audit")]));
const PARTS = {
  fleet: { path: () => "v1/admin/status", show: showFleet },
  requests: { path: () => "v1/admin/requests", show: showRequests },
  keys: { path: () => "v1/admin/keys", show: ({ data }) => keys.show(data) },
  usage: { path: () => usage.path(), show: ({ data }) => usage.show(data) },
  audit: { path: () => "v1/admin/audit?limit=50", show: showAudit },
};

async function follow() {
  for (let round = 0; ; round++) {
    if (!document.hidden) await Promise.all((round % ROUNDS ? OFTEN : Object.keys(PARTS)).map(load));
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
  }
}

async function load(part) {
  const path = PARTS[part].path();
  try {
    const answer = await read(path);
    if (path !== PARTS[part].path()) return; // the user has chosen another period meanwhile
    PARTS[part].show(answer);
    problems.delete(part);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) return askForKey().then(() => load(part));
    problems.set(part, error.message);
  }
  const told = [...new Set(problems.values())].join(" ");
  if (find("#problem").textContent !== told) find("#problem").textContent = told;
}

function showFleet({ version, state, num_open: numOpen, models, workers }) {
  find("#gateway").textContent = `vlm-fleet ${version}, ${state}. This gateway has ${numOpen} open request${numOpen === 1 ? "" : "s"}.`;
  fillRows(
    find("#models"),
    models.map((each) => [each.id, each.num_workers, each.num_open, each.num_backlog, each.oldest_wait_s ? `${each.oldest_wait_s.toFixed(1)} s` : "-"]),
  );
  fillRows(
    find("#workers"),
    workers.map((each) => [
      each.id, each.model, each.engine, each.state, `${each.num_running} of ${each.max_num_seqs}`, each.num_waiting, each.num_finished, each.num_failed,
    ]),
  );
}

function showRequests({ data }) {
  fillRows(
    find("#requests"),
    data.map((each) => [each.id, each.key, each.model, each.worker || "waits", `${each.age_s.toFixed(1)} s`, each.num_tokens]),
  );
}

function showAudit({ data }) {
  fillRows(find("#audit"), data.map(({ at, action, name, key, address }) => [toTime(at), action, name, key, address]));
}

find("#forget-key").addEventListener("click", () => {
  forgetKey();
  location.reload();
});
rememberKey("admin");
follow();
