// What came of a schema or a grammar, as the server reports it.
import { html } from "../core/html.js";

const HOW = {
  full: "Every token conforms.",
  approximate: "Everything was enforced except what is named below.",
  validate_only: "Any JSON was allowed; it was validated at the end.",
};

function verdict(valid, enforcement) {
  if (valid === true) return "It conforms.";
  if (valid === false) return "It does not conform.";
  return enforcement === "full" ? "" : "It was cut off before it could be validated.";
}

export function Report({ report }) {
  const isGood = report.valid !== false && report.enforcement === "full";
  return html`<details class=${`report ${report.valid === false ? "bad" : isGood ? "good" : "fair"}`}>
    <summary>Structured output: ${report.enforcement.replace("_", " ")}${report.valid === false ? ", not valid" : ""}</summary>
    <p>${HOW[report.enforcement]} ${verdict(report.valid, report.enforcement)} Grammar backend: <code>${report.backend}</code>.</p>
    ${report.ignored.length > 0 && html`<p>Not enforced: ${report.ignored.map((one) => html`<code>${one}</code> `)}</p>`}
    ${(report.tools ?? []).map(
      (tool) => html`<p><code>${tool.name}</code>: ${HOW[tool.enforcement]} ${tool.valid === false ? "Its arguments do not conform." : ""}
        ${tool.ignored.length > 0 && html`Not enforced: ${tool.ignored.join(", ")}`}</p>`,
    )}
  </details>`;
}
