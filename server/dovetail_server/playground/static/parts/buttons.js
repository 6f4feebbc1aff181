// Buttons that are an icon with a name.
import { html, useState } from "../core/html.js";
import { Icon } from "./icons.js";

export function IconButton({ icon, label, text = "", ...rest }) {
  return html`<button type="button" class="quiet" title=${label} aria-label=${text ? undefined : label} ...${rest}>
    <${Icon} name=${icon} />${text && html`<span>${text}</span>`}
  </button>`;
}

export function CopyButton({ text, what, label = "" }) {
  const [state, setState] = useState("");
  const copy = async () => {
    setState((await copied(text)) ? "Copied" : "Not copied");
    setTimeout(() => setState(""), 1500);
  };
  return html`<${IconButton}
    icon=${state === "Copied" ? "check" : "copy"}
    label=${state || `Copy ${what}`}
    text=${label}
    onClick=${copy}
  />`;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedByHand(text); // an address that is neither https nor this machine has no clipboard
  }
}

function copiedByHand(text) {
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}
