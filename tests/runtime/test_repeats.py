"""Rehearsals go through one of the layers that are alike, and through all that differ."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dovetail.runtime.kernels.repeats import Repeats, alike
from dovetail.sdk.layers.packed import PackedLinear
from dovetail_testing.engine import make_core
from dovetail_testing.models import make_model


@dataclass(frozen=True, slots=True)
class Spec:
    """A layer's number and window."""

    index: int
    window: int = 0


class Layer(nn.Module):
    """Counts its calls; has a number, a path and a window, as layers do."""

    def __init__(self, index: int, window: int = 0, width: int = 4) -> None:
        super().__init__()
        self.spec, self.path = Spec(index, window), f"layers.{index}.mlp"
        self.product = nn.Linear(width, width)
        self.act = partial(torch.clamp, min=float(window))
        self.calls = 0

    def forward(self, x: Tensor, *, rows: list[Tensor]) -> Tensor:
        """One more than what it is given."""
        self.calls += 1
        return x + 1


class Model(nn.Module):
    """Layers, one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"layers": nn.ModuleList(layers)})

    def calls(self, num: int = 3) -> list[int]:
        """Rehearse, and say how often each layer was really called."""
        layers = self.body["layers"]
        with Repeats(self).left_out():
            x = torch.zeros(num, 4)
            for layer in layers:
                x = layer(x, rows=[x])
        return [layer.calls for layer in layers]


def test_one_of_each_kind_is_gone_through() -> None:
    """The first of a kind, the second layer, and each sixteenth, whose number a kernel may be specialised on."""
    windows = [8 if i % 3 == 2 else 0 for i in range(20)]
    calls = Model(*(Layer(i, window) for i, window in enumerate(windows))).calls()
    assert [i for i, num in enumerate(calls) if num] == [0, 1, 2, 16]


def test_short_lists_are_gone_through() -> None:
    """There is nothing to gain."""
    assert Model(*(Layer(i) for i in range(3))).calls() == [1, 1, 1]


def test_layers_are_what_they_were_afterwards() -> None:
    """Also those with a forward pass of their own, and where a rehearsal raises."""
    layers = [Layer(i) for i in range(6)]
    own = layers[5].forward = lambda x, rows: x  # type: ignore[method-assign, assignment]
    model = Model(*layers)
    with pytest.raises(ValueError, match="stumbled"), Repeats(model).left_out():
        raise ValueError("stumbled")
    assert all("forward" not in vars(layer) for layer in layers[:5])
    assert layers[5].forward is own
    x = torch.zeros(1)
    for layer in layers:
        x = layer(x, rows=[])
    assert x.item() == 5


def test_inputs_of_other_shapes_are_no_repetition() -> None:
    """A layer that is given fewer rows than the one that it is like is gone through."""
    layers = [Layer(i) for i in range(5)]
    with Repeats(Model(*layers)).left_out():
        for i, layer in enumerate(layers):
            layer(torch.zeros(2 if i == 3 else 3, 4), rows=[])
    assert [layer.calls for layer in layers] == [1, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (3, 3, True),
        (2, 5, True),  # their numbers
        (5, 2, False),
        (4, 5, False),
        ("layers.2.mlp", "layers.5.mlp", True),
        ("layers.2.mlp", "layers.5.attention", False),
        ("layers.22.mlp", "layers.25.mlp", False),
        (torch.zeros(2, 3), torch.ones(2, 3), True),
        (torch.zeros(2, 3), torch.zeros(3, 2), False),
        (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bfloat16), False),
        (torch.zeros(2, 3), torch.zeros(3, 2).t(), False),
        (torch.zeros(16), torch.zeros(17)[1:], False),  # a kernel is specialised on where memory begins
        (torch.zeros(2, 3).to_sparse(), torch.zeros(2, 3).to_sparse(), False),  # there is no plain memory to look at
        (Spec(2, 7), Spec(5, 7), True),
        (Spec(2, 7), Spec(5, 8), False),
        ({"a": [1, (2.5, None)]}, {"a": [1, (2.5, None)]}, True),
        ({"a": 1}, {"b": 1}, False),
        ([1], [1, 1], False),
        (1, True, False),
        (1, 1.0, False),
        (partial(max, key=len), partial(max, key=len), True),
        (partial(max, key=len), partial(max, key=abs), False),
        ({1, 2}, {1, 2}, True),
        ({1, 2}, {1, 3}, False),
        (torch.device("cpu"), torch.device("cpu"), True),
        (torch.device("cpu"), torch.device("meta"), False),
    ],
    ids=str,
)
def test_what_is_alike(a: Any, b: Any, expected: bool) -> None:
    """Of layers 2 and 5: values of weights and their numbers may differ, nothing else."""
    assert alike(a, b, (2, 5)) is expected


def test_things_that_hold_themselves_or_cannot_be_compared() -> None:
    """Neither goes round for ever nor raises."""

    class Odd:
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("not today")

        __hash__ = None  # type: ignore[assignment]

    a: list[Any] = [1]
    b: list[Any] = [1]
    a.append(a)
    b.append(b)
    assert alike(a, b, (0, 1))
    assert not alike(Odd(), Odd(), (0, 1))


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("architecture", "wanted"),
    [("Qwen3ForCausalLM", [0, 1, 16]), ("Gemma3ForCausalLM", [0, 1, 5, 16]), ("GptOssForCausalLM", [0, 1, 16])],
)
def test_our_layers_are_found_to_be_alike(architecture: str, wanted: list[int], tmp_path: Path) -> None:
    """Those with another window or another kind of MLP are not."""
    folder = make_model(tmp_path, architecture, num_hidden_layers=18)
    core = make_core(folder, max_total_tokens=2048)
    model: Any = core.executor.runner.model
    with Repeats(model).left_out():
        layers = max((one for one in model.modules() if isinstance(one, nn.ModuleList)), key=len)
        replaced = [type(vars(layer).get("forward")).__name__ for layer in layers]
    assert [i for i, name in enumerate(replaced) if name != "_Repeated"] == wanted
    core.close()


def test_what_a_library_has_packed_differs(tmp_path: Path) -> None:
    """On the CPU, bfloat16 weights have no memory that can be looked at: all layers are gone through."""
    folder = make_model(tmp_path, "Qwen3ForCausalLM", num_hidden_layers=5)
    core = make_core(folder, max_total_tokens=2048, dtype="bfloat16")
    model: Any = core.executor.runner.model
    with Repeats(model).left_out():
        replaced = [vars(layer).get("forward") for layer in model.layers]
    packed = [linear._packed for linear in model.modules() if isinstance(linear, PackedLinear)]
    is_packed = any(getattr(one, "layout", torch.strided) != torch.strided for one in packed)
    core.close()
    if not is_packed:
        pytest.skip("this processor's library packs nothing")
    assert replaced == [None] * 5
