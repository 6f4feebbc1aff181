// A block of code: its language, a button that copies it, and colours from highlight.js, which is loaded when needed.
import { html, useEffect, useState } from "../core/html.js";
import { CopyButton } from "./buttons.js";
import { plain } from "./text.js";

const LANGUAGES = ["python", "javascript", "typescript", "json", "bash", "xml", "sql", "yaml", "cpp", "rust", "go"];
LANGUAGES.push("java", "diff");
const OTHERS = { py: "python", js: "javascript", jsx: "javascript", ts: "typescript", tsx: "typescript", sh: "bash" };
Object.assign(OTHERS, { shell: "bash", console: "bash", html: "xml", svg: "xml", yml: "yaml", c: "cpp", "c++": "cpp" });
Object.assign(OTHERS, { rs: "rust", golang: "go", patch: "diff", jsonl: "json" });
const MOST = 50_000; // characters that are coloured
const loaded = new Map();

/** Builds elements where highlight.js would write HTML. */
class Emitter {
  constructor() {
    this.root = { children: [] };
    this.stack = [this.root];
  }

  addText(text) {
    if (text) this.stack.at(-1).children.push(text);
  }

  startScope(scope) {
    const node = { scope, children: [] };
    this.stack.at(-1).children.push(node);
    this.stack.push(node);
  }

  endScope() {
    this.stack.pop();
  }

  openNode(scope) {
    this.startScope(scope);
  }

  closeNode() {
    this.endScope();
  }

  __addSublanguage(emitter) {
    this.stack.at(-1).children.push(emitter.root);
  }

  finalize() {}

  toHTML() {
    return "";
  }
}

let highlighter = null;

async function load(language) {
  highlighter ??= import("../vendor/highlight.js").then((module) => {
    module.default.configure({ __emitter: Emitter });
    return module.default;
  });
  const [core, grammar] = await Promise.all([highlighter, import(`../vendor/languages/${language}.js`)]);
  core.registerLanguage(language, grammar.default);
  loaded.set(language, core);
}

function coloured(text, language) {
  return elements(loaded.get(language).highlight(text, { language, ignoreIllegals: true })._emitter.root);
}

function elements(node) {
  const inside = node.children.map((child) => (typeof child === "string" ? plain(child) : elements(child)));
  return node.scope ? html`<span class=${`c-${node.scope.split(".")[0]}`}>${inside}</span>` : inside;
}

export function languageOf(name) {
  const word = name.trim().split(/\s/, 1)[0].toLowerCase();
  const found = OTHERS[word] ?? word;
  return LANGUAGES.includes(found) ? found : null;
}

export function Code({ text, language = "", label = "" }) {
  const known = text.length <= MOST ? languageOf(language) : null;
  const [, setLoaded] = useState(0);
  const isColoured = known && loaded.has(known);
  useEffect(() => {
    if (!known || isColoured) return;
    // Another block may have loaded it since this one was laid out.
    const ready = loaded.has(known) ? Promise.resolve() : load(known);
    ready.then(() => setLoaded((count) => count + 1), console.warn);
  }, [known]);
  const name = label || language.trim().split(/\s/, 1)[0] || "text";
  return html`<figure class="code">
    <figcaption><span>${plain(name)}</span><${CopyButton} text=${text} what="code" /></figcaption>
    <pre tabindex="0" role="region" aria-label=${`Code, ${name}`} dir="ltr"><code>${isColoured ? coloured(text, known) : plain(text)}</code></pre>
  </figure>`;
}
