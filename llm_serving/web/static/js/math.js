// LaTeX in Markdown: $a$, $$a$$, \(a\) and \[a\]. The plugin only finds the formulas; render.js draws them.

const PAIRS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];

/** A plugin of markdown-it. A formula becomes <span class="math"> or <div class="math math-block"> with its source. */
export function mathPlugin(markdown) {
  markdown.inline.ruler.before("escape", "math", inlineMath);
  markdown.block.ruler.before("fence", "math_block", blockMath, { alt: ["paragraph", "reference", "blockquote", "list"] });
  const escape = markdown.utils.escapeHtml;
  markdown.renderer.rules.math = (tokens, at) =>
    `<span class="math${tokens[at].meta ? " math-block" : ""}">${escape(tokens[at].content)}</span>`;
  markdown.renderer.rules.math_block = (tokens, at) => `<div class="math math-block">${escape(tokens[at].content)}</div>`;
}

function inlineMath(state, silent) {
  const { src, pos } = state;
  const pair = PAIRS.find(([open]) => src.startsWith(open, pos));
  if (!pair) return false;
  const [open, close, display] = pair;
  const begin = pos + open.length;
  const end = src.indexOf(close, begin);
  if (end <= begin || end >= state.posMax) return false;
  // Prices are no formula. In "$5 and $6", the second $ has a space before it and a digit after it.
  if (open === "$" && (/\s/.test(src[begin]) || /\s/.test(src[end - 1]) || /\d/.test(src[end + 1] ?? ""))) return false;
  if (!silent) {
    const token = state.push("math", "", 0);
    token.content = src.slice(begin, end).trim();
    token.meta = display;
  }
  state.pos = end + close.length;
  return true;
}

function blockMath(state, startLine, endLine, silent) {
  const start = state.bMarks[startLine] + state.tShift[startLine];
  const pair = PAIRS.find(([open, , display]) => display && state.src.startsWith(open, start));
  if (!pair) return false;
  const [open, close] = pair;
  const lines = [];
  for (let line = startLine; line < endLine; line += 1) {
    const from = line === startLine ? start + open.length : state.bMarks[line] + Math.min(state.tShift[line], state.blkIndent);
    const text = state.src.slice(from, state.eMarks[line]);
    const end = text.indexOf(close);
    if (end < 0) { lines.push(text); continue; }
    if (text.slice(end + close.length).trim() !== "") return false;
    if (silent) return true;
    lines.push(text.slice(0, end));
    const token = state.push("math_block", "", 0);
    token.block = true;
    token.content = lines.join("\n").trim();
    token.map = [startLine, line + 1];
    state.line = line + 1;
    return true;
  }
  return false;
}
