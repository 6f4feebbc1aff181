"""Experts that stand in one tensor are converted a few at a time: with the numbers that all have at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_transforms import BLOCKS, of_table
from safetensors.torch import save_file
from test_transforms import NAMES, same, scales, some_bytes
from torch import Tensor

from dovetail.contracts.errors import PluginError
from dovetail.contracts.quantization import Conversion, FileTensor
from dovetail.runtime.checkpoint import files
from dovetail.runtime.checkpoint.files import Checkpoint, open_checkpoint
from dovetail.sdk.quantization import forms as packed_forms
from dovetail_backends.gguf.blocks import BY_NAME
from dovetail_backends.kernels.cpu import CpuKernels
from dovetail_backends.quantization import fp4, fp8, gguf, modules
from dovetail_testing.targets import target_for

E, N, K = 5, 24, 192
TARGET = target_for("bfloat16")


def module(tensors: Mapping[str, Tensor]) -> modules.Module:
    """Return experts in one tensor, with the others of a module."""
    made = {end: FileTensor(f"m{end}", NAMES[t.dtype], tuple(t.shape), "m", K) for end, t in tensors.items()}
    return modules.Module("m", made)


def check(conversion: Conversion, tensors: Mapping[str, Tensor], right: Tensor) -> None:
    """See that two, then three experts are those of the reference, and so are all at once."""
    (result,) = conversion.results
    given = {name: tensors[name.removeprefix("m")] for name in conversion.sources}
    assert conversion.by_expert
    assert result.shape == right.shape
    for some in (slice(0, 2), slice(2, 5), slice(4, 5), slice(0, 5)):
        few = {name: each[some] if name in conversion.by_expert else each for name, each in given.items()}
        made = conversion.convert(few)
        assert list(made) == [result.name]
        same(made[result.name], right[some])


@pytest.mark.sampled
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("is_in_blocks", [False, True])
@pytest.mark.parametrize("stays", [False, True])
def test_mxfp4(turned: bool, is_in_blocks: bool, stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written out, and brought into rows of bytes, as gpt-oss is published and as others write it."""
    packed, powers = some_bytes(E, N, K // 2), some_bytes(E, N, K // 32, seed=1)
    tensors = {"_blocks": packed.view(E, N, -1, 16) if is_in_blocks else packed, "_scales": powers}
    if stays:
        monkeypatch.setattr(CpuKernels, "keeps_packed", lambda _, ask: True)
    rights = [packed, powers]
    if not stays:
        table, scale = torch.tensor(packed_forms.E2M1), torch.exp2(powers.float() - 127)
        rights = [of_table(packed, table, scale, 32, torch.bfloat16, high=False)]
    found = list(fp4.mxfp4(module(tensors), "_blocks", "_scales", TARGET, turned=turned))
    for conversion, right in zip(found, rights, strict=True):
        check(conversion, tensors, right.transpose(-1, -2) if turned else right)


@pytest.mark.parametrize("whole", [(), (1,), (E,), (E, 1)])
def test_nvfp4(whole: tuple[int, ...]) -> None:
    """With one scale for all experts, which each of them needs, or with one for each."""
    packed, eighths = some_bytes(E, N, K // 2), scales(E, N, K // 16).to(torch.float8_e4m3fn)
    tensors = {"": packed, "_scale": eighths, "_scale_2": torch.rand(whole) + 0.5}
    factor = tensors["_scale_2"].expand(E) if len(whole) < 1 or whole == (1,) else tensors["_scale_2"].view(E)
    scale = eighths.float() * factor[:, None, None]
    right = of_table(packed, torch.tensor(packed_forms.E2M1), scale, 16, torch.bfloat16, high=False)
    check(fp4.nvfp4(module(tensors), "", "_scale", "_scale_2", TARGET, divides=False), tensors, right)


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [(E, 2, 2), (E, 2, 1, 2, 1), (E, N, 1), (E, N), (E,), (E, 1), (E, 1, 1)])
@pytest.mark.parametrize("stays", [False, True])
def test_fp8(shape: tuple[int, ...], stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With scales for blocks that do not divide the rows, for rows, and for matrices: written out, or scales alone."""
    weight, block = scales(E, N, K).to(torch.float8_e4m3fn), (16, 96)
    tensors = {"": weight, "_scale": torch.rand(shape) + 0.5}
    if stays:
        monkeypatch.setattr(CpuKernels, "keeps_packed", lambda _, ask: True)
    headers = {each.name: each for each in module(tensors).tensors.values()}
    (conversion,) = fp8.float8(headers, TARGET, block)
    scale = tensors["_scale"]
    if scale.numel() == 4 * E:
        scale = scale.view(E, 2, 2).repeat_interleave(16, 1)[:, :N]
    else:
        scale = scale.view(E, -1, 1).expand(E, N, 1).contiguous()
    wide = scale.repeat_interleave(K // scale.shape[-1], -1)
    check(conversion, tensors, scale if stays else (weight.float() * wide).bfloat16())


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "IQ4_XS"])
def test_gguf(kind: str) -> None:
    """Blocks of any type."""
    block = BY_NAME[kind]
    rows = some_bytes(E, N, 2 * block.size)
    conversion = gguf._written_out(FileTensor("m", kind, tuple(rows.shape), "m", 2 * block.numbers), TARGET)
    check(conversion, {"": rows}, BLOCKS[kind](rows.view(-1, block.size)).view(E, N, -1).bfloat16())


def test_a_matrix_is_made_at_once() -> None:
    """Its first axis counts outputs, and what is computed for one may need another."""
    tensors = {"": some_bytes(N, K // 2), "_scale": some_bytes(N, K // 32)}
    assert not any(each.by_expert for each in fp4.mxfp4(module(tensors), "", "_scale", TARGET))


def opened(folder: Path, by_expert: tuple[str, ...], convert: Any, *shapes: tuple[int, ...]) -> Checkpoint:
    """Return a checkpoint of `x` `[5, 4]` and `y` `[2]` with a conversion of both to tensors of some shapes."""
    save_file({"x": torch.arange(20.0).view(5, 4), "y": torch.tensor([2.0, 3.0])}, folder / "model.safetensors")
    results = tuple(FileTensor(f"r{number}", "F32", shape) for number, shape in enumerate(shapes))
    conversion = Conversion(("x", "y"), results, convert, by_expert=by_expert)
    return Checkpoint(folder, open_checkpoint(folder).headers, [conversion])


@pytest.mark.parametrize(("by_expert", "sizes"), [(("x",), [2, 2, 1]), ((), [5])])
def test_a_conversion_gets_what_it_asks_for(
    by_expert: tuple[str, ...], sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some experts and the whole of other sources; one that says nothing of experts gets all at once, as ever."""
    monkeypatch.setattr(files, "PART_BYTES", 40)
    given = []

    def convert(sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
        given.append(len(sources["x"]))
        assert sources["y"].tolist() == [2.0, 3.0]
        return {"r0": sources["x"] * 2}

    with opened(tmp_path, by_expert, convert, (5, 4)) as checkpoint:
        (header,) = checkpoint.headers
        parts = checkpoint.parts(header)
        made = [checkpoint.read("r0", experts=part) for part in parts]
        for part in parts:
            checkpoint.release(["r0"], part)
    assert given == sizes
    assert torch.equal(torch.cat(made), torch.arange(20.0).view(5, 4) * 2)


@pytest.mark.parametrize(
    ("by_expert", "shapes"),
    [(("z",), [(5, 4)]), (("x", "y"), [(5, 4)]), (("x",), [(4, 5)]), (("x",), [(5, 4), (5,)]), (("x",), [])],
)
def test_what_cannot_be_divided_is_refused(
    by_expert: tuple[str, ...], shapes: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """A source that is none, another number of experts, several results: before anything is read."""
    with pytest.raises(PluginError, match=r"is by expert of .*: possible are sources of its own"):
        opened(tmp_path, by_expert, dict, *shapes)


def test_a_conversion_that_makes_all_experts_of_some_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said that it makes those that it is given."""
    monkeypatch.setattr(files, "PART_BYTES", 40)
    made = {"r0": torch.zeros(5, 4)}
    with (
        opened(tmp_path, ("x",), lambda _: made, (5, 4)) as checkpoint,
        pytest.raises(PluginError, match=r"a conversion of x, y made .*\(5, 4\).* instead of .*\(2, 4\)"),
    ):
        checkpoint.read("r0", experts=checkpoint.parts(checkpoint.headers[0])[0])
