// The conversations of this window and the replies that are being written, whichever page is shown.
import { facts } from "../core/facts.js";
import { blame, hold } from "../core/images.js";
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

/** Give a conversation another title. */
export async function rename(id, title) {
  const conversation = await find(id);
  if (!conversation) return;
  Object.assign(conversation, { title, renamed: Date.now() });
  conversation.notify();
  await save(conversation);
}

export function isRunning(conversation) {
  return running.has(conversation.id);
}

export function stop(conversation) {
  running.get(conversation.id)?.abort();
}

/** The body of the request that a reply to the messages up to `path`'s last would be; `isShown`: without images' data. */
export function requestOf(conversation, path, isShown = false) {
  const { settings } = conversation;
  const { body, problems } = bodyOf(settings);
  const model = facts.names.includes(settings.model) ? settings.model : facts.names[0];
  return { body: { model, messages: asMessages(path, settings.system, isShown), ...body }, problems };
}

/** Add what somebody typed after `parent`, and have it answered; a conversation without a title gets one of `words`. `images` are held already. */
export function send(conversation, text, parent, words = text, images = []) {
  if (!conversation.title) conversation.title = titleOf(words);
  const named = images.map(({ id, name, type }) => ({ id, name, type }));
  const node = conversation.add(parent, { role: "user", content: text, ...(named.length ? { images: named } : {}) });
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
export function reply(conversation, parent) {
  const path = conversation.path();
  const upTo = path.slice(0, path.findIndex((node) => node.id === parent) + 1);
  const { body } = requestOf(conversation, upTo);
  return follow(conversation, upTo, body, () => conversation.add(parent, emptyReply(body.model)));
}

/** Put a changed reply beside the one that came, on a branch of its own; the model is not asked. */
export function amend(conversation, node, content) {
  const { id, parent, version, ...rest } = structuredClone(node);
  const cleared = { tokens: [], usage: null, report: null, error: null, isContinued: false };
  conversation.add(parent, { ...rest, ...cleared, content, state: "done", finish: "edited" });
  return save(conversation);
}

/** Whether a reply ended before the model had finished, and can go on. */
export function canContinue(node) {
  const isCut = node.state === "stopped" || node.state === "failed" || (node.state === "done" && ["length", "edited"].includes(node.finish));
  return isCut && node.content !== "" && node.calls.length === 0;
}

/** Have the model go on behind what came of the conversation's last reply. */
export function resume(conversation, node) {
  const path = conversation.path();
  const { body } = requestOf(conversation, path);
  const going = { ...body, continue_final_message: true, add_generation_prompt: false };
  const again = { state: "writing", error: null, param: null, finish: null, report: null, isContinued: true };
  return follow(conversation, path, going, () => Object.assign(node, again));
}

/** Write into the message that `begin` returns, keeping it now and then; `path` is what `body` has of the conversation. */
async function follow(conversation, path, body, begin) {
  open.set(conversation.id, conversation);
  const stopper = new AbortController();
  running.set(conversation.id, stopper);
  const node = begin();
  conversation.changed();
  let saved = 0;
  const changed = () => {
    conversation.touch(node);
    if (Date.now() - saved > SAVE_MS) {
      saved = Date.now();
      save(conversation);
    }
  };
  changed();
  for (const asked of path.filter(({ images }) => images?.some(({ problem }) => problem))) {
    for (const image of asked.images) delete image.problem;
    conversation.touch(asked);
  }
  await write(node, body, stopper.signal, changed);
  const asked = blame(node, body.messages, path);
  for (const changedToo of asked ? [asked, node] : []) conversation.touch(changedToo);
  running.delete(conversation.id);
  conversation.changed();
  await save(conversation);
  return node;
}
