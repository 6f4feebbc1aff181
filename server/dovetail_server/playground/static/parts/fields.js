// Fields of a form, each with its label, its hint and what is wrong with it.
import { html, useId } from "../core/html.js";

function Problem({ id, text }) {
  return text && html`<span class="problem" id=${id}>${text}</span>`;
}

/** A number that may be left to the model: then it is empty, and its standard is shown in grey. */
export function NumberField({ field, standard, value, problem, onChange }) {
  const id = useId();
  return html`<label class="field" title=${field.hint ?? ""}>${field.label}
    <input type="number" inputmode="decimal" min=${field.min} max=${field.max} step=${field.step === 1 ? 1 : "any"} value=${value}
      placeholder=${standard ?? ""} aria-invalid=${Boolean(problem)} aria-describedby=${problem ? id : undefined}
      onInput=${(event) => onChange(event.target.value)} />
    <${Problem} id=${id} text=${problem} />
  </label>`;
}

export function TextField({ label, value, problem, onChange, rows = 2, isCode = false, isJson = false, placeholder = "" }) {
  const id = useId();
  const tidy = () => onChange(JSON.stringify(JSON.parse(value), null, 2));
  return html`<div class="field"><label for=${`${id}-area`}>${label}</label>
    <textarea id=${`${id}-area`} rows=${rows} class=${isCode ? "code" : ""} spellcheck=${!isCode} value=${value} placeholder=${placeholder}
      aria-invalid=${Boolean(problem)} aria-describedby=${problem ? id : undefined} onInput=${(event) => onChange(event.target.value)}></textarea>
    <${Problem} id=${id} text=${problem} />
    ${isJson && value.trim() && !problem && html`<button type="button" class="plain" onClick=${tidy}>Format JSON</button>`}
  </div>`;
}

export function Choice({ label, options, value, onChange }) {
  return html`<label class="field">${label}
    <select value=${value} onChange=${(event) => onChange(event.target.value)}>
      ${options.map(([name, text]) => html`<option key=${name} value=${name} selected=${name === value}>${text}</option>`)}
    </select>
  </label>`;
}

export function Check({ label, hint, value, onChange }) {
  return html`<label class="check" title=${hint}><input type="checkbox" checked=${Boolean(value)} onChange=${(event) => onChange(event.target.checked)} /> ${label}</label>`;
}
