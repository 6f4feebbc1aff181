// What the pages beside chat have in common.
import { html, useEffect, useState } from "../core/html.js";
import { plain } from "./text.js";

/** What `load(signal)` resolves to, asked again every `everyMs`; `{value, problem, again}`. */
export function useLoaded(load, everyMs = 0) {
  const [state, setState] = useState({ value: null, problem: "" });
  const [round, setRound] = useState(0);
  useEffect(() => {
    const stopper = new AbortController();
    let timer = null;
    const go = async () => {
      try {
        const value = await load(stopper.signal);
        if (!stopper.signal.aborted) setState({ value, problem: "" });
      } catch (error) {
        if (!stopper.signal.aborted) setState(({ value }) => ({ value, problem: error.message }));
      }
      if (everyMs && !stopper.signal.aborted) timer = setTimeout(go, everyMs);
    };
    go();
    return () => {
      stopper.abort();
      clearTimeout(timer);
    };
  }, [round]);
  return { ...state, again: () => setRound(round + 1) };
}

export function Page({ title, lead, problem = "", children }) {
  return html`<main id="page" class="page"><div class="broad">
    <h1>${title}</h1>
    ${lead && html`<p class="lead">${lead}</p>`}
    ${problem && html`<p class="problem" role="alert">${plain(problem)}</p>`}
    ${children}
  </div></main>`;
}

/** Terms and what they are, `[[term, value]]`. */
export function Facts({ rows }) {
  return html`<dl class="facts">${rows
    .filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([term, value]) => html`<div key=${term}><dt>${term}</dt><dd>${typeof value === "string" ? plain(value) : value}</dd></div>`)}</dl>`;
}

export function bytes(count) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  const power = count > 0 ? Math.min(4, Math.floor(Math.log2(count) / 10)) : 0;
  return `${power ? (count / 1024 ** power).toFixed(1) : count} ${units[power]}`;
}

export function count(number) {
  return Number(number).toLocaleString("en");
}
