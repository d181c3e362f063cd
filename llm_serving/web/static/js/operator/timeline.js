// Reads and draws the timeline of one request: its phases in order, with the chunks of its prompt.

import { call } from "../api.js";
import { $, element } from "../dom.js";
import { t } from "../i18n.js";
import { milliseconds, partName } from "./reasons.js";

const PHASES = { queued: "queue", under_way: "tokenise" }; // other phases have the same name as their part of the receipt
const MAX_READS = 3; // the recorder may write a request's end half a second late: read again at most this often

let wanted = ""; // key of the timeline that is read or shown: the request, and whether it has ended
let reads = 0;

function phaseName(phase) {
  return phase === "under_way" ? t("span_under_way") : partName(PHASES[phase] ?? phase);
}

/** Forgets the shown timeline, so that the next call of showTimeline reads the timeline again. */
export function forgetTimeline() {
  wanted = "";
}

/** Shows the timeline of a request. Reads it once while the request is served, and again after its end. */
export async function showTimeline(id, hasEnded) {
  const key = `${id} ${hasEnded}`;
  if (key === wanted) return;
  if (!wanted.startsWith(`${id} `)) { clear(t("timeline_reading")); reads = 0; }
  wanted = key;
  let timeline = null;
  try {
    timeline = await (await call(`/requests/${encodeURIComponent(id)}/timeline`)).json();
    if (wanted === key) draw(timeline);
  } catch (error) {
    if (wanted === key) clear(error.key ? t(error.key, error.values) : error.message);
  }
  const isCut = !timeline?.end && timeline?.is_complete !== false;
  if (wanted === key && hasEnded && isCut && ++reads < MAX_READS) wanted = `${id} again`;
}

function clear(note) {
  $("timeline-note").textContent = note;
  $("timeline-bar").hidden = true;
  $("timeline").replaceChildren();
}

function draw(timeline) {
  $("timeline-note").textContent = note(timeline);
  const bar = $("timeline-bar");
  bar.hidden = !timeline.spans.length;
  bar.setAttribute("aria-label", timeline.spans.map((span) => `${phaseName(span.phase)} ${milliseconds(span.ms)}`).join(", "));
  bar.replaceChildren(...timeline.spans.map((span) => {
    const piece = element("span", { class: PHASES[span.phase] ?? span.phase, title: `${phaseName(span.phase)} ${milliseconds(span.ms)}` });
    piece.style.flexGrow = String(span.ms);
    return piece;
  }));
  const head = element("tr", {}, element("th", { scope: "col" }, t("part")), element("th", { scope: "col", class: "number" }, t("col_begin")),
    element("th", { scope: "col", class: "number" }, t("time")), element("th", { scope: "col" }, t("col_detail")));
  const rows = [...timeline.spans.map((span) => spanRow(span, timeline)), ...timeline.chunks.map(chunkRow)];
  rows.sort((a, b) => a.begin - b.begin || a.rank - b.rank);
  $("timeline").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows.map((row) => row.node)));
}

function note(timeline) {
  const { spans, chunks } = timeline.left_out;
  return [t(timeline.is_complete ? "timeline_note" : "timeline_lost"), spans + chunks ? t("timeline_more", { spans, chunks }) : ""].join(" ").trim();
}

function spanRow(span, timeline) {
  const { count, ms, longest_ms: longest } = timeline.decode_steps;
  const decodes = timeline.spans.filter((one) => one.phase === "decode");
  const detail = span === decodes.at(-1) && count ? t("decode_detail", { n: count, ms: milliseconds(ms), longest: milliseconds(longest) }) : "";
  const name = element("th", { scope: "row" }, element("span", { class: `swatch ${PHASES[span.phase] ?? span.phase}` }), phaseName(span.phase));
  return row(span, 0, name, detail);
}

function chunkRow(chunk) {
  const detail = t("chunk_detail", { tokens: chunk.tokens, all: chunk.step_tokens, requests: chunk.step_requests });
  return row(chunk, 1, element("th", { scope: "row", class: "chunk" }, t("chunk")), detail);
}

function row({ begin_ms: begin, ms }, rank, name, detail) {
  const node = element("tr", {}, name, element("td", { class: "number" }, milliseconds(begin)), element("td", { class: "number" }, milliseconds(ms)),
    element("td", {}, detail));
  return { begin, rank, node };
}
