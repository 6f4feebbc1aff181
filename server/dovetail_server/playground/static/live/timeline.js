// The engine's steps of the last seconds: when each was, how long it took, and what it computed.
import { html } from "../core/html.js";
import { seconds } from "../core/reply.js";
import { count } from "../parts/page.js";

const SPAN_MS = 10_000;
const MOST = 512; // as many as the server keeps
const WIDTH = 1000;
const HEIGHT = 90;
const SLOWEST = 5;

/** Add the steps of an answer to those that are known; `at` is when it was asked for. */
export function join(known, answer, at) {
  const fresh = answer.map((row) => ({ ...row, end: at - row.ago_s * 1000 }));
  // An engine that was started again counts from the beginning.
  const kept = fresh.length && known.length && fresh[0].step <= known.at(-1).step ? [] : known;
  return [...kept, ...fresh].slice(-MOST);
}

const tokens = (row) => row.num_decode + row.num_prefill_tokens;

export function Timeline({ rows, now }) {
  const shown = rows.filter((row) => row.end > now - SPAN_MS);
  const slowest = [...shown].sort((a, b) => b.seconds - a.seconds).slice(0, SLOWEST);
  const top = Math.max(1, ...shown.map(tokens));
  const prompts = shown.filter((row) => row.num_prefill_tokens).length;
  const busy = shown.reduce((sum, row) => sum + row.seconds * 1000, 0);
  const words = shown.length
    ? `${count(shown.length)} steps in ten seconds, ${count(prompts)} with prompts; longest ${seconds(slowest[0].seconds * 1000)}, total ${seconds(busy)}`
    : "no steps in ten seconds";
  return html`<figure class="chart steps" aria-label="Steps">
    <figcaption><span>Steps of the last ten seconds</span><b>${words}</b></figcaption>
    <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${`Steps: ${words}`}>${shown.map((row) => bar(row, now, top))}</svg>
    <p class="note"><i class="part-k"></i>decode only <i class="part-w"></i>with prefill. Width is time, height is tokens, up to ${count(top)}.</p>
    ${slowest.length > 0 && html`<details class="section"><summary>Slowest steps</summary>
      <div class="scrolls" tabindex="0" role="region" aria-label="Table of the slowest steps"><table class="rows">
        <thead><tr><th>Step</th><th>Duration</th><th>Sampled requests</th><th>Prompt tokens</th><th>Queued requests</th></tr></thead>
        <tbody>${slowest.map((row) => html`<tr key=${row.step}><td>${count(row.step)}</td><td>${seconds(row.seconds * 1000)}</td><td>${count(row.num_decode)}</td><td>${count(row.num_prefill_tokens)}</td><td>${count(row.num_queued)}</td></tr>`)}</tbody>
      </table></div></details>`}
  </figure>`;
}

function bar(row, now, top) {
  const end = WIDTH * (1 - (now - row.end) / SPAN_MS);
  const width = Math.max(1, (WIDTH * row.seconds * 1000) / SPAN_MS);
  const height = Math.max(3, (HEIGHT - 4) * Math.sqrt(tokens(row) / top));
  const kind = row.num_prefill_tokens ? "w" : "k";
  return html`<rect key=${row.step} class=${`part-${kind}`} x=${(end - width).toFixed(1)} y=${(HEIGHT - height).toFixed(1)} width=${width.toFixed(1)} height=${height.toFixed(1)} />`;
}
