"""The logits processors of an engine: which rows ask for which, and how the sampler calls them.

R rows that are sampled together, K of them that ask for a processor, V vocabulary size.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.contracts.logits import LogitsProcessor, LogitsRows
from dovetail.messages.step import StepInput
from dovetail.plugins import LoadedPlugins
from dovetail.plugins.loader import describe
from dovetail.runtime.device.row_params import SampleRow
from dovetail.runtime.device.upload import upload

logger = logging.getLogger(__name__)


class Processors:
    """Those of one engine, by the names that requests call them."""

    def __init__(self, loaded: Mapping[str, LogitsProcessor]) -> None:
        """They are called in this order."""
        self._loaded = dict(loaded)
        self._rows: dict[int, frozenset[str]] = {}

    @classmethod
    def make(cls, plugins: LoadedPlugins, vocab_size: int, num_rows: int, device: torch.device) -> Processors:
        """Make those of an engine's plan."""
        made: dict[str, LogitsProcessor] = {}
        for planned, plugin in plugins.candidates("logits_processor"):
            with torch.inference_mode(), plugins.watched(planned):
                made[planned.name] = plugin(vocab_size, num_rows, device)
            if not plugin.capturable:
                text = "%s reads tensors on the host: steps with requests that ask for it wait for the device."
                logger.info(text, describe(planned))
        return cls(made)

    def apply_step(self, step: StepInput) -> None:
        """Take what a step says of rows: they are cleared, then taken again."""
        if not self._loaded:
            return
        for row in step.cleared.tolist():
            for name in self._rows.pop(row, ()):
                self._loaded[name].release(row)
        for admit in step.admit:
            if admit.params.processors:
                self._rows[admit.row] = frozenset(admit.params.processors)
            for name, given in admit.params.processors.items():
                processor = self._loaded[name]
                processor.admit(admit.row, params_of(type(processor), given), admit.history, admit.num_prompt)

    def groups(self, rows: Sequence[SampleRow]) -> dict[str, list[int]]:
        """Return which of some rows ask for each processor; empty, and at no cost, where none is served."""
        found: dict[str, list[int]] = {}
        if not self._loaded:
            return found
        for i, row in enumerate(rows):
            for name in row.params.processors:
                found.setdefault(name, []).append(i)
        return {name: found[name] for name in self._loaded if name in found}

    def apply(self, raw: Tensor, groups: Mapping[str, list[int]], at: Tensor, positions: Tensor) -> Tensor:
        """Return a copy of logits `[R, V]`, changed for each processor's rows; device rows are `at` `[R]`."""
        out = raw.clone()
        for name, wanted in groups.items():
            index = upload(wanted, torch.int64, raw.device)
            chosen = out[index]
            self._loaded[name].apply(chosen, LogitsRows(at[index], positions[index]))
            out.index_copy_(0, index, chosen)
        return out

    def drawn(self, ids: Tensor, groups: Mapping[str, list[int]], at: Tensor, positions: Tensor) -> None:
        """Tell them of the tokens `[R]` that were drawn."""
        for name, wanted in groups.items():
            index = upload(wanted, torch.int64, ids.device)
            self._loaded[name].drawn(LogitsRows(at[index], positions[index]), ids[index])


def params_of(plugin: type[LogitsProcessor], given: Mapping[str, Any]) -> Any:
    """Make a processor's `Params` of what a request said, which was checked when it came in."""
    return plugin.Params(**given)
