"""Images beside text on a CUDA device: captured steps, eager ones and transformers' model; bits in any company."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from families import SECTIONS
from logprobs_of import assert_same, entries
from seeing import TURNS, Prompts, make_vl, picture, reference
from test_seeing_invariant import asked

from dovetail.messages import SamplerParams, Submit
from dovetail_testing.engine import make_core, serve

pytestmark = pytest.mark.gpu
WIDE = {
    **{"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 64, "initializer_range": 0.05},
}
"""Heads as kernels of GPUs have them."""
SHAPES: dict[str, Any] = {
    "qwen2_5_vl": {"rope_parameters": {**SECTIONS["rope_parameters"], "mrope_section": [8, 12, 12]}},
    "qwen3_vl": {"rope_parameters": {**TURNS["rope_parameters"], "mrope_section": [12, 10, 10]}},
}
LAST_BIT = 2e-6
"""Of a log probability: see `test_batch_invariance`."""
EACH: list[list[Any]] = [
    [[3, 9, 14], picture(91, 57), [7, 8]],
    [[5, 6, 7, 8] * 9],
    [picture(57, 200), [9]],
    [[11, 12, 13] * 20],
    [[4], picture(28, 28), [9, 9], picture(143, 143, seed=1)],
    [[21, 22]],
    [picture(200, 31), [33, 34], picture(91, 57)],
    [[23, 24, 25, 26] * 30],
]


@pytest.fixture(scope="module", autouse=True)
def exact() -> Iterator[None]:
    """No tf32: comparisons are in full float32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def run(folder: Path, submits: list[Submit], device: str, **settings: Any) -> tuple[list[Any], int, int]:
    """Serve at most 3 at a time; returns each reply's entries, and the steps that replayed decodes and prompts."""
    more: dict[str, Any] = {"wait_for_kernels": True} if device == "cuda" else {}
    core = make_core(
        folder, device=device, dtype="float32", max_running_requests=3, chunked_prefill_size=64, **more, **settings
    )
    replays = [0, 0]
    launch = core.executor.launch

    def counted(step: Any) -> Any:
        replays[0] += step.decode_graph is not None
        replays[1] += step.prefill_graph is not None
        assert step.prefill_graph is None or not any(admit.media for admit in step.admit)
        return launch(step)

    core.executor.launch = counted  # type: ignore[method-assign]
    found: list[list[Any]] = [[] for _ in submits]
    for handle, submit in enumerate(submits):
        core.handle(msgspec.structs.replace(submit, handle=handle))
    while core.has_work:
        for delta in core.step().deltas:
            found[delta.handle].append(delta)
    core.close()
    return [entries(deltas) for deltas in found], replays[0], replays[1]


def check(kind: str, path: Path, device: str) -> tuple[int, int]:
    """Compare both with each other and with transformers; returns the replays."""
    model = make_vl(path / "model", kind, **WIDE, **SHAPES[kind])
    prompts = Prompts(path / "model", path / "files")
    params = SamplerParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=3)
    submits = [msgspec.structs.replace(prompts.submit(parts), params=params) for parts in EACH]
    captured, decodes, chunks = run(path / "model", submits, device)
    eager, none, nothing = run(path / "model", submits, device, disable_cuda_graph=True)
    assert (none, nothing) == (0, 0)
    for parts, submit, mine, other in zip(EACH, submits, captured, eager, strict=True):
        ids = [entry.token_id for entry in mine]
        assert ids == [entry.token_id for entry in other] == reference(model, parts, submit, 24)
        for one, two in zip(mine, other, strict=True):
            assert one.logprob == pytest.approx(two.logprob, abs=1e-4), (kind, len(parts), one, two)
    return decodes, chunks


@pytest.mark.parametrize("kind", SHAPES)
def test_captured_steps_are_the_eager_ones(kind: str, tmp_path: Path) -> None:
    """Image and text rows decode in one graph; prompts of text are captured beside images, which run eagerly."""
    decodes, chunks = check(kind, tmp_path, "cuda")
    assert decodes > 20
    assert chunks > 0


def check_company(kind: str, path: Path, **settings: Any) -> None:
    """Compare replies with `--batch-invariant`: together, in chunks beside few, and one by one without graphs."""
    make_vl(path / "model", kind, **WIDE, **SHAPES.get(kind, {}))
    submits = asked(Prompts(path / "model", path / "files"))
    on = {"batch_invariant": True, "dtype": "bfloat16", **settings}
    together = serve(path / "model", submits, **on)
    few = serve(path / "model", submits, chunked_prefill_size=23, max_running_requests=2, **on)
    assert_same(few, together, atol=LAST_BIT)
    eager: dict[str, Any] = {"disable_cuda_graph": True, "disable_radix_cache": True, "max_running_requests": 1}
    assert_same(serve(path / "model", submits, **eager, **on), together, atol=LAST_BIT)


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_a_request_with_images_is_the_same_in_any_company(kind: str, tmp_path: Path) -> None:
    """Gemma, whose images see both ways, and a model whose images do not; text beside them, too."""
    check_company(kind, tmp_path, device="cuda", disable_compile_ahead=False)
