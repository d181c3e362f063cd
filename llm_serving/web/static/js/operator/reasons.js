// Explains where the time of a request went, from its receipt.

import { t } from "../i18n.js";

/** The parts of a receipt in their order, each with the keys of its name and of its explanation. */
export const PARTS = {
  tokenise: ["part_tokenise", "why_tokenise"], queue: ["part_queue", "why_queue"],
  prefill: ["part_prefill", "why_prefill"], decode: ["part_decode", "why_decode"],
  preempted: ["part_preempted", "why_preempted"], swapped: ["part_swapped", "why_swapped"],
  restarted: ["part_restarted", "why_restarted"], delivery: ["part_delivery", "why_delivery"],
};
const REASONS = {
  rows: "reason_rows", blocks: "reason_blocks", admission: "reason_admission", batch: "reason_batch",
  policy: "reason_policy", prefix: "reason_prefix", load: "reason_load", preempted_first: "reason_preempted_first",
};

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  return value >= 100 ? `${Math.round(value)} ms` : `${Math.round(value * 10) / 10} ms`;
}

export function partName(part) {
  return PARTS[part] ? t(PARTS[part][0]) : part;
}

/** Returns one sentence: the largest part of the request's time, and its reason. */
export function whySlow(receipt) {
  const parts = Object.entries(receipt.parts_ms).sort((a, b) => b[1] - a[1]);
  const [part, ms] = parts[0] ?? ["", 0];
  if (!ms) return t("why_nothing");
  const percent = Math.round(100 * ms / Object.values(receipt.parts_ms).reduce((sum, one) => sum + one, 0));
  const blocked = receipt.blocked[0];
  const reason = part === "queue" && blocked ? t(REASONS[blocked.reason] ?? "reason_other") : "";
  const sentence = t(PARTS[part]?.[1] ?? "why_other", {
    ms: milliseconds(ms), percent, prompt: receipt.prompt_tokens, cached: receipt.cached_tokens, output: receipt.output_tokens,
    chunks: receipt.prefill_chunks, preemptions: receipt.preemptions, swaps: receipt.swaps, part,
  });
  return reason ? `${sentence} ${reason}` : sentence;
}

/** Returns further sentences: why the request waited, for which requests, and how often it was preempted. */
export function moreReasons(receipt) {
  const lines = receipt.blocked.filter((one) => one.times || one.ms).map((one) =>
    t("blocked", { times: one.times, ms: milliseconds(one.ms), reason: t(REASONS[one.reason] ?? "reason_other") }));
  if (receipt.blocked_by.length) lines.push(t("blocked_by", { names: receipt.blocked_by.join(", ") }));
  if (receipt.preemptions) lines.push(t("preempted_times", { n: receipt.preemptions, swaps: receipt.swaps }));
  if (receipt.cached_tokens) lines.push(t("cached", { n: receipt.cached_tokens, of: receipt.prompt_tokens }));
  return lines;
}
