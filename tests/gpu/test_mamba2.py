"""Mamba 2 on a CUDA device: kernels at the widths of published models against float64, and whole engines in graphs."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from mamba_models import make_mamba
from torch import Tensor

from dovetail.contracts.kernels import Ask, make_ask, meaning
from dovetail.messages import SamplerParams, TokenDelta
from dovetail.runtime.device.devices import device_of
from dovetail_backends.kernels.triton import TritonKernels
from dovetail_testing.conformance.kernels_mixers import MixerRequests, Weights
from dovetail_testing.engine import generate, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
WIDTHS = {"granite": (1, 128, 128, 64), "nemotron": (8, 128, 128, 64), "falcon": (2, 32, 256, 128)}
"""Groups, heads, width of states, width of heads: of Granite-4-H-Small, Nemotron-H-8B, Falcon-H1-34B."""
TAPS, CUDA = 4, torch.device("cuda")
STATE_ERROR, READ_ERROR = 2e-5, {torch.bfloat16: 6e-3, torch.float32: 2e-5}
"""Largest relative error against float64: of a state, which is float32 in every model, and of what tokens read."""
LONG = (1, 63, 64, 65, 127, 128, 129, 1000, 4097)
DENSE: dict[str, Any] = {"num_local_experts": 0}


def ask(op: str, widths: Sequence[int], dtype: torch.dtype, *, invariant: bool = False) -> Ask:
    """The question for an operation at these widths."""
    groups, heads, dim, width = widths
    dims = {"G": groups, "J": heads // groups, "D": dim, "W": width}
    dims |= {"K": TAPS} if op == "ssd_decode" else {}
    name = str(dtype).removeprefix("torch.")
    return make_ask(op, device_of(CUDA).view, name, dims, {}, invariant=invariant, captured=True)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, device="cuda").to(dtype)


def error(found: Tensor, want: Tensor) -> float:
    """Relative, of the whole; NaN is more than any bound."""
    off = float((found.double() - want.double()).norm() / want.double().norm())
    return off if off == off else float("inf")


def by_definition(
    x: Tensor, dt: Tensor, weights: Weights, skip: Tensor, limits: tuple[float, float], state: Tensor
) -> tuple[Tensor, Tensor]:
    """Fold tokens one by one in float64: what they read `[T, N, W]`, and the state `[N, D, W]`."""
    (heads, dim, width), (groups, each) = state.shape, dt.shape[1:]
    q, k, v = x.double().split([groups * dim, groups * dim, heads * width], 1)
    q, k = (one.view(-1, groups, dim).repeat_interleave(each, 1) for one in (q, k))
    step = torch.nn.functional.softplus(dt.flatten(1).double() + weights.dt_bias.double()).clamp(*limits)
    decay = (-weights.a_log.double().exp() * step).exp()
    v, state, reads = v.view(-1, heads, width), state.double(), []
    for at in range(len(x)):
        state = state * decay[at, :, None, None] + torch.einsum("nd,nw->ndw", k[at], v[at] * step[at, :, None])
        reads.append(torch.einsum("nd,ndw->nw", q[at], state) + skip.double()[:, None] * v[at])
    return torch.stack(reads), state


@pytest.mark.parametrize("invariant", [False, True], ids=["pieces", "tokens"])
@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_prompts_are_folded_as_defined(dtype: torch.dtype, name: str, invariant: bool) -> None:
    """Prompts of 1 to 4,097 tokens at once, one begun within a piece, with copies behind every other piece."""
    torch.manual_seed(1)
    groups, heads, dim, width = WIDTHS[name]
    requests = MixerRequests(LONG, [0] * (len(LONG) - 2) + [30, 64], CUDA, len(LONG) + 2)
    num, limits = sum(LONG), (0.0, 0.08) if name == "falcon" else (0.0, math.inf)
    x, dt = draw(num, 2 * groups * dim + heads * width, dtype=dtype), draw(num, groups, heads // groups, dtype=dtype)
    weights, skip = Weights.draw(heads, torch.Generator().manual_seed(2), CUDA), draw(heads)
    state = draw(len(LONG) + 2, heads, dim, width) / 8
    before, copies = state.clone(), torch.full((requests.num_copies, heads, dim, width), float("nan"), device="cuda")
    kernel = TritonKernels().make(ask("ssd_prefill", WIDTHS[name], dtype, invariant=invariant))
    found = kernel(x, dt, *weights, skip, *limits, *requests.plan(), state, copies)
    starts, first = requests.pieces.starts.tolist(), requests.pieces.pieces.tolist()
    worst = {"read": 0.0, "state": 0.0, "copy": 0.0}
    for number, row in enumerate(requests.rows.tolist()):
        own = slice(starts[number], starts[number + 1])
        read, after = by_definition(x[own], dt[own], weights, skip, limits, before[row])
        worst["read"] = max(worst["read"], error(found[own], read))
        worst["state"] = max(worst["state"], error(state[row], after))
        piece = first[number]  # the copy behind a request's first piece, where there is one
        if (copy := int(requests.saves[piece])) >= 0:
            part = slice(starts[number], starts[number] + int(requests.pieces.table[piece, 2]))
            kept = by_definition(x[part], dt[part], weights, skip, limits, before[row])[1]
            worst["copy"] = max(worst["copy"], error(copies[copy], kept))
    print(f"{dtype} {name} {'tokens' if invariant else 'pieces'}: {worst}")
    assert worst["read"] <= READ_ERROR[dtype], worst
    assert max(worst["state"], worst["copy"]) <= STATE_ERROR, worst
    untouched = [row for row in range(len(state)) if row not in requests.rows.tolist()]
    assert torch.equal(state[untouched], before[untouched])


@pytest.mark.parametrize("num", [1, 2, 16, 64, 256])
@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_decoded_tokens_are_folded_as_defined(dtype: torch.dtype, name: str, num: int) -> None:
    """The fused kernel equals its meaning over ten steps, whose states it reads and writes; other rows stay."""
    torch.manual_seed(num)
    groups, heads, dim, width = WIDTHS[name]
    keys, channels = groups * dim, 2 * groups * dim + heads * width
    weight, bias, skip = draw(channels, TAPS, dtype=dtype) / 2, draw(channels, dtype=dtype), draw(heads)
    weights = Weights.draw(heads, torch.Generator().manual_seed(3), CUDA)
    rings, states = draw(num + 3, TAPS, channels, dtype=dtype), draw(num + 3, heads, dim, width) / 8
    want_rings, want_states, at_first = rings.clone(), states.clone(), states.clone()
    question = ask("ssd_decode", WIDTHS[name], dtype)
    kernel, plain = TritonKernels().make(question), meaning(question)
    rows, positions = torch.randperm(num + 3, device="cuda")[:num], torch.randint(0, 999, (num,), device="cuda")
    for _ in range(10):
        made = draw(num, channels + heads, dtype=dtype).split([heads * width, keys, keys, heads], 1)
        v, k, q, dt = (one.unflatten(1, (groups, -1)) for one in made)
        rest = (rows, positions, weight, bias, *weights, skip, 0.0, math.inf)
        got, want = kernel(q, k, v, dt, *rest, rings, states), plain(q, k, v, dt, *rest, want_rings, want_states)
        assert error(got, want) <= READ_ERROR[dtype]
        positions += 1
    assert torch.equal(rings, want_rings)
    assert error(states, want_states) <= (STATE_ERROR if dtype == torch.float32 else 1e-3)
    others = [row for row in range(num + 3) if row not in rows.tolist()]
    assert torch.equal(states[others], at_first[others])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few dense layers whose heads are as wide as published ones."""
    made = tmp_path_factory.mktemp("granite")
    widths = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 2, "mamba_d_state": 128, "hidden_size": 256}
    make_mamba(made, "granitemoehybrid", **DENSE, **widths, max_position_embeddings=8192, head_dim=64,
               initializer_range=0.05)  # fmt: skip
    return made


def prompts_of(num: int) -> list[list[int]]:
    """Prompts of which some begin alike, across pieces."""
    rng = random.Random(5)
    start = [rng.randrange(5, 130) for _ in range(300)]
    return [start[: rng.randrange(300)] + [rng.randrange(5, 130) for _ in range(1 + 9 * i)] for i in range(num)]


def told(deltas: Sequence[TokenDelta]) -> list[float]:
    """Log probabilities of the tokens."""
    return [logprob.logprob for delta in deltas for logprob in delta.logprobs or ()]


def test_an_engine_says_what_one_on_the_cpu_says(folder: Path) -> None:
    """In float32, graphs and cached states: the tokens of plain torch, and its log probabilities to 1e-3."""
    prompts, params = prompts_of(12), SamplerParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    ahead = {"device": "cuda", "disable_compile_ahead": False, "max_running_requests": 12}  # one by one takes minutes
    ways: list[dict[str, Any]] = [
        ahead, {**ahead, "chunked_prefill_size": 128, "max_running_requests": 3}, {**ahead, "batch_invariant": True}
    ]  # fmt: skip
    want = generate(folder, prompts, params, model_impl="dovetail")
    for more in ways:
        got = generate(folder, prompts, params, model_impl="dovetail", **more)
        for mine, other in zip(got, want, strict=True):
            same = next((i for i, (a, b) in enumerate(zip(tokens(mine), tokens(other), strict=True)) if a != b), 24)
            assert same > 12, more  # a near tie may be decided otherwise, not soon
            worst = max(abs(a - b) for a, b in zip(told(mine)[:same], told(other)[:same], strict=True))
            assert worst < 1e-3, (more, worst)


def test_a_reply_has_the_same_bits_in_any_company(folder: Path) -> None:
    """In bfloat16 with `--batch-invariant`: alone, beside 40 others in graphs, in chunks, behind cached states."""
    prompts = prompts_of(40)
    params = SamplerParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=1)
    settings: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "disable_compile_ahead": False,
        "max_running_requests": 40,
        "batch_invariant": True,
        "model_impl": "dovetail",
    }
    together = generate(folder, prompts, params, max_total_tokens=60000, **settings)
    said = [(tokens(one), told(one)) for one in together]
    ways: list[dict[str, Any]] = [
        {"chunked_prefill_size": 96, "max_running_requests": 7, "max_total_tokens": 60000},
        {"disable_cuda_graph": True, "disable_radix_cache": True, "max_total_tokens": 60000},
        {"max_total_tokens": 2560},  # some are retracted
    ]
    for way in ways:
        found = generate(folder, prompts, params, **{**settings, **way})
        assert [tokens(one) for one in found] == [one for one, _ in said], way
        worst = max(abs(a - b) for one, (_, own) in zip(found, said, strict=True)
                    for a, b in zip(told(one), own, strict=True))  # fmt: skip
        assert worst <= 2e-6, (way, worst)  # a graph's kernel adds up a softmax otherwise; logits have the same bits
