// The page for operators: reads /server_info, /metrics and /requests every few seconds and draws them.

import { call } from "../api.js";
import { $ } from "../dom.js";
import { loadTexts, setLanguage, t } from "../i18n.js";
import { apiKey, loadSettings, saveSettings, setApiKey } from "../store.js";
import { parseMetrics } from "./prometheus.js";
import { drawFigures, drawLatency, drawRequests, drawWhy, isEnded } from "./tables.js";
import { forgetTimeline, showTimeline } from "./timeline.js";

const POLL_MS = 2000;
const RECENT_MS = 60000; // percentiles of the last minute: the latest reading minus the oldest one within this time
const LISTED = 200;
const SLOW_SHARE = 0.1; // the fraction of the ended requests that the page marks as slow: the slowest tenth

await loadTexts(["", "operator."]);
const settings = loadSettings();
document.documentElement.dataset.theme = settings.theme ?? "";
setLanguage(settings.language);
$("language").value = settings.language ?? "";
$("key").value = apiKey();

let readings = []; // {at, samples}, oldest first
let last = null; // {info, receipts}
let filter = "all";
let chosen = null; // id of the explained request
let timer = null;

function shown(receipts) {
  const live = receipts.filter((one) => !isEnded(one));
  if (filter === "running") return live.filter((one) => one.state !== "queued");
  if (filter === "queued") return live.filter((one) => one.state === "queued");
  if (filter === "all") return receipts;
  const ended = receipts.filter(isEnded).sort((a, b) => b.e2e_ms - a.e2e_ms);
  return ended.slice(0, Math.max(1, Math.ceil(ended.length * SLOW_SHARE)));
}

function draw() {
  if (!last) return;
  const now = readings.at(-1);
  const earlier = readings.length > 1 ? readings[0] : null;
  const { model, engine } = last.info;
  $("name").textContent = t("operator_of", { model: model.name });
  $("state").className = engine.state === "ready" ? "ready" : "down";
  $("state").setAttribute("aria-label", engine.state);
  if ($("state-text").textContent !== engine.state) $("state-text").textContent = engine.state;
  const before = readings.at(-2);
  drawFigures(last.info, now.samples, before?.samples, before ? (now.at - before.at) / 1000 : 1);
  drawLatency(now.samples, earlier?.samples);
  drawRequests(shown(last.receipts), explain);
  const receipt = last.receipts.find((one) => one.request_id === chosen);
  if (receipt) drawReceipt(receipt);
}

function drawReceipt(receipt) {
  drawWhy(receipt);
  showTimeline(receipt.request_id, isEnded(receipt));
}

function explain(receipt) {
  chosen = receipt.request_id;
  forgetTimeline();
  drawReceipt(receipt);
  $("why-title").focus();
}

async function read() {
  clearTimeout(timer);
  if (!document.hidden) {
    try {
      const [info, metrics, requests] = await Promise.all(["/server_info", "/metrics", `/requests?limit=${LISTED}`].map((path) => call(path)));
      last = { info: await info.json(), receipts: (await requests.json()).requests };
      const at = performance.now();
      readings = [...readings.filter((one) => at - one.at < RECENT_MS), { at, samples: parseMetrics(await metrics.text()) }];
      $("problem").hidden = true;
      draw();
    } catch (error) {
      $("problem").hidden = false;
      $("problem").textContent = error.key ? t(error.key === "key_needed" ? "key_needed_here" : error.key, error.values) : error.message;
      $("state").className = "down";
      if (error.code === "key" && document.activeElement === document.body) $("key").focus();
    }
  }
  timer = setTimeout(read, POLL_MS);
}

$("language").addEventListener("change", () => {
  const all = { ...loadSettings(), language: $("language").value };
  saveSettings(all);
  setLanguage(all.language);
  forgetTimeline();
  draw();
});
$("key").addEventListener("change", () => { setApiKey($("key").value.trim()); read(); });
$("key-form").addEventListener("submit", (event) => event.preventDefault());
$("why-close").addEventListener("click", () => {
  $("why").hidden = true;
  document.querySelector(`[data-request="${CSS.escape(chosen)}"]`)?.focus();
  chosen = null;
});
for (const button of document.querySelectorAll("[data-filter]")) {
  button.addEventListener("click", () => {
    filter = button.dataset.filter;
    for (const each of document.querySelectorAll("[data-filter]")) each.setAttribute("aria-pressed", String(each === button));
    draw();
  });
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) read(); });
await read();
document.body.dataset.ready = "true";
