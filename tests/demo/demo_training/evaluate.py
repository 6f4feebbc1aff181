"""Measures the accuracy on held-out samples, skill by skill, through `transformers`.

Run it as `python -m demo_training.evaluate --model DIR`.
"""

from __future__ import annotations

import argparse
import json
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
        """The answer without its reasoning."""
        return self.text.split("</think>")[-1].strip()

    @property
    def right(self) -> bool:
        """Whether the answer passes the sample's rule, and reasoning is there exactly if it was asked for."""
        if ("<think>" in self.text) != bool(self.sample.think):
            return False
        if self.sample.check is not None:
            return self.sample.check(self.visible)
        return all(text.strip() in self.visible for text in self.sample.expect)


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, samples: list[Sample], temperature: float = 0.0) -> list[Answer]:
    """Answers `samples` in batches of similar length, greedily or at a temperature."""
    rendered = [render(sample) for sample in samples]
    budgets = [len(tokenizer(document.completion).input_ids) for document in rendered]
    lengths = [len(tokenizer(document.prompt).input_ids) for document in rendered]
    order = sorted(range(len(samples)), key=lambda i: (bisect(_BUDGETS, budgets[i]), lengths[i]))
    answers: dict[int, Answer] = {}
    settings: dict[str, Any] = {"do_sample": temperature > 0, "top_k": None}
    settings |= {"temperature": temperature, "top_p": 0.95} if temperature else {"temperature": None, "top_p": None}
    with tqdm(total=len(samples), desc="evaluation", mininterval=5) as bar:
        while order:
            size = 1
            while size < len(order) and size * (lengths[order[size]] + budgets[order[size]]) < _BATCH_TOKENS:
                if bisect(_BUDGETS, budgets[order[size]]) != bisect(_BUDGETS, budgets[order[0]]):
                    break
                size += 1
            batch, order = order[:size], order[size:]
            inputs = tokenizer([rendered[i].prompt for i in batch], return_tensors="pt", padding=True).to(model.device)
            longest = max(budgets[i] for i in batch)
            output = model.generate(**inputs, max_new_tokens=longest + longest // 4 + 24, **settings)
            texts = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
            for i, text in zip(batch, texts, strict=True):
                answers[i] = Answer(samples[i], rendered[i].prompt, text)
            bar.update(len(batch))
    return [answers[i] for i in range(len(samples))]


def load(path: Path) -> tuple[Any, Any]:
    """Loads the model and its tokenizer, on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    return model.to(device).eval(), tokenizer


def table_of(greedy: list[Answer], sampled: list[Answer]) -> str:
    """Returns a Markdown table of accuracies per skill and mode, in percent."""
    rows: dict[tuple[str, bool], list[list[bool]]] = defaultdict(lambda: [[], []])
    for column, answers in enumerate((greedy, sampled)):
        for item in answers:
            rows[item.sample.skill, bool(item.sample.think)][column].append(item.right)
    lines = ["| skill | thinking | held-out items | greedy | temperature 0.3 |", "| --- | --- | ---: | ---: | ---: |"]
    for (skill, think), columns in sorted(rows.items()):
        shares = [f"{100 * sum(column) / len(column):.1f}" if column else "" for column in columns]
        lines.append(f"| {skill} | {'on' if think else 'off'} | {len(columns[0])} | {shares[0]} | {shares[1]} |")
    return "\n".join(lines)


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


def evaluate_and_report(path: Path, per_skill: int, seed: int = 0, out: Path | None = None) -> None:
    """Evaluates the checkpoint in `path` and prints the table; writes it and the mistakes into `out` if given."""
    model, tokenizer = load(path)
    samples = [sample for skill in WEIGHTS for sample in held_out_samples(skill, per_skill, seed)]
    torch.manual_seed(seed)
    greedy = answer(model, tokenizer, samples)
    sampled = answer(model, tokenizer, samples, temperature=0.3)
    table = table_of(greedy, sampled)
    if out is not None:
        (out / "accuracy.md").write_text(table + "\n", encoding="utf-8")
        write_mistakes(greedy, out / "mistakes.jsonl")
    right = sum(item.right for item in greedy)
    print(table)
    print(f"{right} of {len(greedy)} held-out items are right ({100 * right / len(greedy):.1f} %)")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Evaluate the demo model on held-out samples.")
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--out", type=Path, help="a folder for the table and the mistakes")
    parser.add_argument("--per-skill", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    evaluate_and_report(options.model, options.per_skill, options.seed, options.out)


if __name__ == "__main__":
    main()
