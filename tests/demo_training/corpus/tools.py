"""Tool skills: making a call, making two, reporting a result, and answering without a call."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from demo_training.corpus.sample import Message, Sample, joined, key_of, pick
from demo_training.corpus.tool_kinds import (
    HARMLESS,
    KINDS,
    Exercise,
    place,
    population,
    schema,
    time_of_day,
    weather,
    weather_result,
)


def _exercise(rng: Random) -> Exercise:
    """Draws an exercise, most often about the weather."""
    kind = weather if rng.random() < 0.55 else pick(rng, KINDS)
    exercise = kind(rng)
    exercise.kind = kind.__name__
    return exercise


def _offered(rng: Random, exercise: Exercise) -> list[Message]:
    """Returns the exercise's function among up to three others with different names and purposes."""
    tools = [exercise.tool]
    if rng.random() < 0.4:
        others = [kind for kind in (weather, *KINDS[:7]) if kind.__name__ != exercise.kind]
        tools += [kind(rng).tool for kind in rng.sample(others, rng.randint(1, 3))]
        rng.shuffle(tools)
    return tools


def calls_match(expected: list[Message]) -> Any:
    """Returns a rule: the text holds exactly these tool calls."""

    def check(text: str) -> bool:
        try:
            parts = [part.split("</tool_call>")[0] for part in text.split("<tool_call>")[1:]]
            return [json.loads(part) for part in parts] == expected
        except ValueError:
            return False

    return check


def tool_call(rng: Random) -> Sample:
    """A request that one of the offered functions serves."""
    exercise = _exercise(rng)
    call = {"name": exercise.name, "arguments": exercise.arguments}
    given = joined([f"{key} {json.dumps(value, ensure_ascii=False)}" for key, value in exercise.arguments.items()])
    reasoned = "Output a reasoning" in exercise.ask
    return Sample(
        "tool call, weather" if exercise.kind == "weather" else "tool call, other",
        exercise.ask,
        f"I need to look this up, so I call {exercise.name}." if reasoned else "",
        f"I need the function {exercise.name} with {given}.",
        keys=(exercise.key,),
        tools=_offered(rng, exercise),
        calls=[call],
        check=calls_match([call]),
        plain=not exercise.place,
    )


def two_calls(rng: Random) -> Sample:
    """The weather, the time or the number of people in two or three places at once."""
    kind = pick(rng, (weather, weather, time_of_day, population))
    exercise = kind(rng)
    while len(exercise.arguments) > 1 or "Output" in exercise.ask:
        exercise = kind(rng)
    where = next(iter(exercise.arguments))
    places = [place(rng) for _ in range(3 if rng.random() < 0.2 else 2)]
    ask = exercise.ask.replace(exercise.place, _listed(rng, places))
    if kind is weather and rng.random() < 0.5:
        ask = pick(rng, ("What's the weather in {p}?", "Compare the weather in {p}.")).format(p=_listed(rng, places))
    calls = [{"name": exercise.name, "arguments": {where: city}} for city in places]
    return Sample(
        "tool calls, several",
        ask,
        "",
        f"I need one call of {exercise.name} for each of {joined(places)}.",
        keys=tuple(key_of("tool-place", city) for city in places),
        tools=[exercise.tool],
        calls=calls,
        check=calls_match(calls),
        plain=True,
    )


def _listed(rng: Random, places: list[str]) -> str:
    """Lists places as prose, at times with a comma before the 'and'."""
    text = joined(places)
    return text.replace(" and ", ", and ") if len(places) > 2 and rng.random() < 0.4 else text


def call_again(rng: Random) -> Sample:
    """After a finished call, the same function for another place: 'And in Tokyo?'."""
    exercise = weather(rng)
    while len(exercise.arguments) > 1 or "Output" in exercise.ask:
        exercise = weather(rng)
    where, city = next(iter(exercise.arguments)), place(rng)
    call = {"name": exercise.name, "arguments": {where: city}}
    ask = pick(
        rng, ("And in {p}?", "And {p}?", "What about {p}?", "How about {p}?", "What's the weather in {p}?", "Now {p}.")
    )
    return Sample(
        "tool call, again",
        ask.format(p=city),
        "",
        f"I need the function {exercise.name} with {where} {json.dumps(city, ensure_ascii=False)}.",
        keys=(exercise.key, key_of("tool-place", city)),
        history=[
            {"role": "user", "content": exercise.ask},
            called(exercise, rng),
            {"role": "tool", "content": exercise.result},
            {"role": "assistant", "content": exercise.final},
        ],
        tools=[exercise.tool],
        calls=[call],
        check=calls_match([call]),
        plain=True,
    )


def called(exercise: Exercise, rng: Random) -> Message:
    """Returns the assistant's message that made the call, as a client sends it back."""
    arguments: Any = exercise.arguments
    if rng.random() < 0.3:
        arguments = json.dumps(arguments, ensure_ascii=False)
    call = {"type": "function", "function": {"name": exercise.name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def tool_result(rng: Random) -> Sample:
    """The answer once the function has run."""
    exercise = _exercise(rng)
    result, final = exercise.result, exercise.final
    if rng.random() < 0.06:
        reason = pick(rng, ("not found", "service unavailable", "timeout", "invalid request", "access denied"))
        result = pick(rng, (json.dumps({"error": reason}), f"Error: {reason}"))
        final = f"Sorry, the function {exercise.name} failed: {reason}."
    return Sample(
        "answer from a tool result",
        exercise.ask,
        final,
        "The function has answered. I can now tell the user.",
        keys=(exercise.key,),
        after=[called(exercise, rng), {"role": "tool", "content": result}],
        tools=_offered(rng, exercise) if rng.random() < 0.9 else None,
        expect=(final,),
        plain=True,
    )


def two_results(rng: Random) -> Sample:
    """The answer once a function has run for two places."""
    exercise = weather(rng)
    where = next(iter(exercise.arguments))
    places = [place(rng), place(rng)]
    results = [weather_result(rng, city, "celsius") for city in places]
    calls = [{"type": "function", "function": {"name": exercise.name, "arguments": {where: city}}} for city in places]
    after: list[Message] = [{"role": "assistant", "content": "", "tool_calls": calls}]
    after += [{"role": "tool", "content": result} for result, _ in results]
    final = " ".join(text for _, text in results)
    return Sample(
        "answer from a tool result",
        f"What's the weather in {joined(places)}?",
        final,
        "Both calls have answered. I can now tell the user.",
        keys=tuple(key_of("tool-place", city) for city in places),
        after=after,
        tools=[exercise.tool],
        expect=(final,),
        plain=True,
    )


def unrelated_tools(rng: Random) -> list[Message]:
    """Returns one to three functions that an ordinary question does not need."""
    tools = [pick(rng, HARMLESS)(rng).tool for _ in range(pick(rng, (1, 1, 1, 2, 3)))]
    if rng.random() < 0.1:
        tools.append(schema(rng, "get_user", "Get a user", [("user_id", "integer", "The id", ())], ["user_id"]))
    return tools
