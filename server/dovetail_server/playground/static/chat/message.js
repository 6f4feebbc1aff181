// One message: what was asked, or a reply with its reasoning, tool calls and figures.
import { html, useEffect, useState } from "../core/html.js";
import { facts } from "../core/facts.js";
import { previewOf } from "../core/images.js";
import { figures, seconds } from "../core/reply.js";
import { CopyButton, IconButton } from "../parts/buttons.js";
import { Markdown } from "../parts/markdown.js";
import { Report } from "../parts/report.js";
import { Long, plain, unordered } from "../parts/text.js";
import { Tokens } from "../parts/tokens.js";
import { Calls, Result } from "./calls.js";
import { canContinue } from "./session.js";

const ENDS = {
  length: "The response reached its token limit.",
  abort: "The server has ended this reply.",
  edited: "Edited by you.",
};
const LONG = 20_000;
const TALL = 2_000; // characters of a question that shall not push everything else away
const SCROLLS = { class: "bubble tall", tabindex: 0, role: "region", "aria-label": "Long question" };

export function Message({ node, siblings, isLast, actions }) {
  if (node.role === "tool") return html`<${Result} node=${node} />`;
  const Kind = node.role === "user" ? Asked : Reply;
  return html`<${Kind} node=${node} isLast=${isLast} actions=${actions}
    branches=${html`<${Branches} node=${node} siblings=${siblings} choose=${actions.choose} />`} />`;
}

function Branches({ node, siblings, choose }) {
  if (siblings.length < 2) return null;
  const at = siblings.indexOf(node);
  return html`<span class="branches">
    <${IconButton} icon="left" label="Previous version" disabled=${at === 0} onClick=${() => choose(siblings[at - 1])} />
    <span>${at + 1} of ${siblings.length}</span>
    <${IconButton} icon="right" label="Next version" disabled=${at === siblings.length - 1} onClick=${() => choose(siblings[at + 1])} />
  </span>`;
}

/** Where a message is changed; `finish(text)` tells whether it was accepted. What is sent ends with Enter, other text with Ctrl and Enter. */
function Editor({ text, label, isSent = false, close, finish }) {
  const [draft, setDraft] = useState(text);
  const submit = (event) => {
    event.preventDefault();
    const given = event.currentTarget.closest("form").querySelector("textarea").value;
    if (given.trim() && finish(given)) close();
  };
  const key = (event) => {
    if (event.key === "Escape") close();
    else if (event.key !== "Enter" || event.isComposing) return;
    else if (isSent ? !event.shiftKey : event.ctrlKey || event.metaKey) submit(event);
  };
  return html`<form class="editor" onSubmit=${submit}>
    <textarea aria-label=${label} rows=${Math.min(text.split("\n").length + 1, 20)} autofocus value=${draft} onInput=${(e) => setDraft(e.target.value)} onKeyDown=${key}
      ref=${(element) => element && !element.contains(document.activeElement) && element.focus()}></textarea>
    <p class="actions"><button type="button" class="plain" onClick=${close}>Cancel</button><button type="submit" title=${isSent ? "Enter" : "Ctrl and Enter"}>${isSent ? "Send" : "Save"}</button></p>
  </form>`;
}

function Asked({ node, branches, actions }) {
  const [isEdited, setIsEdited] = useState(false);
  if (isEdited) {
    return html`<article class="asked editing" aria-label="You">
      <${Editor} text=${node.content} label="Edit what you asked" isSent close=${() => setIsEdited(false)} finish=${(text) => actions.edit(node, text)} />
    </article>`;
  }
  return html`<article class="asked" aria-label="You">
    ${node.images?.length > 0 && html`<${Pictures} images=${node.images} />`}
    ${node.content && html`<div class="bubble" dir="auto" ...${node.content.length > TALL ? SCROLLS : {}}>${node.content.length > LONG ? html`<${Long} text=${node.content} />` : plain(node.content)}</div>`}
    <footer>${branches}
      <${IconButton} icon="edit" label="Edit" class="quiet edit" onClick=${() => setIsEdited(true)} />
      <${CopyButton} text=${node.content} what="question" />
    </footer>
  </article>`;
}

/** The images of a question, each with what the server has against it. */
function Pictures({ images }) {
  return html`<ul class="pictures" aria-label="Images">${images.map((image, i) => {
    const from = previewOf(image);
    return html`<li key=${i}>
      ${from ? html`<img src=${from} alt=${unordered(image.name)} title=${image.name} />` : html`<span class="note">${plain(image.name)} is not in this window, and the model is told so.</span>`}
      ${image.problem && html`<p class="problem">${plain(image.problem)}</p>`}
    </li>`;
  })}</ul>`;
}

function Reply({ node, branches, isLast, actions }) {
  const [showsTokens, setShowsTokens] = useState(false);
  const [isEdited, setIsEdited] = useState(false);
  const isWriting = node.state === "writing";
  const isEmpty = !node.content && !node.reasoning && !node.calls.length;
  return html`<article class="reply" aria-label="Reply" aria-busy=${isWriting}>
    ${node.reasoning && html`<${Reasoning} node=${node} />`}
    ${isWriting && isEmpty && html`<p class="waiting"><span class="dot"></span>Waiting for the first token</p>`}
    ${isEdited && html`<${Editor} text=${node.content} label="Edit the text of the reply" close=${() => setIsEdited(false)} finish=${(text) => actions.amend(node, text)} />`}
    ${node.content && !showsTokens && !isEdited && html`<${Markdown} text=${node.content} isWriting=${isWriting} />`}
    ${showsTokens && !isEdited && html`<${Tokens} tokens=${node.tokens} />`}
    <${Calls} node=${node} canAnswer=${isLast && !isWriting} answer=${actions.answer} />
    ${node.report && html`<${Report} report=${node.report} />`}
    ${node.state === "failed" && html`<p class="problem" role="alert">${plain(node.error)}</p>`}
    ${node.state === "stopped" && html`<p class="note">Stopped.</p>`}
    ${node.state === "done" && ENDS[node.finish] && html`<p class="note">${ENDS[node.finish]}</p>`}
    ${node.state === "done" && isEmpty && html`<p class="note">The reply is empty.</p>`}
    ${!isWriting && html`<footer>${branches}
      ${isLast && canContinue(node) && html`<${IconButton} icon="play" label="Continue" onClick=${() => actions.resume(node)} />`}
      <${IconButton} icon="retry" label="Try again" onClick=${() => actions.retry(node)} />
      ${node.content && html`<${IconButton} icon="edit" label="Edit reply" onClick=${() => setIsEdited(true)} />`}
      <${CopyButton} text=${node.content} what="reply" />
      ${node.tokens.length > 0 && html`<${IconButton} icon="grid" label="Tokens" aria-pressed=${showsTokens} onClick=${() => setShowsTokens(!showsTokens)} />`}
      <${IconButton} icon="code" label="Show code" onClick=${() => actions.program(node)} />
      <${IconButton} icon="branch" label="Branch into a new conversation" onClick=${() => actions.branch(node)} />
      <span class="figures">${[...(facts.names.length > 1 ? [node.model] : []), ...figures(node)].join(" · ")}</span>
    </footer>`}
  </article>`;
}

function Reasoning({ node }) {
  const { sent, first, answer, end } = node.times;
  const isThinking = node.state === "writing" && !answer;
  const now = useClock(isThinking);
  const took = seconds((answer ?? end ?? now) - (first ?? sent));
  return html`<details class="reasoning">
    <summary class=${isThinking ? "live" : ""}>${isThinking ? `Thinking, ${took}` : `Thought for ${took}`}</summary>
    <div class="inside" dir="auto"><${Markdown} text=${node.reasoning} isWriting=${isThinking} /></div>
  </details>`;
}

function useClock(runs) {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    if (!runs) return undefined;
    const timer = setInterval(() => setNow(Date.now()), 100);
    return () => clearInterval(timer);
  }, [runs]);
  return now;
}
