"""Models with recurrent layers and one fault each: the kit names every fault."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from dovetail.contracts.cache import CacheTensor
from dovetail.contracts.config import ModelConfig
from dovetail.sdk.layers.recurrent import State
from dovetail_testing import ModelConformance

EXAMPLE = Path(__file__).parents[3] / "docs/examples/dovetail-recurrent"


def load(name: str) -> Any:
    """Import a file of the example."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


example, reference = load("dovetail_recurrent"), load("recurrent_reference")


class Recurrent(ModelConformance):
    """The kit with the example's reference."""

    configs: ClassVar[Any] = ({},)

    def make_checkpoint(self, folder: Path, **changes: Any) -> Path:
        return reference.write_checkpoint(folder, **changes)  # type: ignore[no-any-return]

    def reference_logits(self, folder: Path, ids: Any) -> Tensor:
        return reference.logits(folder, ids)  # type: ignore[no-any-return]


def folding(fold: Callable[[Any, Tensor, State], tuple[Tensor, State]]) -> type[Any]:
    """Return a model whose recurrent layers fold in another way; the layer is given first."""

    def build(config: ModelConfig, ctx: Any) -> Any:
        model = example.RecurrentModel.build(config, ctx)
        for layer in (layer.attention for layer in model.layers if hasattr(layer.attention, "fold")):
            right = layer.fold
            layer.fold = lambda x, state, layer=layer, right=right: fold((layer, right), x, state)
        return model

    return type("Broken", (example.RecurrentModel,), {"build": staticmethod(build), "__module__": __name__})


def forgets(own: Any, x: Tensor, state: State) -> tuple[Tensor, State]:
    """Begin every piece of a prompt with an empty memory, as if it were the whole."""
    _, right = own
    return right(x, {name: torch.zeros_like(y) for name, y in state.items()} if x.shape[1] > 1 else state)


def never_written(own: Any, x: Tensor, state: State) -> tuple[Tensor, State]:
    """Return the state that was given."""
    _, right = own
    return right(x, state)[0], state


def by_itself(own: Any, x: Tensor, state: State) -> tuple[Tensor, State]:
    """Keep the memory of whoever came last in the layer, and go on with that where a piece is no beginning."""
    layer, right = own
    is_new = not any(bool(y.any()) for y in state.values())
    given = state if is_new or not hasattr(layer, "kept") else layer.kept
    found, after = right(x, given)
    layer.kept = after
    return found, after


class NarrowState(example.RecurrentModel):  # type: ignore[misc, name-defined]
    """Keeps its memory in the dtype of the model, and rounds it."""

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        config = super().config_from_hf(hf)
        layers = []
        for spec in config.layers:
            state = tuple(CacheTensor(t.name, t.shape, "bfloat16") for t in spec.state)
            layers.append(replace(spec, state=state))
        return replace(config, layers=tuple(layers))  # type: ignore[no-any-return]

    @classmethod
    def build(cls, config: ModelConfig, ctx: Any) -> Any:
        def widened(own: Any, x: Tensor, state: State) -> tuple[Tensor, State]:
            return own[1](x, {name: y.float() for name, y in state.items()})  # type: ignore[no-any-return]

        return folding(widened).build(config, ctx)


FAULTS: dict[str, tuple[Any, str, str]] = {
    "forgets between chunks": (folding(forgets), "test_greedy_in_a_mixed_batch", "with chunked prefill: a prompt of"),
    "never writes its state": (
        folding(never_written),
        "test_greedy_in_a_mixed_batch",
        "greedy tokens differ in a mixed",
    ),
    "keeps a state of its own": (
        folding(by_itself),
        "test_a_copied_state_is_gone_on_from",
        "tokens of another request, whose states were copied there, logits are wrong",
    ),
    "rounds its state": (NarrowState, "test_a_copied_state_is_gone_on_from", "logits are wrong (relative error"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_kit_names_the_fault(fault: str, caught: Callable[..., None]) -> None:
    """A model with one fault fails the test for it, with a message that names it."""
    plugin, test, message = FAULTS[fault]
    attrs = {name: vars(Recurrent)[name] for name in ("configs", "make_checkpoint", "reference_logits")}
    caught("model", plugin, test, message, select=test, architecture="RecurrentForCausalLM", **attrs)
