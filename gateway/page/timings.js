// Where an answer's time went: a bar of its stages, their numbers, and one line of facts.

const LABELS = {
  ingest: "ingest",
  image_decode: "image decode",
  queue: "queue",
  preprocess: "preprocess",
  vision: "vision",
  prefill: "prefill",
  decode: "decode",
  relay: "relay",
};

/** The stages in their order. Units: seconds. */
function stagesOf(timings) {
  return Object.keys(LABELS)
    .map((name) => ({ name, seconds: timings[`${name}_s`] ?? 0 }))
    .filter(({ seconds }) => seconds > 0);
}

export function formatTime(seconds) {
  const ms = seconds * 1000;
  if (ms >= 1000) return `${seconds.toFixed(2)} s`;
  return ms >= 100 ? `${ms.toFixed(0)} ms` : `${ms.toFixed(1)} ms`;
}

/** Fill the footer of an answer from the stream's `timings` and `usage`. */
export function showTimings(footer, { timings, usage }) {
  const stages = stagesOf(timings);
  const bar = footer.querySelector(".bar");
  bar.ariaLabel = `Time by stage: ${stages.map(({ name, seconds }) => `${LABELS[name]} ${formatTime(seconds)}`).join(", ")}`;
  bar.replaceChildren(...stages.map(toSegment));
  footer.querySelector(".stages").replaceChildren(...stages.map(toEntry));
  const facts = toFacts(timings, usage, stages).map((fact) => fact.replaceAll(" ", "\u00a0"));
  footer.querySelector(".facts").textContent = facts.join("\u00a0\u00b7 "); // lines break between facts alone
  footer.hidden = false;
}

function toSegment({ name, seconds }) {
  const segment = document.createElement("span");
  segment.className = `stage-${name}`;
  segment.style.flexGrow = seconds * 1e6; // shares of a whole only above 1
  segment.title = `${LABELS[name]} ${formatTime(seconds)}`;
  return segment;
}

function toEntry({ name, seconds }) {
  const entry = document.createElement("div");
  const term = document.createElement("dt");
  const value = document.createElement("dd");
  entry.className = `stage-${name}`;
  term.textContent = LABELS[name];
  value.textContent = formatTime(seconds);
  entry.append(term, value);
  return entry;
}

function toFacts(timings, usage, stages) {
  const { completion_tokens: tokens = 0, prompt_tokens: prompt = 0, prompt_tokens_details: details } = usage ?? {};
  const firstToken = stages.filter(({ name }) => name !== "decode" && name !== "relay").reduce((sum, { seconds }) => sum + seconds, 0);
  const facts = [`${formatTime(timings.e2e_s)} in all`];
  if (tokens) facts.push(`first token after ${formatTime(firstToken)}`);
  facts.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
  if (tokens > 1 && timings.decode_s > 0) facts.push(`${Math.round((tokens - 1) / timings.decode_s)} tokens/s`);
  facts.push(`${prompt} prompt tokens${details?.cached_tokens ? ` (${details.cached_tokens} cached)` : ""}`);
  return facts;
}
