// Complete: text goes on as the model sees fit, without a chat template; for base models.
import { html, useEffect, useReducer, useRef, useState } from "../core/html.js";
import { facts, watchFacts } from "../core/facts.js";
import { emptyReply, figures, write } from "../core/reply.js";
import { NUMBERS, bodyOf } from "../core/settings.js";
import { Choice, NumberField, TextField } from "../parts/fields.js";
import { Page } from "../parts/page.js";
import { plain } from "../parts/text.js";

const KEPT = "dovetail-complete";
const FIRST = { text: "", settings: { max_tokens: "256" } };

function restored() {
  try {
    const found = JSON.parse(localStorage.getItem(KEPT));
    return typeof found?.text === "string" && typeof found.settings === "object" ? found : FIRST;
  } catch {
    return FIRST;
  }
}

export function CompletePage() {
  const [form] = useState(restored); // changed in place: two keys may come between two layouts
  const [notice, setNotice] = useState("");
  const [, redraw] = useReducer((count) => count + 1, 0);
  const run = useRef({ reply: null, stopper: null, before: null });
  const area = useRef(null);
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
  const { reply, before } = run.current;
  const runs = reply?.state === "writing";
  const { body, problems } = bodyOf({ ...form.settings, thinking: "", output: "", tools: "", probabilities: false });
  const submit = (event) => {
    event?.preventDefault();
    const problem = Object.values(problems)[0];
    setNotice(problem ? `Not sent. ${problem}` : "");
    if (problem || runs || facts.state !== "known" || !form.text) return;
    const model = facts.names.includes(form.settings.model) ? form.settings.model : facts.names[0];
    run.current = { reply: emptyReply(model), stopper: new AbortController(), before: form.text };
    const { reply: own, stopper, before: prompt } = run.current;
    const changed = () => {
      change({ text: prompt + own.content });
      if (area.current) area.current.scrollTop = area.current.scrollHeight;
    };
    write(own, { model, prompt, ...body }, stopper.signal, changed, "v1/completions");
    redraw();
  };
  const undo = () => {
    run.current = { reply: null, stopper: null, before: null };
    change({ text: before });
  };
  const key = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit(event);
    else if (event.key === "Escape" && runs) run.current.stopper.abort();
  };
  const set = (name) => (value) => change({ settings: { ...form.settings, [name]: value } });
  const bind = (name) => ({ value: form.settings[name] ?? "", problem: problems[name], onChange: set(name) });
  const defaults = facts.info?.preferred_sampling_params ?? {};
  return html`<${Page} title="Complete" lead="The model continues a text, without a chat template. For base models, and to see what a template adds.">
    <form class="compare-form" onSubmit=${submit}>
      <label class="field" for="complete-text">Text</label>
      <textarea ref=${area} id="complete-text" rows="14" value=${form.text} readonly=${runs} aria-busy=${runs} dir="auto"
        placeholder="Text to continue" onInput=${(event) => change({ text: event.target.value })} onKeyDown=${key}></textarea>
      <div class="line">
        ${
          runs
            ? html`<button type="button" onClick=${() => run.current.stopper.abort()}>Stop</button>`
            : html`<button type="submit" title="Ctrl and Enter" disabled=${facts.state !== "known" || !form.text}>Complete</button>`
        }
        <button type="button" class="plain" disabled=${runs || before === null || form.text === before} onClick=${undo}>Undo</button>
        <span class="note" role="status">${reply && !runs ? figures(reply).join(" · ") : ""}</span>
      </div>
      ${(notice || reply?.state === "failed") && html`<p class="problem" role="alert">${plain(notice || reply.error)}</p>`}
    </form>
    <section class="card complete" aria-label="Settings"><h2>Settings</h2><div class="settings">
      ${facts.names.length > 1 && html`<${Choice} label="Model" options=${facts.names.map((name) => [name, name])} ...${bind("model")} value=${form.settings.model || facts.names[0]} />`}
      <div class="pairs">${NUMBERS.map((field) => html`<${NumberField} key=${field.name} field=${field} standard=${defaults[field.name]} ...${bind(field.name)} />`)}</div>
      <${TextField} label="Stop sequences, one per line" rows=${2} isCode ...${bind("stop")} />
      <${TextField} label="More fields (JSON object)" rows=${2} isCode ...${bind("extra")} placeholder='{"echo": true}' />
    </div></section>
  <//>`;
}
