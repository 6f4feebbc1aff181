// The conversations that this browser keeps: found by their texts, renamed, removed, exported and imported.
import { html, useEffect, useRef, useState } from "../core/html.js";
import { keeps, list, loadAll, remove, save, watch } from "../core/store.js";
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
  return html`<nav class="list" aria-label="Conversations">
    <button type="button" class="wide" onClick=${onNew}>New conversation</button>
    ${rows.length > 0 && html`<input type="search" aria-label="Search conversations" placeholder="Search" value=${query} onInput=${(e) => setQuery(e.target.value)} />`}
    <ul>${found.map(
      (row) => html`<li key=${row.id} class=${row.id === current ? "current" : ""}>
        <a href=${`#/chat/${row.id}`} aria-current=${row.id === current ? "page" : undefined} title=${row.title} onClick=${onLeave} dir="auto">${plain(row.title)}</a>
        <${IconButton} icon="edit" label=${`Rename ${row.title}`} onClick=${() => name(row)} />
        <${IconButton} icon="trash" label=${`Remove ${row.title}`} onClick=${() => drop(row)} />
      </li>`,
    )}</ul>
    ${query.trim() && !found.length && html`<p class="note" role="status">No conversation has this text.</p>`}
    ${notice && html`<p class="note" role="status">${plain(notice)}</p>`}
    <${Transfer} hasRows=${rows.length > 0} setNotice=${setNotice} />
    <p class="note">${keeps() ? "Kept in this browser only." : "This browser keeps nothing: conversations end with this window."}</p>
  </nav>`;
}

/** The rows whose title or messages have the text; titles at once, messages a moment after the last key. */
function useFound(rows, query) {
  const [inTexts, setInTexts] = useState({ query: "", ids: new Set() });
  useEffect(() => {
    if (!query) return undefined;
    let isWanted = true;
    const timer = setTimeout(async () => {
      const all = await loadAll();
      const has = (text) => (text ?? "").toLowerCase().includes(query);
      const ids = all.filter(({ nodes }) => Object.values(nodes).some((node) => has(node.content) || has(node.reasoning)));
      if (isWanted) setInTexts({ query, ids: new Set(ids.map(({ id }) => id)) });
    }, PAUSE_MS);
    return () => {
      isWanted = false;
      clearTimeout(timer);
    };
  }, [rows, query]);
  const isIn = ({ id, title }) => title.toLowerCase().includes(query) || (inTexts.query === query && inTexts.ids.has(id));
  return query ? rows.filter(isIn) : rows;
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
