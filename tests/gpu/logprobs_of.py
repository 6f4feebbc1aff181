"""What an engine says of its tokens beside what transformers computes for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor

from dovetail.messages import TokenDelta, TokenLogprob
from dovetail_testing.engine import tokens

Values = list[list[float]]
"""For each token of a reply: its own log probability, then those of its top alternatives."""


def entries(deltas: Iterable[TokenDelta]) -> list[TokenLogprob]:
    """Return what was reported of each token of a reply."""
    return [entry for delta in deltas for entry in delta.logprobs or ()]


def check_sane(reply: Sequence[TokenLogprob], is_greedy: bool) -> None:
    """No log probability is above 0, alternatives are in order, and a greedy token is the first of them."""
    for entry in reply:
        values = [top.logprob for top in entry.top]
        assert entry.logprob is not None
        assert max([entry.logprob, *values]) < 1e-4, entry
        assert values == sorted(values, reverse=True), entry
        if is_greedy and values:
            assert entry.logprob >= values[0] - 1e-5, entry


class Reference:
    """Transformers' model on the GPU, in one dtype; its numbers are the checkpoint's."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str = "cuda") -> None:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        self._model = loaded.to(device=device, dtype=dtype).eval()
        self._device = device

    @torch.inference_mode()
    def values(self, prompt: Sequence[int], reply: Sequence[TokenLogprob]) -> Values:
        """Return the log probabilities of the tokens that a reply names, in its order."""
        ids = [*prompt, *(entry.token_id for entry in reply)]
        hidden = self._model.model(torch.tensor([ids[:-1]], device=self._device))[0][0, len(prompt) - 1 :]
        found: Values = []
        for first in range(0, len(reply), 128):
            logprobs = self._model.lm_head(hidden[first : first + 128]).float().log_softmax(-1)
            for row, entry in zip(logprobs, reply[first : first + 128], strict=True):
                named = [entry.token_id, *(top.token_id for top in entry.top)]
                found.append(row[torch.tensor(named, device=self._device)].tolist())
        return found


def reported(reply: Sequence[TokenLogprob]) -> Values:
    """Return a reply's own values, as `Reference.values` has them."""
    return [[entry.logprob or 0.0, *(top.logprob for top in entry.top)] for entry in reply]


def differences(found: Values, want: Values) -> Tensor:
    """Return all absolute differences of two lists of values."""
    pairs = [(a, b) for one, other in zip(found, want, strict=True) for a, b in zip(one, other, strict=True)]
    return torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2).diff(dim=1).abs().flatten()


def assert_same(
    found: Sequence[Sequence[TokenDelta]], want: Sequence[Sequence[TokenDelta]], atol: float = 1e-4
) -> None:
    """Tokens of all replies are equal, and what is reported of them within a tolerance."""
    assert [tokens(deltas) for deltas in found] == [tokens(deltas) for deltas in want]
    for mine, right in zip(found, want, strict=True):
        reply, other = entries(mine), entries(right)
        check_sane(reply, is_greedy=False)
        off = differences(reported(reply), reported(other))
        assert not off.numel() or off.max() <= atol
