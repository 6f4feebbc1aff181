"""Compacting: the model sums a conversation up, and goes on from an item that holds the summary.

Three ways lead here: `context_management`, where a prompt has grown beyond a threshold (the item replaces everything
before it); an input that ends in a `compaction_trigger`, and `POST /v1/responses/compact` (messages of users, system
and developer stay in front of the item).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from dovetail.contracts.requests import Chat, JsonObject, Request, Sampling
from dovetail_server.apis.responses.items import CALLS, RESULTS, Item, all_opened, joined, stays

encode = msgspec.json.encode
MAX_SUMMARY = 2048
"""Tokens of a summary: it takes the place of what may fill the context."""
MIN_REPLACED = 128
"""A part of a conversation with fewer tokens is not worth a summary, …"""
SHARE = 2
"""… which has half the tokens of what it replaces at most, so that compacting always makes a prompt shorter."""
ASK = (
    "Summarize this conversation for yourself: you will go on with it from this summary and from what I say next. Keep "
    "every decision, fact, name, number, open question, every wish of mine that still holds, and the state of the "
    "work. Write the summary and nothing else."
)
PARTS = 4
"""Where a conversation may be cut earlier, and of a threshold what a user's message that stays may have."""
CUT = "\n[The summary ended here, at its limit.]"


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What becomes of a summary.

    Attributes:
        replaces: It takes the place of everything before it, and the model answers then; else the item is the reply.
        before: Items that stay before it, and …
        after: … behind it.
        limit: Its most tokens.
    """

    replaces: bool = False
    before: list[Item] = []
    after: list[Item] = []
    limit: int = MAX_SUMMARY


encode_plan, decode_plan = encode, msgspec.json.Decoder(Plan).decode


def summary_request(request: Request, messages: Sequence[JsonObject], limit: int) -> Request:
    """Return the request for a summary of messages: without tools or grammars, and without thinking first."""
    *before, last = messages
    asked = {"role": "user", "content": ASK}
    drops = any(isinstance(prompt, Chat) and prompt.drops_turns for prompt in request.prompts)
    given = request.sampling
    return replace(
        request,
        prompts=[Chat(messages=joined([*before, last, asked]), drops_turns=drops)],
        sampling=Sampling(temperature=given.temperature, top_p=given.top_p, top_k=given.top_k, seed=given.seed),
        limit=limit,
        clamps=True,
        clamps_by_default=False,
        logprobs=None,
        tools=None,
        grammar={},
        grammar_backend=None,
        thinking_budget=None,
        no_thinking=True,
        reply={**request.reply, "compacts": True, "preferred": {}},
    )


def effective(items: Iterator[Item]) -> list[Item]:
    """Return the items of a conversation that count, what compaction items stand for among them."""
    found: list[Item] = []
    for _, item in all_opened(items, "input"):
        if item["type"] == "window":
            found.clear()
        elif item["type"] == "users":
            found = [one for one in found if stays(one)]
        else:
            found.append(item)
    return found


def plans_of(items: list[Item], num_tokens: int, threshold: int, num_beside: int) -> Iterator[tuple[list[Item], Plan]]:
    """Yield what of a conversation may be summed up, and what becomes of the rest: the best first, a few at most.

    What the user said last stays, with everything behind it; where that alone is more than half the threshold, the
    last turn. A call is never parted from its result. There is nothing where it would not be worth it.

    Args:
        items: Those that count.
        num_tokens: Tokens of the whole prompt.
        threshold: Tokens that it should not have.
        num_beside: Characters of what stands beside the items in the prompt.
    """
    sizes = [text_len(item) for item in items]
    per_char = num_tokens / max(1, num_beside + sum(sizes))
    first = max((at for at, item in enumerate(items) if item["type"] == "summary"), default=-1)
    cuts = [at for at in boundaries(items) if at > first]
    users = [at for at, item in enumerate(items) if is_users(item)]
    wanted = [at for at in users[-1:] if at in cuts and sum(sizes[at:]) * per_char <= threshold // 2]
    fewer = [cuts[len(cuts) * part // PARTS] for part in range(PARTS - 1, 0, -1) if cuts]
    for cut in dict.fromkeys([*wanted, *cuts[-1:], *fewer]):
        old = items[:cut]
        replaced = sum(size for item, size in zip(old, sizes, strict=False) if is_history(item))
        if (num := int(replaced * per_char)) >= MIN_REPLACED:
            said = max((at for at in users if at < cut), default=-1)
            if sizes[said] * per_char > threshold // PARTS:
                said = -1
            before = [one for at, one in enumerate(old) if at == said or (stays(one) and not is_users(one))]
            yield old, Plan(replaces=True, before=before, after=items[cut:], limit=min(MAX_SUMMARY, num // SHARE))


def is_users(item: Item) -> bool:
    """Whether an item is a message of the user."""
    return bool(item["type"] == "message" and item["role"] == "user")


def is_history(item: Item) -> bool:
    """Whether an item is something that a summary replaces and that is no summary itself."""
    return is_users(item) or not (stays(item) or item["type"] == "summary")


def boundaries(items: Sequence[Item]) -> list[int]:
    """Return where a conversation may be cut: before messages and the model's turns, between no call and its result."""
    answered = {result_key(item) for item in items if item["type"] in RESULTS}
    waits: set[str] = set()
    found = []
    for at, item in enumerate(items):
        begins = at > 0 and (not is_turn(item) or not is_turn(items[at - 1])) and item["type"] not in RESULTS
        if begins and not waits:
            found.append(at)
        if item["type"] in CALLS and item["call_id"] in answered:
            waits.add(item["call_id"])
        elif item["type"] in RESULTS:
            waits.discard(result_key(item))
    return found


def result_key(item: Item) -> str:
    """Return the identifier of the call that an item is the result of."""
    return str(item.get("call_id") or item["id"])


def is_turn(item: Item) -> bool:
    """Whether an item is part of a turn of the model."""
    return not stays(item) and item["type"] not in (*RESULTS, "summary")


def text_len(item: Item) -> int:
    """Return about how many characters of an item are in the prompt."""
    if item["type"] == "message":
        return sum(len(part.get("text") or part.get("refusal") or "") for part in item["content"])
    return len(encode(item))
