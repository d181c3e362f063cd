// Reads Prometheus' text format, and percentiles from its histograms.

/** Returns the samples of a text: name -> list of {labels, value}. */
export function parseMetrics(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const found = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!found) continue;
    const labels = Object.fromEntries([...(found[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map((one) => [one[1], one[2]]));
    if (!samples.has(found[1])) samples.set(found[1], []);
    samples.get(found[1]).push({ labels, value: Number(found[3].replace("Inf", "Infinity")) });
  }
  return samples;
}

/** Returns the sum of all samples of a name. */
export function total(samples, name) {
  return (samples.get(name) ?? []).reduce((sum, one) => sum + one.value, 0);
}

/** Returns the cumulative counts of a histogram since an earlier reading. Series with different labels are added up. */
export function histogram(samples, name, earlier = null) {
  const sums = new Map();
  for (const [reading, sign] of [[samples, 1], [earlier, -1]]) {
    for (const { labels, value } of reading?.get(`${name}_bucket`) ?? []) {
      const limit = Number(labels.le.replace("Inf", "Infinity"));
      sums.set(limit, (sums.get(limit) ?? 0) + sign * value);
    }
  }
  return [...sums].sort((a, b) => a[0] - b[0]);
}

/** Returns a quantile of a histogram, or null if the histogram has no observations. Like Prometheus, interpolates linearly inside a bucket. */
export function quantile(buckets, fraction) {
  const count = buckets.at(-1)?.[1] ?? 0;
  if (count === 0) return null;
  const rank = fraction * count;
  const at = buckets.findIndex(([, upTo]) => upTo >= rank);
  const [low, below] = at > 0 ? buckets[at - 1] : [0, 0];
  const [high, upTo] = buckets[at];
  if (high === Infinity) return low;
  return upTo === below ? high : low + (high - low) * (rank - below) / (upTo - below);
}
