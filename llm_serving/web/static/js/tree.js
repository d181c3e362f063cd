// A conversation is a tree of messages. An edited message or a second answer is a sibling of the first one.
// `chosen` maps the id of each message, or "" for the root, to the id of the child that is shown.

export function newConversation() {
  const now = Date.now();
  return { id: crypto.randomUUID?.() ?? `${now}-${Math.random()}`, title: "", named: false, created: now, changed: now,
           messages: [], chosen: {} };
}

/** Adds a message below `parent`, or at the root if `parent` is null. Shows the message and returns it. */
export function addMessage(conversation, parent, message) {
  const number = conversation.messages.reduce((most, each) => Math.max(most, Number(each.id)), 0) + 1;
  const added = { id: String(number), parent: parent === null ? "" : parent.id, ...message };
  conversation.messages.push(added);
  conversation.chosen[added.parent] = added.id;
  conversation.changed = Date.now();
  if (!conversation.named && message.role === "user" && added.parent === "") conversation.title = titleOf(message);
  return added;
}

function titleOf(message) {
  const line = message.text.trim().split("\n")[0] || message.files?.[0]?.name || "";
  return line.length > 60 ? line.slice(0, 59) + "…" : line;
}

/** Returns the messages that are shown, from the first to the last. */
export function shownPath(conversation) {
  const found = [];
  for (let id = conversation.chosen[""]; id; id = conversation.chosen[id]) {
    const message = conversation.messages.find((each) => each.id === id);
    if (!message) break;
    found.push(message);
  }
  return found;
}

/** Returns the messages with the same parent, oldest first, the message itself included. */
export function siblings(conversation, message) {
  return conversation.messages.filter((each) => each.parent === message.parent);
}

/** Returns the parent of a message, or null. */
export function parentOf(conversation, message) {
  return conversation.messages.find((each) => each.id === message.parent) ?? null;
}

/** Shows the previous (-1) or next (1) sibling of a message. */
export function chooseSibling(conversation, message, step) {
  const all = siblings(conversation, message);
  const next = all[all.indexOf(message) + step];
  if (next) conversation.chosen[message.parent] = next.id;
}

/** Returns whether a title or a message of a conversation contains a text. */
export function contains(conversation, text) {
  const wanted = text.trim().toLowerCase();
  return [conversation.title, ...conversation.messages.map((each) => each.text)]
    .some((each) => each.toLowerCase().includes(wanted));
}
