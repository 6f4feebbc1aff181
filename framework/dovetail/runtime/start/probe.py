"""Phase `probe`: computes a made-up request before the engine is ready: what fails or differs is not served.

Every model computes a chunk and a decode step, through the code that real steps run. A plugin whose model's code was
not written for Dovetail says so (`ModelPlugin.compares_schedules`): of its model the same tokens are computed whole,
in two pieces and by decoding, and the start is refused where the results differ by more than rounding explains.

The request stands in a spare row, and in the first pages, which are nobody's yet; both are zeroed again.

T tokens, H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.contracts.errors import ConfigError, PluginError, described
from dovetail.messages import SamplerParams
from dovetail.messages.step import AT_DEVICE, NONE, POOL, SAMPLE, Admit, Ints, StepInput
from dovetail.plugins.loader import describe
from dovetail.runtime.start.allocate import Allocated
from dovetail.runtime.start.check import Checked
from dovetail.runtime.start.load import LoadedModel

logger = logging.getLogger(__name__)

LENGTH, CUT, DECODED = 12, 5, 2
"""Tokens of the request, where its two pieces meet, and how many of its tokens are decoded behind them."""
MOST, MOST_HALF = 0.01, 0.25
"""By how much a token's hidden state may differ, relative to its length; and in 16 bits, where that holds of half of
the tokens: a router that hesitates there sends some of them elsewhere."""


class Probe:
    """Computes the made-up request in one engine, while no step is in flight."""

    def __init__(self, checked: Checked, loaded: LoadedModel, made: Allocated) -> None:
        """Nothing is computed yet."""
        self._config, self._model = checked.config, loaded.model
        self._served_by = describe(checked.plugins.plan.of_kind("model")[0])
        self._backend, self._kernels = checked.chosen.label, checked.kernels.outside
        self._stepper, self._state, self._pool = made.stepper, made.state, made.pool
        self._row = made.state.padding_row
        room = [(pool.num_pages - 1) * made.pool.page_size for pool in made.pool.pools]
        self._length = min([LENGTH, checked.memory.plan.context_len, *room])
        self._compares = checked.plugin.compares_schedules and self._length == LENGTH and checked.config.generates
        self._is_wide = checked.dtype == torch.float32

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Launch every kernel of it: they are collected, not run."""
        try:
            self._compute()
        finally:
            self._clear()

    @torch.inference_mode()
    def run(self) -> None:
        """Compute the request.

        Raises:
            PluginError: A step fails, or schedules differ; the model and who serves it are named.
        """
        try:
            whole, pieces, decoded = self._compute()
        except (ConfigError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a plugin's own code, or the backend's under it
            logger.debug("The probe of a start failed.", exc_info=True)
            kernels, or_plain = "", "--model-impl or --attention-backend"
            if self._kernels:
                kernels, or_plain = f" with {' and '.join(self._kernels)}", f"{or_plain}, or --kernels plain"
            raise PluginError(
                f"{self._config.architecture} cannot be served by {self._served_by} over attention {self._backend}"
                f"{kernels}: its first tokens fail: {described(error)}; every request would fail so: choose another "
                f"{or_plain}, or report it to the plugin's author"
            ) from error
        finally:
            self._clear()
        if self._compares:
            self._compare(whole[CUT:-DECODED], pieces, "a prompt in two pieces")
            self._compare(whole[-DECODED:], decoded, "tokens that are decoded")

    def _compute(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden states `[T, H]`: of all tokens whole, and of the last ones of pieces and decode steps."""
        length = self._length
        with self._recorded() as found:
            if not self._config.generates:
                self._chunk(0, length, POOL)
            elif not self._compares:
                self._chunk(0, max(1, length - 1), SAMPLE)
                if length > 1:
                    self._decode(None)
            else:
                self._chunk(0, length, SAMPLE)
                self._chunk(0, CUT, NONE)
                self._chunk(CUT, length - DECODED, SAMPLE)
                for place in range(length - DECODED, length):
                    self._decode(place)
        if not self._compares:
            return found[0], found[0], found[0]
        return found[0], found[2], torch.cat(found[3:])

    @contextmanager
    def _recorded(self) -> Iterator[list[Tensor]]:
        """Write down what the model returns inside."""
        model: Any = self._model
        found: list[Tensor] = []
        inner, own = model.forward, vars(model).get("forward")

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            found.append(inner(*args, **kwargs))
            return found[-1]

        model.forward = forward
        try:
            yield found
        finally:
            del model.forward
            if own is not None:
                model.forward = own

    def _chunk(self, start: int, stop: int, task: int) -> None:
        """Compute some tokens; the request takes its row where they are its first."""
        changes: dict[str, Any] = {"ids": self._ids()[start:stop]}
        if start == 0:
            pool = None if self._config.generates else self._config.pool
            greedy = SamplerParams(max_tokens=1, temperature=0.0)
            admit = Admit(row=self._row, seed=0, num_prompt=self._length, params=greedy, pool=pool)
            changes |= {"admit": (admit,), "tables": self._tables(), "loads": self._loads()}
        self._step(start, stop - start, task, **changes)

    def _decode(self, place: int | None) -> None:
        """Compute a token by itself: that of a place, or the one that was drawn last."""
        if place is not None:
            row, token = torch.tensor([[self._row], [int(self._ids()[place])]], device=self._state.device)
            self._state.set_next(row, token)
        self._step(AT_DEVICE, 1, SAMPLE)

    def _step(self, start: int, num_new: int, task: int, **changes: Any) -> None:
        """Compute a step of the row."""
        facts = {"rows": self._row, "start": start, "num_new": num_new, "task": task}
        changes |= {name: _ints([value]) for name, value in facts.items()}
        self._stepper.read(self._stepper.launch(StepInput(step=0, waits=np.zeros(1, dtype=np.bool_), **changes)))

    def _ids(self) -> Ints:
        return ((7 * np.arange(self._length) + 3) % self._config.vocab_size).astype(np.int32)

    def _tables(self) -> Ints:
        """Give the row its first pages in every group that has pages."""
        num = -(-self._length // self._pool.page_size)
        entries = [[group, self._row, i, 1 + i] for group in range(len(self._pool.pools)) for i in range(num)]
        return _ints(entries).reshape(-1, 4).T

    def _loads(self) -> Ints:
        """Put zeros into the row's states."""
        return _ints([[group, 0, self._row] for group in self._pool.states]).reshape(-1, 3).T

    def _compare(self, want: Tensor, got: Tensor, what: str) -> None:
        """Refuse the model if the hidden states `[T, H]` of some way differ from those of the prompt as a whole."""
        errors = (got.float() - want.float()).norm(dim=1) / want.float().norm(dim=1).clamp_min(1e-30)
        worst, most = (errors.max(), MOST) if self._is_wide else (errors.median(), MOST_HALF)
        found = float(worst)
        if not found <= most:
            raise PluginError(
                f"{self._config.architecture} cannot be served by {self._served_by}: it computes other values for "
                f"{what} than for the same prompt as a whole, by {found:.0%} where rounding explains {most:.0%}, "
                "so its answers would be wrong; a plugin of its own is needed"
            )

    def _clear(self) -> None:
        """Leave nothing of the request behind."""
        pages = _ints([[group, page] for group, _, _, page in self._tables().T]).reshape(-1, 2).T
        self._stepper.take(StepInput(step=0, zeroed=pages, cleared=_ints([self._row])))


def _ints(values: Any) -> Ints:
    return np.array(values, dtype=np.int32)
