// The form of a conversation's settings.
import { html } from "../core/html.js";
import { facts } from "../core/facts.js";
import { EXAMPLES, NUMBERS, OUTPUTS, THINKING, bodyOf } from "../core/settings.js";
import { Check, Choice, NumberField, TextField } from "../parts/fields.js";

const USUAL = NUMBERS.slice(0, 3).concat(NUMBERS.slice(4, 6));
const MORE = NUMBERS.filter((field) => !USUAL.includes(field));

/** `settings` are shown, `change({name: value})` takes what somebody types. In a comparison the seed is common, and no tool is called. */
export function SettingsForm({ settings, change, isCompared = false }) {
  const { problems } = bodyOf(settings);
  const defaults = facts.info?.preferred_sampling_params ?? {};
  const bind = (name) => ({ value: settings[name] ?? "", problem: problems[name], onChange: (value) => change({ [name]: value }) });
  const numbers = (fields) =>
    fields.map((field) => html`<${NumberField} key=${field.name} field=${field} standard=${defaults[field.name]} ...${bind(field.name)} />`);
  return html`<div class="settings">
    ${facts.names.length > 1 && html`<${Choice} label="Model" options=${facts.names.map((name) => [name, name])} ...${bind("model")} value=${settings.model || facts.names[0]} />`}
    <${TextField} label="System prompt" rows=${3} ...${bind("system")} />
    <${Choice} label="Reasoning effort" options=${THINKING} ...${bind("thinking")} />
    <div class="pairs">${numbers(USUAL.filter((field) => !(isCompared && field.name === "seed")))}</div>
    <details class="section"><summary>More sampling</summary>
      <div class="pairs">${numbers(MORE)}</div>
      <${TextField} label="Stop sequences, one per line" rows=${2} isCode ...${bind("stop")} />
    </details>
    <${Check} label="Token probabilities" hint="Returned with each response, which then takes longer." ...${bind("probabilities")} />
    <${Structure} settings=${settings} change=${change} problems=${problems} />
    ${!isCompared && html`<${Tools} settings=${settings} bind=${bind} problems=${problems} change=${change} />`}
    <details class="section"><summary>More fields</summary>
      <${TextField} label="JSON object, added to the request" rows=${3} isCode ...${bind("extra")} placeholder='{"ignore_eos": true}' />
    </details>
  </div>`;
}

function Structure({ settings, change, problems }) {
  const kind = settings.output ?? "";
  const texts = settings.grammar ?? {};
  const set = (value) => change({ grammar: { ...texts, [kind]: value } });
  const choose = (value) => {
    const isNew = EXAMPLES[value] && !(texts[value] ?? "").trim();
    change({ output: value, ...(isNew ? { grammar: { ...texts, [value]: EXAMPLES[value] } } : {}) });
  };
  return html`<${Choice} label="Output format" options=${OUTPUTS} value=${kind} onChange=${choose} />
    ${EXAMPLES[kind] !== undefined && html`<${TextField} label=${kind === "json_schema" ? "JSON schema" : kind === "regex" ? "Regular expression" : "Grammar"}
      rows=${kind === "regex" ? 2 : 10} isCode isJson=${kind === "json_schema"} value=${texts[kind] ?? ""} problem=${problems.grammar} onChange=${set} />`}`;
}

function Tools({ settings, bind, problems, change }) {
  return html`<details class="section" open=${Boolean(settings.tools)}><summary>Tools</summary>
    <${TextField} label="Functions, as a JSON list" rows=${8} isCode isJson ...${bind("tools")} />
    ${!settings.tools && html`<button type="button" class="plain" onClick=${() => change({ tools: EXAMPLES.tools })}>Use an example</button>`}
    ${settings.tools && !problems.tools && html`<${Choice} label="Tool choice" ...${bind("tool_choice")}
      options=${[["", "Auto"], ["required", "Required"], ["none", "None"]]} />`}
  </details>`;
}
