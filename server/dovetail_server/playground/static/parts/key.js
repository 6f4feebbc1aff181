// Asks for the server's key: once a session, and it stays in this window.
import { html, useEffect, useRef, useState } from "../core/html.js";
import { askForKeyWith } from "../core/api.js";
import { Dialog } from "./dialog.js";

export function KeyDialog() {
  const [reason, setReason] = useState(null);
  const [key, setKey] = useState("");
  const settle = useRef(null);
  useEffect(() => {
    askForKeyWith((why) => {
      setKey("");
      setReason(why);
      return new Promise((resolve) => (settle.current = resolve));
    });
  }, []);
  if (reason === null) return null;
  const answer = (value) => {
    setReason(null);
    settle.current(value);
  };
  const submit = (event) => {
    event.preventDefault();
    const typed = event.currentTarget.querySelector("input").value.trim(); // Enter may come before a new layout
    if (typed) answer(typed);
  };
  return html`<${Dialog} title="API key" onClose=${() => answer(null)}>
    <form onSubmit=${submit}>
      <p>${reason} This server needs a key. It is kept until this window closes, and sent to this server only.</p>
      <label>Key
        <input type="password" autocomplete="off" spellcheck="false" autofocus value=${key} onInput=${(e) => setKey(e.target.value)} />
      </label>
      <p class="actions"><button type="submit">Use this key</button></p>
    </form>
  <//>`;
}
