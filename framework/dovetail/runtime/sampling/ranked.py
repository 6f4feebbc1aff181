"""Log probabilities of chosen tokens and of their top_ids, on their way from the device to the host.

N rows that ask for them, W most top_ids, M most tokens that a row names, V vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.messages import TokenLogprob, TopLogprob
from dovetail.runtime.device.upload import to_host, upload


@dataclass(slots=True, eq=False)
class RankedLogprobs:
    """Log probabilities of one draw on their way to the host, before anyone waits for them.

    They are copied at once: `packed` may be the output of a graph, which the next replay overwrites.

    Attributes:
        packed: `[P, 2 + 2 W + M]` int32: the token in question, the bits of its log probability and of those of the W
            most likely tokens, best first, these tokens, and the bits of the log probabilities of named tokens.
        lines: `[N]` of these P lines, those that were asked for.
        rows: Which sampled rows asked.
        num_top: Rivals that each of these wants, at most W.
        width: W.
        named_ids: Tokens that each of these rows names, or nothing where none does.
    """

    packed: Tensor
    lines: list[int]
    rows: list[int]
    num_top: list[int]
    width: int
    named_ids: list[tuple[int, ...]]

    def __post_init__(self) -> None:
        """Begin to copy."""
        self.packed = to_host(self.packed)

    def read(self) -> list[TokenLogprob]:
        """Return one entry per entry of `rows`, once the device has come that far."""
        host, width, most = self.packed, self.width, max(self.num_top)
        numbers = host.view(torch.float32)
        chosen, top_ids = host[:, 0].tolist(), host[:, 2 + width : 2 + width + most].tolist()
        values, named = numbers[:, 1 : 2 + most].tolist(), numbers[:, 2 + 2 * width :].tolist()
        found = []
        for at, num, names in zip(self.lines, self.num_top, self.named_ids, strict=True):
            line = values[at]
            top = list(map(TopLogprob, top_ids[at][:num], line[1 : 1 + num]))
            found.append(
                TokenLogprob(chosen[at], line[0], top, list(map(TopLogprob, names, named[at])) if names else [])
            )
        return found


def rank_logprobs(
    logits: Tensor, chosen: Tensor, num_top: list[int], rows: list[int], named_ids: list[tuple[int, ...]]
) -> RankedLogprobs:
    """Log probability of `chosen[i]`, the `num_top[i]` most likely tokens and `named_ids[i]` in row i of `[N, V]`."""
    logprobs = logits.float().log_softmax(dim=-1)
    picked = logprobs.gather(1, chosen[:, None])
    width = min(max(num_top, default=0), logits.shape[-1])
    values, top_ids = logprobs.topk(width, dim=-1)
    parts = [chosen[:, None].int(), picked.view(torch.int32), values.view(torch.int32), top_ids.int()]
    most_named = max(map(len, named_ids), default=0)
    if most_named:
        padded = [[*ids, *[0] * (most_named - len(ids))] for ids in named_ids]
        index = upload([token for ids in padded for token in ids], torch.int64, logits.device)
        named = logprobs.gather(1, index.view(len(padded), most_named))
        parts.append(named.view(torch.int32))
    packed = torch.cat(parts, dim=1)
    return RankedLogprobs(packed, list(range(len(rows))), rows, [min(num, width) for num in num_top], width, named_ids)
