"""Latent rows with `batch_invariant`: Triton's products of heads and attention between them; on CPU interpreted."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from dovetail.contracts.attention import Phase
from dovetail_backends.torch_native import TorchNativeBackend
from dovetail_backends.triton import TritonBackend
from dovetail_backends.triton.head_products import multiply_heads
from dovetail_testing.conformance.attention_steps import part_of
from dovetail_testing.conformance.attention_world import Case, World, make_backend, make_world

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MADE, VALUE = 24, 20
LATENT: dict[str, Any] = {"latent": True, "num_kv_heads": 1, "head_dim": 40, "v_dim": 32, "scale": 0.3}
LENGTHS = ((7, 1), (70, 1), (0, 9), (0, 33), (13, 4))


@pytest.fixture(autouse=True)
def plain_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter add up products one input after the other, as a matrix instruction does for every output.

    NumPy's library takes other instructions at other places of a matrix, on some processors: see `keeps_bits`.
    """

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        total = np.zeros_like(d.data)
        for k in range(a.data.shape[1]):
            total += a.data[:, k, None] * b.data[None, k]
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("shape", [(3, 16, 32), (5, 70, 100), (1, 8, 24)], ids=str)
def test_a_row_of_heads_has_the_bits_that_it_has_alone(shape: tuple[int, int, int]) -> None:
    """In any number of rows, of weights that lie in either order; what is between tokens is not written."""
    torch.manual_seed(0)
    heads, num_in, num_out = shape
    x = torch.randn(70, heads, num_in + 8, device=DEVICE)[..., :num_in]
    for weight in (torch.randn(shape), torch.randn(heads, num_out, num_in).transpose(1, 2)):
        weight = weight.to(DEVICE)
        whole = torch.full((70, heads, num_out + 8), float("nan"), device=DEVICE)
        multiply_heads(x, weight, whole[..., :num_out])
        want = torch.einsum("tni,nio->tno", x.double(), weight.double()).float()
        torch.testing.assert_close(whole[..., :num_out], want, rtol=1e-4, atol=1e-4)
        assert whole[..., num_out:].isnan().all()
        for num, at in ((1, 0), (1, 66), (17, 3), (64, 5), (0, 9)):
            got = torch.empty(num, heads, num_out, device=DEVICE)
            multiply_heads(x[at : at + num], weight, got)
            assert torch.equal(got, whole[at : at + num, :, :num_out]), (num, at)


class Step:
    """A step over latent rows, with queries of heads; `heads` is the layer's matrix."""

    def __init__(self, world: World, q: Tensor, heads: Tensor) -> None:
        self.world, self.q, self.heads = world, q, heads

    def run(self, backend_class: Any, *, by_backend: bool = True) -> Tensor:
        """Return values of heads `[T, Hq, V]`."""
        world, rank = self.world, self.world.case.value_dim
        backend = make_backend(backend_class, world)
        backend.batch_invariant = True
        world.batch.attention = backend
        queries = self.q.new_full((*self.q.shape[:2], world.case.head_dim), float("nan"))
        queries[..., rank:] = self.q[..., MADE:]
        out = self.q.new_full((*self.q.shape[:2], VALUE), float("nan"))
        if by_backend:
            backend.plan(world.batch, Phase.EAGER)
            backend.plan_in_graph(world.batch)
            backend.write_kv(world.layer, world.k, world.v, world.batch)
            assert backend.forward_latent(self.q, queries, self.heads, world.layer, world.batch, out)
            return out
        to_keys, to_values = self.heads.split([MADE, VALUE], dim=1)
        queries[..., :rank] = torch.einsum("tni,nir->tnr", self.q[..., :MADE], to_keys)
        world.q = queries
        return torch.einsum("tnr,nvr->tnv", world.run(backend), to_values)


def whole_step(lengths: Any, **changes: Any) -> Step:
    """Make a step of whole requests."""
    world = make_world(Case(lengths=lengths, **{**LATENT, **changes}), DEVICE)
    rng, heads = torch.Generator().manual_seed(7), world.case.num_qo_heads
    matrix = torch.randn(heads, MADE + VALUE, world.case.value_dim, generator=rng) * world.case.value_dim**-0.5
    width = MADE + world.case.head_dim - world.case.value_dim
    q = torch.randn(world.batch.num_tokens, heads, width, generator=rng)
    return Step(world, q.to(DEVICE), matrix.to(DEVICE))


@pytest.mark.parametrize(
    "changes", [{}, {"num_qo_heads": 17, "page_size": 3}, {"cache_dtype": "float8_e4m3fn"}], ids=str
)
def test_it_is_the_absorbed_form(changes: dict[str, Any]) -> None:
    """Decode rows and chunks in one call, as products and attention in plain torch."""
    step = whole_step(LENGTHS, **changes)
    got = step.run(TritonBackend)
    torch.testing.assert_close(
        got, whole_step(LENGTHS, **changes).run(TorchNativeBackend, by_backend=False), rtol=1e-3, atol=1e-4
    )
    assert not make_backend(TritonBackend, step.world).forward_latent(
        step.q, step.q, step.heads, step.world.layer, step.world.batch, got
    )


@pytest.mark.parametrize("changes", [{}, {"num_qo_heads": 5, "window": 37}, {"cache_dtype": "int8"}], ids=str)
def test_company_and_chunks_change_no_bit(changes: dict[str, Any]) -> None:
    """Requests alone and beside others, chunks that cut tiles, and each token as a decode row."""
    step = whole_step(LENGTHS, **changes)
    together, start = step.run(TritonBackend), 0
    for number, (cached, new) in enumerate(LENGTHS):
        own = slice(start, start + new)
        alone = Step(part_of(step.world, number, cached, cached + new), step.q[own], step.heads)
        assert torch.equal(alone.run(TritonBackend), together[own]), number
        start += new
    step = whole_step(((0, 150),), **changes)
    want = step.run(TritonBackend)
    for cuts in ((0, 7, 16, 41, 128, 150), (0, 64, 65, 150)):
        for first, end in itertools.pairwise(cuts):
            part = Step(part_of(step.world, 0, first, end), step.q[first:end], step.heads)
            assert torch.equal(part.run(TritonBackend), want[first:end]), (first, end)
    for place in (1, 15, 16, 63, 64, 127, 149):
        part = Step(part_of(step.world, 0, place, place + 1), step.q[place : place + 1], step.heads)
        assert torch.equal(part.run(TritonBackend), want[place : place + 1]), place
