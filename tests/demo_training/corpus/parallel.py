"""Requests that need two or three different functions at once, and the answer from all their results."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from demo_training.corpus.sample import Message, Sample, joined, pick
from demo_training.corpus.tool_kinds import KINDS, Exercise, weather
from demo_training.corpus.tools import called, calls_match


def _exercises(rng: Random, count: int) -> list[Exercise]:
    """Draws exercises of different kinds whose functions have different names."""
    kinds = rng.sample((*KINDS, weather, weather), len(KINDS) + 2)
    found: list[Exercise] = []
    for kind in kinds:
        exercise = kind(rng)
        while "Output" in exercise.ask:
            exercise = kind(rng)
        exercise.kind = kind.__name__
        if all(exercise.kind != other.kind and exercise.name != other.name for other in found):
            found.append(exercise)
        if len(found) == count:
            break
    return found


def _lowered(text: str) -> str:
    """Returns the sentence as it continues another one."""
    return text if text.startswith("I ") else text[:1].lower() + text[1:]


def _joined_asks(rng: Random, asks: list[str]) -> str:
    """Puts several requests into one message, in the ways that people do."""
    kind = rng.random()
    if kind < 0.45:
        bare = [asks[0].rstrip("?."), *(_lowered(ask).rstrip("?.") for ask in asks[1:])]
        return joined(bare) + (asks[-1][-1] if asks[-1][-1] in "?." else "")
    if kind < 0.7:
        link = pick(rng, ("And ", "Also, ", "And also: ", "Then ", "And "))
        return " ".join([asks[0], *(link + _lowered(ask) for ask in asks[1:])])
    if kind < 0.9:
        return " ".join(asks)
    return "\n".join(f"{i}. {ask}" for i, ask in enumerate(asks, 1))


def _offered(rng: Random, exercises: list[Exercise]) -> list[Message]:
    """Returns the functions of the exercises, now and then with another one among them."""
    tools = [exercise.tool for exercise in exercises]
    if rng.random() < 0.3:
        for extra in _exercises(rng, 4):
            if all(extra.kind != exercise.kind and extra.name != exercise.name for exercise in exercises):
                tools.append(extra.tool)
                break
    rng.shuffle(tools)
    return tools


def parallel_calls(rng: Random) -> Sample:
    """One message that asks for two or three things, each of which a different function serves."""
    exercises = _exercises(rng, 3 if rng.random() < 0.2 else 2)
    calls: list[Message] = [{"name": exercise.name, "arguments": exercise.arguments} for exercise in exercises]
    needed = [f"{each['name']} with {json.dumps(each['arguments'], ensure_ascii=False)}" for each in calls]
    return Sample(
        "tool calls, different functions",
        _joined_asks(rng, [exercise.ask for exercise in exercises]),
        "",
        f"I need {joined(needed)}.",
        keys=tuple(exercise.key for exercise in exercises),
        tools=_offered(rng, exercises),
        calls=calls,
        check=calls_match(calls),
        plain=True,
    )


def parallel_results(rng: Random) -> Sample:
    """The answer once several functions have run: each result in words, in order."""
    exercises = _exercises(rng, 3 if rng.random() < 0.15 else 2)
    message = called(exercises[0], rng)
    for exercise in exercises[1:]:
        message["tool_calls"] += called(exercise, rng)["tool_calls"]
    results: list[Message] = []
    finals: list[str] = []
    for exercise in exercises:
        result, final = exercise.result, exercise.final
        if rng.random() < 0.04:
            reason = pick(rng, ("not found", "service unavailable", "timeout", "invalid request", "access denied"))
            result, final = json.dumps({"error": reason}), f"Sorry, the function {exercise.name} failed: {reason}."
        results.append({"role": "tool", "content": result})
        finals.append(final)
    answer = " ".join(finals)
    after: list[Any] = [message, *results]
    return Sample(
        "answer from several tool results",
        _joined_asks(rng, [exercise.ask for exercise in exercises]),
        answer,
        "All functions have answered. I can now tell the user.",
        keys=tuple(exercise.key for exercise in exercises),
        after=after,
        tools=_offered(rng, exercises),
        expect=(answer,),
        plain=True,
    )
