// Texts of the pages in English and Chinese. The tables are in static/texts; a test compares their keys.

const LANGUAGES = ["en", "zh"];
const tables = {};
let language = "en";

/** Loads the tables of all languages. `names` are the starts of their paths below static/texts. */
export async function loadTexts(names) {
  for (const each of LANGUAGES) {
    const parts = await Promise.all(names.map(async (name) => (await fetch(`/static/texts/${name}${each}.json`)).json()));
    tables[each] = Object.assign({}, ...parts);
  }
}

/** Chooses the language of the texts. An empty name stands for the browser's language. */
export function setLanguage(wanted) {
  const preferred = wanted ? [wanted] : navigator.languages;
  const found = preferred.map((each) => each.slice(0, 2).toLowerCase()).find((each) => LANGUAGES.includes(each));
  language = found || "en";
  document.documentElement.lang = language;
  fill(document);
}

/** Returns the text of a key in the chosen language. `{name}` stands for a value. */
export function t(key, values = {}) {
  return tables[language][key].replace(/\{(\w+)\}/g, (_, name) => String(values[name]));
}

function fill(root) {
  for (const node of root.querySelectorAll("[data-i18n]")) node.textContent = t(node.dataset.i18n);
  for (const node of root.querySelectorAll("[data-i18n-label]")) node.setAttribute("aria-label", t(node.dataset.i18nLabel));
  for (const node of root.querySelectorAll("[data-i18n-title]")) node.title = t(node.dataset.i18nTitle);
  for (const node of root.querySelectorAll("[data-i18n-placeholder]")) node.placeholder = t(node.dataset.i18nPlaceholder);
}
