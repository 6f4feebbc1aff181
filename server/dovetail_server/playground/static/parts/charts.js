// Charts as SVG, with their numbers in words beside them.
import { html } from "../core/html.js";

const WIDTH = 300;
const HEIGHT = 80;

/** A line through the last values; a null is a gap. `most` is the top of the scale where it is known. */
export function Line({ title, values, size, show, most = 0 }) {
  const known = values.filter((value) => value !== null);
  const top = Math.max(most, ...known, 1e-9);
  const step = WIDTH / (size - 1);
  const x = (i) => WIDTH - (values.length - 1 - i) * step;
  const y = (value) => HEIGHT - 3 - (value / top) * (HEIGHT - 8);
  const lines = [];
  values.forEach((value, i) => {
    if (value === null) return;
    if (i === 0 || values[i - 1] === null) lines.push([]);
    lines.at(-1).push(`${x(i).toFixed(1)},${y(value).toFixed(1)}`);
  });
  const now = values.at(-1) ?? null;
  return html`<figure class="chart">
    <figcaption><span>${title}</span><b>${now === null ? "unknown" : show(now)}</b></figcaption>
    <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${`${title}: ${now === null ? "unknown" : show(now)}, at most ${show(known.length ? Math.max(...known) : 0)} of late`}>
      ${lines.map((points, i) =>
        points.length > 1
          ? html`<polyline key=${i} points=${points.join(" ")} />`
          : html`<circle key=${i} cx=${points[0].split(",")[0]} cy=${points[0].split(",")[1]} r="2" />`,
      )}
    </svg>
    ${known.length > 0 && html`<span class="note">up to ${show(top)}</span>`}
  </figure>`;
}

/** Bars of a histogram, `[[upper bound, count]]`, without the empty ones at its ends. */
export function Bars({ title, rows, show, children }) {
  const first = rows.findIndex(([, value]) => value > 0);
  const last = rows.findLastIndex(([, value]) => value > 0);
  if (first === -1) return html`<figure class="chart"><figcaption><span>${title}</span><b>nothing yet</b></figcaption></figure>`;
  const shown = rows.slice(Math.max(0, first - 1), last + 2);
  const top = Math.max(...shown.map(([, value]) => value));
  const all = shown.reduce((sum, [, value]) => sum + value, 0);
  return html`<figure class="chart">
    <figcaption><span>${title}</span>${children}</figcaption>
    <table class="bars"><caption class="unseen">${title}</caption><tbody>${shown.map(([bound, value]) => {
      const name = bound === Infinity ? "more" : `to ${show(bound)}`;
      return html`<tr key=${bound}><th scope="row">${name}</th>
        <td class="bar"><svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true"><rect width=${(value / top) * 100} height="10" /></svg></td>
        <td class="number">${Math.round((value / all) * 100)} %</td></tr>`;
    })}</tbody></table>
  </figure>`;
}
