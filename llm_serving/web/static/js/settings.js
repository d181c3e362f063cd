// The dialog of settings. The browser stores all settings except the API key, which lasts as long as the tab.

import { $ } from "./dom.js";
import { setLanguage } from "./i18n.js";
import { apiKey, loadSettings, saveSettings, setApiKey } from "./store.js";

const FIELDS = ["system", "temperature", "top_p", "top_k", "repetition_penalty", "max_tokens", "seed", "language", "theme"];

/** The settings. `changed` is called after a change of the language, `keyed` after a change of the key. */
export class Settings {
  constructor(changed, keyed) {
    this.values = loadSettings();
    for (const name of FIELDS) {
      $(name).value = this.values[name] ?? "";
      $(name).addEventListener("change", () => {
        if (!$(name).checkValidity()) { $(name).reportValidity(); return; }
        this.set(name, $(name).value);
        if (name === "theme") this.applyTheme();
        if (name === "language") { setLanguage(this.values.language); changed(); }
      });
    }
    $("key").value = apiKey();
    $("key").addEventListener("change", () => { setApiKey($("key").value.trim()); keyed(); });
    $("settings-open").addEventListener("click", () => $("settings").showModal());
    this.applyTheme();
  }

  set(name, value) {
    this.values[name] = value;
    saveSettings(this.values);
  }

  applyTheme() {
    document.documentElement.dataset.theme = this.values.theme ?? "";
  }

  /** Opens the dialog at the field of the key. */
  askKey() {
    if (!$("settings").open) $("settings").showModal();
    $("key").focus();
  }
}
