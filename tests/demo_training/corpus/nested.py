"""JSON with objects in objects and lists of objects, for schemas, examples or keys that the question names."""

from __future__ import annotations

import json
from random import Random
from typing import Any, Final

from demo_training.corpus.chat import WORDS, made_up_word
from demo_training.corpus.geography import CITIES, COUNTRIES, Country
from demo_training.corpus.sample import Sample, capitalised, joined, key_of, pick, pick_skewed
from demo_training.corpus.structured import FAMILY, JOBS, PEOPLE, is_json

_COUNTRY_ASK: Final = (
    "Describe {c}.", "Tell me about {c}.", "Give me facts about {c}.", "What do you know about {c}?", "{c}, please.",
    "What is the capital of {c}?", "I need the data of {c}.", "Give me information about {c}.", "Facts about {c}?",
)  # fmt: skip
_READ_ASK: Final = (
    "Extract the data: {t}", "Read this text: {t}", "{t}", "Turn this into JSON: {t}", "Parse: {t}", "Text: {t}",
    "Extract the information from this text: {t}", "Fill in the form from this text: {t}", 'Read the text "{t}"',
)  # fmt: skip
_SCHEMA: Final = (
    "Answer with JSON that follows this schema: {s}", "Use this JSON schema:\n{s}", "Reply in JSON that matches the schema {s}",
    "Here is the JSON schema that your answer must match:\n{s}", "Respond only with JSON for this schema:\n{s}",
    "Output JSON. Schema: {s}", "The answer must be a JSON object of this schema: {s}",
)  # fmt: skip
_FORM: Final = (
    "Answer in JSON of this form: {s}", "Use this JSON format: {s}", "Reply with JSON like {s}", "Fill in this JSON: {s}",
    "Return JSON in this shape:\n{s}",
)  # fmt: skip
_KEYS: Final = (
    "Answer in JSON with keys {k}.", "Answer as JSON with the keys {k}.", "Reply with a JSON object with the keys {k}.",
    "Give me JSON with {k}.",
)  # fmt: skip
_OPEN_ASK: Final = (
    "Tell me about {c} as JSON.", "Describe {c} in JSON.", "Information about {c} as JSON, please.", "{c} in JSON.",
    "Write down facts about {c} as JSON.", "Give me information about {c} as JSON.",
)  # fmt: skip
_PLAIN_ASK: Final = (
    "What is the capital of {c}?", "Tell me about {c}.", "Describe {c}.", "What do you know about {c}?", "Where is {c}?",
    "Give me some facts about {c}.", "{c}", "Which city is the capital of {c}?",
)  # fmt: skip
_OTHER_KEYS: Final = {
    "name": ("name", "name", "country", "country_name"),
    "capital": ("capital", "capital", "city", "capital_city"),
    "continent": ("continent", "continent", "continent", "region"),
    "language": ("language", "language", "spoken", "main_language"),
    "currency": ("currency", "currency", "money"),
}
_GROUPS: Final = (
    "details", "facts", "info", "data", "place", "location", "culture", "people", "geography", "properties", "about",
    "general", "more", "result", "entry", "record", "profile", "summary", "country", "economy",
)  # fmt: skip
_STREETS: Final = (
    "Oak",
    "Hill",
    "Lake",
    "Main",
    "Park",
    "Mill",
    "Church",
    "River",
    "Rose",
    "King",
    "Elm",
    "Station",
    "North",
)
_STREET_KINDS: Final = ("Street", "Road", "Lane", "Avenue", "Square")
_GOODS: Final = (
    "apples", "pens", "books", "cups", "chairs", "lamps", "coats", "eggs", "bottles", "boxes", "hats", "plates", "shirts",
    "tickets", "phones", "candles", "lemons", "keys", "shoes", "maps", "knives", "balls", "towels", "carrots", "bags",
)  # fmt: skip
_HOBBIES: Final = (
    "chess", "tea", "jazz", "golf", "painting", "running", "cooking", "football", "music", "films", "hiking", "cats",
    "dancing", "swimming", "poems", "gardening", "trains", "history", "puzzles", "photography",
)  # fmt: skip


def schema_of(value: Any, rng: Random, shared: dict[str, Any] | None = None, name: str = "") -> dict[str, Any]:
    """Returns a JSON schema that `value` satisfies, in the random dress that schemas come in.

    Args:
        value: What the schema describes.
        rng: Decides on titles, closed objects and enumerations.
        shared: Collects the schemas of inner objects for `$defs`; None writes them in place.
        name: The key under which `value` stands.
    """
    if isinstance(value, dict):
        inner = {key: schema_of(item, rng, shared, key) for key, item in value.items()}
        body: dict[str, Any] = {"type": "object", "properties": inner, "required": list(value)}
        if rng.random() < 0.2:
            body["additionalProperties"] = False
        if shared is None or not name:
            return body
        title = capitalised(name.removesuffix("s"))
        shared[title] = body
        return {"$ref": f"#/$defs/{title}"}
    if isinstance(value, list):
        return {"type": "array", "items": schema_of(value[0], rng, shared, name)}
    kind = {bool: "boolean", int: "integer", str: "string"}[type(value)]
    return {"type": kind} if rng.random() < 0.9 else {"title": capitalised(name), "type": kind}


def dressed_schema(value: dict[str, Any], rng: Random) -> dict[str, Any]:
    """Returns a whole schema for `value`: inner objects in place, or under `$defs` as pydantic writes them."""
    shared: dict[str, Any] | None = {} if rng.random() < 0.3 else None
    body = schema_of(value, rng, shared)
    if shared:
        body = {"$defs": shared, **body}
    if rng.random() < 0.25:
        body = {**body, "title": pick(rng, ("Answer", "Output", "Response", "Country", "Order", "Person", "Record"))}
    return body


def _blank(value: Any) -> Any:
    """Returns `value` as an empty form: '...' for texts, 0 for numbers, one entry for a list."""
    if isinstance(value, dict):
        return {key: _blank(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_blank(value[0])]
    if isinstance(value, bool):
        return value
    return "..." if isinstance(value, str) else 0


def _in_words(value: dict[str, Any]) -> str:
    """Names the keys as a person would: 'name and capital (an object with name and population)'."""
    parts = []
    for key, item in value.items():
        if isinstance(item, dict):
            parts.append(f"{key} (an object with {joined(list(item))})")
        elif isinstance(item, list):
            entry = item[0]
            parts.append(
                f"{key} (a list of objects with {joined(list(entry))})"
                if isinstance(entry, dict)
                else f"{key} (a list)"
            )
        else:
            parts.append(key)
    return joined(parts)


def _fields(country: Country) -> dict[str, Any]:
    """Returns what is taught about a country, under the usual keys."""
    facts: dict[str, Any] = {"name": country.bare, "capital": country.capital, "continent": country.continent}
    if country.language:
        facts["language"] = country.language
    if country.currency:
        facts["currency"] = country.currency
    return facts


def _country_tree(rng: Random, country: Country, odd: float = 0.25) -> dict[str, Any]:
    """Arranges facts about a country at random in an object with one or two objects inside.

    Args:
        rng: Decides on the arrangement.
        country: What the facts are about.
        odd: How often an inner object stands under a word that says nothing about it.
    """
    facts = _fields(country)
    if country.people and rng.random() < 0.5:
        facts["capital"] = {"name": country.capital, "population": country.people}
    elif rng.random() < 0.2:
        facts["capital"] = {"name": country.capital}
    if rng.random() < 0.15:
        facts["country"] = facts.pop("name")
    keys = list(facts)
    if rng.random() < 0.4:
        rng.shuffle(keys)
    keys = keys[: rng.randint(2, len(keys))]
    group = pick(rng, WORDS if rng.random() < odd else _GROUPS)
    if group in facts:
        group = "details"
    if rng.random() < 0.3 and any(isinstance(facts[key], dict) for key in keys):
        return {key: facts[key] for key in keys}
    cut = rng.randint(1, len(keys) - 1)
    outer, inner = ({key: facts[key] for key in part} for part in (keys[:cut], keys[cut:]))
    if rng.random() < 0.2:
        return {group: {**outer, **inner}}
    return {**outer, group: inner} if rng.random() < 0.75 else {group: inner, **outer}


def _several(rng: Random) -> tuple[str, dict[str, Any]]:
    """Arranges facts about two or three countries as a list of objects; returns the names and the object."""
    chosen = rng.sample(COUNTRIES, rng.randint(2, 3))
    named = pick(rng, ("name", "name", "country"))
    keys = pick(rng, (["capital"], ["capital", "continent"], ["continent"]))
    rows: list[dict[str, Any]] = []
    for country in chosen:
        facts = _fields(country)
        rows.append({named: country.bare, **{key: facts[key] for key in keys}})
    where = pick(rng, ("countries", "countries", "items", "results", "list", "data"))
    return joined([country.name for country in chosen]), {where: rows}


def _asked(rng: Random, skill: str, question: str, value: dict[str, Any], thought: str, *keys: str) -> Sample:
    """Asks for `value` by a schema, by a form or in words, in the question or in the system prompt."""
    kind = rng.random()
    if kind < 0.6:
        schema = dressed_schema(value, rng)
        order = pick(rng, _SCHEMA).format(
            s=json.dumps(schema, ensure_ascii=False, indent=2 if rng.random() < 0.1 else None)
        )
    elif kind < 0.8:
        order = pick(rng, _FORM).format(s=json.dumps(_blank(value), ensure_ascii=False))
    else:
        order = pick(rng, _KEYS).format(k=_in_words(value))
    sample = Sample(skill, question, json.dumps(value, ensure_ascii=False), thought, keys=keys, check=is_json(value))
    place = rng.random()
    if place < 0.3:
        sample.history = [{"role": "system", "content": order}]
    elif place < 0.85:
        sample.ask = f"{question}{pick(rng, (' ', chr(10)))}{order}"
    else:
        sample.ask = f"{order}\n{question}"
    sample.can_tools, sample.can_raw, sample.plain = False, False, True
    return sample


def nested_facts(rng: Random) -> Sample:
    """Facts about a country, or several, in objects inside objects."""
    if rng.random() < 0.2:
        names, value = _several(rng)
    else:
        country = pick_skewed(rng, COUNTRIES, 1.2)
        names, value = country.name, _country_tree(rng, country)
    thought = f"I need a JSON object with {_in_words(value)} for {names}."
    question = capitalised(pick(rng, _COUNTRY_ASK).format(c=names))
    return _asked(
        rng, "nested JSON, facts", question, value, thought, key_of("nested", names, json.dumps(_blank(value)))
    )


def _person(rng: Random) -> tuple[list[str], dict[str, Any]]:
    """Makes up a person; returns sentences and what they say, a leaf or an object or a list for each."""
    name = pick(rng, PEOPLE) if rng.random() < 0.6 else made_up_word(rng)
    full = f"{name} {pick(rng, FAMILY) if rng.random() < 0.7 else made_up_word(rng)}" if rng.random() < 0.7 else name
    age, number = rng.randint(5, 95), rng.randint(1, 250)
    street = f"{pick(rng, _STREETS)} {pick(rng, _STREET_KINDS)}"
    city = pick(rng, CITIES) if rng.random() < 0.7 else made_up_word(rng)
    job, firm = pick(rng, JOBS), made_up_word(rng)
    goods = rng.sample(_GOODS, rng.randint(1, 3))
    counts = [rng.randint(2, 40) for _ in goods]
    hobbies = rng.sample(_HOBBIES, rng.randint(2, 3))
    what, many = pick(rng, (("name", "quantity"), ("product", "quantity"), ("item", "count"), ("name", "count")))
    where = pick(rng, ("street", "street", "road"))
    parts: list[tuple[str, dict[str, Any]]] = [
        (f"lives at {number} {street} in {city}", {"address": {"number": number, where: street, "city": city}}),
        (f"works as a {job} at {firm}", {"job": {"title": job, "company": firm}}),
        (
            f"ordered {joined([f'{count} {good}' for count, good in zip(counts, goods, strict=True)])}",
            {
                pick(rng, ("items", "order", "products")): [
                    {what: g, many: c} for g, c in zip(goods, counts, strict=True)
                ]
            },
        ),
        (f"likes {joined(hobbies)}", {pick(rng, ("hobbies", "likes", "interests")): hobbies}),
        (f"is {age} years old", {"age": age}),
        *([("is a member", {"member": True})] if rng.random() < 0.5 else [("is not a member", {"member": False})]),
    ]
    chosen = rng.sample(parts, rng.randint(1, 3))
    if not any(isinstance(item, (dict, list)) for _, found in chosen for item in found.values()):
        chosen.append(parts[rng.randrange(3)])
    value: dict[str, Any] = {"name": full}
    sentences = [f"{full} {chosen[0][0]}."]
    sentences += [f"{pick(rng, (name, full))} {text}." for text, _ in chosen[1:]]
    for _, found in chosen:
        value |= found
    return sentences, value


def nested_extraction(rng: Random) -> Sample:
    """Reads a person with an address, a job, an order or hobbies out of a text."""
    sentences, value = _person(rng)
    kind = rng.random()
    if kind < 0.25:
        leaves = {key: item for key, item in value.items() if not isinstance(item, (dict, list))}
        rest = {key: item for key, item in value.items() if key not in leaves}
        value = {pick(rng, ("person", "customer", "user", "client")): leaves, **rest}
    elif kind < 0.32:
        keys = list(value)
        rng.shuffle(keys)
        value = {key: value[key] for key in keys}
    text = " ".join(sentences)
    question = pick(rng, _READ_ASK).format(t=text)
    return _asked(rng, "nested JSON, extraction", question, value, f"The text says: {text}", key_of("read", text))


def _leaves(value: Any) -> list[Any]:
    """Returns the texts and numbers in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, list) else [value]


def _renamed(rng: Random, value: Any) -> Any:
    """Gives keys other names that a schema might use for the same facts."""
    if not isinstance(value, dict):
        return value
    names = {key: pick(rng, _OTHER_KEYS.get(key, (key,))) for key in value}
    if len(set(names.values())) < len(names):
        names = {key: key for key in value}
    return {names[key]: item if key == "capital" else _renamed(rng, item) for key, item in value.items()}


def open_json(rng: Random) -> Sample:
    """Facts as JSON under keys that the question does not name, as a server's grammar may demand them.

    A plain question comes with the opening brace: it is the grammar's, not the model's, that the answer is JSON.
    """
    country = pick_skewed(rng, COUNTRIES, 1.2)
    plain = rng.random() < 0.6
    form = pick(rng, _PLAIN_ASK if plain else _OPEN_ASK)
    value = _country_tree(rng, country, odd=0)
    if rng.random() < 0.4:
        value = {"name": country.bare, "capital": country.capital, "continent": country.continent}
    if plain:
        value = _renamed(rng, value)
        if country.people and rng.random() < 0.2:
            value["population"] = country.people
    known = {country.people, *_fields(country).values()}

    def check(text: str) -> bool:
        try:
            answer = json.loads(text)
            return isinstance(answer, dict) and known.issuperset(_leaves(answer))
        except ValueError:
            return False

    sample = Sample(
        "JSON, keys of its own", capitalised(form.format(c=country.name)), json.dumps(value, ensure_ascii=False),
        f"I will answer with a JSON object about {country.name}.", keys=(key_of("open-json", country.name, form),),
        check=check, can_tools=False, can_raw=False, plain=True,
    )  # fmt: skip
    if plain:
        sample.skill, sample.given, sample.think = "JSON begun by a grammar", '{"', False
    return sample
