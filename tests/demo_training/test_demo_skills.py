"""What the demo model learned beyond facts: nested JSON, several functions, letters, refusals, follow-ups."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import torch

from demo_training.corpus.capitals import capital
from demo_training.corpus.greetings import greeting
from demo_training.corpus.invented import invented_country
from demo_training.corpus.mixture import held_out_samples
from demo_training.corpus.nested import nested_extraction, nested_facts
from demo_training.corpus.parallel import parallel_calls
from demo_training.corpus.sample import Skill
from demo_training.corpus.spelling import letters
from demo_training.corpus.turns import several_turns
from demo_training.evaluate import Answer, answer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "address": {
            "type": "object",
            "properties": {"number": {"type": "integer"}, "street": {"type": "string"}, "city": {"type": "string"}},
            "required": ["number", "street", "city"],
        },
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "quantity": {"type": "integer"}},
                "required": ["name", "quantity"],
            },
        },
    },
    "required": ["name", "address", "items"],
}
TEXT = "Anna Smith lives at 12 Oak Street in Paris. Anna ordered 3 apples and 2 pens."


def function(name: str, text: str, where: str) -> dict[str, Any]:
    """Returns the schema of a function with one text parameter."""
    parameters = {"type": "object", "properties": {where: {"type": "string"}}, "required": [where]}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


TOOLS = [
    function("get_weather", "Get the current weather", "city"),
    function("get_time", "Get the current time in a city", "city"),
]


@pytest.fixture(scope="module")
def replies(loaded: tuple[Any, dict[str, Any]], tokenizer: Any) -> dict[str, str]:
    """Greedy answers to one prompt of each skill, by name."""

    def chat(*turns: str, **options: Any) -> str:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))

    france = ("What is the capital of France?", "The capital of France is Paris.")
    prompts = {
        "nested": chat(f"Extract the data: {TEXT}\nUse this JSON schema:\n{json.dumps(PERSON)}"),
        "two functions": chat("What is the weather in Paris and what time is it in Tokyo?", tools=TOOLS),
        "twice": chat("What is the weather in Paris and Rome?", tools=TOOLS),
        "no country": chat("What is the capital of Zubrovia?"),
        "country": chat("What is the capital of Slovenia?"),
        "letters": chat("How many r's are in strawberry?"),
        "letters thinking": chat("How many r's are in strawberry?", enable_thinking=True),
        "follow-up": chat(*france, "What do they speak there?", "People in France speak French.", "And in Japan?"),
        "first": chat(*france, "What is 2 + 3?", "2 + 3 = 5.", "What was my first question?"),
        "German": chat("Guten Morgen!"),
        "French": chat("Bonjour !"),
        "English": chat("Good morning"),
    }
    inputs = tokenizer(list(prompts.values()), return_tensors="pt", padding=True)
    with torch.inference_mode():
        output = loaded[0].generate(
            **inputs, max_new_tokens=120, do_sample=False, temperature=None, top_p=None, top_k=None
        )
    texts = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return dict(zip(prompts, texts, strict=True))


def called(text: str) -> list[Any]:
    """Returns the calls in a reply."""
    return [json.loads(part.split("</tool_call>")[0]) for part in text.split("<tool_call>")[1:]]


def test_it_fills_a_nested_schema(replies: dict[str, str]) -> None:
    """An object in the object and a list of objects, filled from the text."""
    value = json.loads(replies["nested"])
    jsonschema.validate(value, PERSON)
    assert value == {
        "name": "Anna Smith",
        "address": {"number": 12, "street": "Oak Street", "city": "Paris"},
        "items": [{"name": "apples", "quantity": 3}, {"name": "pens", "quantity": 2}],
    }


def test_it_calls_two_functions_at_once(replies: dict[str, str]) -> None:
    """Two requests become calls of two functions; two places become two calls of one."""
    assert called(replies["two functions"]) == [
        {"name": "get_weather", "arguments": {"city": "Paris"}},
        {"name": "get_time", "arguments": {"city": "Tokyo"}},
    ]
    assert called(replies["twice"]) == [
        {"name": "get_weather", "arguments": {"city": "Paris"}},
        {"name": "get_weather", "arguments": {"city": "Rome"}},
    ]


def test_it_invents_no_capital(replies: dict[str, str]) -> None:
    """A country that does not exist is not known; a small one that does is."""
    assert replies["no country"] == "I do not know a country named Zubrovia."
    assert replies["country"] == "The capital of Slovenia is Ljubljana."


@pytest.mark.parametrize("name", ["letters", "letters thinking"])
def test_it_counts_letters(replies: dict[str, str], name: str) -> None:
    """The question that everybody asks, with thinking and without."""
    assert "appears 3 times in strawberry" in replies[name]


def test_it_follows_a_conversation(replies: dict[str, str]) -> None:
    """The question stays when the country changes, and the first question is remembered."""
    assert replies["follow-up"] == "People in Japan speak Japanese."
    assert "What is the capital of France?" in replies["first"]


def test_it_greets_in_three_languages(replies: dict[str, str]) -> None:
    """A greeting is returned in its language."""
    assert replies["German"].startswith("Guten Morgen!")
    assert replies["French"].startswith("Bonjour !")
    assert replies["English"].startswith("Hello!")


SHARES: dict[Skill, float] = {
    nested_facts: 0.9, nested_extraction: 0.9, parallel_calls: 0.9, invented_country: 0.9, letters: 0.85,
    several_turns: 0.85, greeting: 0.7, capital: 0.9,
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(loaded: tuple[Any, dict[str, Any]], tokenizer: Any) -> dict[str, list[Answer]]:
    """Twenty held-out items of each skill, in as few batches as there are lengths."""
    items = [(skill, item) for skill in SHARES for item in held_out_samples(skill, 20, seed=12)]
    found: dict[str, list[Answer]] = {}
    for (skill, _), got in zip(items, answer(loaded[0], tokenizer, [item for _, item in items]), strict=True):
        found.setdefault(skill.__name__, []).append(got)
    return found


@pytest.mark.parametrize("skill", SHARES, ids=lambda skill: skill.__name__)
def test_it_generalises(answers: dict[str, list[Answer]], skill: Skill) -> None:
    """Of the held-out items of a skill nearly all are answered right."""
    found = answers[skill.__name__]
    assert sum(item.right for item in found) >= SHARES[skill] * len(found)
