// Asks the server for one answer and measures it.

import { streamAnswer } from "./api.js";
import { textWithFiles } from "./attach.js";
import { splitThinking } from "./thinking.js";

const NUMBERS = ["temperature", "top_p", "top_k", "repetition_penalty", "max_tokens", "seed"];
const COMPLETION_TOKENS = 128; // limit for a model without a chat template, whose text has no natural end

/** Returns path and body of the request for an answer to `messages`. */
function requestOf(messages, settings, model, isChat) {
  const body = { stream: true, stream_options: { include_usage: true } };
  if (model) body.model = model;
  for (const name of NUMBERS) if (settings[name] !== undefined && settings[name] !== "") body[name] = Number(settings[name]);
  const turns = messages.map((message) => ({
    role: message.role,
    content: message.role === "user" ? textWithFiles(message) : splitThinking(message.text).answer,
  })).filter((turn) => turn.content);
  if (!isChat) {
    return ["/v1/completions", { max_tokens: COMPLETION_TOKENS, ...body, prompt: turns.map((turn) => turn.content).join("") }];
  }
  const system = (settings.system ?? "").trim();
  return ["/v1/chat/completions", { ...body, messages: system ? [{ role: "system", content: system }, ...turns] : turns }];
}

/** Streams an answer into `message`. Calls `changed` after each piece. Stores an error in `message.error`. */
export async function streamInto(message, messages, settings, model, signal, changed) {
  try {
    await stream(message, requestOf(messages, settings, model, true), signal, changed);
  } catch (error) {
    if (error.code !== "no_chat_template") return fail(message, error);
    try {
      await stream(message, requestOf(messages, settings, model, false), signal, changed);
    } catch (second) {
      return fail(message, second);
    }
  }
  return undefined;
}

function fail(message, error) {
  if (error.name === "AbortError") message.facts = { ...message.facts, reason: "stopped" };
  else message.error = { key: error.key ?? null, values: error.values ?? {}, message: error.message, code: error.code ?? null };
}

async function stream(message, [path, body], signal, changed) {
  const begin = performance.now();
  let first = 0;
  let last = 0;
  let pieces = 0;
  for await (const piece of streamAnswer(path, body, signal)) {
    if (piece.text || piece.thought) {
      last = performance.now();
      first ||= last;
      pieces += 1;
      message.text += piece.text;
      if (piece.thought) message.thought = (message.thought ?? "") + piece.thought;
    }
    const tokens = piece.tokens ?? pieces;
    const seconds = (last - first) / 1000;
    if (first) {
      message.facts = {
        first: Math.round(first - begin), tokens,
        rate: tokens > 1 && seconds > 0 ? Math.round((tokens - 1) / seconds * 10) / 10 : null,
        reason: piece.reason === "length" || message.facts?.reason === "cut" ? "cut" : null,
      };
    }
    changed();
  }
}
