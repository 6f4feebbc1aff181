// Tool calls: what the model wants called with what, and a place for its result.
import { html, useState } from "../core/html.js";
import { Code } from "../parts/code.js";
import { Icon } from "../parts/icons.js";
import { plain } from "../parts/text.js";

/** Arguments laid out for reading, or as they came where they are not JSON. */
export function laidOut(text) {
  try {
    return { text: JSON.stringify(JSON.parse(text), null, 2), isJson: true };
  } catch {
    return { text, isJson: false };
  }
}

export function Calls({ node, canAnswer, answer }) {
  const [answers, setAnswers] = useState({});
  if (!node.calls.length) return null;
  const submit = (event) => {
    event.preventDefault();
    const given = [...event.currentTarget.querySelectorAll("textarea")].map((area) => area.value);
    answer(node, node.calls.map((call, i) => [call, given[i]]));
  };
  return html`<form class="calls" onSubmit=${submit}>
    ${node.calls.map((call, i) => {
      const { text, isJson } = laidOut(call.arguments);
      return html`<section class="call" key=${i} aria-label=${`Call of ${call.name}`}>
        <h2><${Icon} name="tool" /> ${plain(call.name)}</h2>
        <${Code} text=${text} language=${isJson ? "json" : ""} label="arguments" />
        ${!isJson && node.state !== "writing" && html`<p class="note">These arguments are not JSON; they are shown as they came.</p>`}
        ${canAnswer && html`<label>Result of ${call.name}
          <textarea rows="2" placeholder='{"temperature": 21}' value=${answers[i] ?? ""}
            onInput=${({ target }) => setAnswers((all) => ({ ...all, [i]: target.value }))}></textarea></label>`}
      </section>`;
    })}
    ${canAnswer && html`<p class="actions"><button type="submit">Send ${node.calls.length > 1 ? "the results" : "the result"}</button></p>`}
  </form>`;
}

export function Result({ node }) {
  return html`<details class="result"><summary><${Icon} name="tool" /> Result of ${plain(node.name)}</summary>
    <${Code} text=${laidOut(node.content).text} language=${laidOut(node.content).isJson ? "json" : ""} label="result" />
  </details>`;
}
