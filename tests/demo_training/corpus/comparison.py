"""Which of two numbers is greater or smaller, with and without the digit-by-digit work."""

from __future__ import annotations

from decimal import Decimal
from random import Random
from typing import Final

from demo_training.corpus.sample import Sample, capitalised, key_of, pick

_MORE: Final = ("greater", "bigger", "larger", "higher")
_LESS: Final = ("smaller", "less", "lower")
_ASK: Final = (
    "{a} and {b}, which is {w}?",
    "Which is {w}, {a} or {b}?",
    "Which is {w}: {a} or {b}?",
    "Which number is {w}, {a} or {b}?",
    "Which one is {w}, {a} or {b}?",
    "{a} or {b}, which is {w}?",
    "{a} vs {b}, which is {w}?",
    "{a} vs {b}: which one is {w}?",
    "Which of {a} and {b} is {w}?",
    "Which is {w}: {a} and {b}?",
    "Which is {w}, {a} and {b}?",
    "Compare {a} and {b}. Which is {w}?",
    "What is {w}, {a} or {b}?",
    "Tell me which is {w}: {a} or {b}.",
    "Of the numbers {a} and {b}, which is {w}?",
    "Between {a} and {b}, which number is {w}?",
    "is {a} or {b} {w}?",
)
_ASK_IF: Final = ("Is {a} {w} than {b}?", "Is it true that {a} is {w} than {b}?", "{a} is {w} than {b}, right?")
_ASK_OPEN: Final = ("Compare {a} and {b}.", "{a} vs {b}", "{a} vs {b}?", "Compare the numbers {a} and {b}.")


def _fraction(rng: Random, digits: int) -> str:
    """Returns `digits` random digits."""
    return "".join(pick(rng, "0123456789") for _ in range(digits))


def _number(rng: Random, whole: int) -> str:
    """Returns a number with the given whole part and up to three decimals."""
    digits = pick(rng, (0, 1, 1, 1, 2, 2, 2, 3))
    return f"{whole}.{_fraction(rng, digits)}" if digits else str(whole)


def _pair(rng: Random) -> tuple[str, str]:
    """Returns two numbers; most share their whole part, so that the decimals decide."""
    whole = rng.randint(0, 20) if rng.random() < 0.7 else rng.randint(0, 999)
    kind = rng.random()
    if kind < 0.55:
        first = f"{whole}.{_fraction(rng, rng.randint(1, 3))}"
        return first, _number(rng, whole)
    if kind < 0.65:  # close relatives: 4.5 and 4.51, 3.07 and 3.70
        first = f"{whole}.{_fraction(rng, rng.randint(1, 2))}"
        return first, first + _fraction(rng, 1)
    if kind < 0.85:
        other = max(0, whole + pick(rng, (-1, 1, 2, -2, 10, -10, rng.randint(-50, 50))))
        return _number(rng, whole), _number(rng, other)
    top = pick(rng, (99, 999, 9999))
    return str(rng.randint(0, top)), str(rng.randint(0, top))


def thought_of(first: str, second: str) -> str:
    """Compares two decimals step by step: whole parts, then padded decimals one digit at a time."""
    whole_a, _, part_a = first.partition(".")
    whole_b, _, part_b = second.partition(".")
    lines = [f"Whole parts: {whole_a} and {whole_b}."]
    if whole_a != whole_b:
        if len(whole_a) != len(whole_b):
            lines.append(f"They have {len(whole_a)} and {len(whole_b)} digits.")
        else:
            lines += _digit_lines(whole_a, whole_b)
    else:
        width = max(len(part_a), len(part_b))
        if width:
            part_a, part_b = part_a.ljust(width, "0"), part_b.ljust(width, "0")
            lines.append(f"They are equal. Decimals: {part_a} and {part_b}.")
            lines += _digit_lines(part_a, part_b)
    lines.append(_verdict(first, second) + ".")
    return "\n".join(lines)


def _digit_lines(left: str, right: str) -> list[str]:
    """Compares digits of equally long texts up to the first difference."""
    lines = []
    for a, b in zip(left, right, strict=True):
        sign = "=" if a == b else (">" if a > b else "<")
        lines.append(f"{a} {sign} {b}")
        if a != b:
            break
    return lines


def _verdict(first: str, second: str) -> str:
    """Says how two numbers relate, as '9.11 < 9.8'."""
    a, b = Decimal(first), Decimal(second)
    return f"{first} {'=' if a == b else ('>' if a > b else '<')} {second}"


def compare(rng: Random) -> Sample:
    """'Which is greater, A or B?' for decimals and whole numbers, both orders, both directions."""
    a, b = _pair(rng)
    if rng.random() < 0.5:
        a, b = b, a
    return compare_pair(rng, a, b)


def compare_pair(rng: Random, a: str, b: str) -> Sample:
    """Builds the comparison of `a` with `b` in a random wording."""
    more = rng.random() < 0.65
    word = pick(rng, _MORE if more else _LESS)
    keys = (key_of("compare", *sorted((a, b))),)
    high, low = (a, b) if Decimal(a) > Decimal(b) else (b, a)
    kind = rng.random()
    if Decimal(a) == Decimal(b):
        ask = pick(rng, _ASK).format(a=a, b=b, w=word)
        answer, expect = f"{a} and {b} are equal.", ["equal"]
    elif kind < 0.82:
        ask = capitalised(pick(rng, _ASK).format(a=a, b=b, w=word))
        best, rest = (high, low) if more else (low, high)
        answer, expect = f"{best} is {word} than {rest}.", [f"{best} is"]
    elif kind < 0.92:
        ask = pick(rng, _ASK_IF).format(a=a, b=b, w=word)
        true = (a == high) == more
        best, rest = (high, low) if more else (low, high)
        answer = f"{'Yes' if true else 'No'}, {best} is {word} than {rest}."
        expect = [answer[:3], f"{best} is"]
    else:
        ask = pick(rng, _ASK_OPEN).format(a=a, b=b)
        answer, expect = f"{high} is greater than {low}.", [f"{high} is"]
    decimals = "." in a or "." in b
    name = "comparison of decimals" if decimals else "comparison of whole numbers"
    return Sample(name, ask, answer, thought_of(a, b), keys=keys, expect=tuple(expect), plain=rng.random() < 0.7)
