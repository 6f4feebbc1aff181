"""Formats of checkpoints with one fault each: the kit names every fault."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.contracts.checkpoint import CheckpointFormat, Listing, TensorHeader
from dovetail.contracts.errors import ModelError
from dovetail_testing import FakeSite, check_class, conformance_class

NAME = "model.raw"
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 32}


def write(self: Any, folder: Path) -> Mapping[str, Tensor]:
    """Eight bytes that count rows of eight numbers, and these."""
    tensor = torch.arange(1.0, 257.0).view(32, 8)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / NAME).write_bytes((32).to_bytes(8, "little") + tensor.numpy().tobytes())
    return {"model.layers.0.a": tensor}


ATTRS: dict[str, Any] = {"write": write, "num_broken": 20}


class Right(CheckpointFormat):
    """Believes no count."""

    @classmethod
    def claims(cls, listing: Listing) -> Sequence[str]:
        return [name for name in listing.names if name == NAME]

    def rows(self) -> int:
        with self.files[0].open("rb") as file:
            return int.from_bytes(file.read(8), "little")

    def headers(self) -> Iterable[TensorHeader]:
        if (rows := self.rows()) * 32 + 8 > self.files[0].stat().st_size:
            raise ModelError(f"{self.files[0]}: says {rows:,} rows; get the file again")
        yield TensorHeader("model.layers.0.a", self.files[0], (rows, 8), "F32", start=8)

    def tensor(self, header: TensorHeader, data: Tensor) -> Tensor:
        return data.view(torch.float32).view(header.shape)


class ClaimsAll(Right):
    @classmethod
    def claims(cls, listing: Listing) -> Sequence[str]:
        return listing.names[:1]


class Rounds(Right):
    def tensor(self, header: TensorHeader, data: Tensor) -> Tensor:
        return super().tensor(header, data).bfloat16().float() + 0.25


class Misnames(Right):
    def headers(self) -> Iterable[TensorHeader]:
        yield from (header._replace(name="model.layers.0.b") for header in super().headers())


class BreaksAtItsHead(Right):
    """Raises what its reading happens to raise."""

    def headers(self) -> Iterable[TensorHeader]:
        if self.rows() != 32:
            raise IndexError("rows")
        return super().headers()


class Allocates(Right):
    """Makes room for what a file claims, within bounds that are no file's."""

    def headers(self) -> Iterable[TensorHeader]:
        bytearray(min(self.rows() * 32, 1 << 27))
        return super().headers()


class Filled(CheckpointFormat):
    is_filled = True

    def fill(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        parameter.random_(0, 100, generator=generator)


class FillsByChance(Filled):
    def fill(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        parameter.random_(0, 100)


class FillsOnes(Filled):
    def fill(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        parameter.fill_(1)


FAULTS = {
    "claims all": (ClaimsAll, "test_it_claims_its_own_alone", "which nobody has written for it"),
    "other numbers": (Rounds, "test_tensors_are_as_written", "is read as another tensor"),
    "another name": (Misnames, "test_tensors_are_as_written", "were written"),
    "an IndexError": (BreaksAtItsHead, "test_a_broken_file_is_read_or_refused", "instead of a ModelError"),
    "room for a claim": (
        Allocates,
        "test_a_broken_file_is_read_or_refused",
        "allocate nothing that a file",
    ),
    "fills by chance": (FillsByChance, "test_it_fills_alike_and_finite", "equal generators give other weights"),
    "fills alike": (FillsOnes, "test_it_fills_alike_and_finite", "are alike"),
}


@pytest.mark.parametrize("plugin", [Right, Filled])
def test_a_right_format_passes(plugin: type[CheckpointFormat]) -> None:
    """The formats that the faults are made from have none."""
    report = check_class(conformance_class("checkpoint", plugin_class=plugin, **ATTRS))
    assert report.passed, report.text()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_kit_names_a_formats_fault(fault: str, caught: Callable[..., None]) -> None:
    """A format with one fault fails the test for it, with a message that names it."""
    plugin, test, message = FAULTS[fault]
    caught("checkpoint", plugin, test, message, select=test, **ATTRS)


@pytest.mark.full
def test_a_format_that_brings_torch_is_named(dovetail_site: FakeSite) -> None:
    """A start asks formats before torch is there."""
    module = "import torch\nfrom dovetail.contracts import CheckpointFormat\nclass Acme(CheckpointFormat):\n    pass\n"
    group = {"dovetail.checkpoints.v1": {"acme": "acme_format:Acme"}}
    dovetail_site.add("acme", "1.0", group, {"acme_format.py": module})
    report = check_class(conformance_class("checkpoint", "acme"), "test_it_is_asked_before_torch_is_there")
    assert "importing acme_format imports torch" in report.text()
