"""Whether an engine computes what transformers does: logits, and greedy tokens in every schedule.

In float32. Schedules: a prompt whole and in chunks, decode; several requests at once whose prompts begin alike, in a
cache that is too small for them, so that they hit cached prefixes, and are retracted and resumed.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dovetail.contracts.cache import FULL
from dovetail.contracts.replies import TokenLogprob
from dovetail.engine.core import EngineCore
from dovetail.messages import SamplerParams, Submit
from dovetail_testing.engine import make_core

TOLERANCE = 1e-4
NEAR = 2e-5
"""Of the largest score, or logarithm of a share: differences that rounding may turn round. It differs from processor to
processor, and changed these by up to 5e-6 of the largest, in any family here, in float32 against float64."""
NUM_NEW = 64
PAGE = 4
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Told:
    """What was told of a token whose log probabilities were asked for, and how its request had come there."""

    logprob: TokenLogprob
    cached: int
    retractions: int


@dataclass(slots=True)
class Outcome:
    """What a schedule gave: the worst relative error of a token's logits, and what was seen of the schedule."""

    worst: float = 0.0
    cached: int = 0
    retractions: int = 0
    tokens: list[list[int]] = field(default_factory=list)
    told: list[list[Told]] = field(default_factory=list)


def prompt(length: int, seed: int) -> list[int]:
    """Random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(3, 130) for _ in range(length)]


class NearTie(Exception):
    """Rounding decides which experts a token goes through, and with others its logits differ by a tenth."""


class Choices(TorchFunctionMode):
    """Refuses what is chosen (`topk`) where the last that is, and the first that is not, are nearly tied."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "topk":
            self._look_at(args[0], found[0].shape[-1])
        return found

    def _look_at(self, scores: Tensor, num: int) -> None:
        if num == scores.shape[-1]:
            return
        scores = scores.double()
        if ((scores.sum(-1) - 1).abs() < 1e-4).all():  # of shares a small one is as exact as a large one
            scores = scores.log()
        best = scores.topk(num + 1).values
        gaps = (best[..., -2] - best[..., -1]) / scores.masked_fill(scores.isinf(), 0).abs().amax(-1)
        if gaps.min() < NEAR:
            raise NearTie(f"{num} of {scores.shape[-1]} experts, by {gaps.min():.1g} of the largest score")


def on_settled_prompts(check: Callable[..., Result]) -> Callable[..., Result]:
    """Make a check take other prompts, by `seed`, as long as one of its tokens is a `NearTie`."""

    @functools.wraps(check)
    def checked(*args: Any, **settings: Any) -> Result:
        ties = []
        for seed in range(0, 20_000, 1000):
            try:
                return check(*args, seed=seed, **settings)
            except NearTie as tie:
                ties.append(str(tie))
        raise AssertionError(f"all prompts are near ties: {ties}")

    return checked


@torch.inference_mode()
def reference(model: Any, ids: Sequence[int]) -> Tensor:
    """Transformers' logits `[T, V]`."""
    found: Tensor = model(torch.tensor([list(ids)])).logits[0].float()
    return found


def run(core: EngineCore, prompts: Sequence[list[int]], num_new: int, **params: Any) -> Outcome:
    """Generate greedily, all prompts at once."""
    chosen = SamplerParams(max_tokens=num_new, temperature=0.0, ignore_eos=True, **params)
    outcome = Outcome(tokens=[[] for _ in prompts], told=[[] for _ in prompts])
    for handle, ids in enumerate(prompts, 1):
        core.handle(Submit(rid="", handle=handle, prompt_ids=ids, params=chosen))
    for _ in range(40 * num_new * len(prompts)):
        if not core.has_work:
            break
        for delta in core.step().deltas:
            outcome.tokens[delta.handle - 1] += delta.ids
            seen = delta.cached_tokens, delta.num_retractions
            outcome.told[delta.handle - 1] += [Told(one, *seen) for one in delta.logprobs or ()]
            outcome.cached = max(outcome.cached, delta.cached_tokens)
            outcome.retractions = max(outcome.retractions, delta.num_retractions)
            assert delta.finish is None or delta.finish.reason == "length", delta.finish
        assert core.pages.check_counts(core.scheduler.running)
        assert core.pages.check_ownership(core.scheduler.running)
    assert not core.has_work
    return outcome


def greedy(model: Any, prompts: Sequence[list[int]], outcome: Outcome) -> None:
    """Compare tokens with transformers' choice behind each prefix of them: equal exactly where all are.

    Of logits that are as close as `check_logits` wants them to be transformers', either may be the larger.

    Raises:
        NearTie: They say nothing of whether the engine is right.
    """
    for ids, tokens in zip(prompts, outcome.tokens, strict=True):
        with Choices():
            logits = reference(model, [*ids, *tokens[:-1]])[len(ids) - 1 :]
        best, want = logits.max(-1)
        said = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        close = (best - said) <= TOLERANCE * logits.norm(dim=1)
        assert close.all(), f"a prompt of {len(ids)} tokens: {tokens} instead of {want.tolist()}"


def recorded(core: EngineCore) -> list[Tensor]:
    """Return a list that will hold whatever logits the engine's model computes."""
    model: Any = core.executor.runner.model  # type: ignore[attr-defined]
    found: list[Tensor] = []
    if isinstance(model.lm_head, nn.Module):
        model.lm_head.register_forward_hook(lambda module, given, out: found.append(out.detach().clone()))
    else:
        inner = model.lm_head

        def head(hidden: Tensor) -> Tensor:
            found.append(inner(hidden).detach().clone())
            return found[-1]

        model.lm_head = head
    return found


@on_settled_prompts
def check_logits(
    folder: Path, model: Any, *, chunk: int, num_new: int = NUM_NEW, seed: int = 0, **settings: Any
) -> Outcome:
    """Compare every token's logits of one request, its prompt in chunks; returns the worst error."""
    core = make_core(folder, page_size=PAGE, chunked_prefill_size=chunk, max_running_requests=4, **settings)
    logits, ids = recorded(core), prompt(100, seed + 1)
    outcome = run(core, [ids], num_new, prompt_logprobs=0)
    with Choices():
        want = reference(model, [*ids, *outcome.tokens[0][:-1]])
    got = torch.cat(logits).float()
    assert got.shape == want.shape, (got.shape, want.shape)
    outcome.worst = float(((got - want).norm(dim=1) / want.norm(dim=1)).max())
    assert outcome.worst <= TOLERANCE, f"chunks of {chunk}: relative error {outcome.worst:.2g}"
    greedy(model, [ids], outcome)
    return outcome


def check_pieces(folder: Path, model: Any) -> None:
    """Compare a prompt whole and what is decoded behind it, beyond 128 tokens, and it in chunks that cut pieces."""
    check_logits(folder, model, chunk=100, model_impl="dovetail")
    check_logits(folder, model, chunk=33, num_new=4, model_impl="dovetail")


@on_settled_prompts
def check_schedules(folder: Path, model: Any, *, num_new: int = NUM_NEW, seed: int = 0, **settings: Any) -> Outcome:
    """Compare the tokens of requests that are computed together, hit a cached prefix, and are retracted."""
    core = make_core(
        folder, page_size=PAGE, chunked_prefill_size=48, max_running_requests=4, max_total_tokens=484, **settings
    )
    shared = prompt(134, seed + 2)  # some states are copied every 128 tokens
    first = run(core, [shared], 4)
    greedy(model, [shared], first)
    prompts = [shared + prompt(n, seed + n) for n in (3, 17, 40)] + [prompt(61, seed + 5)]
    outcome = run(core, prompts, num_new)
    greedy(model, prompts, outcome)
    assert outcome.cached, "no request hit a cached prefix"
    runner: Any = core.executor.runner  # type: ignore[attr-defined]
    if any(spec.reach == FULL for spec in runner.config.layers):  # windows alone give back what they need
        assert outcome.retractions, "no request was retracted"
    return outcome


def check(folder: Path, model: Any, **settings: Any) -> float:
    """Compare whole, in chunks of 7 and 64, decoding, together; returns the worst error."""
    errors = [check_logits(folder, model, chunk=chunk, **settings).worst for chunk in (4096, 7, 64)]
    check_schedules(folder, model, **settings)
    return max(errors)
