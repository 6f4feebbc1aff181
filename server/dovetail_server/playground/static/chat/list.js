// The conversations that this browser keeps.
import { html, useEffect, useState } from "../core/html.js";
import { keeps, list, remove, watch } from "../core/store.js";
import { IconButton } from "../parts/buttons.js";
import { plain } from "../parts/text.js";
import { forget } from "./session.js";

export function ConversationList({ current, onNew, onLeave }) {
  const [rows, setRows] = useState([]);
  const [query, setQuery] = useState("");
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
  const found = rows.filter((row) => row.title.toLowerCase().includes(query.toLowerCase()));
  return html`<nav class="list" aria-label="Conversations">
    <button type="button" class="wide" onClick=${onNew}>New conversation</button>
    ${rows.length > 8 && html`<input type="search" aria-label="Find a conversation" placeholder="Find" value=${query} onInput=${(e) => setQuery(e.target.value)} />`}
    <ul>${found.map(
      (row) => html`<li key=${row.id} class=${row.id === current ? "current" : ""}>
        <a href=${`#/chat/${row.id}`} aria-current=${row.id === current ? "page" : undefined} onClick=${onLeave} dir="auto">${plain(row.title)}</a>
        <${IconButton} icon="trash" label=${`Remove ${row.title}`} onClick=${() => drop(row)} />
      </li>`,
    )}</ul>
    <p class="note">${keeps() ? "Kept in this browser only." : "This browser keeps nothing: conversations end with this window."}</p>
  </nav>`;
}
