// Text as it is: characters that reorder what follows them are shown by name instead of obeyed.
import { html, useRef } from "../core/html.js";

const REORDERING = /[\u202A-\u202E\u2066-\u2069]/;
const NAMES = {
  "\u202A": "left-to-right embedding",
  "\u202B": "right-to-left embedding",
  "\u202C": "end of embedding",
  "\u202D": "left-to-right override",
  "\u202E": "right-to-left override",
  "\u2066": "left-to-right isolate",
  "\u2067": "right-to-left isolate",
  "\u2068": "isolate",
  "\u2069": "end of isolate",
};

/** A string, or pieces of it with marks between. */
export function plain(text) {
  if (!REORDERING.test(text)) return text;
  return text.split(/([\u202A-\u202E\u2066-\u2069])/).map((piece) =>
    NAMES[piece]
      ? html`<span class="mark" title=${NAMES[piece]}>U+${piece.codePointAt(0).toString(16).toUpperCase()}</span>`
      : piece,
  );
}

/** The text without them, for those who hear it. */
export function unordered(text) {
  return text.replace(/[\u202A-\u202E\u2066-\u2069]/g, "");
}

const CHUNK = 1 << 14;

/** A long text without any markup, in pieces that the browser lays out when they come into view. */
export function Long({ text, isWriting = false }) {
  const cut = useRef(null);
  if (!isWriting || cut.current === null) cut.current = { at: 0, pieces: [] };
  const { pieces } = cut.current;
  // The last piece of a text that is still written may grow: it is cut anew.
  while (text.length - cut.current.at > 2 * CHUNK || (!isWriting && cut.current.at < text.length)) {
    const { at } = cut.current;
    const line = text.indexOf("\n", at + CHUNK);
    const end = line === -1 || line > at + 2 * CHUNK ? Math.min(at + CHUNK, text.length) : line + 1;
    pieces.push(html`<div class="piece" key=${pieces.length}>${plain(text.slice(at, end))}</div>`);
    cut.current.at = end;
  }
  const rest = text.slice(cut.current.at);
  return html`<div class="long">${pieces}${rest && html`<div class="piece">${plain(rest)}</div>`}</div>`;
}
