// Draws the messages of the current conversation, and updates an answer while it is streamed.

import { $, copy, element } from "./dom.js";
import { t } from "./i18n.js";
import { renderMarkdown } from "./render.js";
import { splitThinking } from "./thinking.js";
import { parentOf, shownPath, siblings } from "./tree.js";

const NEAR_END = 80; // pixels: the page follows a growing answer if its end is at most this far below

/** The list of messages. `actions` has edit, retry, choose and isRunning. */
export class Messages {
  constructor(actions) {
    this.actions = actions;
    this.turns = new Map();
    this.timers = new Map();
    this.cost = 0;
  }

  draw(conversation) {
    this.conversation = conversation;
    this.turns.clear();
    const path = shownPath(conversation);
    $("log").replaceChildren(...path.map((message) => this.turn(message)));
    if (!path.length) $("log").append(element("p", { class: "empty" }, t("empty")));
    $("log").scrollTop = $("log").scrollHeight;
  }

  /** Draws a message again after a short delay. The delay grows with the time that the last drawing took. */
  changed(message) {
    if (this.timers.has(message)) return;
    this.timers.set(message, setTimeout(() => this.update(message), Math.max(30, 5 * this.cost)));
  }

  update(message) {
    clearTimeout(this.timers.get(message));
    this.timers.delete(message);
    const turn = this.turns.get(message);
    if (!turn) return;
    const log = $("log");
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
    const opened = turn.querySelector(".thought")?.open;
    const begin = performance.now();
    const fresh = this.turn(message);
    this.cost = performance.now() - begin;
    if (opened && fresh.querySelector(".thought")) fresh.querySelector(".thought").open = true;
    turn.replaceWith(fresh);
    if (follows) log.scrollTop = log.scrollHeight;
  }

  turn(message) {
    const isUser = message.role === "user";
    const runs = this.actions.isRunning(message);
    const who = t(isUser ? "question_of" : "answer_of");
    const node = element("article", { class: `turn ${message.role}${runs ? " waiting" : ""}`, "aria-label": who },
      isUser ? this.question(message) : this.answer(message));
    if (message.error) node.append(element("p", { class: "error" }, errorText(message.error)));
    node.append(this.tools(message, runs));
    this.turns.set(message, node);
    return node;
  }

  question(message) {
    const bubble = element("div", { class: "bubble" }, message.text);
    for (const file of message.files ?? []) {
      bubble.append(element("details", { class: "attached" }, element("summary", {}, file.name),
        element("pre", { tabindex: "0" }, file.text)));
    }
    return bubble;
  }

  answer(message) {
    const { thought, answer, open } = splitThinking(message.text, message.thought);
    const bubble = element("div", { class: "bubble" });
    if (thought || open) {
      bubble.append(element("details", { class: "thought" }, element("summary", {}, t("thinking")),
        element("div", { class: "body" }, renderMarkdown(thought))));
    }
    bubble.append(element("div", { class: "body" }, renderMarkdown(answer)));
    bubble.hidden = Boolean(message.error) && !thought && !answer;
    return bubble;
  }

  tools(message, runs) {
    const bar = element("div", { class: "tools" });
    const all = siblings(this.conversation, message);
    if (all.length > 1) {
      const at = all.indexOf(message);
      const button = (key, sign, step) => element("button", {
        type: "button", "aria-label": t(key), disabled: !all[at + step], onclick: () => this.actions.choose(message, step),
      }, sign);
      bar.append(button("previous", "‹", -1),
        element("span", { class: "facts", role: "img", "aria-label": t("version", { n: at + 1, of: all.length }) }, `${at + 1}/${all.length}`),
        button("next", "›", 1));
    }
    if (!runs) {
      const add = (key, action, label) => bar.append(
        element("button", { type: "button", class: key, "aria-label": label, onclick: action }, t(key)));
      if (message.role === "user") add("edit", () => this.edit(message));
      else {
        const copied = message.text;
        add("copy", () => copy(splitThinking(copied, message.thought).answer), t("copy_answer"));
        if (parentOf(this.conversation, message)) add("retry", () => this.actions.retry(message));
      }
    }
    bar.append(element("span", { class: "facts" }, factsText(message.facts)));
    return bar;
  }

  /** Replaces a question by a field with its text. */
  edit(message) {
    const turn = this.turns.get(message);
    const field = element("textarea", { rows: "4", "aria-label": t("edit") });
    field.value = message.text;
    const leave = () => { this.update(message); this.turns.get(message).querySelector("button.edit")?.focus(); };
    const save = () => { if (field.value.trim()) this.actions.edit(message, field.value); };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); save(); }
      if (event.key === "Escape") { event.stopPropagation(); leave(); }
    });
    const bubble = element("div", { class: "bubble editing" }, field, element("div", { class: "row end" },
      element("button", { type: "button", onclick: leave }, t("cancel")),
      element("button", { type: "button", class: "primary save", onclick: save }, t("save_send"))));
    turn.replaceChildren(bubble);
    field.focus();
  }

  /** Edits the last question, if there is one. */
  editLast() {
    const last = shownPath(this.conversation).filter((message) => message.role === "user").pop();
    if (last) this.edit(last);
  }
}

export function errorText(error) {
  return error.key ? t(error.key, error.values) : error.message;
}

function factsText(facts) {
  if (!facts) return "";
  return [
    facts.first === undefined ? "" : t("first_token", { ms: facts.first }),
    facts.rate ? t("tokens_per_second", { n: facts.rate }) : "",
    facts.tokens ? t("tokens", { n: facts.tokens }) : "",
    facts.reason ? t(facts.reason) : "",
  ].filter(Boolean).join(" · ");
}
