"""Whether what a model makes of a token has the same bits whatever is computed with it, where it claims so."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.runtime.batch_invariance import claims
from dovetail_testing.checks import check
from dovetail_testing.conformance.base import Conformance
from dovetail_testing.conformance.model_runtime import CPU, NoAttention, Running, TinyEngine

LENGTHS = (1, 9, 40, 70)
CUTS = ((0, 1, 17, 70), (0, 33, 34, 70), (0, 69, 70))


class ModelInvarianceChecks(Conformance):
    """What `ModelPlugin.batch_invariant` promises, with `BuildContext.batch_invariant` set."""

    def test_batch_invariance(self, checkpoints: list[Path]) -> None:
        """Where the class claims it, logits have the same bits for a token alone, in any chunk, beside any others.

        Attention answers with the queries, so that the layers between are what is compared.
        """
        if not claims(self.plugin()):
            pytest.skip("the class claims no batch invariance")
        for folder in checkpoints:
            engine = TinyEngine(self.plugin(), folder, batch_invariant=True)
            engine.attention = NoAttention(engine.config, engine.pool, CPU)
            prompts = [[(7 * i + 3 * n) % 190 for i in range(n)] for n in LENGTHS]
            together = engine.prefill_logits(prompts)
            for prompt, want in zip(prompts, together, strict=True):
                check(
                    torch.equal(engine.prefill_logits([prompt])[0], want),
                    f"not batch invariant: a prompt of {len(prompt)} tokens has other logits alone",
                )
            for what, first, got in chunks_of(engine, prompts[-1], prompts[1]):
                same = torch.equal(got, together[-1][first : first + len(got)])
                check(same, f"not batch invariant: tokens {first} to {first + len(got)} have other logits {what}")


def chunks_of(engine: TinyEngine, prompt: list[int], other: list[int]) -> Iterator[tuple[str, int, Any]]:
    """Yield the logits of chunks of a prompt, alone and behind another request's decode row, with where they begin."""
    for cuts in CUTS:
        alone, beside, neighbour = (Running(list(ids), row) for row, ids in enumerate((prompt, prompt, other)))
        engine.step((), [(neighbour, len(other))])
        for first, end in itertools.pairwise(cuts):
            yield "in a chunk", first, engine.step((), [(alone, end - first)])
            neighbour.ids.append(9)
            yield "in a chunk beside others", first, engine.step([neighbour], [(beside, end - first)])[1:]
