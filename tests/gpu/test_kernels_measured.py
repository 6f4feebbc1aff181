"""`--kernels auto` on a GPU: sets that serve one operation are timed in graphs, by the device's clock, and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.contracts.kernels import Ask, Claim, KernelSet, make_ask, meaning
from dovetail.runtime.device.devices import device_of
from dovetail.runtime.kernels.binding import KernelBinder, LoadedSet
from dovetail.runtime.kernels.contest import Trials
from dovetail.sdk.quantization.forms import Int4, Scaled
from dovetail_backends.kernels.triton import TritonKernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "norm": ("rms_norm", {"H": 4096}, {}),
    "product": ("linear", {"N": 6144, "K": 4096}, {}),
    "fused product": ("norm_linear", {"N": 6144, "K": 4096}, {}),
    "int4": ("packed_linear", {"N": 4096, "K": 4096}, {"form": Int4(128)}),
    "fp8": ("packed_linear", {"N": 4096, "K": 4096}, {"form": Scaled(torch.float8_e4m3fn, None)}),
}


class Plain(KernelSet):
    """Serves everything by its meaning, as what graphs can record."""

    devices = frozenset({"cuda"})

    def serves(self, ask: Ask) -> Claim | str:
        return Claim(ask.rows, capturable=True)

    def make(self, ask: Ask) -> Any:
        return meaning(ask)


@pytest.mark.parametrize("case", CASES)
def test_our_kernels_beside_plain_torch(case: str, tmp_path: Path) -> None:
    """Both are timed and agree; the faster has each class of rows, and a later start reads the figures."""
    op, dims, options = CASES[case]
    device = device_of(torch.device("cuda", 0))
    sets = [
        LoadedSet("default", "kernels 'default' of x 1", Plain(), False),
        LoadedSet("triton", "kernels 'triton' of x 1", TritonKernels(), False),
    ]
    trials = Trials.on(device)
    kept = Trials(trials.place, trials.model, trials.clock, tmp_path)
    ask = make_ask(op, device.view, "bfloat16", dims, options, captured=True)

    def bound(trials: Trials) -> Any:
        binder = KernelBinder(sets, device.view, captured=True, trials=lambda: trials)
        binder.bind(ask)
        return next(use for use in binder.table if use.operation == ask.place)

    use = bound(kept)
    print(case, use.served, use.measured)
    assert use.measured.count("triton") == 5, use.others
    if case != "product":  # plain torch's own product is cuBLAS: either may win
        assert use.served[0][2] == "triton"

    def silent(run: Any, is_captured: bool) -> float:
        raise AssertionError("figures are read, not taken anew")

    assert bound(Trials(trials.place, trials.model, silent, tmp_path)) == use
