// Dialogs: the browser's own, which hold the focus and close with Escape.
import { html, useEffect, useRef } from "../core/html.js";
import { IconButton } from "./buttons.js";

export function Dialog({ title, onClose, children, kind = "" }) {
  const element = useRef(null);
  useEffect(() => {
    element.current.showModal();
  }, []);
  const outside = (event) => event.target === element.current && onClose();
  return html`<dialog ref=${element} class=${kind} aria-label=${title} onClose=${onClose} onClick=${outside}>
    <div class="inside">
      <header><h2>${title}</h2><${IconButton} icon="close" label="Close" onClick=${() => element.current.close()} /></header>
      ${children}
    </div>
  </dialog>`;
}
