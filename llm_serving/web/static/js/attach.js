// Text files that the user attaches to a message. The browser reads the files, and their text goes to the model with the message.

import { $, element, say } from "./dom.js";
import { t } from "./i18n.js";

const MAX_FILES = 8;
const MAX_KB = 256;
const MAX_BYTES = MAX_KB * 1024;

/** The files of the message that is being written. */
export class Attachments {
  constructor() {
    this.files = [];
    $("attach").addEventListener("click", () => $("attach-file").click());
    $("attach-file").addEventListener("change", () => { this.add([...$("attach-file").files]); $("attach-file").value = ""; });
    let depth = 0;
    const carriesFiles = (event) => event.dataTransfer?.types.includes("Files");
    const show = (change) => { depth = Math.max(0, depth + change); $("drop").hidden = depth === 0; };
    addEventListener("dragenter", (event) => { if (carriesFiles(event)) show(1); });
    addEventListener("dragleave", (event) => { if (carriesFiles(event)) show(-1); });
    addEventListener("dragover", (event) => { if (carriesFiles(event)) event.preventDefault(); });
    addEventListener("drop", (event) => {
      if (!carriesFiles(event)) return;
      event.preventDefault();
      show(-depth);
      this.add([...event.dataTransfer.files]);
    });
  }

  /** Reads the chosen files. Refuses a file, with a reason, if it is too large or is not text. */
  async add(chosen) {
    const problems = [];
    for (const file of chosen) {
      if (this.files.length >= MAX_FILES) { problems.push(t("file_many", { limit: MAX_FILES })); break; }
      if (file.size > MAX_BYTES) { problems.push(t("file_big", { name: file.name, limit: MAX_KB })); continue; }
      const text = decode(await file.arrayBuffer());
      if (text === null) problems.push(t("file_binary", { name: file.name }));
      else this.files.push({ name: file.name.slice(0, 200), text });
    }
    this.draw(problems);
  }

  take() {
    const taken = this.files;
    this.files = [];
    this.draw([]);
    return taken;
  }

  draw(problems) {
    const entries = this.files.map((file) => element("li", {}, `${file.name} (${file.text.length})`,
      element("button", { type: "button", "aria-label": t("remove", { name: file.name }),
                          onclick: () => { this.files = this.files.filter((each) => each !== file); this.draw([]); } }, "×")));
    const notes = problems.map((problem) => element("li", { class: "error" }, problem));
    $("files").replaceChildren(...entries, ...notes);
    if (problems.length) say(problems.join(" "));
  }
}

function decode(bytes) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

/** Returns a message's text with its files, as the model gets it. */
export function textWithFiles(message) {
  const parts = (message.files ?? []).map(({ name, text }) => {
    const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${name}\n${fence}\n${text}\n${fence}`;
  });
  return [...parts, message.text].filter(Boolean).join("\n\n");
}
