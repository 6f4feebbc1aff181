"""Trains the demo model for a given time and writes a checkpoint folder with its held-out accuracy.

Run it as `python -m demo_training.train --out DIR --max-minutes 7`.
"""

from __future__ import annotations

import argparse
import math
import shutil
import time
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from demo_training.data import GROUP_TOKENS, Feed
from demo_training.export import export, restore
from demo_training.model import DemoModel, Shape
from demo_training.muon import Muon
from demo_training.tokenizer import save_tokenizer, train_tokenizer
from dovetail.demo import MODEL_DIR

WARMUP: Final = 0.02
DECAY_FROM: Final = 0.45


def rate_at(progress: float, peak: float) -> float:
    """Returns the learning rate at `progress` in [0, 1]: a short warm-up, a plateau, then a slope down to zero."""
    if progress < WARMUP:
        return peak * (progress + 1e-3) / (WARMUP + 1e-3)
    if progress < DECAY_FROM:
        return peak
    left = (1 - progress) / (1 - DECAY_FROM)
    return peak * max(0.0, left)


def prepare_tokenizer(out: Path, source: Path, retrain: bool, documents: int) -> Tokenizer:
    """Puts the tokenizer of the folder `source` into `out`, or a newly trained one, and returns it."""
    if retrain or not (source / "tokenizer.json").exists():
        save_tokenizer(train_tokenizer(documents, seed=1), out)
    elif out.resolve() != source.resolve():
        out.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copyfile(source / name, out / name)
    return Tokenizer.from_file(str(out / "tokenizer.json"))


def train(model: DemoModel, feed: Feed, options: argparse.Namespace) -> int:
    """Trains until the time is up; the learning rate follows the clock. Returns the number of steps."""
    device = next(model.parameters()).device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    muon = Muon(model.matrices())
    adam = torch.optim.AdamW(model.others(), lr=options.lr, betas=(0.9, 0.98), weight_decay=0.0)
    tokens, targets, weights, groups = feed.batch(options.groups, options.group_tokens)
    model.loss(tokens, targets, weights, groups, dtype).backward()  # type: ignore[no-untyped-call]
    model.zero_grad()  # that was only to compile, so that the clock starts after it
    limit, step, begin = options.max_minutes * 60, 0, time.monotonic()
    with tqdm(total=round(limit), unit="s", desc="training", mininterval=5) as bar:
        while (elapsed := time.monotonic() - begin) < limit and step < options.max_steps:
            rate = rate_at(elapsed / limit, options.lr)
            tokens, targets, weights, groups = feed.batch(options.groups, options.group_tokens)
            loss = model.loss(tokens, targets, weights, groups, dtype)
            loss.backward()  # type: ignore[no-untyped-call]
            muon.step(rate)
            adam.param_groups[0]["lr"] = rate
            adam.step()
            adam.zero_grad()
            step += 1
            if step % 50 == 0 or step == 1:
                value = loss.item()
                if not math.isfinite(value):
                    raise FloatingPointError(f"the loss is {value} at step {step}")
                bar.set_postfix(loss=f"{value:.4f}", step=step, documents=feed.documents, rate=f"{rate:.1e}")
                bar.update(round(min(elapsed, limit)) - bar.n)
    return step


def _options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint folder to write")
    parser.add_argument("--from", type=Path, dest="source", help="train this exported model further, at a lower rate")
    parser.add_argument("--max-minutes", type=float, default=7.0, help="training time, without the evaluation")
    parser.add_argument("--total-minutes", type=float, default=math.inf, help="after which the evaluation is cut short")
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--lr", type=float, default=3e-3, help="the peak learning rate; with --from about a third")
    parser.add_argument("--groups", type=int, default=6, help="groups of documents in a batch")
    parser.add_argument("--group-tokens", type=int, default=GROUP_TOKENS)
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--width", type=int, default=Shape.width)
    parser.add_argument("--hidden", type=int, default=Shape.hidden)
    parser.add_argument("--workers", type=int, default=15, help="processes that write the corpus")
    parser.add_argument("--shard", type=int, default=8_000, help="documents that a process writes at a time")
    parser.add_argument("--shards", type=int, default=10_000, help="shards after which the corpus is complete")
    parser.add_argument("--new-tokenizer", action="store_true", help="train the tokenizer instead of the bundled one")
    parser.add_argument("--tokenizer-documents", type=int, default=60_000)
    parser.add_argument("--evaluate", type=int, default=200, help="held-out samples per skill; 0 skips the evaluation")
    parser.add_argument("--greedy-only", action="store_true", help="evaluate without the pass at temperature 0.3")
    parser.add_argument("--seed", type=int, default=1000, help="continue with another, to see other documents")
    options = parser.parse_args()
    if options.source is not None and options.new_tokenizer:
        parser.error("--from keeps the tokenizer of its model: leave out --new-tokenizer")
    return options


def main() -> None:
    """Runs the command line."""
    started = time.monotonic()
    options = _options()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = prepare_tokenizer(
        options.out, options.source or MODEL_DIR, options.new_tokenizer, options.tokenizer_documents
    )
    feed = Feed(options.out / "tokenizer.json", device, options.workers, options.shard, options.shards, options.seed)
    shape = Shape(vocab=tokenizer.get_vocab_size(), width=options.width, layers=options.layers, hidden=options.hidden)
    model = DemoModel(shape)
    if options.source is not None:
        restore(model, options.source)
    model = model.to(device)
    if device.type == "cuda":
        model.compile_parts()
    try:
        begin = time.monotonic()
        steps = train(model, feed, options)
        minutes = (time.monotonic() - begin) / 60
    finally:
        feed.close()
    size = export(model, tokenizer, options.out)
    tokens = steps * options.groups * options.group_tokens
    print(f"{steps} steps, {tokens / 1e6:.0f}M tokens, {feed.documents} documents, {minutes:.1f} minutes, {size} bytes")
    if options.evaluate:
        from demo_training.evaluate import evaluate_and_report

        until = started + options.total_minutes * 60
        evaluate_and_report(options.out, options.evaluate, out=options.out, until=until, sample=not options.greedy_only)


if __name__ == "__main__":
    main()
