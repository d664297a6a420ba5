// Connects the components of the chat page: sends questions, and shows answers.

import { ApiError, countTokens, listModels, streamAnswer } from "./api.js";
import { addCalls, Conversation } from "./conversation.js";
import { HistoryView } from "./history.js";
import { askForKey } from "./key_dialog.js";
import { filesIn, ImageTray, kindOf } from "./images.js";
import { SearchView } from "./search.js";
import { findProblem } from "./limits.js";
import { Microphone } from "./microphone.js";
import { describeModel, readSettings, showModels } from "./settings.js";
import { Turn } from "./turn.js";
import { followAddress, shownView } from "./views.js";
import { showWelcome } from "./welcome.js";

const REFRESH_PAUSE_MS = 15000;
const AWAY_PAUSE_MS = 2000; // while the gateway does not answer
const find = (selector) => document.querySelector(selector);
const main = find("#main");
const question = find("#question");
const hint = find("#hint");
const settings = find("#settings");
const tray = new ImageTray(find("#tray"), showProblem);
const search = new SearchView(() => refreshModels());
const microphone = new Microphone(find("#record"), { onFile: (file) => addFiles([file]), onProblem: showHint });

const kept = new HistoryView(find("#history"), { onOpen: showConversation, onRemove: startAnew });

let conversation = new Conversation();
let models = [];
let refreshing = null; // the promise of the current refresh of the models
let isAway = false; // whether the gateway did not answer the last request
let timer = null; // the timer of the next refresh of the models
let running = null; // the AbortController of the current answer

// --- asking ---------------------------------------------------------------------------------------------------------

/** Send a question. `instead`: the turn to replace, with all later ones. Returns whether it was sent. */
function ask(question, instead = null) {
  if (running) return false;
  const chosen = readSettings(settings);
  if (!chosen) {
    toggleSettings(true);
    settings.reportValidity();
    return false;
  }
  const earlier = conversation.before(instead?.exchange);
  const problem = findProblem(chosenModel(), earlier, question, chosen.system);
  showHint(problem);
  if (problem) return false;
  while (instead && instead.element.nextSibling) instead.element.nextSibling.remove();
  instead?.element.remove();
  const turn = addTurn(conversation.add(question, { instead: instead?.exchange, isJson: Boolean(chosen.wanted.response_format) }));
  find("#welcome").hidden = true;
  main.scrollTop = main.scrollHeight;
  const body = { model: find("#model").value, messages: conversation.toMessages(chosen.system), ...chosen.wanted };
  answer(turn, body);
  return true;
}

function addTurn(exchange) {
  const turn = new Turn(find("#turn-template"), exchange, {
    onAsk: (question) => ask(question, turn),
    onResults: (results) => ask({ text: "", images: [], results }),
  });
  find("#log").append(turn.element);
  return turn;
}

/** Show an answer as it streams, and how it ended. */
async function answer(turn, body) {
  const { exchange } = turn;
  const talk = conversation;
  setRunning(new AbortController());
  try {
    exchange.measured = await follow(turn, body, running.signal);
    if (exchange.measured.reason === "length") exchange.note = "Cut at the maximum length.";
    const names = exchange.calls.map((call) => call.function.name);
    if (names.length) exchange.note = "This page does not run functions: enter their results, or ask again.";
    announce(exchange.answer || (names.length ? `The model calls ${names.join(", ")}.` : "The answer is empty."));
  } catch (error) {
    if (error.name === "AbortError") exchange.note = "Stopped.";
    else fail(exchange, error);
  } finally {
    keepAtEnd(() => turn.end());
    setRunning(null);
    showHint(await kept.save(talk));
  }
}

/** Add the stream's text to the exchange. Returns usage and timings. */
async function follow(turn, body, signal) {
  const measured = { timings: null, usage: null, reason: null };
  for await (const chunk of streamAnswer(body, signal)) {
    measured.timings = chunk.timings ?? measured.timings;
    measured.usage = chunk.usage ?? measured.usage;
    const [choice] = chunk.choices;
    measured.reason = choice?.finish_reason ?? measured.reason;
    const { content = "", reasoning_content: thought = "", tool_calls: calls = [] } = choice?.delta ?? {};
    if (!content && !thought && !calls.length) continue;
    turn.exchange.answer += content ?? "";
    turn.exchange.thought += thought ?? "";
    addCalls(turn.exchange.calls, calls);
    keepAtEnd(() => turn.update());
  }
  return measured;
}

function fail(exchange, error) {
  if (!(error instanceof ApiError)) throw error;
  const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  Object.assign(exchange, { note: error.message + wait, isError: true });
  announce(`Failed: ${error.message}`);
  if (error.status === 401 || error.status === 0) refreshModels();
}

/** Change the log. If it was scrolled to the end, it stays there. */
function keepAtEnd(change) {
  const isAtEnd = main.scrollHeight - main.scrollTop - main.clientHeight < 60;
  change();
  if (isAtEnd) requestAnimationFrame(() => (main.scrollTop = main.scrollHeight));
}

function setRunning(controller) {
  running = controller;
  const hadFocus = document.activeElement?.closest(".composer button");
  find("#send").hidden = running !== null;
  find("#stop").hidden = running === null;
  find("#new").disabled = find("#show-history").disabled = running !== null;
  find("#log").classList.toggle("running", running !== null);
  if (hadFocus) question.focus();
}

function announce(message) {
  find("#announcer").textContent = message;
}

function showHint(message) {
  hint.textContent = message;
}

/** Show why the gateway would refuse the chosen images, before they are sent. */
function showProblem() {
  showHint(findProblem(chosenModel(), conversation.before(), { text: "", images: tray.images }));
}

function submit() {
  const text = question.value.trim();
  if (running) return;
  if (!text) {
    showHint(tray.images.length ? "What would you like to know about it?" : "Type a question first.");
    question.focus();
    return;
  }
  if (!find("#model").value) {
    showHint("No model is available yet: wait until a worker has started.");
    return;
  }
  if (ask({ text, images: tray.images })) {
    tray.take();
    question.value = "";
    fitQuestion();
  }
}

// --- images -------------------------------------------------------------------------------------------------------

async function addFiles(files) {
  for (const file of files) {
    try {
      const added = await tray.add(file, file.name, chosenModel()?.limits?.max_image_pixels);
      if (kindOf(added) !== "image" && !hint.textContent) await showTokens(added);
    } catch (error) {
      showHint(error.message);
    }
  }
  question.focus();
}

/** Show how much of the model's context a video or audio uses. Throws ApiError if the model refuses it. */
async function showTokens(added) {
  const { id: model, tasks } = chosenModel() ?? {};
  if (!tasks?.includes("tokenize")) return;
  const messages = new Conversation({ exchanges: [{ question: { text: "", images: [added] } }] }).toMessages();
  const { count, max_model_len: most, frames } = await countTokens({ model, messages });
  const share = (part, whole) => [part, whole].filter(Boolean).map((number) => number.toLocaleString("en")).join(" of ");
  const seen = frames ? `${share(frames[0].used, frames[0].total)} frames, ` : "";
  showHint(`${added.name} takes ${seen}${share(count, most)} tokens.`);
}

async function addSample(blob, name) {
  await tray.add(blob, name);
  question.focus();
}

function askSuggested(text) {
  question.value = text;
  submit();
}

// --- the model and the settings -------------------------------------------------------------------------------------

function refreshModels() {
  refreshing ??= loadModels().finally(() => {
    refreshing = null;
    planRefresh();
  });
  return refreshing;
}

function planRefresh() {
  clearTimeout(timer);
  timer = setTimeout(() => (document.hidden ? planRefresh() : refreshModels()), isAway ? AWAY_PAUSE_MS : REFRESH_PAUSE_MS);
}

async function loadModels() {
  try {
    const all = await listModels();
    models = all.filter(({ tasks }) => !tasks || tasks.includes("generate"));
    search.showModels(all);
    showModels(find("#model"), models);
    showModel();
    if (isAway) announce("The gateway is back.");
    isAway = false;
  } catch (error) {
    if (error.status === 401) return askForKey().then(loadModels);
    isAway = error.status === 0;
    find("#fleet").textContent = error.status === 0 ? "gateway unreachable" : "not ready";
    find("#fleet").classList.add("told");
  }
}

function chosenModel() {
  return models.find(({ id }) => id === find("#model").value);
}

function showModel() {
  const model = chosenModel();
  find("#fleet").textContent = describeModel(model);
  find("#fleet").classList.toggle("told", !model?.num_workers); // show it on small screens too
  settings.elements.max_tokens.max = model?.limits?.max_output_tokens ?? "";
  microphone.show(model?.input_modalities?.includes("audio"));
}

function toggleSettings(isOpen) {
  settings.hidden = !isOpen;
  find("#show-settings").ariaExpanded = String(isOpen);
  if (isOpen) settings.elements.temperature.focus();
}

function startAnew() {
  kept.setOpen(null);
  showConversation({});
  question.focus();
}

/** Show a stored conversation, or an empty one. */
function showConversation({ id, exchanges = [] }) {
  if (running) return;
  conversation = new Conversation({ id, exchanges });
  find("#log").replaceChildren();
  for (const exchange of exchanges) addTurn(exchange).end();
  find("#welcome").hidden = exchanges.length > 0;
  find("#new").disabled = exchanges.length === 0;
  main.scrollTop = main.scrollHeight;
}

function fitQuestion() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
}

// --- events of the user ---------------------------------------------------------------------------------------------

const carriesFiles = (event) => event.dataTransfer?.types.includes("Files");

find("#composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
settings.addEventListener("submit", (event) => event.preventDefault());
question.addEventListener("input", fitQuestion);
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
find("#stop").addEventListener("click", () => running?.abort());
find("#new").addEventListener("click", startAnew);
find("#show-history").addEventListener("click", () => kept.show());
find("#show-settings").addEventListener("click", () => toggleSettings(settings.hidden));
find("#model").addEventListener("change", showModel);
find("#files").addEventListener("change", ({ target }) => {
  addFiles([...target.files]);
  target.value = "";
});
document.addEventListener("paste", ({ clipboardData }) => {
  if (!clipboardData.files.length) return;
  if (shownView() === "search") search.askByImage(clipboardData.files[0]);
  else addFiles([...clipboardData.files]);
});
document.addEventListener("dragover", (event) => {
  if (!carriesFiles(event)) return;
  event.preventDefault();
  find("#drop-zone").hidden = false;
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) find("#drop-zone").hidden = true;
});
document.addEventListener("drop", (event) => {
  if (!carriesFiles(event)) return;
  event.preventDefault();
  find("#drop-zone").hidden = true;
  if (shownView() === "search") filesIn(event.dataTransfer).then((files) => search.add(files));
  else addFiles([...event.dataTransfer.files]);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || find("dialog[open], :popover-open")) return;
  if (shownView() === "search") search.stop();
  else running?.abort();
});

showWelcome(
  { images: find("#samples"), questions: find("#suggestions") },
  { hasImage: () => tray.images.length > 0, onImage: addSample, onQuestion: askSuggested },
);
kept.restore();
refreshModels();
followAddress((view) => {
  if (matchMedia("(pointer: fine)").matches) (view === "search" ? find("#words") : question).focus();
});
