"""The page `reference/quantizations.md`: what each built-in quantisation reads, from the plugins."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points

import torch

from dovetail.base.distribution import DISTRIBUTION
from dovetail.sdk.quantization.forms import Int4, Mxfp4, Scaled
from dovetail_testing.targets import target_for

FORMS = {"int8": Scaled(), "int4": Int4(), "float8_e4m3fn": Scaled(torch.float8_e4m3fn), "mxfp4": Mxfp4()}
SHAPE = (1024, 1024)
HEAD = """\
# Quantisations in figures

What the quantisations of Dovetail read, or make; [Quantised checkpoints](../quantization.md) says how to use them. Bits
are those of a weight in the file, scales included.

"""


def page() -> str:
    """Return the whole page."""
    return HEAD + "\n".join(rows()) + "\n"


def rows() -> Iterator[str]:
    """Yield the rows of the table."""
    yield "| `--quantization` | reads | numbers | bits a weight | in memory on CPU | on CUDA |"
    yield "|---|---|---|---|---|---|"
    for point in sorted(entry_points(group="dovetail.quantizations.v1"), key=lambda point: point.name):
        if point.dist is None or point.dist.name != DISTRIBUTION:
            continue
        for what, numbers, bits in point.load().reads:
            is_made, form = what.startswith("a plain checkpoint"), FORMS.get(numbers)
            kept = [
                "packed" if is_made or (form and target_for("bfloat16", device).keeps(form, SHAPE)) else "written out"
                for device in ("cpu", "cuda")
            ]
            yield f"| `{point.name}` | {what} | {numbers} | {bits:.3g} | {' | '.join(kept)} |"
