// Two settings side by side: one question, one seed, two replies.
import { html, useEffect, useReducer, useRef, useState } from "../core/html.js";
import { facts, watchFacts } from "../core/facts.js";
import { emptyReply, figures, write } from "../core/reply.js";
import { bodyOf, lastSettings } from "../core/settings.js";
import { Calls } from "../chat/calls.js";
import { SettingsForm } from "../chat/settings.js";
import { Markdown } from "../parts/markdown.js";
import { Report } from "../parts/report.js";
import { Tokens } from "../parts/tokens.js";
import { plain } from "../parts/text.js";
import { Page } from "../parts/page.js";

const KEPT = "dovetail-compare";

function restored() {
  try {
    return JSON.parse(localStorage.getItem(KEPT)) ?? null;
  } catch {
    return null;
  }
}

function first() {
  const { seed, ...usual } = lastSettings();
  return { prompt: "", seed: seed || "1", sides: [{ ...usual, temperature: "0" }, { ...usual, temperature: "1" }] };
}

export function ComparePage() {
  const [form] = useState(() => restored() ?? first()); // changed in place: two keys may come between two layouts
  const [notice, setNotice] = useState("");
  const [, redraw] = useReducer((count) => count + 1, 0);
  const run = useRef({ replies: [null, null], stopper: null });
  useEffect(() => watchFacts(redraw), []);
  useEffect(() => () => run.current.stopper?.abort(), []);
  const change = (changes) => {
    Object.assign(form, changes);
    try {
      localStorage.setItem(KEPT, JSON.stringify(form));
    } catch {
      // The browser keeps nothing.
    }
    redraw();
  };
  const runs = run.current.replies.some((reply) => reply?.state === "writing");
  const submit = (event) => {
    event.preventDefault();
    const { prompt } = form;
    const made = form.sides.map((side) => bodyOf({ ...side, seed: form.seed }));
    const wrong = made.map(({ problems }, i) => [Object.values(problems)[0], "AB"[i]]).find(([problem]) => problem);
    setNotice(wrong ? `Not sent. Side ${wrong[1]}: ${wrong[0]}` : "");
    if (wrong || !prompt.trim()) return;
    const stopper = new AbortController();
    const replies = made.map(({ body }, i) => {
      const { model: chosen, system } = form.sides[i];
      const model = facts.names.includes(chosen) ? chosen : facts.names[0];
      const reply = emptyReply(model);
      const messages = [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: prompt }];
      write(reply, { model, messages, ...body }, stopper.signal, redraw);
      return reply;
    });
    run.current = { replies, stopper };
    redraw();
  };
  const set = (i) => (changes) => (Object.assign(form.sides[i], changes), change({}));
  return html`<${Page} title="Compare" lead="One question and one seed, answered with two settings. Where both sample the same tokens, the settings made no difference.">
    <form class="compare-form" onSubmit=${submit}>
      <label class="field" for="compare-prompt">Question</label>
      <textarea id="compare-prompt" rows="3" value=${form.prompt} onInput=${(event) => change({ prompt: event.target.value })}></textarea>
      <div class="line">
        <label class="field seed">Seed <input type="number" step="1" value=${form.seed} onInput=${(event) => change({ seed: event.target.value })} /></label>
        ${
          runs
            ? html`<button type="button" onClick=${() => run.current.stopper.abort()}>Stop</button>`
            : html`<button type="submit" disabled=${facts.state !== "known" || !form.prompt.trim()}>Ask both</button>`
        }
      </div>
      ${notice && html`<p class="problem" role="alert">${notice}</p>`}
    </form>
    <div class="sides">${form.sides.map(
      (side, i) => html`<section key=${i} class="card" aria-label=${`Side ${"AB"[i]}`}>
        <h2>${"AB"[i]}</h2>
        <details class="section" open=${!run.current.replies[i]}><summary>Settings</summary>
          <${SettingsForm} settings=${side} change=${set(i)} isCompared />
        </details>
        ${run.current.replies[i] && html`<${Side} reply=${run.current.replies[i]} />`}
      </section>`,
    )}</div>
    ${!runs && run.current.replies[0] && html`<p class="lead" role="status">${verdict(run.current.replies)}</p>`}
  <//>`;
}

function verdict([a, b]) {
  if (a.state !== "done" || b.state !== "done") return "";
  if (a.content === b.content) {
    const [ours, theirs] = [a, b].map(({ calls }) => JSON.stringify(calls.map((call) => [call.name, call.arguments])));
    return ours === theirs ? "Both replies are the same." : "The texts are the same, the tool calls are not.";
  }
  let at = 0;
  while (a.content[at] === b.content[at]) at += 1;
  return at === 0 ? "The replies differ from the beginning." : `The replies are the same for ${at} character${at === 1 ? "" : "s"}.`;
}

function Side({ reply }) {
  const isWriting = reply.state === "writing";
  return html`<article class="reply" aria-label="Reply" aria-busy=${isWriting}>
    ${reply.reasoning && html`<details class="reasoning"><summary>Reasoning</summary><div class="inside"><${Markdown} text=${reply.reasoning} isWriting=${isWriting} /></div></details>`}
    ${reply.content && html`<${Markdown} text=${reply.content} isWriting=${isWriting} />`}
    <${Calls} node=${reply} canAnswer=${false} />
    ${!reply.content && !reply.calls.length && isWriting && html`<p class="waiting"><span class="dot"></span>Waiting for the first token</p>`}
    ${reply.tokens.length > 0 && !isWriting && html`<details class="section"><summary>Tokens</summary><${Tokens} tokens=${reply.tokens} /></details>`}
    ${reply.report && html`<${Report} report=${reply.report} />`}
    ${reply.state === "failed" && html`<p class="problem" role="alert">${plain(reply.error)}</p>`}
    ${reply.state === "stopped" && html`<p class="note">Stopped.</p>`}
    ${!isWriting && html`<p class="figures">${figures(reply).join(" · ")}</p>`}
  </article>`;
}
