// The gateway's API as the page uses it. The key lives in this module's memory and nowhere else.

import { readEvents } from "./events.js";

let apiKey = "";

export function setKey(key) {
  apiKey = key;
}

/** What the gateway refused, or that it could not be reached (status 0). `message` is for people. */
export class ApiError extends Error {
  constructor(message, { status = 0, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** The models of `/v1/models` that chat. Throws ApiError. */
export async function listModels() {
  const response = await call("v1/models");
  const { data } = await response.json();
  return data.filter(({ tasks }) => !tasks || tasks.includes("generate"));
}

/** The chunks of a streamed answer. Throws ApiError, or AbortError when `signal` says stop. */
export async function* streamAnswer(body, signal) {
  const wanted = { stream: true, stream_options: { include_usage: true }, timings: true };
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, ...wanted }),
    signal,
  });
  for await (const data of readChunks(response, signal)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message);
    yield chunk;
  }
  throw new ApiError("The connection ended before the answer did.");
}

async function* readChunks(response, signal) {
  try {
    yield* readEvents(response.body);
  } catch (error) {
    signal.throwIfAborted();
    throw new ApiError("The connection was lost before the answer was complete.");
  }
}

async function call(path, options = {}) {
  const headers = { ...options.headers, ...(apiKey && { authorization: `Bearer ${apiKey}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    options.signal?.throwIfAborted();
    throw new ApiError("The gateway cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await toError(response);
  return response;
}

async function toError(response) {
  const retryAfter = Number(response.headers.get("retry-after")) || null;
  const options = { status: response.status, retryAfter };
  try {
    return new ApiError((await response.json()).error.message, options);
  } catch {
    return new ApiError(`The gateway answered with status ${response.status}.`, options);
  }
}
