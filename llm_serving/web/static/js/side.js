// The list of conversations: search, choose, rename, delete, export, import.

import { ask } from "./ask.js";
import { $, download, element, say } from "./dom.js";
import { t } from "./i18n.js";
import { fileName, fromJson, toJson, toMarkdown } from "./transfer.js";
import { contains } from "./tree.js";

/** The list next to the messages. `actions` has create, pick, rename, remove, imported, and `all` with the list. */
export class Side {
  constructor(actions) {
    this.actions = actions;
    $("new").addEventListener("click", () => { actions.create(); this.show(false); $("text").focus(); });
    $("search").addEventListener("input", () => this.draw());
    $("open-side").addEventListener("click", () => this.show(true));
    $("close-side").addEventListener("click", () => this.show(false));
    $("veil").addEventListener("click", () => this.show(false));
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => this.importFile());
    $("export-all").addEventListener("click", () => download("conversations.json", "application/json", toJson(actions.all())));
    addEventListener("click", (event) => {
      for (const menu of document.querySelectorAll("#list details[open]")) if (!menu.contains(event.target)) menu.open = false;
    });
  }

  /** Shows or hides the list on a phone. */
  show(shown) {
    if (document.body.classList.contains("listed") === shown) return;
    document.body.classList.toggle("listed", shown);
    $("veil").hidden = !shown;
    $("open-side").setAttribute("aria-expanded", String(shown));
    (shown ? $("search") : $("open-side")).focus();
  }

  draw() {
    const wanted = $("search").value;
    const found = this.actions.all().filter((conversation) => contains(conversation, wanted));
    $("list").replaceChildren(...found.map((conversation) => this.entry(conversation)));
    $("nothing").hidden = found.length > 0 || wanted === "";
    $("nothing").textContent = t("nothing_found");
  }

  entry(conversation) {
    const title = conversation.title || t("untitled");
    const isCurrent = conversation === this.actions.current();
    const item = (key, action) => element("button", { type: "button", class: key, onclick: () => { menu.open = false; action(); } }, t(key));
    const menu = element("details", {},
      element("summary", { "aria-label": t("more", { title }) }, "⋯"),
      element("div", { class: "menu" },
        item("rename", () => this.rename(conversation)),
        item("export_json", () => download(fileName(conversation, "json"), "application/json", toJson([conversation]))),
        item("export_markdown", () => download(fileName(conversation, "md"), "text/markdown", this.markdown(conversation))),
        item("delete", () => this.remove(conversation))));
    menu.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !menu.open) return;
      event.stopPropagation();
      menu.open = false;
      menu.firstChild.focus();
    });
    return element("li", { class: isCurrent ? "current" : "" },
      element("button", { type: "button", class: "pick", "aria-current": isCurrent && "true",
                          onclick: () => { this.actions.pick(conversation); this.show(false); } }, title),
      menu);
  }

  markdown(conversation) {
    return toMarkdown(conversation, { user: t("question_of"), assistant: t("answer_of") });
  }

  async rename(conversation) {
    const title = await ask(t("rename"), t("rename"), conversation.title);
    if (title) this.actions.rename(conversation, title);
  }

  async remove(conversation) {
    const title = conversation.title || t("untitled");
    if (await ask(t("delete_question", { title }), t("delete"))) this.actions.remove(conversation);
  }

  async importFile() {
    const [file] = $("import-file").files;
    $("import-file").value = "";
    let text;
    try {
      const found = fromJson(await file.text());
      await this.actions.imported(found);
      text = t("imported", { n: found.length });
    } catch (error) {
      text = t("bad_import", { reason: error.message });
    }
    $("nothing").textContent = text;
    $("nothing").hidden = false;
    say(text);
  }
}
