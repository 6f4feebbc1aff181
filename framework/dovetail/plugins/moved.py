"""Where a name of the core stands now that a plugin imports from where it stood: its author is told in the error."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from dovetail.plugins.monkeypatches import CORE

_MISSING = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")
MODULES = {
    "dovetail.cache.quantized": "dovetail.sdk.cache",
    "dovetail.errors": "dovetail.contracts.errors",
    "dovetail.gguf.blocks": "dovetail_backends.gguf.blocks",
    "dovetail.gguf.config": "dovetail_backends.gguf.config",
    "dovetail.gguf.reader": "dovetail_backends.gguf.reader",
    "dovetail.grammar.bits": "dovetail.sdk.masks",
    "dovetail.grammar.spec.expressions": "dovetail.sdk.expressions",
    "dovetail.grammar.spec.formats": "dovetail.sdk.schemas.formats",
    "dovetail.grammar.spec.schema": "dovetail.sdk.schemas.schema",
    "dovetail.grammar.spec.structural": "dovetail.sdk.schemas.structural",
    "dovetail.layers": "dovetail.sdk.layers (packed_forms, scratch and words: dovetail.sdk.quantization)",
    "dovetail.messages.seeds": "dovetail.contracts.seeds",
    "dovetail.plugins.contexts": "dovetail.contracts.hooks",
    "dovetail.runtime.cuda_ranks": "dovetail_backends.devices.cuda_ranks",
    "dovetail.runtime.device.draw_params": "dovetail.sdk.rows",
    "dovetail.runtime.device.row_changes_triton": "dovetail_backends.kernels.triton.row_changes",
    "dovetail.runtime.device.row_fields": "dovetail.sdk.rows",
    "dovetail.runtime.graphs.step_ops": "dovetail.sdk.step",
    "dovetail.runtime.graphs.step_triton": "dovetail_backends.kernels.triton.step",
    "dovetail.runtime.rope_config": "dovetail.sdk.rope_config",
    "dovetail.runtime.sampling.adjust_triton": "dovetail_backends.kernels.triton.adjust",
    "dovetail.runtime.sampling.draw": "dovetail.sdk.draws",
    "dovetail.runtime.sampling.draw_triton": "dovetail_backends.kernels.triton.draw",
    "dovetail.runtime.sampling.mask_ops": "dovetail.sdk.step",
    "dovetail.runtime.sampling.mask_triton": "dovetail_backends.kernels.triton.mask",
    "dovetail.runtime.sampling.random": "dovetail.sdk.random",
    "dovetail.sdk.formats.marker_filter": "dovetail_parsers.families.marker_filter",
    "dovetail.sdk.layers.cpu_products": "dovetail_backends.kernels.cpu_products",
    "dovetail.sdk.layers.cuda_products": "dovetail_backends.kernels.triton.packed_weight",
    "dovetail.sdk.layers.latent": "dovetail_models.latent",
    "dovetail.sdk.layers.ops.endings": "dovetail_backends.kernels.triton.endings",
    "dovetail.sdk.layers.ops.experts": "dovetail_backends.kernels.triton.experts",
    "dovetail.sdk.layers.ops.fixed": "dovetail_backends.kernels.triton.fixed",
    "dovetail.sdk.layers.ops.fused": "dovetail_backends.kernels.triton.products",
    "dovetail.sdk.layers.ops.gemv": "dovetail_backends.kernels.triton.gemv",
    "dovetail.sdk.layers.ops.latent": "dovetail_backends.kernels.triton.latent",
    "dovetail.sdk.layers.ops.nibbles": "dovetail_backends.kernels.triton.nibbles",
    "dovetail.sdk.layers.ops.packed": "dovetail_backends.kernels.triton.packed",
    "dovetail.sdk.layers.ops.packed_experts": "dovetail_backends.kernels.triton.packed_experts",
    "dovetail.sdk.layers.ops.packed_few": "dovetail_backends.kernels.triton.packed_few",
    "dovetail.sdk.layers.ops.packed_halves": "dovetail_backends.kernels.triton.packed_halves",
    "dovetail.sdk.layers.ops.packed_integers": "dovetail_backends.kernels.triton.packed_integers",
    "dovetail.sdk.layers.ops.packed_pairs": "dovetail_backends.kernels.triton.packed_pairs",
    "dovetail.sdk.layers.ops.packed_row": "dovetail_backends.kernels.triton.packed_row",
    "dovetail.sdk.layers.ops.packed_slots": "dovetail_backends.kernels.triton.packed_slots",
    "dovetail.sdk.layers.ops.packed_stacked": "dovetail_backends.kernels.triton.packed_stacked",
    "dovetail.sdk.layers.ops.packed_tiles": "dovetail_backends.kernels.triton.packed_tiles",
    "dovetail.sdk.layers.ops.packed_weight": "dovetail_backends.kernels.triton.packed_weight",
    "dovetail.sdk.layers.ops.packed_wide": "dovetail_backends.kernels.triton.packed_wide",
    "dovetail.sdk.layers.ops.packed_write": "dovetail_backends.kernels.triton.packed_write",
    "dovetail.sdk.layers.ops.pdl": "dovetail_backends.kernels.triton.pdl",
    "dovetail.sdk.layers.ops.peer_push": "dovetail_backends.kernels.triton.peer_push",
    "dovetail.sdk.layers.ops.peer_sum": "dovetail_backends.kernels.triton.peer_sum",
    "dovetail.sdk.layers.ops.route": "dovetail_backends.kernels.triton.route",
    "dovetail.sdk.layers.ops.router": "dovetail_backends.kernels.triton.router",
    "dovetail.sdk.layers.ops.silu": "dovetail_backends.kernels.triton.silu",
    "dovetail.sdk.layers.ops.skinny": "dovetail_backends.kernels.triton.skinny",
    "dovetail.testing": "dovetail_testing",
    "dovetail.sdk.formats.without": "dovetail_parsers.families.marker_filter",
    "dovetail.sdk.schemas.recent": "dovetail.sdk.schemas.lru",
    "dovetail.text.detection.derive": "dovetail.sdk.formats.samples (derive itself: dovetail_parsers.derived.derive)",
    "dovetail.text.json_calls": "dovetail.sdk.formats.json_calls",
    "dovetail.text.parsing.layout": "dovetail.sdk.formats.layout",
    "dovetail.text.parsing.machine": "dovetail.sdk.formats.machine",
    "dovetail.text.parsing.matcher": "dovetail.sdk.formats.matcher",
    "dovetail.text.parsing.output": "dovetail.sdk.formats.output",
    "dovetail.text.parsing.place": "dovetail.sdk.formats.place",
    "dovetail.text.parsing.plain": "dovetail.sdk.formats.plain",
    "dovetail.text.parsing.reply": "dovetail.sdk.formats.reply",
    "dovetail.text.parsing.sections": "dovetail.sdk.formats.sections",
    "dovetail.text.parsing.stop_regex": "dovetail.sdk.formats.stop_regex",
    "dovetail.text.parsing.without": "dovetail_parsers.families.marker_filter",
    "dovetail.text.tokenizer.gguf": "dovetail_backends.gguf.tokenizer",
    "dovetail.text.tool_calls.brace_calls": "dovetail_parsers.families.brace_calls",
    "dovetail.text.tool_calls.call_grammar": "dovetail.sdk.formats.call_grammar",
    "dovetail.text.tool_calls.headed_calls": "dovetail_parsers.families.headed_calls",
    "dovetail.text.tool_calls.json_text": "dovetail.sdk.formats.json_text",
    "dovetail.text.tool_calls.pythonic_calls": "dovetail_parsers.families.pythonic_calls",
    "dovetail.text.tool_calls.reply_grammar": "dovetail.sdk.formats.reply_grammar",
    "dovetail.text.tool_calls.schema_types": "dovetail.sdk.formats.schema_types",
    "dovetail.text.tool_calls.tagged_calls": "dovetail_parsers.families.tagged_calls",
    "dovetail.text.tool_calls.tags": "dovetail.sdk.formats.tags",
}
"""Modules that have moved whole: where plugins may have imported them from, and where each is."""

RENAMED = {
    "dovetail.sdk.expressions.plain.Plain": "PlainExpression",
    "dovetail.sdk.formats.layout.View": "PhaseMarkers",
    "dovetail.sdk.layers.matrix.Stored": "StoredSlice",
    "dovetail.sdk.schemas.references.Target": "ReferencedSchema",
    "dovetail_testing.conformance.kernels.Place": "ClaimedOperation",
}
"""Names that are called otherwise in the module that has them."""

_REPACKS = "bind the operation packed_linear with the form None where is_repacked says so"
REPLACED = {
    "dovetail.sdk.layers.linear.can_prepack": _REPACKS,
    "dovetail.sdk.layers.linear.packed_linear": _REPACKS,
    "dovetail.sdk.layers.linear.prepack": _REPACKS,
    "dovetail.sdk.quantization.forms.stays_packed": "ask Target.keeps, which conversions() is given",
}
"""Names that are gone, with what to do instead."""


def where_now(error: BaseException) -> str:
    """Return the fix for an import that fails as a name or a module has moved, "" for any other error."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is {MODULES[error.name]} now: import it from there" if error.name in MODULES else ""
    found = _MISSING.search(str(error)) if isinstance(error, ImportError) else None
    if found is not None and (new := RENAMED.get(f"{found[2]}.{found[1]}")):
        return f"{found[1]} of {found[2]} is called {new} now"
    if found is not None and (instead := REPLACED.get(f"{found[2]}.{found[1]}")):
        return f"{found[1]} of {found[2]} is gone: {instead}"
    return _name_now(*found.groups()) if found is not None and found[2].partition(".")[0] in CORE else ""


def _name_now(name: str, module: str) -> str:
    """Read sources, without importing them: the room that had the name first, then what plugins stand on."""
    home = re.compile(rf"^(?:class |def ){name}\b|^{name}\b(?::.*)? =", re.MULTILINE)
    for package in (module.rpartition(".")[0] or module, "dovetail.contracts", "dovetail.sdk"):
        spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for file in sorted(Path(folder).rglob("*.py")):
                if home.search(file.read_text(encoding="utf-8")):
                    path = ".".join(file.relative_to(folder).with_suffix("").parts)
                    return f"{name} is in {package}.{path.removesuffix('.__init__')} now: import it from there"
    return ""
