// Client of the gateway's API. The key stays in memory; some pages also store it for the tab.

import { readEvents } from "./events.js";

let apiKey = "";

export function setKey(key) {
  apiKey = key;
}

/** An error of the gateway. `message` is shown to the user. Status 0: the gateway could not be reached. */
export class ApiError extends Error {
  constructor(message, { status = 0, retryAfter = null, param = null } = {}) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
    this.param = param;
  }
}

/** The models of `/v1/models`. Throws ApiError. */
export async function listModels() {
  return (await read("v1/models")).data;
}

/** The deployments of `/v1/applications`. Throws ApiError. */
export async function listApplications() {
  return (await read("v1/applications")).data;
}

/** Read a JSON answer. Throws ApiError. */
export async function read(path) {
  return (await call(path)).json();
}

/** Create a key. Only this answer contains the key itself. Throws ApiError. */
export async function createKey(body) {
  return (await post("v1/admin/keys", body)).json();
}

/** Throws ApiError. */
export async function rotateKey(name) {
  return (await call(`v1/admin/keys/${encodeURIComponent(name)}:rotate`, { method: "POST" })).json();
}

/** Throws ApiError. */
export async function revokeKey(name) {
  return (await call(`v1/admin/keys/${encodeURIComponent(name)}`, { method: "DELETE" })).json();
}

/** Count the tokens of messages. Returns `{count, max_model_len, frames}`. Throws ApiError. */
export async function countTokens(body) {
  return (await post("tokenize", body)).json();
}

/** A normalized vector for each input, in order. Throws ApiError, or AbortError when `signal` is aborted. */
export async function embed(body, signal) {
  const response = await post("v1/embeddings", { ...body, encoding_format: "base64" }, signal);
  try {
    return (await response.json()).data.map(({ embedding }) => toVector(embedding));
  } catch {
    signal.throwIfAborted();
    throw new ApiError("The connection was lost before the answer was complete.");
  }
}

function toVector(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}

/** The chunks of a streamed answer. Throws ApiError, or AbortError when `signal` is aborted. */
export async function* streamAnswer(body, signal) {
  const wanted = { stream: true, stream_options: { include_usage: true }, timings: true };
  const response = await post("v1/chat/completions", { ...body, ...wanted }, signal);
  for await (const data of readChunks(response, signal)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message);
    yield chunk;
  }
  throw new ApiError("The connection ended before the answer was complete.");
}

async function* readChunks(response, signal) {
  try {
    yield* readEvents(response.body);
  } catch (error) {
    signal.throwIfAborted();
    throw new ApiError("The connection was lost before the answer was complete.");
  }
}

function post(path, body, signal) {
  const headers = { "content-type": "application/json" };
  return call(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

async function call(path, options = {}) {
  const key = apiKey;
  const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    options.signal?.throwIfAborted();
    throw new ApiError("The gateway cannot be reached. Is it still running?");
  }
  if (response.status === 401 && key !== apiKey) return call(path, options); // the user has entered another key meanwhile
  if (!response.ok) throw await toError(response);
  return response;
}

async function toError(response) {
  const retryAfter = Number(response.headers.get("retry-after")) || null;
  const options = { status: response.status, retryAfter };
  try {
    const { message, param } = (await response.json()).error;
    return new ApiError(message, { ...options, param });
  } catch {
    return new ApiError(`The gateway answered with status ${response.status}.`, options);
  }
}
