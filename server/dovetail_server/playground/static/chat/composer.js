// Where one types: Enter sends, Shift and Enter makes a new line, Escape stops a reply; files go along as text, or as images.
import { facts } from "../core/facts.js";
import { html, useEffect, useRef, useState } from "../core/html.js";
import { bytesOf, imageOf, KINDS, refusalOf, TYPES } from "../core/images.js";
import { newId } from "../core/tree.js";
import { IconButton } from "../parts/buttons.js";
import { Icon } from "../parts/icons.js";
import { plain } from "../parts/text.js";

const MOST_BYTES = 1 << 20;
const TEXT_BYTES = 1 << 16; // of a request are left for its text

/** What is sent: the text, and each text file under its name, in a fence that nothing in it ends. */
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

/** `sent`: images that the conversation has already, which go along each time. */
export function Composer({ draft, setDraft, files, setFiles, sent, isRunning, canSend, onSend, onStop, onEditLast }) {
  const [notice, setNotice] = useState("");
  const area = useRef(null);
  const picker = useRef(null);
  const imagePicker = useRef(null);
  const most = facts.info?.max_images ?? 0;
  const images = files.filter(({ url }) => url);
  useEffect(() => {
    const element = area.current; // grows with its text
    element.style.height = "auto";
    element.style.height = `${Math.min(element.scrollHeight, 320)}px`;
  }, [draft]);
  const submit = (event) => {
    event?.preventDefault();
    setNotice("");
    const text = area.current.value; // a key may come before what was typed has been laid out
    if ((text.trim() || files.length) && canSend) onSend(withFiles(text, files.filter(({ url }) => !url)), text.trim() || files[0].name, images);
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
    let free = most - sent.length - images.length;
    const body = facts.info?.max_body_bytes ?? Infinity;
    let room = body - TEXT_BYTES - bytesOf([...sent, ...images]);
    const attached = async (file) => {
      if (!file.type.startsWith("image/")) return textOf(file);
      if (!most) throw new Error(`${file.name} was left out: ${facts.info?.no_images ?? "the server does not answer yet"}.`);
      const refusal = refusalOf(file) || (free > 0 ? "" : `${file.name} was left out: a conversation may have ${most} image${most === 1 ? "" : "s"}.`);
      if (refusal) throw new Error(refusal);
      const needed = bytesOf([file]);
      if (needed > room) throw new Error(`${file.name} was left out: the images of a conversation go along with each request, which may have ${bytes(body)}.`);
      free -= 1;
      room -= needed;
      return { id: newId(), ...(await imageOf(file)) };
    };
    const read = await Promise.allSettled(given.map(attached));
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
  const drop = (index) => {
    if (files[index].preview) URL.revokeObjectURL(files[index].preview);
    setFiles((all) => all.filter((_, i) => i !== index));
    area.current.focus();
  };
  return html`<form class="composer" onSubmit=${submit} onDragOver=${(event) => event.preventDefault()} onDrop=${dropped}>
    ${notice && html`<p class="note" role="status">${plain(notice)}</p>`}
    ${files.length > 0 && html`<ul class="files" aria-label="Attached files">${files.map(
      ({ name, content, size, preview }, i) => html`<li key=${i}>${preview && html`<img src=${preview} alt=${`Preview of ${name}`} />`}<span title=${name}>${plain(name)}</span> <small>${preview ? bytes(size) : characters(content.length)}</small>
        <${IconButton} icon="close" label=${`Remove ${name}`} onClick=${() => drop(i)} /></li>`,
    )}</ul>`}
    ${images.length > 0 && html`<p class="note">${sent.length + images.length} of ${most} images of a conversation: ${KINDS}.</p>`}
    <div class="box">
      <${IconButton} icon="clip" label="Attach text files" onClick=${() => picker.current.click()} />
      <input ref=${picker} type="file" multiple hidden aria-label="Text files" onChange=${picked} />
      ${
        most > 0 &&
        html`<${IconButton} icon="image" label="Attach images" title=${`Attach images: ${KINDS}, ${most} in a conversation`} onClick=${() => imagePicker.current.click()} />
      <input ref=${imagePicker} type="file" accept=${TYPES.join()} multiple hidden aria-label="Images" onChange=${picked} />`
      }
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

function characters(count) {
  return count < 1000 ? `${count} characters` : `${Math.round(count / 1000)} K characters`;
}

function bytes(count) {
  return count < 1 << 20 ? `${Math.ceil(count / 1024)} KiB` : `${(count / (1 << 20)).toFixed(1)} MiB`;
}
