// Prometheus' text format, as far as the server writes it.

/** Series by name: `[{labels, value}]`. */
export function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/.exec(line);
    if (!match) continue;
    const [, name, inside = "", value] = match;
    const labels = Object.fromEntries([...inside.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, key, text]) => [key, text]));
    if (!found.has(name)) found.set(name, []);
    found.get(name).push({ labels, value: Number(value) });
  }
  return found;
}

/** The sum of a series, or null where it is absent. */
export function total(series, name) {
  const rows = series.get(name);
  return rows ? rows.reduce((sum, { value }) => sum + value, 0) : null;
}

/** A histogram as `[[upper bound, count]]`, the counts each bucket's own. */
export function histogram(series, name) {
  const rows = (series.get(`${name}_bucket`) ?? [])
    .map(({ labels, value }) => [labels.le === "+Inf" ? Infinity : Number(labels.le), value])
    .sort(([a], [b]) => a - b);
  return rows.map(([bound, value], i) => [bound, value - (i ? rows[i - 1][1] : 0)]);
}

/** What came between two looks at a histogram; all of the later one where the server has begun again. */
export function since(before, now) {
  const grown = now.map(([bound, value], i) => [bound, value - (before[i]?.[1] ?? 0)]);
  return grown.some(([, value]) => value < 0) ? now : grown;
}

/** The bound below which a share of all counts lies, straight lines between bounds; null without any. */
export function quantile(rows, share) {
  const all = rows.reduce((sum, [, value]) => sum + value, 0);
  if (!all) return null;
  let seen = 0;
  for (const [i, [bound, value]] of rows.entries()) {
    if (seen + value >= share * all && value) {
      const low = i ? rows[i - 1][0] : 0;
      return bound === Infinity ? low : low + ((bound - low) * (share * all - seen)) / value;
    }
    seen += value;
  }
  return null;
}
