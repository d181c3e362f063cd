// Requests to the server that the page comes from, and its streamed answers.

import { apiKey } from "./store.js";

/** An error that the page shows: the text `key` of i18n.js with `values`, or the server's own sentence in `message`. */
export class ApiError extends Error {
  constructor(message, { key = null, values = {}, code = null } = {}) {
    super(message);
    this.key = key;
    this.values = values;
    this.code = code;
  }
}

/** Sends a request. Raises ApiError unless the status is a success. */
export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST", headers, signal, cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(error.message, { key: "gone" });
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  let error = {};
  try { error = (await response.json()).error ?? {}; } catch { /* no JSON: the response comes from a proxy, for example */ }
  const reason = error.message ?? `HTTP ${response.status}`;
  if (response.status === 401) return new ApiError(reason, { key: "key_needed", code: "key" });
  if (response.status === 429) {
    const seconds = response.headers.get("Retry-After") ?? "1";
    return new ApiError(reason, { key: "busy", values: { seconds, reason } });
  }
  return new ApiError(reason, { code: error.code });
}

/** Returns the names of the models that the key may use. */
export async function modelNames() {
  return (await (await call("/v1/models")).json()).data.map((model) => model.id);
}

/** Returns whether the server answers requests now. Raises ApiError if it cannot be reached. */
export async function isReady() {
  try {
    await call("/health/ready");
    return true;
  } catch (error) {
    if (error.key === "gone") throw error;
    return false;
  }
}

/** Yields the pieces of a streamed answer: {text, thought, reason, tokens}. */
export async function* streamAnswer(path, body, signal) {
  const response = await call(path, { body, signal });
  for await (const event of serverEvents(response)) {
    if (event.error) throw new ApiError(event.error.message, { code: event.error.code });
    const choice = event.choices?.[0];
    yield {
      text: choice?.delta?.content ?? choice?.text ?? "",
      thought: choice?.delta?.reasoning_content ?? "",
      reason: choice?.finish_reason ?? null,
      tokens: event.usage?.completion_tokens ?? null,
    };
  }
}

async function* serverEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    let read;
    try { read = await reader.read(); } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(error.message, { key: "gone" });
    }
    if (read.done) throw new ApiError("the stream ended early", { key: "gone" });
    const parts = (buffer + read.value).split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: ?/, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
