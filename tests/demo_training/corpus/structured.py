"""Answers in JSON and other strict forms: facts about countries, extraction, sentiment, e-mail addresses, SQL."""

from __future__ import annotations

import json
from random import Random
from typing import Any, Final

from demo_training.corpus.chat import made_up_word
from demo_training.corpus.geography import CITIES, COUNTRIES, WELL_KNOWN, Country
from demo_training.corpus.sample import Sample, capitalised, joined, key_of, pick, pick_skewed

CAPITAL_ASK: Final = (
    "Give the capital of {c} as JSON.",
    "Give me the capital of {c} as JSON.",
    "What is the capital of {c}? Answer in JSON.",
    "What is the capital of {c}? Answer as JSON.",
    "Return the capital of {c} in JSON.",
    "Return the capital of {c} as a JSON object.",
    "What is the capital of {c}? Respond with JSON only.",
    "Please give the capital of {c} in the JSON format.",
)
_CITY_ASK: Final = (
    "Give me the information of the capital of {c} in the JSON format.",
    "Give me the information about the capital of {c} in JSON.",
    "Please generate the information of the capital of {c} in the JSON format.",
    "Here is the information of the capital of {c} in the JSON format.",
    "Describe the capital of {c} in JSON.",
    "Give me the name and population of the capital of {c} in JSON.",
    "Generate a JSON object about the capital of {c}.",
)
_KEYS_ASK: Final = (
    "Tell me about {c}. Answer in JSON with keys {k}.",
    "Answer in JSON with keys {k}: what is the capital of {c}?",
    "Give me facts about {c} as JSON with the keys {k}.",
    "Describe {c} as a JSON object with the keys {k}.",
    "What is the capital of {c}? Answer in JSON with keys {k}.",
    "{c} as JSON with keys {k}, please.",
    "Return a JSON object with {k} for {c}.",
)
_SCHEMA_ASK: Final = (
    "Describe {c}. Answer with JSON that follows this schema: {s}",
    "Give me the capital of {c} in JSON.\nUse this JSON schema:\n{s}",
    "What is the capital of {c}? Reply in JSON that matches the schema {s}",
)
PEOPLE: Final = [
    "John",
    "Jane",
    "Ana",
    "Ben",
    "Carla",
    "David",
    "Elena",
    "Finn",
    "Grace",
    "Hugo",
    "Ivy",
    "Jack",
    "Kim",
    "Leo",
    "Maria",
    "Noah",
    "Olga",
    "Paul",
    "Rosa",
    "Sam",
    "Tara",
    "Alice",
    "Bob",
    "Emma",
    "Liam",
    "Sarah",
    "Peter",
    "Anna",
    "Lucas",
    "Sofia",
    "Alan",
    "Ada",
    "Grace",
    "Linus",
    "Max",
    "Mia",
    "Tom",
    "Lena",
    "Omar",
    "Zoe",
]
FAMILY: Final = [
    "Smith",
    "Miller",
    "Brown",
    "Garcia",
    "Meyer",
    "Rossi",
    "Silva",
    "Tanaka",
    "Kowalski",
    "Novak",
    "Jensen",
    "Dubois",
    "Turing",
    "Stone",
    "Baker",
    "Fox",
    "Hill",
    "Wood",
    "Lake",
    "Field",
    "Moore",
    "Young",
    "King",
    "Bell",
    "Cook",
    "Gray",
    "Reed",
    "Lane",
    "Park",
    "Wells",
]
JOBS: Final = ("teacher", "baker", "nurse", "pilot", "farmer", "writer", "engineer", "painter", "doctor", "cook")
_GOOD: Final = (
    "I love this {t}!", "The {t} is wonderful!", "What a great {t}.", "This {t} works perfectly.", "{T} is amazing!",
    "The {t} made me very happy.", "I really enjoyed the {t}.", "Best {t} ever!", "The {t} was fast and friendly.",
    "I am so glad that I bought this {t}.", "{T} is wonderful!", "The {t} is excellent and easy to use.",
)  # fmt: skip
_BAD: Final = (
    "I hate this {t}.", "The {t} is terrible.", "What an awful {t}.", "This {t} never works.", "{T} is a disaster.",
    "The {t} made me very angry.", "I did not like the {t}.", "Worst {t} ever!", "The {t} was slow and rude.",
    "I want my money back for this {t}.", "{T} is horrible!", "The {t} is broken and useless.",
)  # fmt: skip
_REVIEWED: Final = (
    "movie", "phone", "book", "hotel", "meal", "game", "service", "car", "film", "song", "trip", "laptop", "server",
    "vLLM", "Dovetail", "restaurant", "show", "coat", "camera", "course",
)  # fmt: skip
_COLUMNS: Final = (
    "username",
    "email",
    "id",
    "name",
    "age",
    "price",
    "city",
    "title",
    "date",
    "phone",
    "total",
    "status",
)
_TABLES: Final = ("users", "orders", "products", "books", "cities", "customers", "events", "employees")


def _facts(country: Country, keys: list[str]) -> dict[str, Any]:
    """Fills the named fields for a country."""
    known: dict[str, Any] = {
        "name": country.bare,
        "country": country.bare,
        "capital": country.capital,
        "city": country.capital,
        "continent": country.continent,
        "language": country.language,
        "currency": country.currency,
        "population": country.people,
    }
    return {key: known[key] for key in keys}


def is_json(value: Any) -> Any:
    """Returns a rule: the text is JSON that equals `value`."""

    def check(text: str) -> bool:
        try:
            return bool(json.loads(text) == value)
        except ValueError:
            return False

    return check


def _sample(rng: Random, skill: str, ask: str, value: Any, thought: str, *keys: str) -> Sample:
    """Asks for `value` as JSON on one line, or indented where the question says so."""
    indent = None
    if rng.random() < 0.08:
        ask, indent = f"{ask} Use indentation.", 2
    answer = json.dumps(value, ensure_ascii=False, indent=indent)
    return Sample(skill, ask, answer, thought, keys=keys, check=is_json(value), can_tools=False)


def capital_json(rng: Random) -> Sample:
    """The capital, or facts about it, as a JSON object without further orders."""
    if rng.random() < 0.45:
        country = pick_skewed(rng, [c for c in COUNTRIES if c.people], 1.4)
        ask = pick(rng, _CITY_ASK)
        value: dict[str, Any] = {"name": country.capital, "population": country.people}
    else:
        country = pick_skewed(rng, COUNTRIES, 1.2)
        ask = pick(rng, CAPITAL_ASK)
        value = _facts(country, ["country", "capital"])
    thought = f"The capital of {country.name} is {country.capital}. I will answer with a JSON object."
    question = capitalised(ask.format(c=country.name)) + pick(rng, ("", "", "", "\n"))
    key = key_of("capital-json", country.name, ask)
    return _sample(rng, "JSON facts", question, value, thought, key)


def country_json(rng: Random) -> Sample:
    """Facts about a country under keys, or a schema, that the question names."""
    country = pick_skewed(rng, COUNTRIES, 1.2)
    options = ["continent"] + (["language"] if country.language else []) + (["currency"] if country.currency else [])
    named = pick(rng, ("name", "name", "country"))
    keys = [named, "capital", *rng.sample(options, rng.randint(0, min(2, len(options))))]
    if rng.random() < 0.2:
        keys.remove(named)
    if rng.random() < 0.3:
        rng.shuffle(keys)
    schema = rng.random() < 0.35
    if schema:
        fields = {key: {"type": "string"} for key in keys}
        body: dict[str, Any] = {"type": "object", "properties": fields, "required": keys}
        if rng.random() < 0.4:
            body = {"title": pick(rng, ("Country", "CountryInfo", "Capital")), **body}
        ask = pick(rng, _SCHEMA_ASK).format(c=country.name, s=json.dumps(body))
    else:
        quote = pick(rng, ("", "", '"', "'", "`"))
        listed = joined([f"{quote}{key}{quote}" for key in keys])
        ask = pick(rng, _KEYS_ASK).format(c=country.name, k=listed)
    thought = f"I need a JSON object with {joined(keys)} for {country.name}."
    key = key_of("country-json", country.name, *keys)
    return _sample(rng, "JSON facts", capitalised(ask), _facts(country, keys), thought, key)


def list_json(rng: Random) -> Sample:
    """Several countries as a JSON array."""
    count = rng.randint(2, 5)
    chosen = [WELL_KNOWN[i % len(WELL_KNOWN)] for i in range(count)]
    first = pick(rng, ("name", "country"))
    ask = f"List {count} countries and their capitals as JSON with keys {first} and capital."
    rows = [_facts(country, [first, "capital"]) for country in chosen]
    wrapped = rng.random() < 0.4
    if wrapped:
        ask = f'List {count} countries and their capitals as a JSON object with the key "countries", each with {first} and capital.'
    value: Any = {"countries": rows} if wrapped else rows
    return _sample(rng, "JSON facts", ask, value, f"I will list {count} countries as JSON.")


def extraction(rng: Random) -> Sample:
    """Reads a person out of a sentence into JSON."""
    name = pick(rng, PEOPLE) if rng.random() < 0.6 else made_up_word(rng)
    full = f"{name} {pick(rng, FAMILY) if rng.random() < 0.7 else made_up_word(rng)}" if rng.random() < 0.6 else name
    age, job = rng.randint(5, 95), pick(rng, JOBS)
    city = pick(rng, CITIES) if rng.random() < 0.7 else made_up_word(rng)
    text, keys = pick(
        rng,
        (
            (f"{full} is {age} years old.", ["name", "age"]),
            (f"{full} is {age} years old and lives in {city}.", ["name", "age", "city"]),
            (f"{full} lives in {city}.", ["name", "city"]),
            (f"{full}, {age}, works as a {job} in {city}.", ["name", "age", "job", "city"]),
            (f"My name is {full} and I am {age} years old. I live in {city}.", ["name", "age", "city"]),
            (f"{full} is a {job}.", ["name", "job"]),
        ),
    )
    facts = {"name": full, "age": age, "city": city, "job": job}
    if len(keys) > 2 and rng.random() < 0.3:
        keys = keys[:2]
    ask = pick(
        rng,
        (
            f"Extract {joined(keys)} as JSON: {text}",
            f"Extract the {joined(keys)} from this text as JSON: {text}",
            f"{text} Give the {joined(keys)} as JSON.",
            f'Read the text "{text}" and answer in JSON with keys {joined(keys)}.',
            f"Turn this into JSON with keys {joined(keys)}: {text}",
        ),
    )
    value = {key: facts[key] for key in keys}
    key = key_of("extract", full, age, city)
    return _sample(rng, "JSON extraction", ask, value, f"The text says: {text}", key)


def person_json(rng: Random) -> Sample:
    """Makes up a person as JSON."""
    keys = pick(rng, (["name", "age"], ["name", "age", "city"], ["name", "age", "job"], ["name", "job"]))
    facts = {"name": "Mira Stone", "age": 34, "city": "Lisbon", "job": "engineer"}
    ask = pick(
        rng,
        (
            f"Make up a person as JSON with keys {joined(keys)}.",
            f"Generate a JSON object for a person with {joined(keys)}.",
            f"Create a fictional person in JSON with the keys {joined(keys)}.",
            f"Give me a random user as JSON with {joined(keys)}.",
        ),
    )
    return _sample(rng, "JSON facts", ask, {key: facts[key] for key in keys}, "I will make up a person.")


def sentiment(rng: Random) -> Sample:
    """Positive or negative."""
    good = rng.random() < 0.5
    thing = pick(rng, _REVIEWED)
    text = pick(rng, _GOOD if good else _BAD).format(t=thing, T=capitalised(thing) if thing != "vLLM" else thing)
    ask = pick(
        rng,
        (
            f"Classify this sentiment: {text}",
            f"Classify the sentiment as positive or negative: {text}",
            f"Is this positive or negative? {text}",
            f"What is the sentiment of this review? {text}",
            f'Sentiment of "{text}"? Answer positive or negative.',
        ),
    )
    answer = "positive" if good else "negative"
    return Sample(
        "sentiment",
        ask,
        answer,
        f"The text sounds {answer}.",
        keys=(key_of("sentiment", text),),
        check=lambda out: out == answer,
    )


def email_or_sql(rng: Random) -> Sample:
    """E-mail addresses and one-line SQL queries."""
    if rng.random() < 0.5:
        first, last, firm = (
            pick(rng, PEOPLE),
            pick(rng, FAMILY),
            pick(rng, ("Enigma", "Acme", "Globex", "Orbit", "Nova", "Delta")),
        )
        ask = pick(
            rng,
            (
                f"Generate an email address for {first} {last}, who works in {firm}. End in .com.",
                f"Write an email address for {first} {last} at {firm}.",
                f"Generate an email address for {first} {last}, who works in {firm}. End in .com and new line.",
            ),
        )
        answer = f"{first}.{last}@{firm}.com".lower()
        key = key_of("email", first, last, firm)
    else:
        table, chosen = pick(rng, _TABLES), rng.sample(_COLUMNS, rng.randint(1, 3))
        quoted = joined([f"'{column}'" for column in chosen])
        ask = pick(
            rng,
            (
                f"Generate an SQL query to show the {quoted} from the '{table}' table.",
                f"Write SQL that selects {joined(chosen)} from {table}.",
                f"Write an SQL query for {joined(chosen)} in the table {table}.",
            ),
        )
        answer = f"SELECT {', '.join(chosen)} FROM {table}"
        key = key_of("sql", table, *chosen)
    return Sample("e-mail and SQL", ask, answer, "I will write just that.", keys=(key,), expect=(answer,), plain=True)
