// Markdown as elements. The lexer is marked's; nothing here ever makes HTML from text, so no reply can either.
import { html, useMemo, useRef } from "../core/html.js";
import { Lexer, defaults } from "../vendor/marked.js";
import { Code } from "./code.js";
import { Formula, extensions, hooks } from "./math.js";
import { Long, plain } from "./text.js";
import { Reading } from "./reading.js";

export const MOST = 200_000; // characters; a longer reply is shown as plain text
const MOST_INLINE = 4_000; // of one paragraph: the lexer takes quadratic time on some
const IN_TEX = /^\\[,;:!(){}[\]]$/;
const LINKS = /^(https?:|mailto:)/i;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", mdash: "—", ndash: "–" };
Object.assign(ENTITIES, { hellip: "…", times: "×", rarr: "→", larr: "←", deg: "°", euro: "€", le: "≤", ge: "≥", ne: "≠" });

class Bounded extends Lexer {
  inlineTokens(source, tokens = []) {
    if (source.length <= MOST_INLINE) return super.inlineTokens(source, tokens);
    tokens.push({ type: "text", raw: source, text: source });
    return tokens;
  }
}

/** Blocks of Markdown, or null where it cannot be read as such. */
export function lex(text) {
  try {
    return new Bounded({ ...defaults, gfm: true, extensions, hooks }).lex(text);
  } catch (error) {
    if (error instanceof RangeError) return null; // nested deeper than the stack
    throw error;
  }
}

/** Markdown that grows at its end while it is written; the whole is laid out once more when it has ended. */
export function Markdown({ text, isWriting }) {
  if (text.length > MOST) {
    return html`<p class="note">This reply is too long to be laid out; it is shown as plain text.</p>
      <${Long} text=${text} isWriting=${isWriting} />`;
  }
  return html`<div class="markdown" dir="auto"><${isWriting ? Written : Whole} text=${text} /></div>`;
}

function Whole({ text }) {
  return useMemo(() => blocksOf(text, 1).elements, [text]);
}

/** What is settled is never looked at again, so a frame costs as much in a long reply as in a short one. */
function Written({ text }) {
  const { current: reader } = useRef(new Reading(blocksOf));
  const tail = reader.take(text);
  const rest = useMemo(() => blocksOf(tail, reader.level).elements, [tail, reader.level]);
  return html`<${Settled} reader=${reader} count=${reader.chunks.length} />${rest}`;
}

const GROUP = 32;

function Settled({ reader, count }) {
  const starts = Array.from({ length: Math.ceil(count / GROUP) }, (_, i) => i * GROUP);
  const group = (at) => html`<${Group} key=${at} reader=${reader} at=${at} end=${Math.min(at + GROUP, count)} />`;
  return useMemo(() => starts.map(group), [count]);
}

function Group({ reader, at, end }) {
  return useMemo(() => reader.chunks.slice(at, end), [end]);
}

/** Elements, and the level of the last heading; `level` is that of the heading before them. */
function blocksOf(text, level) {
  const tokens = lex(text);
  if (tokens === null) return { elements: html`<${Long} text=${text} />`, level };
  const last = order(tokens, level);
  return { elements: blocks(tokens), level: last };
}

/** Give headings levels below the page's own that leave none out, however a reply writes them. */
function order(tokens, level) {
  let last = level;
  for (const token of tokens) {
    if (token.type === "heading") last = token.level = Math.min(token.depth + 1, last + 1, 6);
    for (const inside of [token.type === "blockquote" ? token : null, ...(token.items ?? [])]) {
      if (inside) last = order(inside.tokens, last);
    }
  }
  return last;
}

function blocks(tokens) {
  return tokens.map(block);
}

function block(token) {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading":
      return html`<${`h${token.level}`} class=${`depth-${token.depth}`} dir="auto">${inlines(token.tokens)}<//>`;
    case "paragraph":
      return html`<p dir="auto">${inlines(token.tokens)}</p>`;
    case "code":
      return html`<${Code} text=${token.text} language=${token.lang ?? ""} />`;
    case "blockquote":
      return html`<blockquote>${blocks(token.tokens)}</blockquote>`;
    case "list":
      return list(token);
    case "table":
      return table(token);
    case "hr":
      return html`<hr />`;
    case "formula":
      return html`<p>${formula(token)}</p>`;
    case "text":
      return token.tokens ? inlines(token.tokens) : plain(decoded(token.text));
    case "html":
      return html`<p class="raw">${plain(token.raw.trimEnd())}</p>`;
    default:
      return inline(token);
  }
}

function list(token) {
  const items = token.items.map((item) => html`<li class=${item.task ? "task" : undefined}>${blocks(item.tokens)}</li>`);
  return token.ordered ? html`<ol start=${token.start || 1}>${items}</ol>` : html`<ul>${items}</ul>`;
}

function table(token) {
  const cells = (row, kind) => row.map((cell) => html`<${kind} class=${cell.align ?? ""}>${inlines(cell.tokens)}<//>`);
  return html`<div class="scrolls" tabindex="0" role="region" aria-label="Table"><table>
    <thead><tr>${cells(token.header, "th")}</tr></thead>
    <tbody>${token.rows.map((row) => html`<tr>${cells(row, "td")}</tr>`)}</tbody>
  </table></div>`;
}

function inlines(tokens = []) {
  return tokens.map(inline);
}

function inline(token) {
  switch (token.type) {
    case "strong":
      return html`<strong>${inlines(token.tokens)}</strong>`;
    case "em":
      return html`<em>${inlines(token.tokens)}</em>`;
    case "del":
      return html`<del>${inlines(token.tokens)}</del>`;
    case "codespan":
      return html`<code>${plain(token.text)}</code>`;
    case "br":
      return html`<br />`;
    case "link":
      return link(token, inlines(token.tokens));
    case "image": // nothing is loaded from anywhere
      return link(token, ["image: ", plain(token.text || token.href)]);
    case "checkbox":
      return token.checked ? "☑ " : "☐ ";
    case "escape": // TeX without its marks stays what it was
      return plain(IN_TEX.test(token.raw) ? token.raw : token.text);
    case "formula":
      return formula(token);
    case "html":
      return plain(token.raw);
    case "text":
      return token.tokens ? inlines(token.tokens) : plain(decoded(token.text));
    default:
      return plain(token.raw ?? "");
  }
}

function formula({ text, raw, isDisplay }) {
  return html`<${Formula} text=${text} raw=${raw.trim()} isDisplay=${isDisplay} />`;
}

function link(token, inside) {
  if (!LINKS.test(token.href)) return plain(token.raw);
  return html`<a href=${token.href} target="_blank" rel="noopener noreferrer" title=${token.title ?? token.href}>
    ${inside}
  </a>`;
}

function decoded(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|([a-z]{2,6}));/gi, (whole, decimal, hex, name) => {
    if (name) return ENTITIES[name] ?? whole;
    const code = decimal ? Number(decimal) : parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : whole;
  });
}
