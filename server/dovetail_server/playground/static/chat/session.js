// The conversations of this window and the replies that are being written, whichever page is shown.
import { facts } from "../core/facts.js";
import { emptyReply, write } from "../core/reply.js";
import { bodyOf, lastSettings } from "../core/settings.js";
import { load, save } from "../core/store.js";
import { asMessages, Conversation, titleOf } from "../core/tree.js";

const SAVE_MS = 2000;
const CLOSED = "This window was closed before the reply was finished. What came is kept.";
const open = new Map();
const running = new Map(); // by conversation: how its reply is stopped

export function fresh() {
  return new Conversation({ settings: lastSettings() });
}

/** The conversation, or null if this browser does not have it any more. */
export async function find(id) {
  if (open.has(id)) return open.get(id);
  const data = await load(id);
  if (!data) return null;
  const conversation = new Conversation(data);
  for (const node of Object.values(conversation.nodes)) {
    if (node.state === "writing") Object.assign(node, { state: "failed", error: CLOSED });
  }
  open.set(id, conversation);
  return conversation;
}

export function forget(id) {
  running.get(id)?.abort();
  open.delete(id);
}

export function isRunning(conversation) {
  return running.has(conversation.id);
}

export function stop(conversation) {
  running.get(conversation.id)?.abort();
}

/** The body of the request that a reply to the messages up to `path`'s last would be. */
export function requestOf(conversation, path) {
  const { settings } = conversation;
  const { body, problems } = bodyOf(settings);
  const model = facts.names.includes(settings.model) ? settings.model : facts.names[0];
  return { body: { model, messages: asMessages(path, settings.system), ...body }, problems };
}

/** Add what somebody typed after `parent`, and have it answered. */
export function send(conversation, text, parent) {
  if (!conversation.title) conversation.title = titleOf(text);
  const node = conversation.add(parent, { role: "user", content: text });
  return reply(conversation, node.id);
}

/** Add the tools' answers, `[[call, text]]`, after the message that called them, and have them answered. */
export function answerCalls(conversation, node, answers) {
  let parent = node.id;
  for (const [call, text] of answers) {
    parent = conversation.add(parent, { role: "tool", call: call.id, name: call.name, content: text }).id;
  }
  return reply(conversation, parent);
}

/** Have the messages up to `parent` answered, on a branch of its own where there is a reply already. */
export async function reply(conversation, parent) {
  open.set(conversation.id, conversation);
  const path = conversation.path();
  const upTo = path.slice(0, path.findIndex((node) => node.id === parent) + 1);
  const { body } = requestOf(conversation, upTo);
  const stopper = new AbortController();
  running.set(conversation.id, stopper);
  const node = conversation.add(parent, emptyReply(body.model));
  let saved = 0;
  const changed = () => {
    conversation.touch(node);
    if (Date.now() - saved > SAVE_MS) {
      saved = Date.now();
      save(conversation);
    }
  };
  changed();
  await write(node, body, stopper.signal, changed);
  running.delete(conversation.id);
  conversation.changed();
  await save(conversation);
  return node;
}
