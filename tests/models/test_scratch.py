"""Memory that a loading thread uses again: never while somebody still reads what lies there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_checkpoint
from packers import METHODS
from quantised_models import loaded, pack_model
from safetensors.torch import save_file
from torch import Tensor

from dovetail.contracts.device import DeviceView
from dovetail.contracts.layers import BuildContext, MatrixSpec, Part
from dovetail.contracts.quantization import Conversion, FileTensor
from dovetail.runtime.checkpoint import weights
from dovetail.runtime.checkpoint.files import Checkpoint, open_checkpoint
from dovetail.runtime.checkpoint.weights import large_first
from dovetail.runtime.kernels.binding import KernelBinder, LoadedSet
from dovetail.sdk.layers.base import Slot
from dovetail.sdk.layers.embedding import LMHead
from dovetail.sdk.layers.linear import PlainLinear
from dovetail.sdk.layers.packed import PackedLinear
from dovetail.sdk.layers.plain import PLAIN
from dovetail.sdk.quantization.scratch import SCRATCH, Scratch
from dovetail_backends.kernels.cpu import CpuKernels

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cleared() -> Iterator[None]:
    """What this thread has given out is none of the next test's."""
    SCRATCH.clear()
    yield
    SCRATCH.clear()


def test_closed_memory_is_the_caller_s() -> None:
    """Outside of loading, each tensor has memory of its own."""
    scratch = Scratch()
    first = scratch.empty((4,), torch.int32, CPU)
    scratch.reuse()
    assert scratch.empty((4,), torch.int32, CPU).data_ptr() != first.data_ptr()


def test_memory_is_given_out_again_when_nobody_reads_it() -> None:
    """Not before; the least that is large enough, and in place of a smaller one where all are too small."""
    scratch = Scratch()
    with scratch.opened(is_open=True):
        small, large = (scratch.empty((size, 4), torch.float32, CPU) for size in (3, 50))
        assert small.data_ptr() != large.data_ptr()
        scratch.reuse()
        assert scratch.empty((6,), torch.bfloat16, CPU).data_ptr() == small.data_ptr()
        assert scratch.empty((25, 4), torch.int64, CPU).data_ptr() == large.data_ptr()
        scratch.reuse()
        scratch.empty((1000,), torch.float32, CPU)
        assert sorted(len(each) for each in scratch._free + scratch._lent) == [48, 4000]
        scratch.awaited.add("x")
        scratch.reuse()
        assert len(scratch._lent) == 1
    assert scratch.joined([torch.ones(2, 3), torch.zeros(1, 3)]).tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]


@pytest.mark.parametrize(("paths", "is_used"), [(("m", "m"), True), (("m", "n"), False), (("", ""), False)])
def test_results_for_several_layers_have_memory_of_their_own(
    paths: tuple[str, str], is_used: bool, tmp_path: Path
) -> None:
    """Another layer's thread may ask for one of them at any time; of one layer's, the first waits for the second."""
    save_file({"x": torch.arange(4.0)}, tmp_path / "model.safetensors")

    def convert(sources: Any) -> dict[str, torch.Tensor]:
        made = {name: SCRATCH.empty((2,), torch.float32, CPU) for name in ("low", "high")}
        return {name: each.copy_(sources["x"][2 * at : 2 * at + 2]) for at, (name, each) in enumerate(made.items())}

    results = tuple(FileTensor(name, "F32", (2,), path) for name, path in zip(("low", "high"), paths, strict=True))
    with Checkpoint(tmp_path, open_checkpoint(tmp_path).headers, [Conversion(("x",), results, convert)]) as checkpoint:
        assert checkpoint.read("low", in_scratch=True).tolist() == [0.0, 1.0]
        SCRATCH.reuse()
        assert len(SCRATCH._lent) == (2 if is_used else 0)
        with SCRATCH.opened(is_open=True):
            SCRATCH.empty((2,), torch.float32, CPU).fill_(7)
        assert checkpoint.read("high", in_scratch=True).tolist() == [2.0, 3.0]
        SCRATCH.reuse()
        assert not SCRATCH._lent


@pytest.mark.sampled
@pytest.mark.parametrize("way", ["nf4", "ct-int4-asymmetric", "awq", "gptq-8", "fp8-blocks", "ct-int8"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_model_is_the_same_in_memory_used_again(
    family: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of matrices of many parts and of experts, however little is computed at a time."""
    make_checkpoint(tmp_path / "plain", family, **({"moe_intermediate_size": 64} if "moe" in family else {}))
    pack_model(tmp_path / "plain", tmp_path / "packed", METHODS[way])
    models = []
    for is_used in (True, False):
        for name in ("forms.LONE_CHUNK", "forms.CHUNK", "words.NUM", "words.LONE_NUM"):
            monkeypatch.setattr(f"dovetail.sdk.quantization.{name}", 200 if is_used else 1 << 30)
        if not is_used:
            monkeypatch.setattr(weights, "SCRATCH", Scratch())  # what is given out is never given out again
        model, _ = loaded(tmp_path / "packed", METHODS[way].plugin)
        models.append(model)
    mine, right = (dict(model.named_parameters()) for model in models)
    assert mine.keys() == right.keys()
    for name, param in mine.items():
        assert torch.equal(param.view(torch.uint8), right[name].view(torch.uint8)), name
    products = [
        layer._packed(torch.randn(3, layer.local_in, generator=torch.Generator().manual_seed(1)))
        for model in models
        for layer in model.modules()
        if isinstance(layer, PackedLinear) and callable(layer._packed)
    ]
    half = len(products) // 2
    assert all(torch.equal(*pair) for pair in zip(products[:half], products[half:], strict=True))


def test_a_layer_says_what_it_keeps_as_it_is() -> None:
    """Of what becomes another layout nothing is copied before: a matrix of parts, and the output head."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no layout for bfloat16 here")
    kernels = KernelBinder([LoadedSet("cpu", "cpu", CpuKernels(), False)], DeviceView("cpu"))
    ctx = BuildContext(device=CPU, dtype=torch.bfloat16, factory=PLAIN, kernels=kernels)
    matrix: Any = ctx.linear("m", 32, (Part("a", 16), Part("b", 16)))
    head = LMHead(16, 32, ctx)
    for layer in (matrix, head):
        assert not layer.holds
        layer.place(next(iter(layer.slots())), torch.zeros(16, 32, dtype=torch.bfloat16))
        assert layer.holds
    matrix.place(Slot("weight", "b"), torch.zeros(16, 32, dtype=torch.bfloat16))
    for layer in (matrix, head):
        layer.finalize()
        assert not layer.holds


def test_of_a_layer_that_does_not_say_so_nothing_is_used_again() -> None:
    """A stranger's class may keep for good what it is given to place, also one that is made of ours."""

    class Kept(PlainLinear):
        def place(self, slot: Slot, tensor: Tensor) -> Tensor | None:
            self.kept = tensor
            return super().place(slot, tensor)

    class Told(Kept):
        def place(self, slot: Slot, tensor: Tensor) -> Tensor | None:
            return PlainLinear.place(self, slot, tensor)

        @property
        def holds(self) -> bool | None:
            return False

    ctx = BuildContext(device=CPU, dtype=torch.float32, factory=PLAIN)
    spec = MatrixSpec(path="m", in_features=32, parts=(Part("a", 16),))
    assert Kept(ctx, spec).holds is None
    assert Told(ctx, spec).holds is False


def test_large_layers_come_first() -> None:
    """So that no thread has the head alone in the end; the others stand as they do in the files."""

    class Header:
        def __init__(self, num_bytes: int) -> None:
            self.num_bytes = num_bytes

    class Move:
        def __init__(self, num_bytes: int) -> None:
            self.header = Header(num_bytes)

    sizes = {"embed": [50], **{f"layer{index}": [3, 2 + index] for index in range(20)}, "head": [60, 1]}
    order, large = large_first({path: [Move(size) for size in each] for path, each in sizes.items()})
    assert large == {"head", "embed"}
    assert order == ["head", "embed", *(f"layer{index}" for index in range(20))]
