// Conversations as a file, and back.
import { emptyReply } from "./reply.js";

const FORMAT = "dovetail-conversations";
const VERSION = 1;
const ROLES = new Set(["user", "assistant", "tool"]);

/** A file with these conversations, each as `Conversation.toJSON` makes it. */
export function asFile(conversations) {
  const text = JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1);
  return new Blob([text], { type: "application/json" });
}

/** Save something under a name. */
export function offer(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** The conversations of a file's text; throws an error for people. Nothing in them is trusted to be what it should. */
export function fromFile(text) {
  let file = null;
  try {
    file = JSON.parse(text);
  } catch (error) {
    throw new Error(`The file is not JSON: ${error.message}.`);
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) throw new Error("The file is not an export of this page.");
  if (file.version !== VERSION) throw new Error(`The file has version ${String(file.version).slice(0, 20)} of the format; this page reads version ${VERSION}.`);
  return file.conversations.map((one, i) => {
    const found = conversationOf(one);
    if (!found) throw new Error(`Conversation ${i + 1} of the file is damaged. Nothing was imported.`);
    return found;
  });
}

const isText = (value) => typeof value === "string";
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const textOr = (value, other) => (isText(value) ? value : other);

function conversationOf(one) {
  if (!isObject(one) || !isText(one.id) || !isText(one.title) || !isObject(one.nodes)) return null;
  const nodes = {};
  for (const [id, node] of Object.entries(one.nodes)) {
    const isKnown = isObject(node) && ROLES.has(node.role) && isText(node.content) && isText(node.parent);
    if (!isKnown || (node.parent !== "" && !Object.hasOwn(one.nodes, node.parent))) return null;
    nodes[id] = { id, parent: node.parent, version: 0, ...(node.role === "assistant" ? replyOf(node) : askedOf(node)) };
  }
  const chosen = Object.fromEntries(Object.entries(isObject(one.chosen) ? one.chosen : {}).filter(([, id]) => Object.hasOwn(nodes, id)));
  const updated = Number.isFinite(one.updated) ? one.updated : Date.now();
  return { id: one.id, title: one.title.slice(0, 200), updated, settings: settingsOf(one.settings), nodes, chosen };
}

function askedOf({ role, content, call, name, images }) {
  if (role === "tool") return { role, content, call: textOr(call, ""), name: textOr(name, "") };
  const named = (Array.isArray(images) ? images : []).filter((image) => isText(image?.name));
  return { role, content, ...(named.length ? { images: named.map(({ name }) => ({ id: "", name, type: "" })) } : {}) };
}

function replyOf(node) {
  const empty = emptyReply(textOr(node.model, ""));
  const calls = (Array.isArray(node.calls) ? node.calls : []).filter(isObject);
  const times = isObject(node.times) ? node.times : {};
  return {
    ...empty,
    content: node.content,
    reasoning: textOr(node.reasoning, ""),
    calls: calls.map((call) => ({ id: textOr(call.id, ""), name: textOr(call.name, ""), arguments: textOr(call.arguments, "") })),
    state: ["stopped", "failed"].includes(node.state) ? node.state : "done",
    error: textOr(node.error, node.state === "failed" ? "The reply failed." : null),
    finish: textOr(node.finish, null),
    usage: Number.isFinite(node.usage?.completion_tokens) ? { completion_tokens: node.usage.completion_tokens } : null,
    times: Object.fromEntries(Object.keys(empty.times).map((name) => [name, Number.isFinite(times[name]) ? times[name] : null])),
  };
}

function settingsOf(settings) {
  const isPlain = (value) => ["string", "number", "boolean"].includes(typeof value);
  const found = Object.entries(isObject(settings) ? settings : {}).filter(([, value]) => isPlain(value));
  const grammar = isObject(settings?.grammar) ? Object.entries(settings.grammar).filter(([, value]) => isText(value)) : [];
  return { ...Object.fromEntries(found), grammar: Object.fromEntries(grammar) };
}
