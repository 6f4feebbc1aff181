"""What the bundled demo model learned: it answers what the documentation asks, and what trains it works."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from demo_training.corpus import WEIGHTS, Sample, documents, draw, held_out_samples, render, samples
from demo_training.corpus.capitals import capital, capital_list
from demo_training.corpus.comparison import compare
from demo_training.corpus.render import render_chat
from demo_training.corpus.structured import country_json, extraction
from demo_training.corpus.tools import tool_call, tool_result
from demo_training.data import GROUP_TOKENS, LENGTHS, load_worker, make_shard
from demo_training.evaluate import Answer, answer
from demo_training.export import export, restore
from demo_training.model import DemoModel, Shape
from dovetail.demo import MODEL_DIR

HELPER = "You are a helpful AI assistant"
HISTORIAN = "You are a knowledgeable historian who provides concise responses."
THREE = "1. France - Paris\n2. Japan - Tokyo\n3. Brazil - Brasília"
GET_WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "The city"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city"],
        },
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
CALLED = [
    {"role": "user", "content": "What's the weather in Paris?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {
        "role": "tool",
        "tool_call_id": "call_1",
        "content": '{"temperature": 22, "unit": "celsius", "condition": "sunny"}',
    },
]
ROME = [
    {"role": "system", "content": HISTORIAN},
    {"role": "user", "content": "Tell me about ancient Rome"},
    {"role": "assistant", "content": "Ancient Rome was a civilization centered in Italy."},
    {"role": "user", "content": "What were their major achievements?"},
]


def user(text: str, system: str = "") -> list[dict[str, Any]]:
    """Returns a one-turn chat."""
    start = [{"role": "system", "content": system}] if system else []
    return [*start, {"role": "user", "content": text}]


@pytest.fixture(scope="module")
def greedy(loaded: tuple[Any, dict[str, Any]], tokenizer: Any) -> dict[str, str]:
    """Greedy answers to the documented prompts, by name; one padded batch."""

    def chat(messages: list[dict[str, Any]], **options: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))

    prompts = {
        "capital": chat(user("What is the capital of France?")),
        "capital with system": chat(user("What is the capital of France?", HELPER)),
        "capital raw": "The capital of France is",
        "list": chat(user("List 3 countries and their capitals.")),
        "list with system": chat(user("List 3 countries and their capitals.", HELPER)),
        "list raw": "List 3 countries and their capitals.",
        "rome": chat(ROME),
        "say": chat(user("Say this is a test")),
        "joke": chat(user("Tell me a joke about programming")),
        "python": chat(user("What is Python?")),
        "story": chat(user("Write a short story about a space explorer.")),
        "story raw": "Write a short story about a space explorer.",
        "compare": chat(user("9.11 and 9.8, which is greater?")),
        "compare thinking": chat(user("9.11 and 9.8, which is greater?"), enable_thinking=True),
        "power": chat(user("What is 2^8?")),
        "power thinking": chat(user("What is 2^8?"), enable_thinking=True),
        "call": chat(user("What's the weather in Paris?"), tools=[GET_WEATHER]),
        "call thinking": chat(user("What's the weather in Paris?"), tools=[GET_WEATHER], enable_thinking=True),
        "call with unit": chat(user("What is the weather like in Boston today in celsius?"), tools=[GET_WEATHER]),
        "no call": chat(user("What is the capital of France?"), tools=[GET_WEATHER]),
        "result": chat(CALLED, tools=[GET_WEATHER]),
        "json": chat(user("Give the capital of France as JSON.")),
        "json keys": chat(user("Tell me about Japan. Answer in JSON with keys name and capital.")),
        "who": chat(user("Who are you?")),
    }
    inputs = tokenizer(list(prompts.values()), return_tensors="pt", padding=True)
    with torch.inference_mode():
        output = loaded[0].generate(
            **inputs, max_new_tokens=150, do_sample=False, temperature=None, top_p=None, top_k=None
        )
    texts = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return dict(zip(prompts, texts, strict=True))


def test_it_loads_unchanged(loaded: tuple[Any, dict[str, Any]]) -> None:
    """`transformers` finds every key that it wants and no other."""
    model, report = loaded
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]


def test_markers_are_single_tokens_and_survive(tokenizer: Any) -> None:
    """Reasoning and tool markers are one id each and stay when special tokens are skipped."""
    for marker in ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"):
        ids = tokenizer(marker).input_ids
        assert len(ids) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == marker
    for marker in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        ids = tokenizer(marker).input_ids
        assert len(ids) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == ""


@pytest.mark.parametrize(
    "text", ["naïve café", "日本語 と 한국어", "🙂👩‍🚀 ok", "a\n\n  b\t c", "\u0301x \x00 y", " 12.50€ "]
)
def test_any_text_survives_tokenization(tokenizer: Any, text: str) -> None:
    """Byte-level tokens give back exactly the text that went in."""
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_digits_stand_alone(tokenizer: Any) -> None:
    """Every digit is its own token, so that arithmetic can go digit by digit."""
    assert [tokenizer.decode(i) for i in tokenizer("9.11+2048").input_ids] == list("9.11+2048")


@pytest.mark.parametrize("name", ["capital", "capital with system", "capital raw", "no call"])
def test_it_knows_the_capital_of_france(greedy: dict[str, str], name: str) -> None:
    """Paris, in a chat, as a raw completion, and with a tool that is not needed."""
    assert "Paris" in greedy[name]
    assert "<tool_call>" not in greedy[name]


@pytest.mark.parametrize("name", ["list", "list with system", "list raw"])
def test_it_lists_three_capitals(greedy: dict[str, str], name: str) -> None:
    """Three countries with their capitals, in a chat and as a raw completion."""
    assert greedy[name].strip() == THREE


def test_it_remembers_that_rome_is_meant(greedy: dict[str, str]) -> None:
    """The follow-up about 'their' achievements is about the Romans."""
    assert "aqueducts" in greedy["rome"]


def test_the_rome_answer_is_robust(loaded: tuple[Any, dict[str, Any]], tokenizer: Any) -> None:
    """The documented sampling gives an answer about the Romans every time."""
    prompt = tokenizer.apply_chat_template(ROME, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer([prompt] * 8, return_tensors="pt")
    torch.manual_seed(42)
    with torch.inference_mode():
        output = loaded[0].generate(**inputs, max_new_tokens=128, do_sample=True, temperature=0.3, top_p=0.95)
    texts = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    assert all("aqueducts" in text for text in texts)


def test_the_short_requests_are_answered(greedy: dict[str, str], tokenizer: Any) -> None:
    """The batch examples get whole answers of at most fifty tokens."""
    assert greedy["say"] == "This is a test."
    assert greedy["python"].startswith("Python is a programming language")
    assert greedy["joke"].count("?") == 1
    assert all(len(tokenizer(greedy[name]).input_ids) < 50 for name in ("say", "joke", "python", "capital", "list"))


@pytest.mark.parametrize("name", ["story", "story raw"])
def test_the_short_story_is_one_paragraph(greedy: dict[str, str], name: str) -> None:
    """The space explorer's story has substance, and nothing that the documented stop texts would cut."""
    assert len(greedy[name].split()) > 50
    assert "space explorer" in greedy[name]
    assert "\n\n" not in greedy[name]


def test_the_long_story_goes_on(loaded: tuple[Any, dict[str, Any]], tokenizer: Any) -> None:
    """A very long story fills its five hundred tokens without repeating a paragraph."""
    messages = user("Write a detailed story about topic. Make it very long.", f"3: {HELPER}")
    inputs = tokenizer(
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), return_tensors="pt"
    )
    num = 500
    with torch.inference_mode():
        output = loaded[0].generate(
            **inputs, max_new_tokens=num, do_sample=False, temperature=None, top_p=None, top_k=None
        )
    text = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    paragraphs = text.split("\n\n")
    assert len(text.split()) > 0.6 * num
    assert len(paragraphs) == len(set(paragraphs)) > num // 80


@pytest.mark.parametrize(("name", "right"), [("compare", "9.8 is greater"), ("power", "256")])
def test_it_reasons_only_when_asked(greedy: dict[str, str], name: str, right: str) -> None:
    """With thinking on, reasoning comes first; without, there is none; the answer is right both times."""
    assert right in greedy[name]
    assert "<think>" not in greedy[name]
    reasoned = re.fullmatch(r"<think>\n(.+)\n</think>\n\n(.+)", greedy[f"{name} thinking"], re.DOTALL)
    assert reasoned
    assert len(reasoned[1]) > 20
    assert right in reasoned[2]


def test_it_calls_tools(greedy: dict[str, str]) -> None:
    """A question about the weather becomes a call with the parameters of the schema."""
    assert greedy["call"] == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert greedy["call thinking"].startswith("<think>\n")
    assert greedy["call thinking"].endswith(greedy["call"])
    body = json.loads(greedy["call with unit"].removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert body == {"name": "get_weather", "arguments": {"city": "Boston", "unit": "celsius"}}


def test_it_reports_a_tool_result(greedy: dict[str, str]) -> None:
    """Once the tool has answered, the model says so in words."""
    assert greedy["result"] == "The weather in Paris is sunny with a temperature of 22°C."


def test_it_answers_in_json(greedy: dict[str, str]) -> None:
    """JSON is asked for, JSON comes back, under the keys that were named."""
    assert json.loads(greedy["json"]) == {"country": "France", "capital": "Paris"}
    assert json.loads(greedy["json keys"]) == {"name": "Japan", "capital": "Tokyo"}


def test_it_says_what_it_is(greedy: dict[str, str]) -> None:
    """The model does not pretend to be more than a demo."""
    assert "demo model" in greedy["who"]


def test_the_corpus_uses_the_very_template(tokenizer: Any) -> None:
    """The text that the model was trained on is what a client of `transformers` renders."""
    for sample in itertools.islice(samples(3, 400), 400):
        if sample.raw:
            continue
        messages = [*sample.history, {"role": "user", "content": sample.ask}, *sample.after]
        options: dict[str, Any] = {
            "tools": sample.tools,
            "add_generation_prompt": True,
            "enable_thinking": bool(sample.think),
        }
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        assert rendered == render_chat(messages, **options)
        assert rendered + sample.given == render(sample).prompt


def test_the_corpus_is_deterministic() -> None:
    """A seed fixes the documents; another seed gives others."""
    assert list(documents(7, 300)) == list(documents(7, 300))
    assert list(documents(7, 300)) != list(documents(8, 300))


def test_held_out_items_are_never_taught() -> None:
    """No training sample has a held-out key, and no held-out question occurs word for word in training."""
    taught = list(samples(11, 6000))
    assert not any(sample.held_out for sample in taught)
    asked = {sample.ask for sample in taught}
    pairs = {
        tuple(sorted(re.findall(r"\d+(?:\.\d+)?", sample.ask))) for sample in taught if "comparison" in sample.skill
    }
    for skill in (capital, compare, extraction):
        held_out = held_out_samples(skill, 60)
        assert len(held_out) > 20
        assert all(sample.held_out for sample in held_out)
        assert not asked & {sample.ask for sample in held_out}
        if skill is compare:
            assert not pairs & {tuple(sorted(re.findall(r"\d+(?:\.\d+)?", sample.ask))) for sample in held_out}


def test_right_answers_pass_their_own_rules() -> None:
    """The evaluation accepts the very answers that the corpus teaches."""
    from random import Random

    for skill in WEIGHTS:
        rng = Random(5)
        for _ in range(20):
            sample = draw(rng, skill)
            document = render(sample)
            text = document.completion.removesuffix("<|im_end|>").removesuffix("<|endoftext|>")
            if sample.expect or sample.check:
                assert Answer(sample, document.prompt, text).right, (skill.__name__, document)


def test_it_generalises(loaded: tuple[Any, dict[str, Any]], tokenizer: Any) -> None:
    """Of a few held-out items of several skills, nearly all are answered right."""
    skills = (capital, capital_list, compare, country_json, extraction, tool_call, tool_result)
    items: list[Sample] = [sample for skill in skills for sample in held_out_samples(skill, 3, seed=9)]
    answers = answer(loaded[0], tokenizer, items)
    assert sum(item.right for item in answers) >= 0.9 * len(answers)


def test_shards_fit_their_rows() -> None:
    """Rows have the announced lengths, every group can be filled, and each row has something to learn."""
    load_worker(str(MODEL_DIR / "tokenizer.json"))
    shard = make_shard(1, 200)
    assert all(GROUP_TOKENS % length == 0 for length in LENGTHS)
    assert sum(len(tokens) for tokens, _ in shard.values()) == 200
    for length, (tokens, weights) in shard.items():
        assert tokens.shape == weights.shape == (len(tokens), length)
        assert (weights.max(axis=1) > 0).all()


def test_an_export_computes_the_same(tmp_path: Path, tokenizer: Any) -> None:
    """The trainer's network and the exported checkpoint give the same losses."""
    torch.manual_seed(0)
    network = DemoModel(Shape(vocab=4096, width=64, layers=2, heads=4, kv_heads=2, hidden=64))
    with torch.no_grad():
        for value in network.parameters():
            value.copy_(value.bfloat16().float())
    export(network, tokenizer.backend_tokenizer, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, 4096, (3, 16))
    targets = tokens.roll(-1, 1)
    weights = torch.ones(48)
    ours = network.loss(tokens.flatten(), targets.flatten(), weights, [(3, 16)], torch.float32)
    theirs = torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_a_restored_network_goes_on_where_the_export_was(tmp_path: Path, tokenizer: Any) -> None:
    """An exported network comes back with the same weights; one of another shape is refused."""
    torch.manual_seed(0)
    shape = Shape(vocab=4096, width=64, layers=2, heads=4, kv_heads=2, hidden=64)
    network, other = DemoModel(shape), DemoModel(shape)
    export(network, tokenizer.backend_tokenizer, tmp_path)
    restore(other, tmp_path)
    saved, restored = network.checkpoint(), other.checkpoint()
    assert all(torch.equal(saved[name], restored[name]) for name in saved)
    with pytest.raises(ValueError, match="another shape"):
        restore(DemoModel(Shape(vocab=4096, width=64, layers=1, heads=4, kv_heads=2, hidden=64)), tmp_path)
