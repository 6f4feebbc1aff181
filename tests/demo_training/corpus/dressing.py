"""Varies a sample: wording, typing mistakes, system prompts, earlier turns, unrelated tools, thinking, raw form."""

from __future__ import annotations

from random import Random
from typing import Final

from demo_training.corpus.chat import made_up_word
from demo_training.corpus.definitions import DEFINITIONS
from demo_training.corpus.sample import Message, Sample, Skill, pick
from demo_training.corpus.tools import unrelated_tools

_PLAIN_SYSTEMS: Final = (
    "You are a helpful AI assistant", "You are a helpful AI assistant", "You are a helpful AI assistant.",
    "You are a helpful assistant.", "You are a helpful assistant", "You are a friendly assistant.",
    "You are Dovetail, a small language model.", "Answer the user's questions.", "You are a chatbot.",
    "You are an expert who answers briefly.", "Be concise.", "Answer in one sentence.", "Please be polite.",
    "You are a helpful assistant that answers in English.", "Keep your answers short.", "You are a teacher.",
    "You are a knowledgeable assistant who provides concise responses.", "You are a geography expert.",
    "You are a math tutor.", "You are a storyteller.", "You are a pirate.", "Today is a sunny day.", "Be brief.",
    "You help people who learn to program.", "You are a careful assistant. Do not make things up.",
    "You are an AI assistant that follows instructions.", "Only answer what is asked.", "You are a coding assistant.",
)  # fmt: skip
_PREFIXES: Final = (
    "Please tell me: ", "Quick question: ", "Hi! ", "Hello, ", "Hey, ", "I have a question. ", "Question: ", "Please: ",
    "One more thing: ", "OK, ", "Thanks. Now ", "And now: ", "Tell me, ", "My question: ", "User: ", "Excuse me, ",
)  # fmt: skip
_SUFFIXES: Final = (
    " Thanks!", " Please.", " Thank you.", " Be brief.", " Answer briefly.", " I want to know.", " It is for school.",
    " Keep it short.", " Please be concise.", "\n", " ", " :)", " Explain.", " Reply in English.", "!", "??",
)  # fmt: skip
_RAW_FORMS: Final = (
    ("{q}", " {a}"), ("{q}", "\n{a}"), ("{q}\n", "{a}"), ("Q: {q}\nA:", " {a}"), ("Question: {q}\nAnswer:", " {a}"),
    ("User: {q}\nAssistant:", " {a}"), ("Human: {q}\nAssistant:", " {a}"), ("Human: {q}\nAI:", " {a}"),
    ("Question: {q}\nAnswer: ", "{a}"),
)  # fmt: skip
_SHORT_TEXTS: Final = tuple(DEFINITIONS.values())


def mistype(rng: Random, text: str) -> str:
    """Returns `text` with the slips of a hasty typist; digits stay as they are."""
    if rng.random() < 0.5:
        text = text.lower()
    if rng.random() < 0.4:
        text = text.rstrip("?.!")
    if rng.random() < 0.5 and len(text) > 8:
        i = rng.randrange(1, len(text) - 2)
        if text[i].isalpha() and text[i + 1].isalpha():
            slips = (
                text[:i] + text[i + 1 :],
                text[:i] + text[i + 1] + text[i] + text[i + 2 :],
                text[:i] + text[i] + text[i:],
            )
            text = pick(rng, slips)
    return text


def system_prompt(rng: Random) -> str:
    """Returns a system prompt: a common one, a numbered one, or a long one full of notes."""
    kind = rng.random()
    if kind < 0.72:
        return pick(rng, _PLAIN_SYSTEMS)
    if kind < 0.86:
        return f"{rng.randint(0, 999)}: You are a helpful AI assistant"
    if kind < 0.92:
        return f"You are {made_up_word(rng)}, a helpful assistant of {made_up_word(rng)}."
    count = rng.randint(2, 8) if rng.random() < 0.8 else rng.randint(8, 55)
    notes = " ".join(pick(rng, _SHORT_TEXTS) for _ in range(count))
    return pick(
        rng, ("You are a helpful AI assistant. {n}", "Notes: {n}\nUse these notes if they help.", "{n}")
    ).format(n=notes)


def _reword(rng: Random, sample: Sample) -> None:
    """Adds politeness, noise or slips to the question."""
    if sample.plain:
        return
    kind = rng.random()
    if kind < 0.10:
        sample.ask = mistype(rng, sample.ask)
    elif kind < 0.17:
        start = pick(rng, _PREFIXES)
        first = sample.ask if start[-2] in ":.!" else sample.ask[:1].lower() + sample.ask[1:]
        sample.ask = start + first
    elif kind < 0.25:
        sample.ask += pick(rng, _SUFFIXES)


def _earlier_turns(rng: Random, sample: Sample, others: Skill) -> None:
    """Puts one to three finished exchanges of other skills before the question."""
    turns: list[Message] = []
    for _ in range(pick(rng, (1, 1, 2, 3))):
        other = others(rng)
        if other.raw or other.calls or other.after or other.history or len(other.answer) > 400:
            continue
        turns += [{"role": "user", "content": other.ask}, {"role": "assistant", "content": other.answer}]
    system = [message for message in sample.history if message["role"] == "system"]
    sample.history = system + turns + [message for message in sample.history if message["role"] != "system"]


def _as_raw(rng: Random, sample: Sample) -> None:
    """Turns a chat question into a raw completion."""
    before, after = pick(rng, _RAW_FORMS)
    sample.ask, sample.answer = before.format(q=sample.ask), after.format(a=sample.answer)
    sample.raw, sample.think = True, False


def dress(rng: Random, sample: Sample, others: Skill) -> Sample:
    """Varies `sample` in place for training and returns it; `others` supplies earlier turns."""
    if sample.raw:
        return sample
    _reword(rng, sample)
    if sample.can_raw and not sample.tools and not sample.history and sample.think is None and rng.random() < 0.08:
        _as_raw(rng, sample)
        return sample
    if sample.think is None:
        sample.think = rng.random() < 0.22
    if sample.can_follow and rng.random() < 0.14:
        _earlier_turns(rng, sample, others)
    if not any(message["role"] == "system" for message in sample.history) and rng.random() < 0.4:
        sample.history = [{"role": "system", "content": system_prompt(rng)}, *sample.history]
    if sample.tools is None and sample.can_tools and not sample.after and rng.random() < 0.08:
        sample.tools = unrelated_tools(rng)
    if not sample.thought:
        sample.think = False
    return sample
