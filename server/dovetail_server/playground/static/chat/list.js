// The conversations that this browser keeps: found by their texts, renamed, removed, exported and imported.
import { html, useEffect, useRef, useState } from "../core/html.js";
import { keeps, list, load, loadAll, remove, save, watch } from "../core/store.js";
import { asFile, fromFile, offer } from "../core/transfer.js";
import { Conversation } from "../core/tree.js";
import { IconButton } from "../parts/buttons.js";
import { plain } from "../parts/text.js";
import { forget, rename } from "./session.js";

const PAUSE_MS = 200; // after a key, before texts are searched

export function ConversationList({ current, onNew, onLeave }) {
  const [rows, setRows] = useState([]);
  const [query, setQuery] = useState("");
  const [notice, setNotice] = useState("");
  const found = useFound(rows, query.trim().toLowerCase());
  useEffect(() => {
    const refresh = () => list().then(setRows);
    refresh();
    return watch(refresh);
  }, []);
  const drop = async (row) => {
    if (!confirm(`Remove "${row.title}" from this browser?`)) return;
    forget(row.id);
    await remove(row.id);
    if (row.id === current) onNew();
  };
  const name = async (row) => {
    const title = prompt("Title of the conversation", row.title)?.trim();
    if (title) await rename(row.id, title.slice(0, 200));
  };
  const exportOne = async (row) => {
    const data = await load(row.id);
    if (data) offer(asFile([data]), "dovetail-conversation.json");
  };
  return html`<nav class="list" aria-label="Conversations">
    <button type="button" class="wide" title="Ctrl, Shift and O" onClick=${onNew}>New conversation</button>
    ${rows.length > 0 && html`<input type="search" id="search" title="Ctrl and K" aria-label="Search conversations" placeholder="Search" value=${query} onInput=${(e) => setQuery(e.target.value)} />`}
    <ul>${found.map(
      (row) => html`<li key=${row.id} class=${row.id === current ? "current" : ""}>
        <a href=${`#/chat/${row.id}`} aria-current=${row.id === current ? "page" : undefined} title=${row.title} onClick=${onLeave} dir="auto">${plain(row.title)}${row.snippet && html`<small>${plain(row.snippet)}</small>`}</a>
        <span class="tools">
          <${IconButton} icon="edit" label=${`Rename ${row.title}`} onClick=${() => name(row)} />
          <${IconButton} icon="download" label=${`Export ${row.title}`} onClick=${() => exportOne(row)} />
          <${IconButton} icon="trash" label=${`Remove ${row.title}`} onClick=${() => drop(row)} />
        </span>
      </li>`,
    )}</ul>
    ${query.trim() && !found.length && html`<p class="note" role="status">No conversation has this text.</p>`}
    ${notice && html`<p class="note" role="status">${plain(notice)}</p>`}
    <${Transfer} hasRows=${rows.length > 0} setNotice=${setNotice} />
    <p class="note">${keeps() ? "Kept in this browser only." : "This browser keeps nothing: conversations end with this window."}</p>
  </nav>`;
}

/** The part of a conversation's messages that has the text, with a few words before it; empty if none has. */
function snippetOf({ nodes }, query) {
  for (const text of Object.values(nodes).flatMap((node) => [node.content ?? "", node.reasoning ?? ""])) {
    const at = text.toLowerCase().indexOf(query);
    if (at !== -1) return `${at > 15 ? "…" : ""}${text.slice(Math.max(0, at - 15), at + query.length + 60)}`;
  }
  return "";
}

/** The rows whose title or messages have the text, with what was found; titles at once, messages a moment after the last key. */
function useFound(rows, query) {
  const [inTexts, setInTexts] = useState({ query: "", snippets: new Map() });
  useEffect(() => {
    if (!query) return undefined;
    let isWanted = true;
    const timer = setTimeout(async () => {
      const all = await loadAll();
      if (isWanted) setInTexts({ query, snippets: new Map(all.map((one) => [one.id, snippetOf(one, query)])) });
    }, PAUSE_MS);
    return () => {
      isWanted = false;
      clearTimeout(timer);
    };
  }, [rows, query]);
  if (!query) return rows;
  const found = rows.map((row) => ({ ...row, snippet: inTexts.query === query ? inTexts.snippets.get(row.id) : "" }));
  return found.filter(({ title, snippet }) => snippet || title.toLowerCase().includes(query));
}

function Transfer({ hasRows, setNotice }) {
  const input = useRef(null);
  const exportAll = async () => offer(asFile(await loadAll()), "dovetail-conversations.json");
  const importFile = async ({ target }) => {
    const [file] = target.files;
    target.value = ""; // the same file may be chosen again
    if (!file) return;
    try {
      const given = fromFile(await file.text());
      const known = new Set((await list()).map(({ id }) => id));
      const fresh = given.filter(({ id }) => !known.has(id)); // nothing that is here is written over
      for (const one of fresh) await save(new Conversation(one));
      const old = given.length - fresh.length;
      setNotice(`${fresh.length} imported${old ? `, ${old} ${old === 1 ? "was" : "were"} here already` : ""}.`);
    } catch (error) {
      setNotice(error.message);
    }
  };
  return html`<p class="transfer">
    <button type="button" class="plain" disabled=${!hasRows} onClick=${exportAll}>Export</button>
    <button type="button" class="plain" onClick=${() => input.current.click()}>Import</button>
    <input ref=${input} type="file" accept="application/json,.json" hidden aria-label="File of conversations" onChange=${importFile} />
  </p>`;
}
