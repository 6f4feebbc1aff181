// Requests to this server and no other: with the key, and with errors as sentences.

export const BASE = new URL("../../", import.meta.url);
const KEY = "dovetail-key";

/** What the server, or the way to it, has against a request. `message` is for people. */
export class ServerError extends Error {
  constructor(message, { status = 0, code = null, param = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param;
    this.retryAfter = retryAfter;
  }
}

let ask = async () => null;
let asking = null;

/** `dialog(reason)` resolves to a key, or to null where none is given. */
export function askForKeyWith(dialog) {
  ask = dialog;
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** Send a request; a server that wants a key gets one from whoever sits here, and the request goes again. */
export async function call(path, { method = "GET", json, form, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = key === null ? {} : { authorization: `Bearer ${key}` };
    if (json !== undefined) headers["content-type"] = "application/json";
    const body = json === undefined ? form : JSON.stringify(json);
    const response = await reach(path, { method, headers, body, signal });
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== 401) throw error;
    if (sessionStorage.getItem(KEY) !== key) continue; // another request has asked meanwhile
    asking ??= ask(key === null ? "" : "The server does not accept this key.").finally(() => (asking = null));
    const given = await asking;
    if (given === null) throw error;
    setKey(given);
  }
}

export async function getJson(path, signal) {
  return (await call(path, { signal })).json();
}

async function reach(path, request) {
  try {
    return await fetch(new URL(path, BASE), { cache: "no-store", ...request });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(`The server does not answer. Is it still running at ${BASE.href}?`);
  }
}

async function errorOf(response) {
  const text = await response.text().catch(() => "");
  let said = null;
  try {
    said = JSON.parse(text).error;
  } catch {
    // Not ours: a proxy's page, for instance.
  }
  const message = said?.message ?? `The server answered with status ${response.status} and no reason.`;
  return new ServerError(asSentence(message), {
    status: response.status,
    code: said?.code ?? null,
    param: said?.param ?? null,
    retryAfter: response.headers.get("retry-after"),
  });
}

export function asSentence(text) {
  const line = String(text).trim();
  return line.charAt(0).toUpperCase() + line.slice(1) + (/[.!?]$/.test(line) ? "" : ".");
}
