// Where one types: Enter sends, Shift and Enter makes a new line, Escape stops a reply; files go along as text.
import { html, useEffect, useRef, useState } from "../core/html.js";
import { IconButton } from "../parts/buttons.js";
import { Icon } from "../parts/icons.js";
import { plain } from "../parts/text.js";

const MOST_BYTES = 1 << 20;

/** What is sent: the text, and each file under its name, in a fence that nothing in it ends. */
export function withFiles(text, files) {
  const parts = files.map(({ name, content }) => {
    const longest = Math.max(2, ...(content.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${content}${content.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [text, ...parts].filter(Boolean).join("\n\n");
}

/** `{name, content}` of a file; throws a sentence for people where it is no text. */
async function textOf(file) {
  if (file.type.startsWith("image/")) throw new Error(`${file.name}: this page sends text only, so the image was left out.`);
  if (file.size > MOST_BYTES) throw new Error(`${file.name} has more than 1 MiB and was left out.`);
  let content = "\0";
  try {
    content = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // a file that went away meanwhile says so itself
  }
  if (content.includes("\0")) throw new Error(`${file.name} is not a text file (UTF-8) and was left out.`);
  return { name: file.name, content };
}

export function Composer({ draft, setDraft, files, setFiles, isRunning, canSend, onSend, onStop, onEditLast }) {
  const [notice, setNotice] = useState("");
  const area = useRef(null);
  const picker = useRef(null);
  useEffect(() => {
    const element = area.current; // grows with its text
    element.style.height = "auto";
    element.style.height = `${Math.min(element.scrollHeight, 320)}px`;
  }, [draft]);
  const submit = (event) => {
    event?.preventDefault();
    setNotice("");
    const text = area.current.value; // a key may come before what was typed has been laid out
    if ((text.trim() || files.length) && canSend) onSend(withFiles(text, files), text.trim() || files[0].name);
  };
  const key = (event) => {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      submit();
    } else if (event.key === "Escape" && isRunning) onStop();
    else if (event.key === "ArrowUp" && area.current.value === "") onEditLast();
  };
  const take = async (given) => {
    const read = await Promise.allSettled(given.map(textOf));
    setNotice(read.filter(({ reason }) => reason).map(({ reason }) => reason.message).join(" "));
    const found = read.filter(({ status }) => status === "fulfilled").map(({ value }) => value);
    if (found.length) setFiles((all) => [...all, ...found]);
    area.current?.focus();
  };
  const dropped = (event) => {
    const given = [...((event.clipboardData ?? event.dataTransfer)?.files ?? [])];
    if (!given.length) return;
    event.preventDefault();
    take(given);
  };
  const picked = ({ target }) => {
    take([...target.files]);
    target.value = ""; // the same file may be chosen again
  };
  const drop = (index) => setFiles((all) => all.filter((_, i) => i !== index));
  return html`<form class="composer" onSubmit=${submit} onDragOver=${(event) => event.preventDefault()} onDrop=${dropped}>
    ${notice && html`<p class="note" role="status">${plain(notice)}</p>`}
    ${files.length > 0 && html`<ul class="files" aria-label="Attached files">${files.map(
      ({ name, content }, i) => html`<li key=${i}><span title=${name}>${plain(name)}</span> <small>${size(content.length)}</small>
        <${IconButton} icon="close" label=${`Remove ${name}`} onClick=${() => drop(i)} /></li>`,
    )}</ul>`}
    <div class="box">
      <${IconButton} icon="clip" label="Attach text files" onClick=${() => picker.current.click()} />
      <input ref=${picker} type="file" multiple hidden aria-label="Text files" onChange=${picked} />
      <textarea ref=${area} rows="1" id="composer" aria-label="Your message" placeholder="Ask something" value=${draft} autofocus
        onInput=${(event) => setDraft(event.target.value)} onKeyDown=${key} onPaste=${dropped}></textarea>
      ${
        isRunning
          ? html`<button type="button" class="round" title="Stop (Escape)" aria-label="Stop" onClick=${onStop}><${Icon} name="stop" /></button>`
          : html`<button type="submit" class="round" title="Send (Enter)" aria-label="Send" disabled=${(!draft.trim() && !files.length) || !canSend}><${Icon} name="send" /></button>`
      }
    </div>
  </form>`;
}

function size(characters) {
  return characters < 1000 ? `${characters} characters` : `${Math.round(characters / 1000)} K characters`;
}
