// The tokens of a reply: each one's probability as a shade, and the top alternatives.
import { html, useRef, useState } from "../core/html.js";
import { plain } from "./text.js";

export const MOST = 5_000; // tokens shown
const percent = (logprob) => `${(Math.exp(logprob) * 100).toFixed(logprob > -0.001 ? 0 : 1)} %`;

function shade(logprob) {
  const probability = Math.exp(logprob);
  return probability > 0.9 ? 0 : probability > 0.6 ? 1 : probability > 0.3 ? 2 : probability > 0.1 ? 3 : 4;
}

export function visible(token) {
  return token.replace(/ /g, "\u00b7").replace(/\n/g, "\u23ce").replace(/\t/g, "\u21e5") || "\u2205";
}

/** One tab stop; the arrow keys go from token to token. */
export function Tokens({ tokens }) {
  const [at, setAt] = useState(0);
  const group = useRef(null);
  const shown = tokens.slice(0, MOST);
  const go = (event) => {
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -at, End: shown.length - 1 - at };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(shown.length - 1, at + steps[event.key]));
    setAt(next);
    group.current.children[next].focus();
  };
  const over = (event) => {
    const index = event.target.dataset?.at;
    if (index !== undefined) setAt(Number(index));
  };
  return html`<div class="tokens">
    <div ref=${group} class="row" role="group" aria-label="Tokens of the reply" dir="ltr" onKeyDown=${go} onMouseOver=${over} onFocusIn=${over}>
      ${shown.map(
        ([token, logprob], i) => html`<button type="button" key=${i} data-at=${i} tabindex=${i === at ? 0 : -1}
          class=${`token p${shade(logprob)} ${i === at ? "at" : ""}`}
          aria-label=${`${visible(token)}, ${percent(logprob)}`}>${plain(visible(token))}${token.includes("\n") ? "\n" : ""}</button>`,
      )}
    </div>
    ${tokens.length > MOST && html`<p class="note">The first ${MOST} of ${tokens.length} tokens.</p>`}
    ${shown[at] && html`<${Alternatives} token=${shown[at]} />`}
  </div>`;
}

function Alternatives({ token: [token, logprob, top] }) {
  const rows = top.some(([other]) => other === token) ? top : [[token, logprob], ...top];
  return html`<table class="alternatives" aria-label="Top alternatives">
    <tbody>${rows.map(
      ([other, score], i) => html`<tr key=${i} class=${other === token ? "taken" : ""}>
        <td><code>${plain(visible(other))}</code></td>
        <td class="number">${percent(score)}</td>
        <td class="bar"><svg viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true"><rect width=${Math.exp(score) * 100} height="8" /></svg></td>
      </tr>`,
    )}</tbody>
  </table>`;
}
