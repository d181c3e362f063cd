// Small helpers for elements. Text becomes a text node, never HTML.

export const $ = (id) => document.getElementById(id);

/** Makes an element. `attributes` may have `class`, `on<event>` functions, and any other attribute. */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Makes a screen reader speak a sentence. */
export function say(text) {
  $("said").textContent = text;
}

/** Copies a text to the clipboard. `navigator.clipboard` exists only with HTTPS or on localhost. Otherwise, a hidden
 * field with the text is selected and copied. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = element("textarea", { class: "unseen" });
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
  return undefined;
}

/** Makes the browser save a text as a file. */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = element("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}
