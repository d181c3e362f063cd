// The chat page: connects the list of conversations, the messages, the field and the server.

import { streamInto } from "./answer.js";
import { isReady, modelNames } from "./api.js";
import { Attachments } from "./attach.js";
import { $, element, say } from "./dom.js";
import { loadTexts, setLanguage, t } from "./i18n.js";
import { errorText, Messages } from "./messages.js";
import { Settings } from "./settings.js";
import { Side } from "./side.js";
import { loadConversations, loadSettings, onOtherTab, removeConversation, saveConversation } from "./store.js";
import { splitThinking } from "./thinking.js";
import { addMessage, chooseSibling, newConversation, parentOf, shownPath } from "./tree.js";

await loadTexts([""]);
setLanguage(loadSettings().language);

const LOADING_MS = 2000; // time between two requests for the state of a server that loads its model
let conversations = [];
let current = newConversation();
const running = new Map(); // conversation -> {controller, message} of the answer that is being streamed

const settings = new Settings(drawAll, connect);
const attachments = new Attachments();
const messages = new Messages({
  isRunning: (message) => [...running.values()].some((each) => each.message === message),
  choose(message, step) { chooseSibling(current, message, step); keep(current); drawMessages(); },
  edit(message, text) {
    if (running.has(current)) return;
    const parent = parentOf(current, message);
    answer(current, addMessage(current, parent, { role: "user", text, files: message.files }));
  },
  retry(message) { if (!running.has(current)) answer(current, parentOf(current, message)); },
});
const side = new Side({
  all: () => conversations,
  current: () => current,
  create() { current = newConversation(); drawAll(); },
  pick(conversation) { current = conversation; drawAll(); },
  rename(conversation, title) { conversation.title = title; conversation.named = true; keep(conversation); drawAll(); },
  remove,
  async imported(found) {
    for (const conversation of found) await saveConversation(conversation);
    conversations = [...found, ...conversations];
    if (found.length) [current] = found;
    drawAll();
  },
});

function drawAll() {
  side.draw();
  drawMessages();
}

function drawMessages() {
  messages.draw(current);
  $("title").textContent = current.title || t("untitled");
  document.title = `${current.title || t("untitled")} – llm-serving`;
  drawButton();
}

function drawButton() {
  const stops = running.has(current);
  $("send").textContent = t(stops ? "stop" : "send");
  $("send").classList.toggle("stop", stops);
  $("send").classList.toggle("primary", !stops);
}

async function keep(conversation) {
  try {
    await saveConversation(conversation);
  } catch (error) {
    say(t("storage_full", { reason: error?.message ?? "" }));
  }
}

async function remove(conversation) {
  running.get(conversation)?.controller.abort();
  conversations = conversations.filter((each) => each !== conversation);
  if (conversation === current) current = newConversation();
  drawAll();
  $("text").focus();
  await removeConversation(conversation.id);
}

function send() {
  if (running.has(current)) { running.get(current).controller.abort(); return; }
  const text = $("text").value;
  if (!text.trim() && !attachments.files.length) return;
  const files = attachments.take();
  const parent = shownPath(current).pop() ?? null;
  const question = addMessage(current, parent, { role: "user", text, files: files.length ? files : undefined });
  $("text").value = "";
  grow();
  answer(current, question);
}

async function answer(conversation, question) {
  const before = shownPath(conversation);
  const asked = before.slice(0, before.indexOf(question) + 1);
  const message = addMessage(conversation, question, { role: "assistant", text: "" });
  const controller = new AbortController();
  running.set(conversation, { controller, message });
  conversations = [conversation, ...conversations.filter((each) => each !== conversation)];
  keep(conversation);
  drawAll();
  say(t("answering"));
  await streamInto(message, asked, settings.values, $("model").value, controller.signal, () => messages.changed(message));
  running.delete(conversation);
  conversation.changed = Date.now();
  if (conversations.includes(conversation)) keep(conversation);
  messages.update(message);
  drawButton();
  const { answer: said } = splitThinking(message.text, message.thought);
  say(message.error ? errorText(message.error) : t("answered", { text: said }));
  if (message.error?.code === "key") settings.askKey();
  if (message.error) connect();
}

async function connect() {
  try {
    const names = await modelNames();
    const chosen = $("model").value || settings.values.model;
    $("model").replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    if (names.includes(chosen)) $("model").value = chosen;
    const ready = await isReady();
    drawState(ready ? "ready" : "loading");
    if (!ready) setTimeout(connect, LOADING_MS);
  } catch (error) {
    drawState("down");
    if (error.code === "key") settings.askKey();
  }
}

function drawState(state) {
  $("state").className = state;
  $("state").setAttribute("aria-label", t(state));
  $("state").title = t(state);
}

function grow() {
  $("text").style.height = "auto";
  $("text").style.height = `${$("text").scrollHeight}px`;
}

$("send").addEventListener("click", send);
$("model").addEventListener("change", () => settings.set("model", $("model").value));
$("text").addEventListener("input", grow);
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running.has(current)) send();
  }
  if (event.key === "ArrowUp" && $("text").value === "" && !running.has(current)) { event.preventDefault(); messages.editLast(); }
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (document.body.classList.contains("listed")) side.show(false);
    else running.get(current)?.controller.abort();
  }
  if (event.key === "k" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); side.show(true); $("search").focus(); }
});
onOtherTab(async () => {
  const kept = new Set([current, ...running.keys()]);
  const known = new Map(conversations.filter((each) => kept.has(each)).map((each) => [each.id, each]));
  conversations = (await loadConversations()).map((each) => known.get(each.id) ?? each);
  side.draw();
});
try { conversations = await loadConversations(); } catch (error) { say(t("storage_full", { reason: error?.message ?? "" })); }
if (conversations.length) [current] = conversations;
drawAll();
await connect();
$("text").focus();
document.body.dataset.ready = "true";
