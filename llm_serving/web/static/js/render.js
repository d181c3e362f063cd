// Turns a model's Markdown into elements. Three measures keep a model's output from becoming active HTML:
// markdown-it escapes HTML. DOMPurify keeps only the elements and attributes below. The page's Content-Security-Policy
// forbids inline scripts and all HTML that DOMPurify has not made (Trusted Types).

import hljs from "../vendor/highlight/highlight.min.js";
import { copy, element } from "./dom.js";
import { t } from "./i18n.js";
import { mathPlugin } from "./math.js";

const { DOMPurify, katex, markdownit } = globalThis;
const MAX_COLOURED = 50000; // characters of a code block that gets colours
const TEXT = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "div", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p",
                 "pre", "s", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["class", "href", "start", "title"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  RETURN_DOM_FRAGMENT: true,
};
const COLOURS = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };

const markdown = markdownit({ html: false, linkify: true, breaks: false }).use(mathPlugin);
// Show a link instead of an image. Loading the image would reveal to its host that a user reads this text.
markdown.renderer.rules.image = (tokens, at) => {
  const escape = markdown.utils.escapeHtml;
  const source = tokens[at].attrGet("src");
  return `<a href="${escape(source)}">${escape(tokens[at].content || source)}</a>`;
};
for (const name of ["td_open", "th_open"]) {
  markdown.renderer.rules[name] = (tokens, at, options, _, self) => {
    const side = /text-align:(right|center)/.exec(tokens[at].attrGet("style") ?? "")?.[1];
    tokens[at].attrs = side ? [["class", side]] : null;
    return self.renderToken(tokens, at, options);
  };
}

/** Returns the elements of a Markdown text. */
export function renderMarkdown(text) {
  const fragment = DOMPurify.sanitize(markdown.render(text), TEXT);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const table of fragment.querySelectorAll("table")) wrap(table);
  for (const formula of fragment.querySelectorAll(".math")) drawFormula(formula);
  for (const code of fragment.querySelectorAll("pre > code")) code.parentNode.replaceWith(codeBlock(code));
  return fragment;
}

function wrap(table) {
  const box = element("div", { class: "wide-content", tabindex: "0" });
  table.replaceWith(box);
  box.append(table);
}

function drawFormula(formula) {
  const source = formula.textContent;
  const displayMode = formula.classList.contains("math-block");
  try {
    katex.render(source, formula, { displayMode, trust: false, strict: "ignore", maxSize: 20, maxExpand: 200 });
  } catch {
    formula.replaceChildren(element("code", {}, source)); // show the source if it is not LaTeX, or not yet complete
  }
}

function codeBlock(code) {
  const source = code.textContent;
  const language = /language-([\w+#-]+)/.exec(code.className)?.[1] ?? "";
  const button = element("button", { type: "button", "aria-label": t("copy_code") }, t("copy"));
  button.addEventListener("click", async () => {
    await copy(source.replace(/\n$/, ""));
    button.textContent = t("copied");
  });
  const head = element("div", { class: "code-head" }, element("span", {}, language), button);
  const shown = element("code", {}, source);
  if (language && hljs.getLanguage(language) && source.length < MAX_COLOURED) {
    const coloured = hljs.highlight(source, { language, ignoreIllegals: true }).value;
    shown.replaceChildren(DOMPurify.sanitize(coloured, COLOURS));
  }
  return element("div", { class: "code" }, head, element("pre", { tabindex: "0" }, shown));
}
