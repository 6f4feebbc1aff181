"""One kernel for norm, logits, choice and what experts multiply equals these steps; on CPU in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.contracts.kernels import PLAIN_KERNELS, Kernels
from dovetail.contracts.layers import BuildContext, RMSScale, Stream
from dovetail.contracts.quantization import Stored
from dovetail.runtime.device.devices import device_of
from dovetail.runtime.kernels.binding import KernelBinder, LoadedSet
from dovetail.sdk.layers.moe import MixtureOfExperts, Router
from dovetail.sdk.layers.norm import RMSNorm
from dovetail.sdk.layers.ops import mixture, reference
from dovetail.sdk.layers.packed import PackedFactory
from dovetail.sdk.layers.plain import PLAIN
from dovetail.sdk.layers.routing import Routing
from dovetail.sdk.quantization.forms import Int4, Mxfp4, Scaled
from dovetail_backends.kernels.triton import TritonKernels
from dovetail_backends.kernels.triton import mixture as triton_mixture
from dovetail_backends.kernels.triton.packed_integers import Words, integers
from dovetail_backends.kernels.triton.packed_slots import of_slots
from dovetail_backends.kernels.triton.router import Tile, routed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-5
ROUTINGS = {
    "chosen": Routing(num=11, top_k=4, score="chosen", bias=True),
    "softmax": Routing(num=32, top_k=3, scale=2.5),
    "corrected": Routing(num=12, top_k=4, score="sigmoid", correction=True, groups=3, top_groups=2, is_wide=True),
    "one": Routing(num=1, top_k=1),
}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers on the test device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def router_of(routing: Routing, hidden: int, dtype: torch.dtype) -> Any:
    """A router with random weights."""
    router: Any = Router(routing, hidden, BuildContext(device=DEVICE, dtype=dtype, factory=PLAIN))
    for seed, tensor in enumerate((*router.parameters(), *router.buffers())):
        tensor.data.copy_(random(*tensor.shape, dtype=tensor.dtype, seed=seed))
    return router


def by_steps(router: Any, x: Tensor, rms: RMSScale | None, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and shares by number of the expert, and normed tokens, in plain torch."""
    rows = x if rms is None else reference.rms_norm(x, rms.weight, rms.eps)
    linear = reference.wide_linear if router.routing.is_wide else reference.linear
    logits = linear(rows, router.weight, router.bias)
    ids, shares = mixture.route(logits, router.correction, scale, routing=router.routing, dtype=x.dtype)
    order = ids.argsort()
    return ids.gather(1, order), shares.gather(1, order), rows


@pytest.mark.sampled
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize(
    ("tokens", "hidden", "tile"), [(1, 200, None), (3, 70, (2, 32, 4)), (8, 64, (4, 16, 1)), (64, 8, None)]
)
@pytest.mark.parametrize("has_norm", [True, False])
def test_one_kernel_equals_the_steps(name: str, tokens: int, hidden: int, tile: Tile | None, has_norm: bool) -> None:
    """Whatever the tile and the routing, twice in a row: what is counted begins at zero again."""
    routing = ROUTINGS[name]
    router = router_of(routing, hidden, torch.float32)
    rms = RMSScale(random(hidden, seed=5), EPS) if has_norm else None
    x = random(tokens, hidden + 8, seed=9)[:, :hidden]  # rows with something between them
    want_ids, want, rows = by_steps(router, x, rms, 0.5)
    for _ in range(2):
        found = routed(
            x, rms, router.weight, router.bias, router.correction, routing, scale=0.5, tile=tile
        )  # fmt: skip
        assert isinstance(found.rows, Tensor)
        order = found.ids.argsort()
        assert found.ids.gather(1, order).tolist() == want_ids.tolist()
        torch.testing.assert_close(found.shares.gather(1, order), want, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found.rows, rows, atol=1e-5, rtol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("words", [Words("mxfp4", True), Words("int4", True), Words("int4", False)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [64, 200, 1100])
def test_tokens_become_the_integers_of_their_norm(words: Words, dtype: torch.dtype, hidden: int) -> None:
    """Bit by bit those that a kernel of its own makes, with a norm and without."""
    router, x = router_of(ROUTINGS["softmax"], hidden, dtype), random(3, hidden, seed=1, dtype=dtype)
    norm = random(hidden, seed=2, dtype=dtype)
    for rms in (None, RMSScale(norm, EPS)):
        found = routed(x, rms, router.weight, None, None, router.routing, scale=1.0, words=words)
        want = integers(x, words.kind, None if rms is None else norm, EPS, is_halved=words.is_halved)
        assert not isinstance(found.rows, Tensor)
        assert torch.equal(found.rows.scale, want.scale)
        if rms is None:
            assert torch.equal(found.rows.pairs, want.pairs)
            assert torch.equal(found.rows.sums, want.sums)
        else:  # squares are added up in another order
            low, high = (found.rows.pairs << 16) >> 16, found.rows.pairs >> 16
            want_low, want_high = (want.pairs << 16) >> 16, want.pairs >> 16
            assert (low - want_low).abs().max() <= 256
            assert (high - want_high).abs().max() <= 256


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_token_of_nan_chooses_experts_that_exist() -> None:
    """Another one beside it is as if alone."""
    router, x = router_of(ROUTINGS["chosen"], 70, torch.float32), random(2, 70, seed=3)
    alone = routed(x[1:], None, router.weight, router.bias, None, router.routing, scale=1.0)
    x[0, 4] = float("nan")
    found = routed(x, None, router.weight, router.bias, None, router.routing, scale=1.0)
    assert bool(((found.ids >= 0) & (found.ids < 11)).all())
    assert torch.equal(found.ids[1:], alone.ids)
    assert torch.equal(found.shares[1:], alone.shares)


class Config:
    """What a mixture reads of a model's configuration."""

    hidden_size, hidden_act = 64, "silu"


@pytest.mark.first(2)
@pytest.mark.sampled
@pytest.mark.parametrize("form", [Mxfp4(), Int4(32), Scaled(torch.float8_e4m3fn)], ids=str)
@pytest.mark.parametrize(("tokens", "shared"), [(1, 0), (5, 0), (2, 32)])
@pytest.mark.parametrize("is_added", [True, False])
def test_a_mixture_in_kernels_equals_one_without(
    form: Any, tokens: int, shared: int, is_added: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norm, router and packed experts, with biases and a clamped gate, onto the stream or not, and a shared expert.

    The router's kernel makes integers of the tokens where experts multiply by words.
    """
    given: list[Any] = []

    def noting(*args: Any, **options: Any) -> Tensor:
        given.append(options["given"])
        return of_slots(*args, **options)

    monkeypatch.setattr(triton_mixture, "of_slots", noting)
    dtype = torch.float16
    routing = Routing(num=6, top_k=3, score="chosen", bias=True)
    config: Any = Config
    x = random(tokens, 64, seed=20, dtype=dtype)

    def output(kernels: Kernels) -> Tensor:
        factory = PackedFactory(Stored({}, is_known=False), PLAIN, None, form)
        ctx = BuildContext(device=DEVICE, dtype=dtype, factory=factory, kernels=kernels)
        moe: Any = MixtureOfExperts(
            config, ctx, routing, 96, shared_inner=shared, act="clamped_silu_and_mul", bias=True
        )  # fmt: skip
        norm: Any = RMSNorm(64, EPS, ctx)
        for seed, (name, param) in enumerate([*moe.named_parameters(), ("norm", norm.weight)]):
            if "experts" not in name or name.endswith("bias"):
                param.data.copy_(random(*param.shape, seed=seed) / (1 if name == "norm" else 8))
        for seed, matrix in enumerate((moe.experts.gate_up, moe.experts.down)):
            shape = (6, matrix.local_out, matrix.local_in)
            for name, tensor in form.quantise(random(*shape, seed=seed) / 4).items():
                matrix.get_parameter(name).data.copy_(tensor)
            matrix.finalize()
        stream = Stream(x.clone())
        found = moe(stream, norm=norm, add=stream if is_added else None, scale=1.0)
        return found.total() if isinstance(found, Stream) else found

    sets = [LoadedSet("triton", "triton", TritonKernels(), True)]
    found, want = output(KernelBinder(sets, device_of(DEVICE).view)), output(PLAIN_KERNELS)
    assert (found.float() - want.float()).norm() <= 5e-3 * want.float().norm()
    assert [one is not None for one in given] == ([] if shared or isinstance(form, Scaled) else [True])
