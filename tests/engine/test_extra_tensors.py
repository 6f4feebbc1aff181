"""A model that keeps tensors of its own beside keys and values, under the same pages, in each of two groups."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest
from example_models import Example, prompt, run

EXAMPLE = Example("two-widths", "TwoWidthsForCausalLM")
MODEL = '''
"""Two widths, and an int32 tensor in which each layer notes the place of every token; it reads back what it may see."""

from dataclasses import replace

import torch
from dovetail_two_widths import TwoWidths

from dovetail.contracts import CacheTensor

NOTES = CacheTensor("notes", (2,), "int32")
SEEN = []


class Noting(TwoWidths):
    architectures = ("NotingForCausalLM",)

    @classmethod
    def config_from_hf(cls, hf):
        config = super().config_from_hf(hf)
        return replace(config, layers=tuple(replace(spec, extra=(NOTES,)) for spec in config.layers))

    @classmethod
    def build(cls, config, ctx):
        model = super().build(config, ctx)
        for layer in model.layers:
            layer.attention.attend = noting(layer.attention, layer.attention.attend)
        return model


def noting(attention, attend):
    def noted(qkv, rope, batch):
        index = attention.layer.index
        own = batch.attention.batch_of(index, batch)
        notes = batch.attention.kv_pool.tensor(index, "notes")
        size = notes.shape[1]
        notes[own.kv_slots // size, own.kv_slots % size] = torch.stack((own.positions, own.positions * 7), 1).int()
        window = attention.layer.sliding_window
        for request, length in enumerate(own.seq_lens_cpu):
            places = torch.arange(length)
            if window is not None:
                places = places[places > length - 1 - window]
            pages = own.page_table[own.rows[request], places // size].long()
            found = notes[pages, places % size]
            SEEN.append((window, bool((found == torch.stack((places, places * 7), 1)).all())))
        return attend(qkv, rope, batch)

    return noted
'''


def test_further_tensors_stand_under_the_same_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written and read through `batch_of` and `KVPool.tensor`, over shared prefixes, chunks and pages given back."""
    folder = EXAMPLE.reference().write_checkpoint(
        tmp_path / "model", architectures=["NotingForCausalLM"], num_hidden_layers=2
    )
    file = tmp_path / "noting.py"
    file.write_text(MODEL)
    examples = Path(__file__).parents[2] / "docs/examples/dovetail-two-widths"
    monkeypatch.syspath_prepend(str(examples))
    monkeypatch.setitem(sys.modules, "dovetail_two_widths", import_module("dovetail_two_widths"))
    core = Example("two-widths", "NotingForCausalLM").make_engine(folder, [file], chunked_prefill_size=16)
    asked = [prompt(60, 1), [*prompt(60, 1)[:50], 3, 4], prompt(9, 2)]
    found = run(core, asked, 12)
    assert found == [EXAMPLE.right(folder, *pair) for pair in zip(asked, found, strict=True)]
    runner = core.executor.runner  # type: ignore[attr-defined]
    seen = runner.model.layers[0].attention.attend.__globals__["SEEN"]
    assert {window for window, _ in seen} == {None, 24}
    assert len(seen) > 50
    assert all(right for _, right in seen)
