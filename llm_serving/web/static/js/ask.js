// One question in a dialog: for a text (rename), or for a yes (delete).

import { $ } from "./dom.js";

/** Asks. Returns the text, or true for a question without a field, or null if the user cancels. */
export function ask(title, yes, text = null) {
  const dialog = $("ask");
  $("ask-title").textContent = title;
  $("ask-yes").textContent = yes;
  $("ask-text").hidden = text === null;
  $("ask-text").value = text ?? "";
  $("ask-no").onclick = () => dialog.close("");
  dialog.returnValue = "";
  dialog.showModal();
  if (text !== null) $("ask-text").select();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      if (dialog.returnValue !== "yes") resolve(null);
      else resolve(text === null ? true : $("ask-text").value.trim() || null);
    }, { once: true });
  });
}
