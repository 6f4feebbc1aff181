// Where one types: Enter sends, Shift and Enter makes a new line, Escape stops a reply.
import { html, useEffect, useRef, useState } from "../core/html.js";
import { Icon } from "../parts/icons.js";

const IMAGES = "This model reads text only, so the image was left out.";

export function Composer({ draft, setDraft, isRunning, canSend, onSend, onStop, onEditLast }) {
  const [notice, setNotice] = useState("");
  const area = useRef(null);
  useEffect(() => {
    const element = area.current; // grows with its text
    element.style.height = "auto";
    element.style.height = `${Math.min(element.scrollHeight, 320)}px`;
  }, [draft]);
  const submit = (event) => {
    event?.preventDefault();
    setNotice("");
    const text = area.current.value; // a key may come before what was typed has been laid out
    if (!isRunning && text.trim() && canSend) onSend(text);
  };
  const key = (event) => {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      submit();
    } else if (event.key === "Escape" && isRunning) onStop();
    else if (event.key === "ArrowUp" && area.current.value === "") onEditLast();
  };
  const files = (event) => {
    const given = [...((event.clipboardData ?? event.dataTransfer)?.files ?? [])];
    if (!given.length) return;
    event.preventDefault();
    const texts = given.filter((file) => file.type.startsWith("text/") || /\.(md|json|jsonl|csv|py|js|toml|ya?ml)$/.test(file.name));
    if (texts.length < given.length) setNotice(IMAGES.replace("image", given[0].type.startsWith("image/") ? "image" : "file"));
    Promise.all(texts.map((file) => file.text())).then((found) => found.length && setDraft([draft, ...found].filter(Boolean).join("\n\n")));
  };
  return html`<form class="composer" onSubmit=${submit} onDragOver=${(event) => event.preventDefault()} onDrop=${files}>
    ${notice && html`<p class="note" role="status">${notice}</p>`}
    <div class="box">
      <textarea ref=${area} rows="1" id="composer" aria-label="Your message" placeholder="Ask something" value=${draft} autofocus
        onInput=${(event) => setDraft(event.target.value)} onKeyDown=${key} onPaste=${files}></textarea>
      ${
        isRunning
          ? html`<button type="button" class="round" title="Stop (Escape)" aria-label="Stop" onClick=${onStop}><${Icon} name="stop" /></button>`
          : html`<button type="submit" class="round" title="Send (Enter)" aria-label="Send" disabled=${!draft.trim() || !canSend}><${Icon} name="send" /></button>`
      }
    </div>
  </form>`;
}
