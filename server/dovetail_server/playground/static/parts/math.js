// Formulas: KaTeX, which is loaded with the first one. It makes elements and no HTML from text, as the policy demands.
import { html, useLayoutEffect, useRef } from "../core/html.js";

const MOST = 4_000; // characters; a longer formula is shown as it was written
const LIMITS = { maxSize: 20, maxExpand: 500, strict: "ignore", trust: false, throwOnError: true };
const ENVIRONMENTS = "equation|align|alignat|gather";
// A dollar opens beside a character and closes behind one, and no digit follows: `$5 and $6` are prices.
const INLINE = [/^\\\(([^]+?)\\\)/, /^\\\[([^]+?)\\\]/, /^\$\$([^]+?)\$\$/, /^\$(?![\s$])((?:\\[^]|[^\\$\n])*?)(?<![\s\\])\$(?!\d)/];
const BLOCK = [
  /^ {0,3}\\\[([^]+?)\\\][^\S\n]*(?:\n+|$)/,
  /^ {0,3}\$\$([^]+?)\$\$[^\S\n]*(?:\n+|$)/,
  new RegExp(String.raw`^ {0,3}(\\begin\{(${ENVIRONMENTS})(\*?)\}[^]+?\\end\{\2\3\})[^\S\n]*(?:\n+|$)`),
];
const IN_TEXT = /\\\([^]+?\\\)|\\\[[^]+?\\\]|\$\$[^]+?\$\$|\$(?![\s$])[^$\n]*?(?<!\s)\$(?!\d)/g;
/** How a line begins after which text belongs to a formula, and what ends it. */
export const OPENS = /^ {0,3}(\\\[|\$\$)/;
export const CLOSES = { "\\[": "\\]", $$: "$$" };

function found(patterns, source) {
  const near = source.slice(0, MOST);
  for (const pattern of patterns) {
    const match = pattern.exec(near);
    if (match) return { type: "formula", raw: match[0], text: match[1].trim(), isDisplay: !/^(\\\(|\$(?!\$))/.test(match[0]) };
  }
  return undefined;
}

function at(pattern, source) {
  const index = source.search(pattern);
  return index === -1 ? undefined : index;
}

/** What marked has to know to leave formulas alone. */
export const extensions = {
  block: [(source) => (/^ {0,3}(\\\[|\$\$|\\begin\{)/.test(source) ? found(BLOCK, source) : undefined)],
  startBlock: [(source) => at(/\n {0,3}(\\\[|\$\$|\\begin\{)/, source)],
  inline: [(source) => (/^(\\[([]|\$)/.test(source) ? found(INLINE, source) : undefined)],
  startInline: [(source) => at(/\\[([]|\$/, source)],
};
export const hooks = { emStrongMask: (source) => source.replace(IN_TEXT, (formula) => "a".repeat(formula.length)) };

let library = null; // once it is there
let loading = null;

function load() {
  loading ??= Promise.all([import("../vendor/katex/katex.js"), styled()]).then(() => (library = globalThis.katex));
  return loading;
}

function styled() {
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = new URL("../vendor/katex/katex.css", import.meta.url).href;
  const ready = new Promise((resolve, reject) => Object.assign(link, { onload: resolve, onerror: reject }));
  document.head.append(link);
  return ready;
}

/** A formula, as it was written until KaTeX is there and wherever it cannot be read. */
export function Formula({ text, raw, isDisplay }) {
  const element = useRef(null);
  useLayoutEffect(() => {
    const { current } = element;
    let isWanted = true;
    const show = (katex) => isWanted && typeset(katex, current, text, raw, isDisplay);
    if (library) show(library);
    else {
      current.textContent = raw;
      load().then(show, () => (loading = null)); // the server is away: the next formula asks again
    }
    return () => (isWanted = false);
  }, [text, raw, isDisplay]);
  const kind = isDisplay ? "formula display" : "formula";
  return html`<span ref=${element} class=${kind} dir="ltr" tabindex=${isDisplay ? 0 : undefined} role=${isDisplay ? "math" : undefined} aria-label=${isDisplay ? text : undefined}></span>`;
}

function typeset(katex, element, text, raw, isDisplay) {
  try {
    katex.render(text, element, { ...LIMITS, displayMode: isDisplay });
    element.title = "";
  } catch (error) {
    if (!(error instanceof katex.ParseError) && !(error instanceof RangeError)) throw error;
    element.textContent = raw;
    element.title = error.message;
  }
}
