// A request as a command or a program, to copy.
import { html, useState } from "../core/html.js";
import { Code } from "./code.js";
import { Dialog } from "./dialog.js";
import { SNIPPETS } from "./snippets.js";

const LANGUAGES = { curl: "bash", Python: "python", JavaScript: "javascript" };

export function ProgramDialog({ body, onClose }) {
  const [name, setName] = useState("curl");
  return html`<${Dialog} title="Code for this request" kind="broad" onClose=${onClose}>
    <div class="tabs" role="group" aria-label="Language">
      ${Object.keys(SNIPPETS).map((one) => html`<button type="button" key=${one} aria-pressed=${one === name} onClick=${() => setName(one)}>${one}</button>`)}
    </div>
    <${Code} text=${SNIPPETS[name](body)} language=${LANGUAGES[name]} label=${name} />
  <//>`;
}
