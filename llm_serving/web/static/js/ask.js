// A dialog with one question. The user enters a text (to rename) or confirms (to delete).

import { $ } from "./dom.js";

/** Shows the question. Returns the entered text, or true if there is no text field, or null if the user cancels. */
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
