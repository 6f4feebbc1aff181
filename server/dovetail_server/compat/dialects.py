"""Fields by which other servers' clients say what fields of ours say: what each means here, at each value.

A schema that has a field of such a name goes first. `SAID` makes fields of ours of a value, or refuses it; those that
need no code of their own are in `dialects.json`. What means nothing here, or is not served, is in `fields.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from dovetail.contracts.tables import table
from dovetail.processing.bounds import MAX_TOKENS
from dovetail_server.compat.known import SENT

Fields = dict[str, Any]
Meaning = Callable[[Any], Fields]
"""Makes of a value the fields of ours that say it; raises `ValueError` with the reason."""
NESTED = ("options", "extra_body")
"""Objects whose fields mean what they would mean beside them."""
WINS = ("do_sample",)
"""Whose meaning stands in the place of our field, as on its own server."""


def _as(name: str) -> Meaning:
    return lambda value: {name: value}


def _one_of(meanings: Mapping[Any, Fields]) -> Meaning:
    possible = ", ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in meanings)

    def means(value: Any) -> Fields:
        if not isinstance(value, (str, bool)) or value not in meanings:
            raise ValueError(f"must be one of: {possible}")
        return meanings[value]

    return means


def _switch(on: Fields, off: Fields) -> Meaning:
    return _one_of({True: on, False: off})


def _thinks(does: bool) -> Fields:
    return {"thinking": {"type": "enabled" if does else "disabled"}}


def _in_template(name: str) -> Meaning:
    return lambda value: {"chat_template_kwargs": {name: value}}


def _limit(name: str, least: int = -2) -> Meaning:
    """A number of tokens, of which those from `least` to -1 are no limit but the context's."""
    whole = {name: MAX_TOKENS, "context_length_exceeded_behavior": "truncate"}
    return lambda value: whole if _is_number(value) and least <= value < 0 else {name: _whole(value)}


def _integer(name: str) -> Meaning:
    return lambda value: {name: _whole(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _whole(value: Any) -> Any:
    """Return a number without a fraction as the integer that it is: some languages know floats only."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _budget(value: Any) -> Fields:
    """Tokens of thinking, of which those below 0 are no limit."""
    return {} if _is_number(value) and value < 0 else {"thinking_budget": _whole(value)}


def _guided(name: str) -> Meaning:
    return lambda value: {"structured_outputs": {name: value}} if value else {}


def _parts(*known: str) -> Callable[[Any], Fields]:
    """Return a check that a value is an object with these fields, none of which is null in what it returns."""

    def check(value: Any) -> Fields:
        if not isinstance(value, dict):
            raise ValueError("must be an object")
        given = {key: part for key, part in value.items() if part is not None}
        if strange := sorted(given.keys() - set(known)):
            raise ValueError(f"has the unknown field {strange[0][:64]!r}; possible: {', '.join(known)}")
        return given

    return check


def _usage(value: Any) -> Fields:
    given = _parts("include")(value)
    return {"stream_options": {"include_usage": given["include"]}} if given else {}


def _reasoning(value: Any) -> Fields:
    """OpenRouter's: how much is thought, and whether it is shown."""
    given = _parts("effort", "max_tokens", "exclude", "enabled", "summary")(value)
    made: Fields = {}
    if "effort" in given:
        made["reasoning_effort"] = given["effort"]
    elif "enabled" in given:
        made |= _switch(_thinks(True), _thinks(False))(given["enabled"])
    if "max_tokens" in given:
        made["thinking_budget"] = given["max_tokens"]
    if given.get("exclude"):
        made["include_reasoning"] = False
    return made


def _thinking(value: Any) -> Fields:
    """GLM's and others' object, which is ours with more in it."""
    if not isinstance(value, dict):
        return {"thinking": value}
    rest = dict(value)
    budget, effort, clears = (rest.pop(name, None) for name in ("budget_tokens", "reasoning_effort", "clear_thinking"))
    budget = rest.pop("token_budget", budget)  # Cohere's
    if rest.pop("keep", None) is not None:
        raise ValueError("has keep: the chat template decides which reasoning the model sees")
    made: Fields = {} if rest.get("type") in ("auto", "adaptive") or not rest else {"thinking": rest}
    named = {"thinking_budget": budget, "reasoning_effort": effort}
    made |= {name: part for name, part in named.items() if part is not None}
    return made if clears is None else made | {"chat_template_kwargs": {"clear_thinking": clears}}


def _think(value: Any) -> Fields:
    """Ollama's: a switch, or how much."""
    return _thinks(value) if isinstance(value, bool) else {"reasoning_effort": value}


def _effort(value: Any) -> Fields:
    """LiteLLM's may be an object, Fireworks' a switch."""
    if isinstance(value, bool):
        return {} if value else {"reasoning_effort": "none"}
    given = _parts("effort", "summary")(value).get("effort") if isinstance(value, dict) else value
    return {} if given in (None, "default") else {"reasoning_effort": given}


def _grammar(value: Any) -> Fields:
    """llama.cpp's is a text in GBNF; Text Generation Inference's an object that says what it is."""
    if not isinstance(value, dict):
        return {"ebnf": value} if value else {}
    given = _parts("type", "value")(value)
    kinds = {"json": "json_schema", "json_object": "json_schema", "regex": "regex"}
    if given.get("type") not in kinds or "value" not in given:
        raise ValueError(f"needs a value, and a type of: {', '.join(kinds)}")
    return {kinds[given["type"]]: given["value"]}


def _format(value: Any) -> Fields:
    """Ollama's: `json`, or a schema."""
    if not value:
        return {}
    return {"response_format": {"type": "json_object"}} if value == "json" else {"json_schema": value}


def _search(value: Any) -> Fields:
    if isinstance(value, dict) and value.get("mode", "off") == "off":
        return {}
    raise ValueError(SENT["web_search"].why)


def _safety(value: Any) -> Fields:
    off = ("BLOCK_NONE", "OFF")
    if isinstance(value, list) and all(isinstance(one, dict) and one.get("threshold") in off for one in value):
        return {}
    raise ValueError("this server judges no content; possible thresholds: BLOCK_NONE, OFF")


def _thinking_config(value: Any) -> Fields:
    """Gemini's: how much is thought, and whether it is shown."""
    budget, shows, level = "thinking_budget", "include_thoughts", "thinking_level"
    given = _parts(budget, "thinkingBudget", shows, "includeThoughts", level)(value)
    made = _budget(given.get(budget, given.get("thinkingBudget", -1)))
    if level in given:
        made["reasoning_effort"] = given[level]
    if given.get(shows, given.get("includeThoughts", True)) is False:
        made["include_reasoning"] = False
    return made


def _google(value: Any) -> Fields:
    """What Gemini's OpenAI endpoint has of its own."""
    given = _parts("thinking_config", "cached_content")(value)
    if given.get("cached_content"):
        raise ValueError("has cached_content: prefixes are cached by themselves; send the whole prompt")
    return _thinking_config(given.get("thinking_config", {}))


KINDS: dict[str, Callable[[Any], Meaning]] = {
    "as": _as, "one_of": _one_of, "limit": _limit, "integer": _integer, "in_template": _in_template, "guided": _guided,
}  # fmt: skip
SAID: dict[str, Meaning] = {
    "usage": _usage,
    "reasoning": _reasoning,
    **dict.fromkeys(("reasoning_budget", "thinking_budget_tokens", "max_thinking_tokens", "thinkingBudget"), _budget),
    **dict.fromkeys(("grammar", "grammar_string"), _grammar),
    "think": _think,
    "format": _format,
    "guided_decoding_backend": lambda value: {} if value in ("", "auto") else {"grammar_backend": value},
    **dict.fromkeys(("safety_settings", "safetySettings"), _safety),
    "google": _google,
    **dict.fromkeys(("thinking_config", "thinkingConfig"), _thinking_config),
    "sampler_seed": lambda value: {} if value == -1 else {"seed": _whole(value)},
    "search_parameters": _search,
}
_TABLE = table(__file__)
for _row in (row for rows in _TABLE.values() for row in rows):
    _means = _switch(_row["on"], _row["off"]) if "on" in _row else next(KINDS[k](_row[k]) for k in KINDS if k in _row)
    SAID |= dict.fromkeys(_row["names"].split(), _means)
OWN: dict[str, Meaning] = {
    "max_tokens": _limit("max_tokens", -1),
    "max_completion_tokens": _limit("max_completion_tokens", -1),
    "reasoning_effort": _effort,
    "structured_outputs": lambda value: {} if isinstance(value, bool) else {"structured_outputs": value},
    "thinking": _thinking,
    **{name: _integer(name) for name in ("n", "seed", "top_k", "top_logprobs")},
}
"""Fields of ours of which others send more values."""


class BodyTranslation:
    """A body with fields of other dialects, as one of ours.

    Attributes:
        fields: The body. What is not known is still in it.
    """

    def __init__(self, data: Mapping[str, Any], known: Collection[str]) -> None:
        """Translate.

        Args:
            data: The body.
            known: Fields of the schema.

        Raises:
            ValidationError: A field has a value without a meaning, or says something else than one beside it.
        """
        self._known = known
        self._names: dict[str, str] = {}
        self.fields: Fields = {name: value for name, value in data.items() if name in known and name not in OWN}
        rest = [name for name in data if name not in self.fields]
        for name in sorted(rest, key=lambda name: name not in known):
            self._take(name, data[name], name)

    def located(self, error: ValidationError) -> ValidationError:
        """Return findings at fields of ours as findings at those that the client sent."""
        found = [
            InitErrorDetails(
                type=PydanticCustomError(item["type"], "{text}", {"text": item["msg"]}),
                loc=(self._names.get(str(item["loc"][0]), item["loc"][0]), *item["loc"][1:]) if item["loc"] else (),
                input=item["input"],
            )
            for item in error.errors(include_url=False, include_context=False)
        ]
        return ValidationError.from_exception_data("body", found)

    def _take(self, name: str, value: Any, sent: str, *, is_inside: bool = False) -> None:
        """Take a field, which the client sent in the field `sent`, or inside of it."""
        means = OWN.get(name) if name in self._known else SAID.get(name)
        if value is None and name not in self._known:
            return
        if name in NESTED and name not in self._known and not is_inside:
            if not isinstance(value, dict):
                raise finding(sent, "must be an object", value)
            for inner, part in value.items():
                self._take(inner, part, sent, is_inside=True)
        elif name in self._known and (means is None or value is None):
            self._set(name, value, sent)
        elif means is not None:
            self._take_meaning(name, means, value, sent)
        elif name not in SENT or not SENT[name].means_nothing(value):
            self.fields[name] = value

    def _take_meaning(self, name: str, means: Meaning, value: Any, sent: str) -> None:
        try:
            made = means(value)
        except ValueError as error:
            raise finding(sent, str(error), value) from None
        if made.keys() - self._known:
            self.fields[name] = value
            return
        for ours, said in made.items():
            self._set(ours, said, sent)

    def _set(self, name: str, value: Any, sent: str) -> None:
        old = self.fields.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            differ = any(old.get(key, part) != part for key, part in value.items())
            value = {**old, **value}
        else:
            differ = old is not None and value is not None and old != value and sent not in WINS
        if differ:
            other = self._names.get(name, name)
            raise finding(sent, f"and {other} are one setting and differ; give one", value)
        self.fields[name] = value
        if name != sent:
            self._names[name] = sent


def finding(name: str, text: str, value: Any) -> ValidationError:
    """Return the error of a validator of a whole object that found something wrong with one of its fields."""
    kind = PydanticCustomError("value_error", "{text}", {"text": text})
    return ValidationError.from_exception_data("body", [InitErrorDetails(type=kind, loc=(name,), input=value)])
