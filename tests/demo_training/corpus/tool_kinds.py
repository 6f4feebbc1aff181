"""The functions that tool exercises offer: schemas in random dress, requests, arguments, results and final answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from demo_training.corpus.chat import WORDS, made_up_word
from demo_training.corpus.geography import CITIES, COUNTRIES, STATES
from demo_training.corpus.sample import Message, is_held_out, key_of, pick

Param = tuple[str, str, str, tuple[str, ...]]
"""Name, JSON type, description and allowed values of a parameter."""


@dataclass
class Exercise:
    """A function, a request for it, the right arguments, and what follows once it has run."""

    tool: Message
    ask: str
    arguments: dict[str, Any]
    result: str
    final: str
    key: str
    place: str = ""
    kind: str = ""

    @property
    def name(self) -> str:
        """The name of the function."""
        return str(self.tool["function"]["name"])


def schema(rng: Random, name: str, description: str, params: list[Param], required: list[str]) -> Message:
    """Returns a function schema in the OpenAI format, with optional fields and field order at random."""
    properties: dict[str, Any] = {}
    for param, kind, text, values in params:
        field: dict[str, Any] = {"type": kind}
        if text and rng.random() < 0.7:
            field["description"] = text
        if values:
            field["enum"] = list(values)
        properties[param] = field
    body: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.85:
        body["required"] = required
    if rng.random() < 0.15:
        body["additionalProperties"] = False
    function: dict[str, Any] = {"name": name}
    if rng.random() < 0.85:
        function["description"] = description
    if rng.random() < 0.2:
        function = dict(reversed(function.items()))
    function["parameters"] = body
    if rng.random() < 0.15:
        function["strict"] = rng.random() < 0.7
    return {"type": "function", "function": function}


def place(rng: Random) -> str:
    """Draws a city: a capital, another known city, or a name that no table holds."""
    kind = rng.random()
    if kind < 0.4:
        return pick(rng, COUNTRIES).capital
    if kind < 0.7:
        return pick(rng, CITIES)
    if kind < 0.92:
        return made_up_word(rng) if rng.random() < 0.7 else f"{made_up_word(rng)} {made_up_word(rng)}"
    country = pick(rng, COUNTRIES)
    return f"{country.capital}, {country.bare}"


_WEATHER_ASK: Final = (
    "What's the weather in {p}?", "What is the weather in {p}?", "What is the weather like in {p}?",
    "What is the weather like in {p} today?", "What's the weather like in {p} today?", "How is the weather in {p}?",
    "How's the weather in {p} right now?", "Tell me the weather in {p}.", "Is it raining in {p}?", "Weather in {p}?",
    "What is the current weather in {p}?", "Can you check the weather in {p}?", "What is the temperature in {p}?",
    "How warm is it in {p}?", "How cold is it in {p} now?", "Do I need an umbrella in {p}?", "weather {p}",
    "I am going to {p}. What is the weather there?", "Get the weather for {p}.", "Please look up the weather in {p}.",
    "What's the temperature in {p} right now?", "Is it sunny in {p} today?", "What's the weather like in {p}?",
    "Could you tell me what the weather is like in {p}?", "what is the weather in {p}", "What is the forecast for {p}?",
)  # fmt: skip
_CONDITIONS: Final = (
    "sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear", "partly cloudy", "stormy", "light rain", "overcast",
)  # fmt: skip
_PLACE_TEXT: Final = (
    "The city", "The name of the city", "City name", "The location", "The city, e.g. San Francisco",
    "The city and state, e.g. San Francisco, CA", "City and country e.g. Bogotá, Colombia", "Where to look",
    "The city to find the weather for, e.g. 'San Francisco'", "A place name", "Name of the place, e.g. Paris",
)  # fmt: skip
_PLACE_NAMES: Final = (
    "city",
    "city",
    "city",
    "location",
    "location",
    "location",
    "place",
    "city_name",
    "town",
    "where",
    "query",
)


# Where a held-out city lies cannot be known, so no exercise asks for it.
_TAUGHT_STATES: Final = tuple(city for city in STATES if not is_held_out(key_of("tool-place", city)))


def weather(rng: Random) -> Exercise:
    """The weather in a place, with an optional unit, and the state where the schema wants one."""
    function = pick(rng, ("get_weather", "get_weather", "get_weather", "get_current_weather", "weather", "fetch_weather",
                          "get_forecast", "weather_lookup", "getWeather"))  # fmt: skip
    where = pick(rng, _PLACE_NAMES)
    city = place(rng)
    with_state = rng.random() < 0.12
    if with_state:
        city = pick(rng, _TAUGHT_STATES)
    params: list[Param] = [(where, "string", pick(rng, _PLACE_TEXT), ())]
    arguments: dict[str, Any] = {where: city}
    required = [where]
    ask = pick(rng, _WEATHER_ASK).format(p=city)
    if with_state:
        params.append(("state", "string", "The two letters of the state, e.g. 'CA'", ()))
        arguments["state"] = STATES[city]
        required.append("state")
    unit = pick(rng, ("celsius", "fahrenheit"))
    if rng.random() < 0.45:
        name = pick(rng, ("unit", "unit", "unit", "units", "temperature_unit"))
        params.append((name, "string", "The unit of the temperature", ("celsius", "fahrenheit")))
        if rng.random() < 0.35:
            ask = ask.rstrip("?. ") + f" in {unit}" + ("?" if "?" in ask else ".")
            arguments[name] = unit
        elif rng.random() < 0.35:
            unit = "fahrenheit" if with_state else "celsius"
            arguments[name] = unit
            required.append(name)
    if rng.random() < 0.06:
        ask += " Output a reasoning before act, then use the tools to help you."
    text = pick(rng, ("Get the weather of a city", "Get the current weather in a given location", "Current weather",
                      "Look up the weather.", "Returns the weather for a place", "Get weather information"))  # fmt: skip
    tool = schema(rng, function, text, params, required)
    if name_of_unit := next((p[0] for p in params if "unit" in p[0]), ""):
        _require(tool, name_of_unit, required)
    result, final = weather_result(rng, city, unit)
    key = key_of("tool-state", city, function) if with_state else key_of("tool-place", city)
    return Exercise(tool, ask, arguments, result, final, key, city)


def _require(tool: Message, name: str, required: list[str]) -> None:
    """Makes sure that a unit that must be given is listed as required, whatever the random dress left out."""
    if name in required:
        tool["function"]["parameters"]["required"] = required


def weather_result(rng: Random, city: str, unit: str) -> tuple[str, str]:
    """Returns what a weather function might answer and the sentence that reports it."""
    degrees = rng.randint(-15, 42) if unit == "celsius" else rng.randint(5, 105)
    letter, condition = unit[0].upper(), pick(rng, _CONDITIONS)
    full = f"The weather in {city} is {condition} with a temperature of {degrees}°{letter}."
    only = f"The temperature in {city} is {degrees}°{letter}."
    look = pick(rng, ("condition", "conditions", "description", "weather", "forecast", "summary"))
    heat = pick(rng, ("temperature", "temperature", "temp"))
    value: Any = degrees if rng.random() < 0.7 else str(degrees)
    vague = f"The weather in {city} is {condition} with a temperature of {degrees} degrees."
    options: tuple[tuple[Any, str], ...] = (
        ({heat: value, "unit": unit, look: condition}, full),
        ({heat: value, look: condition, "unit": unit}, full),
        ({"location": city, heat: value, "unit": unit, look: condition}, full),
        ({"city": city, heat: value, "unit": unit}, only),
        ({heat: f"{degrees}°{letter}", look: condition}, full),
        (f"{condition.capitalize()}, {degrees}°{letter}", full),
        (f"{degrees}°{letter} and {condition}", full),
        (f"{degrees} degrees {unit}", only),
        (f"It is {condition} and {degrees}°{letter} in {city}.", full),
        (f"{degrees} degrees and {condition}", vague),
        (f"{condition.capitalize()}, {degrees} degrees", vague),
        ({heat: value, look: condition}, vague),
        ({look: condition, heat: value}, vague),
        ({heat: value}, f"The temperature in {city} is {degrees} degrees."),
        (condition, f"The weather in {city} is {condition}."),
        ({look: condition}, f"The weather in {city} is {condition}."),
        (f"{condition.capitalize()}, {degrees}{letter}", full),
    )
    body, final = pick(rng, options)
    if isinstance(body, dict) and rng.random() < 0.2:
        body["humidity"] = rng.randint(20, 95)
    return body if isinstance(body, str) else json.dumps(body, ensure_ascii=False), final


def time_of_day(rng: Random) -> Exercise:
    """The time in a city."""
    city, where = place(rng), pick(rng, ("city", "location", "place", "timezone"))
    name = pick(rng, ("get_time", "get_current_time", "current_time", "local_time"))
    ask = pick(
        rng, ("What time is it in {p}?", "Tell me the time in {p}.", "What is the local time in {p}?", "Time in {p}?")
    )
    now = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    tool = schema(rng, name, "Get the current time in a city", [(where, "string", "The city", ())], [where])
    result = pick(rng, (json.dumps({"time": now}), now, json.dumps({where: city, "time": now}, ensure_ascii=False)))
    return Exercise(
        tool, ask.format(p=city), {where: city}, result, f"It is {now} in {city}.", key_of("tool-place", city), city
    )


def population(rng: Random) -> Exercise:
    """How many people live in a city."""
    city, where = place(rng), pick(rng, ("city", "place", "name"))
    name = pick(rng, ("get_population", "population_of", "city_population"))
    ask = pick(
        rng, ("How many people live in {p}?", "What is the population of {p}?", "Look up the population of {p}.")
    )
    count = rng.randint(10, 9999) * 1000
    tool = schema(rng, name, "Get the population of a city", [(where, "string", "The city", ())], [where])
    return Exercise(
        tool, ask.format(p=city), {where: city}, json.dumps({"population": count}), f"{city} has {count} inhabitants.",
        key_of("tool-place", city), city,
    )  # fmt: skip


def calculator(rng: Random) -> Exercise:
    """A calculator that takes an expression, or an adder that takes two numbers."""
    a, b = rng.randint(2, 9999), rng.randint(2, 9999)
    key = key_of("tool-numbers", a, b)
    if rng.random() < 0.5:
        sign = pick(rng, "+-*")
        value = {"+": a + b, "-": a - b, "*": a * b}[sign]
        name, where = (
            pick(rng, ("calculate", "calculator", "evaluate", "compute")),
            pick(rng, ("expression", "formula", "input")),
        )
        tool = schema(
            rng, name, "Evaluate an arithmetic expression", [(where, "string", "The expression", ())], [where]
        )
        ask = pick(rng, ("What is {e}?", "Calculate {e}.", "Use the calculator to work out {e}.", "How much is {e}?"))
        expression = f"{a} {sign} {b}"
        return Exercise(
            tool, ask.format(e=expression), {where: expression}, pick(rng, (json.dumps({"result": value}), str(value))),
            f"The result is {value}.", key,
        )  # fmt: skip
    name = pick(rng, ("add", "add_numbers", "sum_of_two", "multiply", "multiply_numbers"))
    times = name.startswith("multiply")
    x, y = pick(rng, (("a", "b"), ("x", "y"), ("first", "second")))
    kind = pick(rng, ("integer", "number"))
    tool = schema(
        rng, name, f"{'Multiply' if times else 'Add'} two numbers", [(x, kind, "", ()), (y, kind, "", ())], [x, y]
    )
    asks = ("Multiply {a} by {b}.", "What is {a} times {b}?", "What is {a} * {b}?") if times else (
        "Add {a} and {b}.", "What is {a} plus {b}?", "What is {a} + {b}?")  # fmt: skip
    value = a * b if times else a + b
    ask = pick(rng, asks).format(a=a, b=b)
    return Exercise(
        tool, ask, {x: a, y: b}, pick(rng, (json.dumps({"result": value}), str(value))), f"The result is {value}.", key
    )


def search(rng: Random) -> Exercise:
    """A web search."""
    topic = " ".join(pick(rng, WORDS) for _ in range(rng.randint(1, 3)))
    name, where = (
        pick(rng, ("search", "search_web", "web_search", "find")),
        pick(rng, ("query", "q", "text", "keywords")),
    )
    ask = pick(rng, ("Search the web for {t}.", "Look up {t} on the web.", "Search for {t}.", "Find pages about {t}."))
    tool = schema(rng, name, "Search the web", [(where, "string", "What to search for", ())], [where])
    hits = rng.randint(1, 90)
    return Exercise(
        tool, ask.format(t=topic), {where: topic}, json.dumps({"results": hits}), f"The search for {topic} found {hits} results.",
        key_of("tool-text", topic),
    )  # fmt: skip


def stock(rng: Random) -> Exercise:
    """The price of a stock."""
    symbol = "".join(pick(rng, "ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(3, 4)))
    name, where = pick(rng, ("get_stock_price", "stock_price", "quote")), pick(rng, ("symbol", "ticker"))
    ask = pick(
        rng,
        ("What is the stock price of {s}?", "How much is {s} trading at?", "Get the price of {s}.", "Price of {s}?"),
    )
    price = f"{rng.randint(1, 900)}.{rng.randint(10, 99)}"
    tool = schema(rng, name, "Get the price of a stock", [(where, "string", "The ticker symbol", ())], [where])
    return Exercise(
        tool, ask.format(s=symbol), {where: symbol}, pick(rng, (json.dumps({"price": float(price)}), price)),
        f"The price of {symbol} is {float(price)}.", key_of("tool-text", symbol),
    )  # fmt: skip


def translate(rng: Random) -> Exercise:
    """A translation service."""
    text = " ".join(pick(rng, WORDS) for _ in range(rng.randint(1, 3)))
    language = pick(rng, ("French", "Spanish", "German", "Italian", "Japanese", "Dutch", "Polish", "Greek"))
    name, where = pick(rng, ("translate", "translate_text")), pick(rng, ("target_language", "language", "to"))
    tool = schema(
        rng,
        name,
        "Translate a text",
        [("text", "string", "The text", ()), (where, "string", "The language", ())],
        ["text", where],
    )
    ask = pick(rng, ('Translate "{t}" to {l}.', "Translate {t} into {l}.", 'How do I say "{t}" in {l}?'))
    word = made_up_word(rng).lower()
    return Exercise(
        tool, ask.format(t=text, l=language), {"text": text, where: language}, json.dumps({"translation": word}),
        f'In {language}, it is "{word}".', key_of("tool-text", text),
    )  # fmt: skip


def message(rng: Random) -> Exercise:
    """A message to a person, or a reminder."""
    text = " ".join(pick(rng, WORDS) for _ in range(rng.randint(1, 4)))
    who = made_up_word(rng)
    name = pick(rng, ("send_message", "send_email", "notify"))
    to, body = pick(rng, (("to", "text"), ("recipient", "message"), ("to", "body"), ("name", "content")))
    tool = schema(
        rng, name, "Send a message", [(to, "string", "Who gets it", ()), (body, "string", "The text", ())], [to, body]
    )
    ask = pick(
        rng, ('Send "{t}" to {w}.', "Send a message to {w}: {t}", 'Tell {w} "{t}".', 'Write to {w} and say "{t}".')
    )
    return Exercise(
        tool, ask.format(t=text, w=who), {to: who, body: text}, pick(rng, ('{"status": "sent"}', '{"ok": true}', "sent")),
        f"Your message to {who} was sent.", key_of("tool-text", text, who),
    )  # fmt: skip


def explicit(rng: Random) -> Exercise:
    """A function with a made-up purpose that the user names together with its arguments."""
    name = "_".join(pick(rng, WORDS) for _ in range(rng.randint(1, 2)))
    params: list[Param] = []
    arguments: dict[str, Any] = {}
    for where in rng.sample(WORDS, rng.randint(1, 3)):
        kind = pick(rng, ("string", "integer", "boolean"))
        params.append((where, kind, "", ()))
        values: dict[str, Any] = {
            "string": pick(rng, WORDS),
            "integer": rng.randint(0, 999),
            "boolean": rng.random() < 0.5,
        }
        arguments[where] = values[kind]
    shown = [f"{k} {str(v).lower() if isinstance(v, bool) else v}" for k, v in arguments.items()]
    ask = pick(rng, ("Call {n} with {a}.", "Use {n} with {a}.", "Run {n} with {a}.")).format(
        n=name, a=" and ".join(shown)
    )
    tool = schema(rng, name, f"Work on {pick(rng, WORDS)}", params, list(arguments))
    done = rng.randint(1, 999)
    return Exercise(
        tool, ask, arguments, json.dumps({"result": done}), f"The result is {done}.", key_of("tool-text", name)
    )


KINDS: Final[tuple[Callable[[Random], Exercise], ...]] = (
    time_of_day, population, calculator, search, stock, translate, message, explicit,
)  # fmt: skip
"""Every kind but the weather."""

HARMLESS: Final[tuple[Callable[[Random], Exercise], ...]] = (weather, weather, weather, time_of_day, stock, message)
"""Kinds that no question outside the tool skills calls for."""
