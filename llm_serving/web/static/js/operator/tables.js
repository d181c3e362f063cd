// Draws the figures, the percentiles, the list of requests, and the explanation of one request.

import { $, element } from "../dom.js";
import { t } from "../i18n.js";
import { histogram, quantile, total } from "./prometheus.js";
import { milliseconds, moreReasons, partName, PARTS, whySlow } from "./reasons.js";

const HISTOGRAMS = [
  ["latency_ttft", "llm_serving_time_to_first_token_seconds"], ["latency_tpot", "llm_serving_time_per_output_token_seconds"],
  ["latency_e2e", "llm_serving_request_seconds"], ["latency_queue", "llm_serving_queue_seconds"],
  ["latency_step", "llm_serving_step_seconds"],
];
const FRACTIONS = [0.5, 0.9, 0.99];

export function isEnded(receipt) {
  return receipt.state === "done";
}

/** Draws the figures. `earlier` is an older reading of the metrics, made `seconds` before `samples`. */
export function drawFigures(info, samples, earlier, seconds) {
  const { engine } = info;
  const used = engine.total_blocks - engine.free_blocks;
  const rate = (name) => (earlier ? Math.max(0, (total(samples, name) - total(earlier, name)) / seconds) : 0);
  const hits = engine.prefix_query_tokens ? Math.round(100 * engine.prefix_hit_tokens / engine.prefix_query_tokens) : 0;
  const rows = [
    ["fig_running", String(engine.running)], ["fig_waiting", String(engine.waiting)], ["fig_swapped", String(engine.swapped)],
    ["fig_blocks", `${used} / ${engine.total_blocks}`, used / Math.max(1, engine.total_blocks)],
    ["fig_tokens", rate("llm_serving_generated_tokens_total").toFixed(1)],
    ["fig_prompt_tokens", rate("llm_serving_prompt_tokens_total").toFixed(1)],
    ["fig_prefix", `${hits} %`], ["fig_preemptions", String(engine.preemptions)], ["fig_steps", String(engine.steps)],
  ];
  $("figures").replaceChildren(...rows.map(([key, value, share]) => {
    const box = element("div", {}, element("dt", {}, t(key)), element("dd", {}, value));
    if (share !== undefined) box.lastChild.append(element("meter", { min: 0, max: 1, value: share, "aria-label": t(key) }));
    return box;
  }));
}

/** Draws the percentiles since the start and since an older reading. */
export function drawLatency(samples, earlier) {
  const labels = FRACTIONS.map((fraction) => `p${fraction * 100}`);
  const head = element("tr", {}, element("th", { scope: "col" }, t("time")),
    ...labels.map((each) => element("th", { scope: "col", class: "number" }, t("recent", { p: each }))),
    ...labels.map((each) => element("th", { scope: "col", class: "number" }, t("since_start", { p: each }))));
  const rows = HISTOGRAMS.map(([key, name]) => {
    const cells = [earlier, null].flatMap((before, column) => {
      const buckets = column === 0 && !before ? [] : histogram(samples, name, before);
      return FRACTIONS.map((fraction) => quantile(buckets, fraction));
    });
    return element("tr", {}, element("th", { scope: "row" }, t(key)),
      ...cells.map((seconds) => element("td", { class: "number" }, seconds === null ? "–" : milliseconds(seconds * 1000))));
  });
  $("latency").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
}

/** Fills a bar with the parts of a request's time, and returns the bar. */
function fillBar(bar, receipt) {
  bar.setAttribute("aria-label", Object.entries(receipt.parts_ms).filter(([, ms]) => ms > 0)
    .map(([part, ms]) => `${partName(part)} ${milliseconds(ms)}`).join(", ") || t("why_nothing"));
  bar.replaceChildren(...Object.keys(PARTS).filter((part) => receipt.parts_ms[part] > 0).map((part) => {
    const piece = element("span", { class: part, title: `${partName(part)} ${milliseconds(receipt.parts_ms[part])}` });
    piece.style.flexGrow = String(receipt.parts_ms[part]);
    return piece;
  }));
  return bar;
}

/** Draws the list of requests. A click on a request calls `choose` with its receipt. */
export function drawRequests(receipts, choose) {
  const focused = document.activeElement?.dataset?.request;
  const columns = ["col_request", "col_state", "col_prompt", "col_output", "col_ttft", "col_whole", "col_where"];
  const head = element("tr", {}, ...columns.map((key, at) => element("th", { scope: "col", class: at > 1 && at < 6 && "number" }, t(key))));
  const rows = receipts.map((receipt) => element("tr", {},
    element("td", {}, element("button", { type: "button", class: "id", "data-request": receipt.request_id,
                                          onclick: () => choose(receipt) }, receipt.request_id)),
    element("td", {}, isEnded(receipt) ? receipt.finish_reason ?? "–" : receipt.state),
    element("td", { class: "number" }, String(receipt.prompt_tokens)),
    element("td", { class: "number" }, String(receipt.output_tokens)),
    element("td", { class: "number" }, milliseconds(receipt.ttft_ms)),
    element("td", { class: "number" }, milliseconds(receipt.e2e_ms)),
    element("td", {}, fillBar(element("div", { class: "bar", role: "img" }), receipt))));
  if (!rows.length) rows.push(element("tr", {}, element("td", { colspan: columns.length, class: "dim" }, t("no_requests"))));
  $("requests").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
  if (focused) document.querySelector(`[data-request="${CSS.escape(focused)}"]`)?.focus();
}

/** Draws the explanation of one request. */
export function drawWhy(receipt) {
  $("why").hidden = false;
  $("why-title").textContent = t("why_title", { id: receipt.request_id });
  $("why-text").textContent = whySlow(receipt);
  fillBar($("why-bar"), receipt);
  const whole = Object.values(receipt.parts_ms).reduce((sum, one) => sum + one, 0);
  const head = element("tr", {}, element("th", { scope: "col" }, t("part")), element("th", { scope: "col", class: "number" }, t("time")),
    element("th", { scope: "col", class: "number" }, "%"));
  const rows = Object.keys(PARTS).map((part) => element("tr", {},
    element("th", { scope: "row" }, element("span", { class: `swatch ${part}` }), partName(part)),
    element("td", { class: "number" }, milliseconds(receipt.parts_ms[part])),
    element("td", { class: "number" }, whole ? String(Math.round(100 * receipt.parts_ms[part] / whole)) : "0")));
  $("why-parts").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
  $("why-more").replaceChildren(...moreReasons(receipt).map((line) => element("li", {}, line)));
}
