"""Computes, and measures nothing: steps and time of long text prompts by the rule for beginnings, and by others.

    python tests/benchmarks/early_prefill.py                          # the table of docs/design/early-prefill.md
    python tests/benchmarks/early_prefill.py --tokens-per-s 1000000   # of a tokenizer with several threads

Prompts come at once. Two are tokenized at a time, each at a steady rate, in groups of 16 pieces. A step takes up to
8,192 tokens, and costs its weights at 2 TB/s, 2 ms, and so much a token. A beginning that follows another one reaches
the engine 1.5 ms after the step before. `ids` is the time of the same prompts as token ids.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from dovetail_server.serving.early import WEIGHTS_PER_S, next_end

CHUNK, GROUP = 8192, 3450
"""Tokens of a step; and of 16 pieces, as 16,384 characters of Qwen3's tokens have."""
AT_ONCE, AGAIN_S = 2, 0.0015
"""Bodies that are read at a time; and until a beginning follows another one."""
LENGTHS = (1000, 4000, 16000, 64000)


@dataclass(frozen=True)
class Model:
    """Weights in bytes, and seconds of a prompt's token beside them."""

    name: str
    weight_bytes: float
    token_s: float

    @property
    def step_s(self) -> float:
        """What a step costs beside its tokens."""
        return self.weight_bytes / WEIGHTS_PER_S + 0.002


MODELS = (
    Model("0.6B", 1.2e9, 7.2e-6),
    Model("8B", 16e9, 29e-6),
    Model("30B-A3B", 61e9, 25e-6),
    Model("35B-A3B", 70e9, 20.6e-6),
    Model("gpt-oss-20b", 13e9, 24.6e-6),
)
"""As an H200 took for 16,000 tokens: as ids of 0.6B and 35B-A3B, as text of the others, while beginnings doubled."""
Rule = Callable[[Model, int, int, int, float, bool], int]
"""Takes a model, tokens sent, known and in all, seconds so far, and whether no beginning is being computed."""


def filled(model: Model, num_sent: int, num_known: int, num: int, seconds: float, is_idle: bool) -> int:
    """Be the rule that serves."""
    step_s = model.weight_bytes / WEIGHTS_PER_S
    return next_end(num_sent, num_known, num, GROUP, seconds, CHUNK, step_s) if is_idle else 0


def doubled(model: Model, num_sent: int, num_known: int, num: int, seconds: float, is_idle: bool) -> int:
    """Be the rule before: whenever twice as many tokens are known."""
    return num_known if num_known >= 2 * num_sent else 0


def none(model: Model, num_sent: int, num_known: int, num: int, seconds: float, is_idle: bool) -> int:
    """Begin nothing."""
    return 0


class Load:
    """Prompts of one length that come at once, from the first body to the end of the last step."""

    def __init__(self, model: Model, num: int, clients: int, tokens_per_s: float, rule: Rule) -> None:
        """Know when which tokens are known."""
        self._model, self._num, self._rule, self._token_s = model, num, rule, 1 / tokens_per_s
        free, self._known = [0.0] * AT_ONCE, list[tuple[float, int, int]]()
        for client in range(clients):
            began = min(free)
            free[free.index(began)] = began + num * self._token_s
            some = [known for known in range(GROUP, num, GROUP) if num - known >= GROUP]
            self._known += [(began + known * self._token_s, client, known) for known in (*some, num)]
        self._known.sort(reverse=True)
        self._queue: list[tuple[int, int, float]] = []  # client, end, and when the engine has it
        self._sent, self._latest, self._computed = [0] * clients, [0] * clients, [0] * clients
        self.num_steps, self.seconds = 0, 0.0

    def run(self) -> Load:
        """Run to the end."""
        while self._known or self._queue:
            self._tokenized(self.seconds)
            planned, left = dict[int, int](), CHUNK
            for client, end, at in self._queue:
                num = min(left, end - self._computed[client])
                if at <= self.seconds and client not in planned and num > 0:
                    planned[client], left = num, left - num
            if not planned:
                self.seconds = min([at for _, _, at in self._queue] + [at for at, _, _ in self._known[-1:]])
                continue
            self.num_steps += 1
            for client, num in planned.items():
                self._computed[client] += num
            end_s = self.seconds + self._model.step_s + self._model.token_s * (CHUNK - left)
            self._tokenized(end_s)
            self.seconds = end_s
            self._queue = [(client, end, at) for client, end, at in self._queue if end > self._computed[client]]
            for client in planned:
                self._begin(client, self.seconds + AGAIN_S)
        return self

    def _tokenized(self, until: float) -> None:
        while self._known and self._known[-1][0] <= until:
            at, client, self._latest[client] = self._known.pop()
            if self._latest[client] == self._num:
                self._queue.append((client, self._num, at))
            else:
                self._begin(client, at)

    def _begin(self, client: int, at: float) -> None:
        num, begun = self._latest[client], [other for other, _, _ in self._queue]
        if num == self._num or not num or any(other != client for other in begun):
            return
        end = self._rule(self._model, self._sent[client], num, self._num, num * self._token_s, not begun)
        if end > self._sent[client]:
            self._sent[client] = end
            self._queue.append((client, end, at))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens-per-s", type=float, default=290e3, help="of one body's tokenizer")
    rate = parser.parse_args().tokens_per_s
    table = Table(title=f"Computed, not measured: steps / ms; {rate:,.0f} tokens/s are tokenized")
    for column in ("model", "prompts", "tokens", "as ids", "nothing begun", "doubled", "filled"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for model in MODELS:
        for clients in (1, 8):
            for num in LENGTHS:
                rules = none, doubled, filled
                as_ids = Load(model, num, clients, float("inf"), none).run()
                loads = [as_ids, *(Load(model, num, clients, rate, rule).run() for rule in rules)]
                cells = [f"{load.num_steps} / {1000 * load.seconds:,.0f}" for load in loads]
                table.add_row(model.name, str(clients), f"{num:,}", *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
