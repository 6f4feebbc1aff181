"""Train the bundled model that reads numbers in images, and write it as a checkpoint.

Run it as `python -m demo_training.digits.train --out DIR`, from `tests`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo_training.digits.dialogue import (
    AGAIN,
    NO_IMAGE,
    QUESTIONS,
    SYSTEMS,
    Batch,
    Turn,
    Writer,
    asked,
    make_tokenizer,
    texts,
)
from demo_training.digits.fonts import HELD_OUT, TRAINED, families
from demo_training.digits.network import MERGE, PATCH, Reader, Shape, config_of
from demo_training.digits.pictures import MOST, draw, shape
from demo_training.digits.strokes import Painter, Strokes, draw_strokes
from demo_training.muon import Muon
from dovetail.demo import DIGITS_DIR
from dovetail_models.qwen2_vl_images import Qwen3VLImages

PIXELS: Final = {"shortest_edge": 6_500, "longest_edge": 9_408}
"""Of a resized image: all are about as large, so that digits are, too."""
PREPROCESSOR: Final[dict[str, Any]] = {
    **{"image_processor_type": "Qwen2VLImageProcessor", "size": PIXELS, "patch_size": PATCH, "merge_size": MERGE},
    **{"temporal_patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
}
CROPS: Final = ((4, 4), (4, 4), (4, 6), (6, 4))
"""Rows and columns of patches of small images."""
TIED: Final = "lm_head.weight"
"""The embedding again, of which a checkpoint has no copy."""
WARMUP: Final = 0.02
DECAY_FROM: Final = 0.3


@dataclass(frozen=True)
class Work:
    """What a step trains on: a batch, its patches `[B, N, 588]`, labels `[B, 3, N]`, and their rows and columns."""

    batch: Batch
    patches: Tensor
    labels: Tensor
    grid: tuple[int, int]


class Desk:
    """Makes batches of pictures of one size, and conversations about them.

    Args:
        strokes: The numbers.
        seed: Of everything that it draws by lot.
    """

    def __init__(self, strokes: Strokes, seed: int) -> None:
        self._painter, self._rng = Painter(strokes, seed), np.random.default_rng(seed)
        self._writer = Writer(make_tokenizer())
        self._images = images_of(self._writer)
        self._texts = texts(seed)

    def work(self, num: int, *, turns: bool = False) -> Work:
        """Make a batch.

        Args:
            num: Its images.
            turns: Whether each conversation has two turns.
        """
        rng = self._rng
        laid = self._images.layout(*shape(rng, 60, 400)).grid
        grid = (laid[1] * MERGE, laid[2] * MERGE)
        chosen = rng.integers(0, self._painter.num, num)
        chosen[rng.random(num) < 0.04] = -1
        pixels, labels = self._painter.paint(torch.from_numpy(chosen), (grid[0] * PATCH, grid[1] * PATCH), PATCH)
        shown = [self._painter.text(index) for index in chosen.tolist()]
        talks, kept = self._talks(shown) if turns else ([[asked(rng, text)] for text in shown], list(range(num)))
        systems = [str(rng.choice(SYSTEMS)) if rng.random() < 0.15 else "" for _ in talks]
        batch = self._writer.batch(talks, (laid[1], laid[2]), systems)
        patches, names = self._cut(pixels, labels)
        return Work(batch, patches[kept], names[kept], grid)

    @staticmethod
    def _cut(pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Put pixels and labels of patches into the order of the image processor."""
        blocks = pixels.unflatten(3, (-1, MERGE, PATCH)).unflatten(2, (-1, MERGE, PATCH))
        patches = blocks.permute(0, 2, 5, 3, 6, 1, 4, 7).flatten(1, 4).flatten(2)
        return patches.round(), labels.unflatten(3, (-1, MERGE)).unflatten(2, (-1, MERGE)).transpose(3, 4).flatten(2)

    def crop(self, num: int) -> tuple[Tensor, Tensor, tuple[int, int]]:
        """Make small images: patches `[B, N, 588]`, their labels `[B, 3, N]`, and rows and columns."""
        grid = CROPS[int(self._rng.integers(len(CROPS)))]
        chosen = torch.from_numpy(self._rng.integers(0, self._painter.num, num))
        return (*self._cut(*self._painter.paint(chosen, (grid[0] * PATCH, grid[1] * PATCH), PATCH)), grid)

    def blind(self, num: int) -> Work:
        """Make a batch without images."""
        batch = self._writer.batch([[self._ask()] for _ in range(num)], (0, 0))
        return Work(batch, torch.zeros(0, 0), torch.zeros(0, dtype=torch.long), (0, 0))

    def _talks(self, shown: Sequence[str]) -> tuple[list[list[Turn]], list[int]]:
        """Ask about two images, or twice about one; also return which images are asked about."""
        rng, talks, kept = self._rng, [], list[int]()
        for first in range(0, len(shown) - 1, 2):
            begun = asked(rng, shown[first])
            again = Turn(str(rng.choice(AGAIN)), begun.answer, has_image=False)
            twice = bool(rng.random() < 0.3)
            talks.append([begun, again if twice else asked(rng, shown[first + 1])])
            kept += [first] if twice else [first, first + 1]
        return talks, kept

    def _ask(self) -> Turn:
        """Ask without an image."""
        known = self._rng.random() < 0.4
        ask = str(self._rng.choice(QUESTIONS[:-1])) if known else next(self._texts)
        return Turn(ask, NO_IMAGE, has_image=False)


def images_of(writer: Writer) -> Qwen3VLImages:
    """Return the image processor that servers take."""
    config = {"image_token_id": writer.image_id, "vision_config": {"patch_size": PATCH}}
    return Qwen3VLImages.from_config(config, PREPROCESSOR)


def rate_at(progress: float, peak: float) -> float:
    """Return the learning rate at `progress` in [0, 1]: a warm-up, a plateau, then a slope down to zero."""
    if progress < WARMUP:
        return peak * (progress + 1e-3) / (WARMUP + 1e-3)
    return peak * min(1.0, (1 - progress) / (1 - DECAY_FROM))


def train(reader: Reader, options: argparse.Namespace) -> None:
    """Train until the processor time is used up."""
    matrices, filters, others = reader.groups()
    groups = [{"params": others, "share": 1.0}, {"params": filters, "share": 0.1}]  # the filters begin well
    muon, adam = Muon(matrices), torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.98), weight_decay=0.0)
    others = [*filters, *others]
    rng = np.random.default_rng(options.seed)
    desk = Desk(draw_strokes(rng, options.trained, options.strokes), options.seed)
    begin, step, progress = time.process_time(), 0, 0.0
    while progress < 1:
        rate = rate_at(progress, options.lr)
        if options.source is None and progress < options.early:  # the tower alone: a batch takes a third of the time
            patches, labels, grid = desk.crop(options.rows * 3)
            losses = torch.stack((torch.zeros(()), reader.naming_loss(reader.tower(patches, grid)[1], labels)))
        else:
            work = desk.blind(options.rows // 2) if step % 16 == 15 else desk.work(options.rows, turns=step % 6 == 5)
            losses = reader.loss(work.batch, work.patches, work.labels, work.grid, 1.0 if progress < 0.7 else 0.3)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        for parameter in (*matrices, *others):  # without images the tower has no gradients
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        step += 1
        progress = max((time.process_time() - begin) / (60 * options.minutes), step / options.steps)
        muon.step(rate)
        for group in adam.param_groups:
            group["lr"] = rate * group["share"]
        adam.step()
        adam.zero_grad()
        if step % options.every == 0 or progress >= 1:
            if not losses.isfinite().all():
                raise FloatingPointError(f"the losses are {losses.tolist()} at step {step}")
            right = accuracy(reader, options.held_out, options.check)
            found = ", ".join(f"{digits} digits {share:.0%}" for digits, share in enumerate(right, 1))
            own, named = losses.tolist()
            used = time.process_time() - begin
            print(f"step {step}: losses {own:.3f} {named:.3f}, held-out: {found}; {used:.0f} s", flush=True)
            export(reader, options.out, options.shape)


def accuracy(reader: Reader, fonts: list[list[Path]], num: int, seed: int = 12345) -> list[float]:
    """Return the share of held-out pictures that greedy decoding reads right, by number of digits.

    They are drawn and resized as servers get them; `num` of each length.
    """
    rng, writer, found = np.random.default_rng(seed), Writer(make_tokenizer()), []
    images = images_of(writer)
    for digits in range(1, MOST + 1):
        right = 0
        for _ in range(num):
            text = "".join(map(str, rng.integers(0, 10, digits)))
            arrays = images.process(draw(rng, text, fonts, shape(rng, 60, 400)))
            _, rows, columns = arrays["grid"].tolist()
            batch = writer.batch([[Turn("Which number is this?", text)]], (rows // MERGE, columns // MERGE))
            right += int(reader.exact(batch, torch.from_numpy(arrays["patches"])[None], (rows, columns)))
        found.append(right / max(1, num))
    return found


def export(reader: Reader, out: Path, shape: Shape) -> int:
    """Write a checkpoint folder that transformers loads unchanged; returns the size of the weights in bytes."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(out / "tokenizer.json"))
    config = config_of(shape, tokenizer)
    config.architectures, config.dtype = ["Qwen3VLForConditionalGeneration"], "bfloat16"
    config.text_config.dtype = config.vision_config.dtype = "bfloat16"
    config.save_pretrained(out)
    end = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    files = {
        "preprocessor_config.json": PREPROCESSOR,
        "generation_config.json": {"do_sample": False, "eos_token_id": end, "pad_token_id": end[1]},
        "tokenizer_config.json": {
            **{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": "<|im_end|>"},
            **{"pad_token": "<|endoftext|>", "unk_token": None, "clean_up_tokenization_spaces": False},
            "model_max_length": config.text_config.max_position_embeddings,
        },
    }
    if out.resolve() != DIGITS_DIR.resolve():
        shutil.copyfile(DIGITS_DIR / "chat_template.jinja", out / "chat_template.jinja")
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    weights = {
        name: value.to(torch.bfloat16).contiguous() for name, value in reader.model.state_dict().items() if name != TIED
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return (out / "model.safetensors").stat().st_size


def restore(reader: Reader, folder: Path) -> None:
    """Put the weights of an exported network into one of the same shape.

    Raises:
        ValueError: They are not those of such a network.
    """
    saved, wanted = load_file(folder / "model.safetensors"), reader.model.state_dict()
    if {name: value.shape for name, value in saved.items()} != {
        name: value.shape for name, value in wanted.items() if name != TIED
    }:
        raise ValueError(f"the weights in {folder} are those of another shape")
    reader.model.load_state_dict(saved, strict=False)


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train the model that reads numbers in images.")
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint folder to write")
    parser.add_argument("--fonts", type=Path, default=Path("/usr/share/fonts"), help="folder with the fonts' files")
    parser.add_argument("--any-fonts", action="store_true", help="train on all fonts there, and hold out none")
    parser.add_argument("--from", type=Path, dest="source", help="train this exported model further")
    parser.add_argument("--minutes", type=float, default=10.0, help="processor time, of one thread")
    parser.add_argument("--steps", type=int, default=10**9, help="after which it ends earlier")
    parser.add_argument("--rows", type=int, default=40, help="images in a batch")
    parser.add_argument(
        "--early", type=float, default=0.15, help="share of the time in which only the tower learns, from small images"
    )
    parser.add_argument(
        "--strokes", type=int, default=8000, help="numbers that are drawn, each of which is painted often"
    )
    parser.add_argument("--lr", type=float, default=3e-3, help="the peak learning rate")
    parser.add_argument("--every", type=int, default=200, help="steps between two checks, each of which writes --out")
    parser.add_argument("--check", type=int, default=100, help="held-out images of each length in a check")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(given)
    options.shape = Shape()
    if options.any_fonts:
        options.trained = options.held_out = [[path] for path in sorted(options.fonts.rglob("*.[ot]tf"))]
    else:
        options.trained, options.held_out = families(TRAINED, options.fonts), families(HELD_OUT, options.fonts)
    return options


def main(given: list[str] | None = None) -> None:
    """Run the command line."""
    options = parse(given)
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    reader = Reader(options.shape, make_tokenizer())
    if options.source is not None:
        restore(reader, options.source)
    train(reader, options)
    print(f"{export(reader, options.out, options.shape)} bytes")


if __name__ == "__main__":
    main()
