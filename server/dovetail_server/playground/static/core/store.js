// Conversations, kept by this browser and nobody else: a list to show, and each conversation by itself.
import { createStore, del, entries, get, set, update } from "../vendor/idb-keyval.js";
import { merged } from "./tree.js";

const LIST = createStore("dovetail-list", "conversations");
const WHOLE = createStore("dovetail-conversations", "conversations");
const news = new BroadcastChannel("dovetail-conversations");
const memory = new Map(); // where the browser keeps nothing: a private window, a full disk
const listeners = new Set();
let isKept = true;

/** Whether conversations outlive this window. */
export function keeps() {
  return isKept;
}

/** Call `listener` whenever the list may have changed, in this window or another. */
export function watch(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function tell() {
  for (const listener of listeners) listener();
}

news.addEventListener("message", tell);

async function kept(work, instead) {
  if (isKept) {
    try {
      return await work();
    } catch (error) {
      console.warn("The browser keeps no conversations:", error);
      isKept = false;
    }
  }
  return instead();
}

/** `[{id, title, updated}]`, the newest first. */
export async function list() {
  const inMemory = () => [...memory.values()].map(({ id, title, updated }) => ({ id, title, updated }));
  const found = await kept(async () => (await entries(LIST)).map(([id, row]) => ({ id, ...row })), inMemory);
  return found.sort((a, b) => b.updated - a.updated);
}

/** The data of a conversation, or undefined if it is not here any more. */
export async function load(id) {
  return kept(() => get(id, WHOLE), () => memory.get(id));
}

/** The data of every conversation, the newest first. */
export async function loadAll() {
  const found = await kept(async () => (await entries(WHOLE)).map(([, data]) => data), () => [...memory.values()]);
  return found.sort((a, b) => b.updated - a.updated);
}

export async function save(conversation) {
  const data = conversation.toJSON();
  memory.set(data.id, data);
  await kept(
    async () => {
      let whole = data;
      await update(data.id, (stored) => (whole = merged(stored, data)), WHOLE);
      await set(data.id, { title: whole.title, updated: whole.updated }, LIST);
    },
    () => undefined,
  );
  if (isKept) memory.delete(data.id);
  news.postMessage(data.id);
  tell();
}

export async function remove(id) {
  memory.delete(id);
  await kept(() => Promise.all([del(id, LIST), del(id, WHOLE)]), () => undefined);
  news.postMessage(id);
  tell();
}
