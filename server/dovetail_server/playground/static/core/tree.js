// A conversation: a tree of messages, since editing and retrying begin new branches, and the path that is shown.
import { partOf } from "./images.js";

export function newId() {
  return crypto.getRandomValues(new Uint32Array(3)).reduce((all, part) => all + part.toString(36), "");
}

export class Conversation {
  constructor(data = {}) {
    this.id = data.id ?? newId();
    this.title = data.title ?? "";
    this.renamed = data.renamed ?? 0; // when somebody gave it its title
    this.updated = data.updated ?? Date.now();
    this.settings = data.settings ?? {};
    this.nodes = data.nodes ?? {}; // in the order in which they were added
    this.chosen = data.chosen ?? {}; // by parent: the child that is shown
    this.listeners = new Set();
    this.watchers = new Map(); // by message: who is told when it grows
  }

  toJSON() {
    const { id, title, renamed, updated, settings, nodes, chosen } = this;
    return { id, title, renamed, updated, settings, nodes, chosen };
  }

  children(parent) {
    return Object.values(this.nodes).filter((node) => node.parent === parent);
  }

  /** The messages shown, from the first. */
  path() {
    const byParent = Map.groupBy ? Map.groupBy(Object.values(this.nodes), (node) => node.parent) : groups(this.nodes);
    const found = [];
    for (let parent = ""; ; ) {
      const children = byParent.get(parent);
      if (!children) return found;
      const node = children.find((one) => one.id === this.chosen[parent]) ?? children.at(-1);
      found.push(node);
      parent = node.id;
    }
  }

  siblings(node) {
    return this.children(node.parent);
  }

  add(parent, fields) {
    const node = { id: newId(), parent, version: 0, ...fields };
    this.nodes[node.id] = node;
    this.chosen[parent] = node.id;
    this.changed();
    return node;
  }

  choose(node) {
    this.chosen[node.parent] = node.id;
    this.changed();
  }

  /** Say that a message has grown, to those alone who watch it. */
  touch(node) {
    node.version += 1;
    for (const watcher of this.watchers.get(node.id) ?? []) watcher();
  }

  watch(node, watcher) {
    if (!this.watchers.has(node.id)) this.watchers.set(node.id, new Set());
    const all = this.watchers.get(node.id).add(watcher);
    return () => all.delete(watcher);
  }

  changed() {
    this.updated = Date.now();
    this.notify();
  }

  notify() {
    for (const listener of this.listeners) listener();
  }

  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** A conversation of its own that ends with `node`. */
  branch(node) {
    const copy = new Conversation({ title: this.title, settings: structuredClone(this.settings) });
    for (const one of this.path()) {
      copy.nodes[one.id] = structuredClone(one);
      copy.chosen[one.parent] = one.id;
      if (one.id === node.id) break;
    }
    return copy;
  }
}

/** What two windows made of one conversation: no message of either is lost. */
export function merged(stored, ours) {
  if (!stored) return ours;
  const nodes = { ...stored.nodes };
  for (const [id, node] of Object.entries(ours.nodes)) {
    if (!nodes[id] || nodes[id].version <= node.version) nodes[id] = node;
  }
  const { title, renamed } = (stored.renamed ?? 0) > (ours.renamed ?? 0) ? stored : ours;
  return { ...ours, title, renamed, nodes, chosen: { ...stored.chosen, ...ours.chosen } };
}

function groups(nodes) {
  const found = new Map();
  for (const node of Object.values(nodes)) {
    if (!found.has(node.parent)) found.set(node.parent, []);
    found.get(node.parent).push(node);
  }
  return found;
}

/** Messages as the API takes them. */
export function asMessages(path, system, isShown = false) {
  const found = system ? [{ role: "system", content: system }] : [];
  for (const node of path) {
    if (node.role === "tool") found.push({ role: "tool", tool_call_id: node.call, content: node.content });
    else if (node.role === "user") found.push({ role: "user", content: asAsked(node, isShown) });
    else found.push(asAssistant(node));
  }
  return found;
}

/** The text alone, or its images, so that their numbers are those of the parts, and the text behind them. */
function asAsked({ content, images }, isShown) {
  if (!images?.length) return content;
  const parts = images.map((image) => partOf(image, isShown));
  return content ? [...parts, { type: "text", text: content }] : parts;
}

function asAssistant(node) {
  const message = { role: "assistant", content: node.content };
  if (node.reasoning) message.reasoning_content = node.reasoning;
  if (node.calls.length) {
    message.tool_calls = node.calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  }
  return message;
}

/** The first words of a conversation, for the list. */
export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0].slice(0, 80);
  return line || "New conversation";
}
