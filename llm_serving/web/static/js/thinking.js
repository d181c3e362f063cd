// Separates a model's thinking from its answer.

const BEGIN = "<think>";
const END = "</think>";

/** Returns {thought, answer, open}. `open` is true while the model thinks. `reasoning` is thinking that the server sent
 * in a separate field. */
export function splitThinking(text, reasoning = "") {
  const end = text.indexOf(END);
  const begins = text.trimStart().startsWith(BEGIN);
  // Some chat templates put the begin tag into the prompt, so the output has only the end tag.
  const ends = end >= 0 && (begins || !text.slice(0, end).includes(BEGIN));
  const clean = (part) => part.trimStart().replace(BEGIN, "").trim();
  if (ends) {
    return { thought: join(reasoning, clean(text.slice(0, end))), answer: text.slice(end + END.length).trimStart(), open: false };
  }
  if (begins) return { thought: join(reasoning, clean(text)), answer: "", open: true };
  return { thought: reasoning.trim(), answer: text, open: reasoning !== "" && text === "" };
}

function join(first, second) {
  return [first.trim(), second].filter(Boolean).join("\n\n");
}
