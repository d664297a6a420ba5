// Shows the timings of an answer: one line, which expands to a bar of the stages, their durations, and more facts.

const LABELS = {
  ingest: "ingest",
  image_decode: "image decode",
  queue: "queue",
  media_decode: "media decode",
  preprocess: "preprocess",
  vision: "vision",
  prefill: "prefill",
  decode: "decode",
  relay: "relay",
};

/** The stages in order, without stages of 0 seconds. */
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
  const { brief, more } = toFacts(timings, usage, stages);
  footer.querySelector("summary").textContent = join(brief);
  footer.querySelector(".facts").textContent = join(more);
  footer.hidden = false;
}

function toSegment({ name, seconds }) {
  const segment = document.createElement("span");
  segment.className = `stage-${name}`;
  segment.style.flexGrow = seconds * 1e6; // a sum of flex-grow below 1 would not fill the bar
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
  const brief = [formatTime(timings.e2e_s), `${tokens} token${tokens === 1 ? "" : "s"}`];
  if (tokens > 1 && timings.decode_s > 0) brief.push(`${Math.round((tokens - 1) / timings.decode_s)} tokens/s`);
  const more = [`${prompt} prompt tokens${details?.cached_tokens ? ` (${details.cached_tokens} cached)` : ""}`];
  if (tokens) more.unshift(`first token after ${formatTime(firstToken)}`);
  return { brief, more };
}

/** Join facts so that lines break only between them. */
function join(facts) {
  return facts.map((fact) => fact.replaceAll(" ", "\u00a0")).join("\u00a0\u00b7 ");
}
