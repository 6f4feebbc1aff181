"""Where a name of the core stands now that a plugin imports from where it stood: its author is told in the error."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from dovetail.plugins.monkeypatches import CORE

_MISSING = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")
_PACKAGES = {
    ("dovetail", "dovetail.base"): (
        "aside config_file distribution forks identity imports log log_json model_files orphans panics process_limits "
        "settings supervisor word_lists word_numbers"
    ),
    ("dovetail.messages", "dovetail.base"): "frames",
    ("dovetail.gguf", "dovetail_backends.gguf"): "blocks config reader",
    ("dovetail.grammar.spec", "dovetail.sdk.schemas"): "formats schema structural",
    ("dovetail.sdk.layers.ops", "dovetail_backends.kernels.triton"): (
        "endings experts fixed gemv latent nibbles packed packed_experts packed_few packed_halves "
        "packed_integers packed_pairs packed_row packed_slots packed_stacked packed_tiles packed_weight "
        "packed_wide packed_write pdl peer_push peer_sum route router silu skinny"
    ),
    ("dovetail.text.parsing", "dovetail.sdk.formats"): (
        "layout machine matcher output place plain reply sections stop_regex"
    ),
    ("dovetail.text.tool_calls", "dovetail.sdk.formats"): "call_grammar json_text reply_grammar schema_types tags",
    ("dovetail.text.tool_calls", "dovetail_parsers.families"): "brace_calls headed_calls pythonic_calls tagged_calls",
}
"""Modules that have gone from one package to another under their names."""
MODULES = {f"{old}.{name}": f"{new}.{name}" for (old, new), names in _PACKAGES.items() for name in names.split()} | {
    "dovetail.cache.quantized": "dovetail.sdk.cache",
    "dovetail.errors": "dovetail.contracts.errors",
    "dovetail.grammar.bits": "dovetail.sdk.masks",
    "dovetail.grammar.spec.expressions": "dovetail.sdk.expressions",
    "dovetail.layers": "dovetail.sdk.layers (packed_forms, scratch and words: dovetail.sdk.quantization)",
    "dovetail.llm": "dovetail.offline.llm (dovetail.LLM)",
    "dovetail.llm_types": "dovetail.offline.types (dovetail.SamplingParams)",
    "dovetail.messages.seeds": "dovetail.contracts.seeds",
    "dovetail.plugin_settings": "dovetail.processing.plugin_settings",
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
    "dovetail.sdk.formats.without": "dovetail_parsers.families.marker_filter",
    "dovetail.sdk.expressions.meaning": "dovetail_grammar.expressions.meaning",
    "dovetail.sdk.expressions.plain": "dovetail_grammar.expressions.plain",
    "dovetail.sdk.expressions.terms": "dovetail_grammar.expressions.terms",
    "dovetail.sdk.expressions.writing": "dovetail_grammar.expressions.writing",
    "dovetail.sdk.layers.cpu_products": "dovetail_backends.kernels.cpu_products",
    "dovetail.sdk.layers.cuda_products": "dovetail_backends.kernels.triton.packed_weight",
    "dovetail.sdk.layers.latent": "dovetail_models.latent",
    "dovetail.sdk.layers.ops.fused": "dovetail_backends.kernels.triton.products",
    "dovetail.sdk.schemas.recent": "dovetail.sdk.schemas.lru",
    "dovetail.testing": "dovetail_testing",
    "dovetail.text.detection.derive": "dovetail.sdk.formats.samples (derive itself: dovetail_parsers.derived.derive)",
    "dovetail.text.json_calls": "dovetail.sdk.formats.json_calls",
    "dovetail.text.parsing.without": "dovetail_parsers.families.marker_filter",
    "dovetail.text.tokenizer.gguf": "dovetail_backends.gguf.tokenizer",
}
"""Modules that have moved whole: where plugins may have imported them from, and where each is."""

RENAMED = {
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
