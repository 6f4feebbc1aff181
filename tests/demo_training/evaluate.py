"""Measures the accuracy on held-out samples, skill by skill, through `transformers`.

Run it as `python -m demo_training.evaluate --model DIR`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from bisect import bisect
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_training.corpus import WEIGHTS, Sample, held_out_samples, render
from dovetail.demo import MODEL_DIR

_BATCH_TOKENS: Final = 600_000
_BUDGETS: Final = (48, 128, 320)


@dataclass
class Answer:
    """A sample with the prompt that was sent and the text that came back."""

    sample: Sample
    prompt: str
    text: str

    @property
    def visible(self) -> str:
        """The answer without its reasoning, with the start that was given."""
        return self.sample.given + self.text.split("</think>")[-1].strip()

    @property
    def right(self) -> bool:
        """Whether the answer passes the sample's rule, and reasoning is there exactly if it was asked for."""
        if ("<think>" in self.text) != bool(self.sample.think):
            return False
        if self.sample.check is not None:
            return self.sample.check(self.visible)
        return all(text.strip() in self.visible for text in self.sample.expect)


@torch.inference_mode()
def answer(
    model: Any, tokenizer: Any, samples: list[Sample], temperature: float = 0.0, until: float = math.inf
) -> list[Answer]:
    """Answers `samples` in batches of similar length, greedily or at a temperature.

    Args:
        model: A causal model of `transformers`.
        tokenizer: Its tokenizer, padding on the left.
        samples: What to ask.
        temperature: 0 for the likeliest token.
        until: When to stop, by `time.monotonic`; samples whose answer has not ended then have none.
    """
    rendered = [render(sample) for sample in samples]
    budgets = [len(tokenizer(document.completion).input_ids) for document in rendered]
    lengths = [len(tokenizer(document.prompt).input_ids) for document in rendered]
    order = sorted(range(len(samples)), key=lambda i: (bisect(_BUDGETS, budgets[i]), lengths[i]))
    answers: dict[int, Answer] = {}
    settings: dict[str, Any] = {"do_sample": temperature > 0, "top_k": None}
    settings |= {"temperature": temperature, "top_p": 0.95} if temperature else {"temperature": None, "top_p": None}
    with tqdm(total=len(samples), desc="evaluation", mininterval=5) as bar:
        while order and time.monotonic() < until:
            size = 1
            while size < len(order) and size * (lengths[order[size]] + budgets[order[size]]) < _BATCH_TOKENS:
                if bisect(_BUDGETS, budgets[order[size]]) != bisect(_BUDGETS, budgets[order[0]]):
                    break
                size += 1
            batch, order = order[:size], order[size:]
            inputs = tokenizer([rendered[i].prompt for i in batch], return_tensors="pt", padding=True).to(model.device)
            longest = max(budgets[i] for i in batch)
            left = None if until == math.inf else until - time.monotonic()
            output = model.generate(**inputs, max_new_tokens=longest + longest // 4 + 24, max_time=left, **settings)
            written = output[:, inputs.input_ids.shape[1] :]
            cut, ends = time.monotonic() >= until, set(model.generation_config.eos_token_id)
            for i, ids in zip(batch, written.tolist(), strict=True):
                if not cut or not ends.isdisjoint(ids):
                    answers[i] = Answer(samples[i], rendered[i].prompt, tokenizer.decode(ids, skip_special_tokens=True))
            bar.update(len(batch))
    return [answers[i] for i in sorted(answers)]


def load(path: Path) -> tuple[Any, Any]:
    """Loads the model and its tokenizer, on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    return model.to(device).eval(), tokenizer


@dataclass
class Row:
    """The accuracy in one skill and mode; `greedy` and `sampled` hold the count of right answers and of all."""

    skill: str
    thinking: bool
    greedy: tuple[int, int]
    sampled: tuple[int, int]


def rows_of(greedy: list[Answer], sampled: list[Answer]) -> list[Row]:
    """Counts right answers per skill and mode."""
    counts: dict[tuple[str, bool], list[list[bool]]] = defaultdict(lambda: [[], []])
    for column, answers in enumerate((greedy, sampled)):
        for item in answers:
            counts[item.sample.skill, bool(item.sample.think)][column].append(item.right)
    return [
        Row(skill, think, *((sum(column), len(column)) for column in columns))
        for (skill, think), columns in sorted(counts.items())
    ]


def table_of(rows: list[Row]) -> str:
    """Returns a Markdown table of accuracies per skill and mode, in percent."""
    is_sampled = any(row.sampled[1] for row in rows)
    names = ["skill", "thinking", "held-out items", "greedy", *(["temperature 0.3"] if is_sampled else [])]
    lines = [f"| {' | '.join(names)} |", f"| --- | --- |{' ---: |' * (len(names) - 2)}"]
    for row in rows:
        ways = (row.greedy, row.sampled) if is_sampled else (row.greedy,)
        shares = [f"{100 * right / count:.1f}" if count else "" for right, count in ways]
        fields = [row.skill, "on" if row.thinking else "off", str(row.greedy[1]), *shares]
        lines.append(f"| {' | '.join(fields)} |")
    return "\n".join(lines)


def write_json(rows: list[Row], asked: int, path: Path) -> None:
    """Writes the counts as JSON: `asked` samples, sums for both ways of decoding, and a row per skill and mode."""

    def counts(pair: tuple[int, int]) -> dict[str, int]:
        return {"right": pair[0], "items": pair[1]}

    sums = {
        way: counts((sum(getattr(row, way)[0] for row in rows), sum(getattr(row, way)[1] for row in rows)))
        for way in ("greedy", "sampled")
    }
    listed = [
        {"skill": row.skill, "thinking": row.thinking, "greedy": counts(row.greedy), "sampled": counts(row.sampled)}
        for row in rows
    ]
    path.write_text(json.dumps({"asked": asked, **sums, "rows": listed}, indent=1) + "\n", encoding="utf-8")


def write_mistakes(answers: list[Answer], path: Path, most: int = 15) -> None:
    """Writes the first mistakes of each skill as JSON lines."""
    counts: dict[str, int] = defaultdict(int)
    with path.open("w", encoding="utf-8") as file:
        for item in answers:
            if not item.right and counts[item.sample.skill] < most:
                counts[item.sample.skill] += 1
                record = {
                    "skill": item.sample.skill,
                    "prompt": item.prompt[-300:],
                    "got": item.text,
                    "want": item.sample.answer,
                }
                file.write(json.dumps(record, ensure_ascii=False) + "\n")


def evaluate_and_report(
    path: Path,
    per_skill: int,
    seed: int = 0,
    out: Path | None = None,
    until: float = math.inf,
    as_json: Path | None = None,
    sample: bool = True,
) -> None:
    """Evaluates the checkpoint in `path` and prints the table.

    Args:
        path: The checkpoint folder.
        per_skill: How many held-out samples to draw of each skill.
        seed: Seeds the samples and the sampling.
        out: Gets the table, the mistakes and the counts, if given.
        until: When to stop, by `time.monotonic`; how many answers had not ended by then is said.
        as_json: Gets the counts as JSON, if given.
        sample: Also answer at temperature 0.3.
    """
    model, tokenizer = load(path)
    samples = [each for skill in WEIGHTS for each in held_out_samples(skill, per_skill, seed)]
    torch.manual_seed(seed)
    greedy = answer(model, tokenizer, samples, until=until)
    sampled = answer(model, tokenizer, samples, temperature=0.3, until=until) if sample else []
    rows = rows_of(greedy, sampled)
    if out is not None:
        (out / "accuracy.md").write_text(table_of(rows) + "\n", encoding="utf-8")
        write_mistakes(greedy, out / "mistakes.jsonl")
    for file in ([] if out is None else [out / "accuracy.json"]) + ([] if as_json is None else [as_json]):
        write_json(rows, len(samples), file)
    right = sum(item.right for item in greedy)
    print(table_of(rows))
    print(f"{right} of {len(greedy)} held-out items are right ({100 * right / max(1, len(greedy)):.1f} %)")
    for name, answers in (("greedy", greedy), *([("sampled", sampled)] if sample else [])):
        if len(answers) < len(samples):
            print(f"no time was left for {len(samples) - len(answers)} of {len(samples)} items, {name}")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Evaluate the demo model on held-out samples.")
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--out", type=Path, help="a folder for the table, the mistakes and the counts")
    parser.add_argument("--json", type=Path, help="a file for the counts as JSON")
    parser.add_argument("--per-skill", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    evaluate_and_report(options.model, options.per_skill, options.seed, options.out, as_json=options.json)


if __name__ == "__main__":
    main()
