"""A step on its way through the device: launched, sampled, read.

Only reading waits for the device, so that the next step can be launched before this one's tokens are known. R rows
that get a token, V vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dovetail.engine.request import Request, StepPlan
from dovetail.runtime.sampler import Ranked, Sampled

BROKEN = -1


@dataclass(slots=True, eq=False)
class Part:
    """Requests of a step whose logits come from one forward pass.

    Attributes:
        requests: R of them.
        rows: `[R]` int64, their device rows.
        broken: `[R]` bool where more than the logits was looked at: something computed for the request is not finite.
        logits: `[R, V]`; kept only while the part waits for what the host has yet to say (grammar masks).
        tokens: `[R]` int64 on the device once chosen; `BROKEN` where what was computed is not finite.
        logprobs: Of the chosen tokens, where asked for.
    """

    requests: list[Request]
    rows: Tensor
    logits: Tensor | None = None
    tokens: Tensor | None = None
    logprobs: Ranked | None = None
    broken: Tensor | None = None

    def choose(self, sampled: Sampled) -> None:
        """Take the sampler's outcome. The tensors of a graph are overwritten by the next replay, so it is copied."""
        broken = sampled.broken if self.broken is None else sampled.broken | self.broken
        self.tokens = torch.where(broken, BROKEN, sampled.ids)
        self.logprobs = sampled.logprobs
        self.logits = None


@dataclass(slots=True, eq=False)
class Launched:
    """A step that the device is computing, or has computed.

    Attributes:
        plan: What it computes.
        parts: In the order in which their requests get tokens.
        silent: Requests that get no token, with `BROKEN` or 0 for each in an int64 tensor on the device.
        prompt_logprobs: Of prompt chunks, by request.
        graph: Whether graphs were replayed.
        forward_done: On CUDA, what tells that the logits are there; kept where a request waits for its grammar.
    """

    plan: StepPlan
    parts: list[Part]
    silent: list[tuple[list[Request], Tensor]] = field(default_factory=list)
    prompt_logprobs: list[tuple[Request, Ranked]] = field(default_factory=list)
    graph: bool = False
    forward_done: torch.cuda.Event | None = None
    _host: Tensor | None = None
    _copied: torch.cuda.Event | None = None

    @property
    def sampled(self) -> list[Request]:
        """The requests that get a token."""
        return [request for part in self.parts for request in part.requests]

    @property
    def is_computing(self) -> bool:
        """Whether the device is still at the logits, as far as `forward_done` says."""
        return self.forward_done is not None and not self.forward_done.query()  # type: ignore[no-untyped-call]

    def add_silent(self, requests: list[Request], broken: Tensor) -> None:
        """Note requests that get no token; `broken` `[S]` bool may be overwritten by the next step."""
        self.silent.append((requests, torch.where(broken, BROKEN, 0)))

    def start_copy(self) -> None:
        """Send the tokens to the host, and behind them what is told of the silent; every part has been sampled."""
        chosen = [part.tokens for part in self.parts if part.tokens is not None]
        chosen += [verdicts for _, verdicts in self.silent]
        if not chosen:
            return
        tokens = chosen[0] if len(chosen) == 1 else torch.cat(chosen)
        if tokens.device.type == "cpu":
            self._host = tokens
            return
        self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        self._host.copy_(tokens, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def read_tokens(self) -> tuple[list[int], list[Request]]:
        """Wait for the device; return one token per request of `sampled`, and the requests that are broken.

        A broken request's token means nothing.
        """
        if self._copied is not None:
            self._copied.synchronize()
        tokens: list[int] = [] if self._host is None else self._host.tolist()
        requests = self.sampled
        if BROKEN not in tokens:
            return tokens[: len(requests)], []
        everyone = requests + [request for silent, _ in self.silent for request in silent]
        broken = [request for request, token in zip(everyone, tokens, strict=True) if token == BROKEN]
        return tokens[: len(requests)], broken
