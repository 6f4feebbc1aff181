"""Sums, differences, products, quotients and powers, with the column work that a small model can carry out."""

from __future__ import annotations

from random import Random
from typing import Final

from demo_training.corpus.sample import Sample, joined, key_of, pick

_PLACES: Final = ("ones", "tens", "hundreds", "thousands", "ten thousands", "hundred thousands")
_ASK: Final = (
    "What is {e}?",
    "{e}",
    "{e} =",
    "{e} = ?",
    "Calculate {e}.",
    "Compute {e}.",
    "How much is {e}?",
    "What's {e}?",
    "Please work out {e}.",
    "What does {e} equal?",
    "what is {e}",
    "Solve {e}.",
    "Can you tell me what {e} is?",
)
_NAMES: Final = ("Ana", "Ben", "Tom", "Mia", "Sam", "Lena", "Omar", "Ivy", "Max", "Zoe")
_THINGS: Final = ("apples", "books", "coins", "pencils", "stickers", "cards", "marbles", "shells", "cups", "stamps")
_POWER_ASK: Final = (
    "What is {b}^{e}?",
    "{b}^{e}",
    "{b}^{e} =",
    "What is {b} to the power of {e}?",
    "What is {b} to the power {e}?",
    "Calculate {b}^{e}.",
    "Compute {b} ** {e}.",
    "What is {b}**{e}?",
    "How much is {b}^{e}?",
    "What's {b}^{e}?",
    "Raise {b} to the power of {e}.",
    "What does {b}^{e} equal?",
    "What is the value of {b}^{e}?",
    "what is {b}^{e}",
)


def add_columns(a: int, b: int) -> str:
    """Adds from the ones upward, one line a column, and reads the digits back at the end."""
    width = max(len(str(a)), len(str(b)))
    left, right = str(a).zfill(width), str(b).zfill(width)
    lines, carry, digits = [f"{left} + {right}"], 0, ""
    for place in range(width):
        x, y = int(left[-1 - place]), int(right[-1 - place])
        total = x + y + carry
        terms = f"{x} + {y} + {carry}" if carry else f"{x} + {y}"
        lines.append(f"{_PLACES[place]}: {terms} = {total}, write {total % 10}, carry {total // 10}")
        digits, carry = str(total % 10) + digits, total // 10
        lines[-1] += f" -> {digits}"
    if carry:
        lines.append(f"carry {carry} -> {carry}{digits}")
    return "\n".join(lines)


def subtract_columns(a: int, b: int) -> str:
    """Subtracts a smaller `b` from `a` from the ones upward, borrowing where needed."""
    width = len(str(a))
    left, right = str(a).zfill(width), str(b).zfill(width)
    lines, borrow, digits = [f"{left} - {right}"], 0, ""
    for place in range(width):
        x, y = int(left[-1 - place]), int(right[-1 - place]) + borrow
        note = f"{x} - {y}" if x >= y else f"1{x} - {y}"
        value = (x - y) % 10
        digits = str(value) + digits
        borrow = int(x < y)
        lines.append(f"{_PLACES[place]}: {note} = {value}, borrow {borrow} -> {digits}")
    return "\n".join(lines)


def multiply_columns(a: int, b: int) -> str:
    """Multiplies `a` by each digit of `b`, then adds the parts."""
    parts, lines = [], []
    for place, digit in enumerate(reversed(str(b))):
        if digit != "0":
            part = int(digit) * 10**place
            parts.append(a * part)
            lines.append(_times_digit(a, int(digit)))
            if place:
                lines.append(f"{a} * {part} = {a * part}")
    if not parts:
        return f"{a} * 0 = 0"
    total = parts[0]
    for part in parts[1:]:
        lines.append(add_columns(part, total))
        total += part
    return "\n".join(lines)


def _times_digit(a: int, digit: int) -> str:
    """Multiplies `a` by one digit, column by column."""
    if a < 13:
        return f"{a} * {digit} = {a * digit}"
    lines, carry, digits = [f"{a} * {digit}"], 0, ""
    for place, figure in enumerate(reversed(str(a))):
        value = int(figure) * digit
        total = value + carry
        step = f"{figure} * {digit} = {value}" + (f", + {carry} = {total}" if carry else "")
        digits, carry = str(total % 10) + digits, total // 10
        lines.append(f"{_PLACES[place]}: {step}, write {total % 10}, carry {carry} -> {digits}")
    if carry:
        lines.append(f"carry {carry} -> {carry}{digits}")
    return "\n".join(lines)


def _operand(rng: Random, most: int) -> int:
    """Draws a number whose count of digits is even up to `most` digits."""
    digits = rng.randint(1, most)
    return rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)


def _wrap(rng: Random, skill: str, expression: str, words: str, result: int, thought: str, key: str) -> Sample:
    """Asks for an expression in a random wording; `words` is the expression read aloud."""
    shown = expression
    if rng.random() < 0.2:
        shown = words
    elif rng.random() < 0.25:
        shown = expression.replace(" ", "")
    return Sample(
        skill,
        pick(rng, _ASK).format(e=shown),
        f"{expression} = {result}.",
        thought,
        keys=(key,),
        expect=(f"= {result}.",),
        plain=rng.random() < 0.7,
    )


def addition(rng: Random) -> Sample:
    """Sums of numbers of up to three digits, up to five when the columns are written out."""
    think = rng.random() < 0.4
    most = 5 if think else 3
    a, b = _operand(rng, most), _operand(rng, most)
    key = key_of("add", *sorted((a, b))) if max(a, b) > 9 else ""
    sample = _wrap(rng, "sums", f"{a} + {b}", f"{a} plus {b}", a + b, add_columns(a, b), key)
    sample.think = think
    if rng.random() < 0.1:
        sample.ask = pick(rng, (f"Add {a} and {b}.", f"What is the sum of {a} and {b}?", f"Add {b} to {a}."))
    return sample


def subtraction(rng: Random) -> Sample:
    """Differences of numbers of up to three digits, up to five with the columns written out."""
    think = rng.random() < 0.4
    most = 5 if think else 3
    a, b = _operand(rng, most), _operand(rng, most)
    if a < b and rng.random() < 0.6:
        a, b = b, a
    if a < b:
        thought = f"{b} is larger than {a}, so the result is negative.\n{subtract_columns(b, a)}"
    else:
        thought = subtract_columns(a, b)
    key = key_of("subtract", a, b) if max(a, b) > 9 else ""
    sample = _wrap(rng, "differences", f"{a} - {b}", f"{a} minus {b}", a - b, thought, key)
    sample.think = think
    if rng.random() < 0.1:
        sample.ask = pick(rng, (f"Subtract {b} from {a}.", f"Take {b} away from {a}."))
    return sample


def multiplication(rng: Random) -> Sample:
    """Products: the tables up to 12, two digits by one, and two by two with the columns written out."""
    think = rng.random() < 0.45
    if rng.random() < 0.5:
        a, b = rng.randint(0, 12), rng.randint(0, 12)
        key = ""
    elif rng.random() < 0.5:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        key = key_of("multiply", *sorted((a, b)))
    else:
        a, b = rng.randint(10, 99), rng.randint(2, 9)
        if rng.random() < 0.3:
            a, b = b, a
        key = key_of("multiply", *sorted((a, b)))
    big, small = (a, b) if a >= b else (b, a)
    thought = multiply_columns(big, small)
    sample = _wrap(rng, "products", f"{a} * {b}", f"{a} times {b}", a * b, thought, key)
    sample.think = think
    if not think:
        sample.answer = f"{a} * {b}{_parts(a, b)} = {a * b}."
    if rng.random() < 0.15:
        sign = pick(rng, ("x", "×"))
        sample.ask = pick(rng, _ASK).format(e=f"{a} {sign} {b}")
    elif rng.random() < 0.1:
        sample.ask = pick(rng, (f"Multiply {a} by {b}.", f"What is the product of {a} and {b}?"))
    return sample


def _parts(a: int, b: int) -> str:
    """Splits a product that is too large to know by heart into parts, as ' = 320 + 16' for 84 * 4."""
    if max(a, b) < 13:
        return ""
    terms = [x * y for x in _split(a) for y in _split(b)]
    text = " = " + " + ".join(str(term) for term in terms)
    while len(terms) > 2:
        terms = [sum(terms[i : i + 2]) for i in range(0, len(terms), 2)]
        text += " = " + " + ".join(str(term) for term in terms)
    return text


def _split(value: int) -> list[int]:
    """Splits 84 into 80 and 4; a part that is zero is left out."""
    return [part for part in (value - value % 10, value % 10) if part]


def extremes(rng: Random) -> Sample:
    """The largest or the smallest of three to five whole numbers, or all of them in order."""
    top = pick(rng, (9, 20, 100, 999))
    values = rng.sample(range(top + 1), rng.randint(3, 5))
    shown = joined([str(value) for value in values])
    most = rng.random() < 0.5
    key = (key_of("extremes", *values),)
    ordered = sorted(values)
    in_order = ", ".join(str(value) for value in ordered)
    thought = f"In order, the numbers are {in_order}."
    if rng.random() < 0.35:
        ask = pick(
            rng, ("Sort these numbers: {v}", "Sort {v}.", "Sort the numbers {v} from small to large.", "Order {v}.")
        )
        listed = ", ".join(str(value) for value in values)
        return Sample(
            "extremes and sorting", ask.format(v=listed), in_order, thought, keys=key, expect=(in_order,), plain=True
        )
    word = pick(rng, ("largest", "biggest", "greatest", "highest") if most else ("smallest", "lowest", "least"))
    ask = pick(
        rng,
        ("What is the {w} of {v}?", "Which is the {w} of {v}?", "Which number is the {w}: {v}?", "Find the {w} of {v}.",
         "Which is the {w}, {v}?"),
    )  # fmt: skip
    answer = f"{ordered[-1] if most else ordered[0]} is the {word} of {shown}."
    return Sample(
        "extremes and sorting",
        ask.format(v=shown, w=word),
        answer,
        thought,
        keys=key,
        expect=(answer,),
        plain=rng.random() < 0.7,
    )


def division(rng: Random) -> Sample:
    """Exact quotients within the tables up to 12."""
    b, q = rng.randint(1, 12), rng.randint(0, 12)
    a = b * q
    thought = f"{b} * {q} = {a}, so {a} / {b} = {q}."
    key = key_of("divide", a, b) if rng.random() < 0.5 else ""
    return _wrap(rng, "quotients", f"{a} / {b}", f"{a} divided by {b}", q, thought, key)


def power(rng: Random) -> Sample:
    """Small powers: of two up to 16, of three to twelve while small, squares, cubes, and powers of ten."""
    base = pick(rng, (2, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, rng.randint(13, 25)))
    top = {2: 16, 3: 8, 4: 7, 5: 6, 6: 5, 7: 4, 8: 4, 9: 4, 10: 9, 11: 3, 12: 3}.get(base, 2)
    exponent = rng.randint(0, top)
    ask = pick(rng, _POWER_ASK)
    if exponent in (2, 3) and rng.random() < 0.25:
        ask = pick(rng, ("What is {b} squared?", "{b} squared?")) if exponent == 2 else "What is {b} cubed?"
    lines = [f"{base}^0 = 1"] if exponent == 0 else [f"{base}^1 = {base}"]
    for e in range(2, exponent + 1):
        lines.append(f"{base}^{e} = {base ** (e - 1)} * {base} = {base**e}")
    return Sample(
        "powers",
        ask.format(b=base, e=exponent),
        f"{base}^{exponent} = {base**exponent}.",
        "\n".join(lines),
        keys=(key_of("power", base, exponent, ask),),
        expect=(f"= {base**exponent}.",),
        plain=rng.random() < 0.8,
    )


def word_problem(rng: Random) -> Sample:
    """One-step problems about people and things."""
    name, thing = pick(rng, _NAMES), pick(rng, _THINGS)
    a, b = rng.randint(2, 50), rng.randint(2, 20)
    kind = rng.randrange(4)
    if kind == 0:
        story, e, r = f"{name} has {a} {thing} and gets {b} more.", f"{a} + {b}", a + b
    elif kind == 1:
        a = a + b
        story, e, r = f"{name} has {a} {thing} and gives away {b}.", f"{a} - {b}", a - b
    elif kind == 2:
        a, b = rng.randint(2, 12), rng.randint(2, 12)
        story, e, r = f"{name} has {a} boxes with {b} {thing} each.", f"{a} * {b}", a * b
    else:
        b = rng.randint(2, 9)
        a = b * rng.randint(2, 9)
        story, e, r = f"{name} shares {a} {thing} among {b} friends.", f"{a} / {b}", a // b
    if kind == 3:
        question, answer = f"How many {thing} does each friend get?", f"Each friend gets {r} {thing}."
    else:
        question = f"How many {thing} does {name} have {'in all' if kind == 2 else 'now'}?"
        answer = f"{name} has {r} {thing}."
    return Sample(
        "word problems",
        f"{story} {question}",
        f"{e} = {r}. {answer}",
        f"The numbers are {a} and {b}. I need {e} = {r}.",
        keys=(key_of("word", kind, a, b, thing),),
        expect=(f"= {r}.",),
        plain=True,
    )


def counting(rng: Random) -> Sample:
    """Counting up, down and in steps."""
    low = rng.randint(2, 30) if rng.random() < 0.35 else 1
    high = low + rng.randint(2, 19)
    if rng.random() < 0.08:
        high = low + rng.randint(10, 80)
    kind = rng.random()
    if kind < 0.6:
        forms: tuple[str, ...] = (
            "Count from {a} to {b}.",
            "Count from {a} to {b}",
            "Count up from {a} to {b}.",
            "List the numbers from {a} to {b}.",
        )
        if low == 1:
            forms += (
                "Count to {b}.",
                "Count to {b}",
                "Count up to {b}.",
                "Can you count to {b}?",
                "Print the numbers 1 to {b}.",
            )
        values = list(range(low, high + 1))
    elif kind < 0.75:
        forms = ("Count down from {b} to {a}.", "Count backward from {b} to {a}.", "Count from {b} down to {a}.")
        values = list(range(high, low - 1, -1))
    else:
        low, high = rng.randint(2, 10), rng.randint(3, 9)
        forms = ("List the first {b} multiples of {a}.", "Give me the first {b} multiples of {a}.")
        values = [low * i for i in range(1, high + 1)]
    ask, answer = pick(rng, forms).format(a=low, b=high), ", ".join(str(value) for value in values)
    key = key_of("count", int(kind * 10) > 5, low, high)
    thought = f"I start with {values[0]} and stop at {values[-1]}."
    return Sample("counting", ask, answer, thought, keys=(key,), expect=(answer,))
