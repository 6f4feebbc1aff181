// One reply: asks the server, and folds what comes into a message of a conversation.
import { asSentence, call, ServerError } from "./api.js";
import { events } from "./events.js";

export const BROKEN = "The connection broke before the reply was finished. What came is kept.";

/** A message that waits for its first token. */
export function emptyReply(model) {
  return {
    role: "assistant",
    model,
    content: "",
    reasoning: "",
    calls: [],
    tokens: [],
    state: "writing",
    error: null,
    param: null,
    finish: null,
    usage: null,
    report: null,
    times: { sent: Date.now(), first: null, answer: null, end: null },
  };
}

/** Stream a chat completion, or a completion, into `reply`, calling `changed` after each piece. Never throws. */
export async function write(reply, body, signal, changed, path = "v1/chat/completions") {
  try {
    const response = await call(path, {
      method: "POST",
      json: { ...body, stream: true, stream_options: { include_usage: true } },
      signal,
    });
    for await (const data of events(response)) {
      if (data === "[DONE]") {
        reply.state = "done";
        break;
      }
      fold(reply, JSON.parse(data));
      changed();
    }
    if (reply.state === "writing") throw new ServerError(BROKEN);
  } catch (error) {
    if (signal.aborted) reply.state = "stopped";
    else {
      reply.state = "failed";
      const isOurs = error instanceof ServerError;
      reply.param = error.param ?? null;
      reply.error = isOurs ? error.message : reply.times.first ? BROKEN : asSentence(error.message);
    }
  }
  reply.times.end = Date.now();
  changed();
}

/** Add one chunk of the stream. */
export function fold(reply, chunk) {
  if (chunk.error) throw new ServerError(asSentence(chunk.error.message), { code: chunk.error.code, param: chunk.error.param });
  if (chunk.usage) reply.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const delta = choice.delta ?? { content: choice.text };
  if (delta.content || delta.reasoning_content || delta.tool_calls) reply.times.first ??= Date.now();
  if (delta.reasoning_content) reply.reasoning += delta.reasoning_content;
  if (delta.content) {
    reply.times.answer ??= Date.now();
    reply.content += delta.content;
  }
  for (const piece of delta.tool_calls ?? []) foldCall(reply, piece);
  for (const token of choice.logprobs?.content ?? []) {
    reply.tokens.push([nameOf(token), token.logprob, token.top_logprobs.map((one) => [nameOf(one), one.logprob])]);
  }
  if (choice.structured_output) reply.report = choice.structured_output;
  if (choice.finish_reason) reply.finish = choice.finish_reason;
}

/** A token as text; one that is part of a character, as its bytes. */
function nameOf({ token, bytes }) {
  if (!token.includes("\ufffd") || !bytes) return token;
  return bytes.map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
}

function foldCall(reply, piece) {
  reply.times.answer ??= Date.now();
  const call = (reply.calls[piece.index] ??= { id: "", name: "", arguments: "" });
  if (piece.id) call.id = piece.id;
  call.name += piece.function?.name ?? "";
  call.arguments += piece.function?.arguments ?? "";
}

/** Tokens, time to the first and rate of a reply, in words. */
export function figures(reply) {
  if (reply.isContinued) return ["continued"]; // what a part of it took says nothing of the whole
  if (reply.finish === "edited") return [];
  const { sent, first, end } = reply.times;
  const found = [];
  const tokens = reply.usage?.completion_tokens;
  if (tokens !== undefined) found.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
  if (first) found.push(`first token after ${seconds(first - sent)}`);
  if (tokens > 1 && end > first) found.push(`${(((tokens - 1) * 1000) / (end - first)).toFixed(1)} tokens/s`);
  return found;
}

export function seconds(ms) {
  if (ms >= 1000) return `${(ms / 1000).toFixed(1)} s`;
  return ms >= 10 || ms <= 0 ? `${Math.max(0, Math.round(ms))} ms` : `${Number(ms.toFixed(1))} ms`;
}
