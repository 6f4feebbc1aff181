"""What becomes of each causal architecture of transformers, tiny and random, in two configurations: served, or refused.

The largest difference of a log probability from transformers' own, of all tokens of the vocabulary, in four ways:
behind a prompt in chunks, decoding, behind a cached prefix, and resumed after a retraction. Run as a program it prints
a row for each (three minutes); `--write` records which are served, and each refusal's line.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from architectures import BARE, CHANGES, LEFT_OUT, SECOND, WHOLE
from families import DECODERS, SIZES, perturb
from parity import PAGE, greedy, on_settled_prompts, prompt, recorded, reference, run
from safetensors.torch import save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dovetail.contracts.errors import ConfigError
from dovetail_testing.engine import make_core

GOLDEN = Path(__file__).parent / "golden" / "architectures.json"
KINDS = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB = tuple(range(131))
FIRST, ANOTHER = "first", "second"


@dataclass(frozen=True, slots=True)
class Row:
    """What became of a configuration: why it is refused, or the differences; None where a way does not occur."""

    refused: str = ""
    chunks: float | None = None
    decode: float | None = None
    hit: float | None = None
    retraction: float | None = None

    @property
    def worst(self) -> float:
        """The largest difference of all ways."""
        return max(way or 0.0 for way in (self.chunks, self.decode, self.hit, self.retraction))


def config_of(kind: str, **changes: Any) -> Any:
    """Make transformers' config of a tiny model."""
    sizes = {} if kind in WHOLE else SIZES
    given = {**sizes, **DECODERS.get(kind, {}), **CHANGES.get(kind, {}), **changes}
    kept = {key: value for key, value in given.items() if value is not LEFT_OUT}
    return CONFIG_MAPPING[kind](**deepcopy(kept))  # some configs write into the dicts that they are given


def second(kind: str) -> dict[str, Any]:
    """What of `SECOND` the config of a model has, unless its first one says it, and transformers builds."""
    base = config_of(kind)
    said = DECODERS.get(kind, {}).keys() | CHANGES.get(kind, {}).keys()
    text = base.get_text_config(decoder=True)
    if text is not base and "text_config" in CHANGES.get(kind, {}):
        has, inner = text.to_dict().keys(), CHANGES[kind]["text_config"]
        changes = {key: value for key, value in SECOND.items() if key in has and inner.get(key) == SIZES.get(key)}
        return {"text_config": _built(kind, changes, lambda some: {"text_config": {**inner, **some}})["text_config"]}
    changes = {key: value for key, value in SECOND.items() if key in base.to_dict().keys() - said}
    return _built(kind, changes, dict)


def _built(kind: str, changes: dict[str, Any], place: Any) -> dict[str, Any]:
    """Leave out, one by one, what transformers refuses or cannot compute."""
    kept: dict[str, Any] = {}
    for key, value in changes.items():
        try:
            model = build(config_of(kind, **place({**kept, key: value})), seed=0)
            reference(model, prompt(30, seed=0))
        except Exception:  # transformers' own check of a config, or what comes of one, of any type
            continue
        kept[key] = value
    return place(kept)


def build(config: Any, seed: int) -> Any:
    """Make transformers' model with random weights."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    perturb(model)
    return model.requires_grad_(False)


def make(folder: Path, kind: str, seed: int, **changes: Any) -> Any:
    """Write a random checkpoint; returns transformers' model, None where that has none which it can build."""
    if kind in BARE:
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
        given = {**config_of(kind, **changes).to_dict(), "architectures": [name], "model_type": kind}
        (folder / "config.json").write_text(json.dumps(given))
        tensors = {f"model.layers.{index}.weight": torch.randn(1, 1 << 18) for index in range(8)}
        save_file(tensors, folder / "model.safetensors")
        return None
    model = build(config_of(kind, **changes), seed)
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def distance(got: Tensor, model: Any, ids: list[int]) -> Tensor:
    """Return how far log probabilities `[R, V]` of the last R tokens are from transformers', `[R]`."""
    want = reference(model, ids)[-len(got) :, : got.shape[1]].log_softmax(-1)
    return (got - want).abs().amax(-1)


@on_settled_prompts
def alone(folder: Path, model: Any, *, seed: int = 0, **settings: Any) -> tuple[float, float]:
    """Measure one request: its prompt in chunks of 7, and what it decodes."""
    core = make_core(folder, page_size=PAGE, chunked_prefill_size=7, max_running_requests=4, **settings)
    logits, ids = recorded(core), prompt(100, seed + 1)
    outcome = run(core, [ids], 8, prompt_logprobs=0)
    got = torch.cat(logits).float()
    assert got.shape[0] == len(ids) + 7
    far = distance(got.log_softmax(-1), model, [*ids, *outcome.tokens[0][:-1]])
    greedy(model, [ids], outcome)
    return float(far[: len(ids)].max()), float(far[len(ids) :].max())


@on_settled_prompts
def together(
    folder: Path, model: Any, num_new: int = 64, *, seed: int = 0, **settings: Any
) -> tuple[float | None, float | None]:
    """Measure requests that share a cache which is too small for them: behind a cached prefix, and resumed."""
    core = make_core(
        folder, page_size=PAGE, chunked_prefill_size=48, max_running_requests=4, max_total_tokens=484, **settings
    )
    shared = prompt(134, seed + 2)  # some states are copied every 128 tokens
    asked: dict[str, Any] = {"logprobs": 0, "logprob_token_ids": VOCAB}
    run(core, [shared], 4, **asked)
    prompts = [shared + prompt(n, seed + n) for n in (3, 17, 40)] + [prompt(61, seed + 5)]
    outcome = run(core, prompts, num_new, **asked)
    greedy(model, prompts, outcome)
    hits, resumed = [], []
    for ids, tokens, told in zip(prompts, outcome.tokens, outcome.told, strict=True):
        got = torch.tensor([[top.logprob for top in one.logprob.named] for one in told])
        far = distance(got, model, [*ids, *tokens[:-1]]).tolist()
        resumed += [x for x, one in zip(far, told, strict=True) if one.retractions]
        hits += [x for x, one in zip(far, told, strict=True) if one.cached and not one.retractions]
    return max(hits, default=None), max(resumed, default=None)


def look(folder: Path, kind: str, which: str, **settings: Any) -> Row:
    """Make a configuration and see what becomes of it."""
    changes = {} if which == FIRST or kind in BARE else second(kind)
    model = make(folder, kind, seed=int(which == ANOTHER), **changes)
    try:
        if model is None:
            make_core(folder, **settings)
            return Row()
        return Row("", *alone(folder, model, **settings), *together(folder, model, **settings))
    except ConfigError as error:
        said = str(error).replace(str(folder), "FOLDER")
        return Row(re.sub(r"\d+%|\d+\.\d+\.\d+", "N", said))


@cache
def recorded_rows() -> dict[str, dict[str, str]]:
    """Return what is recorded: by kind and configuration the refusal's line, "" where it is served."""
    rows: dict[str, dict[str, str]] = json.loads(GOLDEN.read_text())
    return rows


def main(given: list[str]) -> None:
    """Print a row for each configuration of the kinds given, or of all."""
    rows: dict[str, dict[str, str]] = {}
    for kind in [name for name in given if not name.startswith("-")] or KINDS:
        for which in (FIRST, ANOTHER):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    row = look(Path(folder), kind, which, model_impl="transformers")
                except Exception as error:  # a row, too: the table goes on
                    row = Row(f"!! {type(error).__name__}: {error}")
            rows.setdefault(kind, {})[which] = row.refused
            ways = " ".join(f"{k} {v:.1e}" if v else f"{k} -" for k, v in asdict(row).items() if k != "refused")
            print(f"{kind:28} {which:6} {row.refused or ways}", flush=True)
    if "--write" in given:
        GOLDEN.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
