// Exports conversations as JSON (all branches) or Markdown (the shown messages), and imports them from JSON.

import { textWithFiles } from "./attach.js";
import { newConversation, shownPath } from "./tree.js";

const FORMAT = "llm-serving conversations 1";
const MAX_CHARACTERS = 32 * 1024 * 1024;

export function toJson(conversations) {
  return JSON.stringify({ format: FORMAT, conversations }, null, 1);
}

export function toMarkdown(conversation, names) {
  const parts = shownPath(conversation).map((message) => `## ${names[message.role]}\n\n${textWithFiles(message)}`);
  return `# ${conversation.title}\n\n${parts.join("\n\n")}\n`;
}

/** Returns a file name for a conversation. */
export function fileName(conversation, kind) {
  const name = conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 50);
  return `${name || "conversation"}.${kind}`;
}

/** Returns the conversations of an exported file, with new ids. Raises an error that says what is wrong. */
export function fromJson(text) {
  if (text.length > MAX_CHARACTERS) throw new Error(`> ${MAX_CHARACTERS} characters`);
  const document = JSON.parse(text);
  if (document?.format !== FORMAT) throw new Error(`"format" is not "${FORMAT}"`);
  if (!Array.isArray(document.conversations)) throw new Error('"conversations" is not a list');
  return document.conversations.map(checked);
}

function checked(raw) {
  const conversation = { ...newConversation(), title: string(raw?.title, "title", 500), named: raw.named === true };
  for (const name of ["created", "changed"]) if (Number.isFinite(raw[name])) conversation[name] = raw[name];
  if (!Array.isArray(raw.messages)) throw new Error('"messages" is not a list');
  const known = new Set([""]);
  for (const each of raw.messages) {
    const message = checkedMessage(each);
    // Require that a parent comes before its children. Then the tree has no cycle.
    if (known.has(message.id) || !known.has(message.parent)) throw new Error(`message ${message.id} has a wrong place`);
    known.add(message.id);
    conversation.messages.push(message);
  }
  for (const message of conversation.messages) conversation.chosen[message.parent] = message.id;
  for (const message of conversation.messages) {
    if (raw.chosen?.[message.parent] === message.id) conversation.chosen[message.parent] = message.id;
  }
  return conversation;
}

function checkedMessage(raw) {
  const message = { id: string(raw?.id, "id", 20), parent: string(raw.parent, "parent", 20), role: raw.role,
                    text: string(raw.text, "text") };
  if (!/^[1-9]\d*$/.test(message.id)) throw new Error('"id" is not a number');
  if (!["user", "assistant"].includes(message.role)) throw new Error('"role" is neither user nor assistant');
  if (raw.thought !== undefined) message.thought = string(raw.thought, "thought");
  if (raw.files !== undefined) {
    if (!Array.isArray(raw.files)) throw new Error('"files" is not a list');
    message.files = raw.files.map((file) => ({ name: string(file?.name, "name", 200), text: string(file.text, "text") }));
  }
  return message;
}

function string(value, name, limit = MAX_CHARACTERS) {
  if (typeof value !== "string" || value.length > limit) throw new Error(`"${name}" is no text, or too long`);
  return value;
}
