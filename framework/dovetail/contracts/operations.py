"""The table of operations that kernel sets may compute: what each takes, gives and means in plain torch.

Importing this module does not import torch. Letters: T rows of a step (tokens), H and F widths, N heads or outputs, K
inputs, D head dim, R rank, V vocabulary size, S device rows, E experts, I width between of an expert, C experts chosen
for each token. Where tokens are folded into states: B requests, C pieces of them, M copies of states, G key heads with
J value heads each, N of these in all (of a norm by groups: N groups), D and W widths of a key and of a value, K taps
and P channels of a convolution. "kept" is the dtype of states, float32 where `--state-dtype` does not say otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class Component(NamedTuple):
    """An operation that another can be put together of.

    Attributes:
        op: Its name.
        dims: Its letters, each with its number, or the letter of the whole that has it; `2F`: twice that of `F`.
        options: Its options.
    """

    op: str
    dims: Mapping[str, str | int]
    options: Mapping[str, Any] = {}


PARTS = "parts"
"""As the meaning of an operation: its composition, of the meanings of its parts."""


class Operation(NamedTuple):
    """A row of `OPS`.

    Attributes:
        name: As an `Ask` names it.
        signature: Operands with their shapes, in order, and what comes back.
        dims: Letters of the shapes that are known when the model is built; an `Ask` holds each.
        meaning: `module:attr` of the function of plain torch that says what it computes, on any device; or `PARTS`.
        options: What else is known then; the meaning takes them as keywords, a kernel has them in its `Ask`.
        may_overwrite: Operands that a claim may say it overwrites.
        changes: Operands that it changes: that is what it is for.
        invariant_meaning: `module:attr` of the meaning where rows must not depend on each other, if it is another
            function.
        composed_of: Operations of which it can be put together, if a set serves one of those and none serves this; or
            `module:attr` of a function that returns them for an `Ask`.
        composition: `module:attr` of the function that does: it takes their kernels, and its options as keywords, and
            returns a kernel.
        is_row_by_row: Where rows must not depend on each other, the meaning is applied to each row by itself on a CPU:
            torch computes the ends of its loops by other instructions. All its operands are by row.
        packs: Its kernel is a `PackedKernel`, which makes what it reads of a stored matrix; its meaning is a class that
            takes the options.
        over_ranks: Each of several ranks calls it, all in one order; a kernel may read memory that ranks share
            (`KernelSet.connect`). Its last operand is the model's `Parallel`, by which its meaning adds up.
        reads_host: Its meaning reads tensors on the host: no graph can record it. Prompts come through it, and where
            rows may not depend on one another, what decodes does, too.
    """

    name: str
    signature: str
    dims: tuple[str, ...]
    meaning: str
    options: tuple[str, ...] = ()
    may_overwrite: frozenset[str] = frozenset()
    changes: frozenset[str] = frozenset()
    invariant_meaning: str = ""
    composed_of: tuple[Component, ...] | str = ()
    composition: str = ""
    is_row_by_row: bool = False
    packs: bool = False
    over_ranks: bool = False
    reads_host: bool = False

    @property
    def operands(self) -> Mapping[str, str]:
        """What `signature` says of each operand behind its name, in order."""
        found = (each.strip().partition(" ") for each in _BETWEEN.split(self.signature.partition(" -> ")[0]))
        return {name: facts for name, _, facts in found}


_BETWEEN = re.compile(r",(?![^\[]*\])")
"""Commas between operands, not within a shape."""
_PLAIN = "dovetail.sdk.layers.ops.reference"
_NORM, _LINEAR = Component("rms_norm", {"H": "K"}), Component("linear", {"N": "N", "K": "K"})
_MIXTURE = "dovetail.sdk.layers.ops.mixture"
_STEP = "dovetail.sdk.step"
_DRAWS = "dovetail.sdk.draws"
_ROWS = "floats [F, S], numbers [N, S]"
_CONV, _DELTA, _SSD, _SCAN = (f"dovetail.sdk.layers.ops.{name}" for name in ("conv", "delta", "ssd", "scan"))
_KDA = "dovetail.sdk.layers.ops.kda"
_SCANNED = (
    "x [T, P], dt [T, P], b [T, D], c [T, D], gate [T, P], a_log [P, D] float32, dt_bias [P] float32, skip [P] float32"
)
_PIECES = "rows [B], starts [B + 1], pieces [B + 1], table [C, 3], saves [C]"

OPS: Mapping[str, Operation] = {
    row.name: row
    for row in (
        Operation("rms_norm", "x [T, H], weight [H], eps -> [T, H]", ("H",), f"{_PLAIN}:rms_norm"),
        Operation(
            "add_rms_norm",
            "x [T, H], residual [T, H], weight [H], eps -> norm of the sum [T, H], sum [T, H]",
            ("H",),
            f"{_PLAIN}:add_rms_norm",
            may_overwrite=frozenset({"x", "residual"}),
            composed_of=(Component("rms_norm", {"H": "H"}),),
            composition=f"{_PLAIN}:added_rms_norm",
        ),
        Operation("wide_rms_norm", "x [T, H], weight [H] float32, eps -> [T, H]", ("H",), f"{_PLAIN}:wide_rms_norm"),
        Operation("layer_norm", "x [T, H], weight [H], bias [H] | None, eps -> [T, H]", ("H",), f"{_PLAIN}:layer_norm"),
        Operation(
            "rotations",
            "positions [T], freqs [D / 2] float32, factor [] or [F] -> cos [T, 1, D], sin [T, 1, D]",
            ("D", "F"),  # F factors: 1, a number, or D / 2, a tensor
            f"{_PLAIN}:rotations",
            options=("dtype",),
        ),
        Operation(
            "norm_rotate",
            "x [T, N, D], weight [N, D] or None, eps, cos [T, 1, D], sin [T, 1, D] -> [T, N, D]",
            ("D",),
            f"{_PLAIN}:norm_rotate",
        ),
        Operation(
            "latent_rows",
            "q [T, N, nope + D], kv_a [T, R + D], weight [R], eps, cos [T, 1, D], sin [T, 1, D] -> "
            "queries [T, N, R + D], rows [T, 1, R + D]",
            ("R", "D"),
            f"{_PLAIN}:latent_rows",
        ),
        Operation(
            "act_and_mul",
            "gate_up [T, 2F] -> [T, F]",
            ("F",),
            f"{_PLAIN}:act_and_mul",
            options=("act",),
            is_row_by_row=True,
        ),
        Operation(
            "linear",
            "x [T, K], weight [N, K], bias [N] | None -> [T, N]",
            ("N", "K"),
            f"{_PLAIN}:linear",
            invariant_meaning="dovetail.sdk.layers.ops.invariant:linear",
        ),
        Operation(
            "wide_linear",
            "x [T, K], weight [N, K], bias [N] | None -> [T, N] float32",
            ("N", "K"),
            f"{_PLAIN}:wide_linear",
            invariant_meaning=f"{_PLAIN}:invariant_wide_linear",
        ),
        Operation(
            "linear_add",
            "x [T, K], weight [N, K], bias [N] | None, residual [T, N] -> [T, N]",
            ("N", "K"),
            f"{_PLAIN}:linear_add",
            may_overwrite=frozenset({"residual"}),
            invariant_meaning=f"{_PLAIN}:invariant_linear_add",
            composed_of=(_LINEAR,),
            composition=f"{_PLAIN}:added_linear",
        ),
        Operation(
            "norm_linear",
            "x [T, K], norm [K], eps, weight [N, K], bias [N] | None -> [T, N]",
            ("N", "K"),
            f"{_PLAIN}:norm_linear",
            composed_of=(_NORM, _LINEAR),
            composition=f"{_PLAIN}:normed_linear",
        ),
        Operation(
            "norm_gate",  # silu
            "x [T, K], norm [K], eps, weight [2F, K], bias [2F] | None -> [T, F]",
            ("F", "K"),
            f"{_PLAIN}:norm_gate",
            composed_of=(
                _NORM,
                Component("linear", {"N": "2F", "K": "K"}),
                Component("act_and_mul", {"F": "F"}, {"act": "silu_and_mul"}),
            ),
            composition=f"{_PLAIN}:normed_gate",
        ),
        Operation(
            "packed_linear",
            "x [T, K], weight packed, bias [N] | None -> [T, N]",
            ("N", "K"),
            f"{_PLAIN}:PlainPacked",
            options=("form",),
            packs=True,
        ),
        Operation(
            "packed_norm_linear",
            "x [T, K], norm [K] | None, eps, weight packed, bias [N] | None, residual [T, N] | None -> [T, N]",
            ("N", "K"),
            PARTS,
            options=("form",),
            composed_of=f"{_PLAIN}:parts_of_norm_linear",
            composition=f"{_PLAIN}:NormedPacked",
            packs=True,
        ),
        Operation(
            "packed_norm_gate",
            "x [T, K], norm [K] | None, eps, weight packed, bias [2F] | None -> [T, F]",
            ("F", "K"),
            PARTS,
            options=("form", "act"),
            composed_of=f"{_PLAIN}:parts_of_norm_gate",
            composition=f"{_PLAIN}:GatedPacked",
            packs=True,
        ),
        Operation(
            "route",
            "logits [T, E], correction [E] float32 | None, scale -> ids [T, C] int64, shares [T, C]",
            (),
            f"{_MIXTURE}:route",
            options=("routing", "dtype"),
            invariant_meaning=f"{_MIXTURE}:route_by_rows",
        ),
        Operation(
            "norm_route",
            "x [T, H], norm [H] | None, eps, weight [E, H], bias [E] | None, correction [E] float32 | None, scale -> "
            "ids [T, C] int64, shares [T, C], normed [T, H]",
            ("H",),
            PARTS,
            options=("routing", "dtype"),
            composed_of=f"{_MIXTURE}:parts_of_norm_route",
            composition=f"{_MIXTURE}:normed_route",
        ),
        Operation(
            "experts",
            "x [T, H], ids [T, C] int64, shares [T, C], gate_up [E, 2I, H], gate_up_bias [E, 2I] | None, "
            "down [E, H, I], down_bias [E, H] | None, residual [T, H] | None -> [T, H]",
            ("E", "H", "I", "C"),
            f"{_MIXTURE}:experts",
            options=("act", "weigh", "first", "total"),
            invariant_meaning=PARTS,
            composed_of=f"{_MIXTURE}:parts_of_experts",
            composition=f"{_MIXTURE}:each_expert",
        ),
        Operation(
            "packed_experts",
            "x [T, H], ids [T, C] int64, shares [T, C], gate_up packed, gate_up_bias [E, 2I] | None, down packed, "
            "down_bias [E, H] | None, residual [T, H] | None -> [T, H]",
            ("E", "H", "I", "C"),
            PARTS,
            options=("forms", "act", "weigh", "first"),
            composed_of=f"{_MIXTURE}:parts_of_packed_experts",
            composition=f"{_MIXTURE}:EachPacked",
            packs=True,
        ),
        Operation(
            "routed_experts",
            "x [T, H], norm [H] | None, eps, weight [E, H], bias [E] | None, correction [E] float32 | None, scale, "
            "gate_up packed, gate_up_bias [E, 2I] | None, down packed, down_bias [E, H] | None, "
            "residual [T, H] | None -> [T, H]",
            ("E", "H", "I", "C"),
            PARTS,
            options=("forms", "act", "weigh", "first", "routing", "dtype"),
            composed_of=f"{_MIXTURE}:parts_of_routed_experts",
            composition=f"{_MIXTURE}:RoutedPacked",
            packs=True,
        ),
        Operation(
            "conv_qkv",  # silu
            "q [T, G, D], k [T, G, D], v [T, G, J W], weight [P, K], bias [P] | None, lens [B], "
            f"{_PIECES}, conv [S, K, P], copies [M, K, P] -> [T, P]",
            ("G", "J", "D", "W", "K"),
            f"{_CONV}:conv_qkv",
            changes=frozenset({"conv", "copies"}),
            invariant_meaning=f"{_CONV}:conv_qkv_by_token",
            reads_host=True,
        ),
        Operation(
            "short_conv_prefill",
            "x [T, P], before [T, P] | None, behind [T, P] | None, weight [P, K], bias [P] | None, lens [B], "
            f"{_PIECES}, conv [S, K, P], copies [M, K, P] -> [T, P]",
            ("P", "K"),
            f"{_CONV}:short_conv_prefill",
            options=("act",),
            changes=frozenset({"conv", "copies"}),
            invariant_meaning=f"{_CONV}:short_conv_prefill_by_token",
            reads_host=True,
        ),
        Operation(
            "short_conv_decode",
            "x [T, P], before [T, P] | None, behind [T, P] | None, weight [P, K], bias [P] | None, rows [T], "
            "positions [T], conv [S, K, P] -> [T, P]",
            ("P", "K"),
            f"{_CONV}:short_conv_decode",
            options=("act",),
            changes=frozenset({"conv"}),
        ),
        Operation(
            "selective_scan_prefill",
            f"{_SCANNED}, {_PIECES}, state [S, P, D] kept, copies [M, P, D] kept -> [T, P]",
            ("P", "D"),
            f"{_SCAN}:selective_scan_prefill",
            changes=frozenset({"state", "copies"}),
            reads_host=True,
        ),
        Operation(
            "selective_scan_decode",
            f"{_SCANNED}, rows [T], state [S, P, D] kept -> [T, P]",
            ("P", "D"),
            f"{_SCAN}:selective_scan_decode",
            changes=frozenset({"state"}),
        ),
        Operation(
            "gdn_prefill",
            "x [T, P], b [T, G, J], a [T, G, J], a_log [N] float32, dt_bias [N] float32, "
            f"{_PIECES}, state [S, N, D, W] kept, copies [M, N, D, W] kept -> [T, N, W]",
            ("G", "J", "D", "W"),
            f"{_DELTA}:gdn_prefill",
            options=("rate",),
            changes=frozenset({"state", "copies"}),
            invariant_meaning=f"{_DELTA}:gdn_prefill_by_token",
            reads_host=True,
        ),
        Operation(
            "gdn_decode",
            "q [T, G, D], k [T, G, D], v [T, G, J W], z [T, G, J W], b [T, G, J], a [T, G, J], rows [T], "
            "positions [T], weight [P, K], a_log [N] float32, dt_bias [N] float32, norm [W], eps, conv [S, K, P], "
            "state [S, N, D, W] kept -> [T, N W]",
            ("G", "J", "D", "W", "K"),
            f"{_DELTA}:gdn_decode",
            options=("rate",),
            changes=frozenset({"conv", "state"}),
        ),
        Operation(
            "kda_prefill",
            "x [T, P], b [T, G], f [T, G, D], a_log [G] float32, dt_bias [G D] float32, "
            f"{_PIECES}, state [S, G, D, W] kept, copies [M, G, D, W] kept -> [T, G, W]",
            ("G", "D", "W"),
            f"{_KDA}:kda_prefill",
            options=("bound",),
            changes=frozenset({"state", "copies"}),
            invariant_meaning=f"{_KDA}:kda_prefill_by_token",
            reads_host=True,
        ),
        Operation(
            "kda_decode",
            "q [T, G, D], k [T, G, D], v [T, G, W], b [T, G], f [T, G, D], rows [T], positions [T], weight [P, K], "
            "a_log [G] float32, dt_bias [G D] float32, conv [S, K, P], state [S, G, D, W] kept -> [T, G, W]",
            ("G", "D", "W", "K"),
            f"{_KDA}:kda_decode",
            options=("bound",),
            changes=frozenset({"conv", "state"}),
        ),
        Operation(
            "gated_rms_norm",
            "x [T, N, W], gate [T, N, W], weight [W], eps -> [T, N W]",
            ("N", "W"),
            f"{_DELTA}:gated_rms_norm",
            options=("act",),
            invariant_meaning=f"{_DELTA}:gated_rms_norm_by_token",
        ),
        Operation(
            "ssd_prefill",
            "x [T, P], dt [T, G, J], a_log [N] float32, dt_bias [N] float32, skip [N] float32, low, high, "
            f"{_PIECES}, state [S, N, D, W] kept, copies [M, N, D, W] kept -> [T, N, W]",
            ("G", "J", "D", "W"),
            f"{_SSD}:ssd_prefill",
            changes=frozenset({"state", "copies"}),
            invariant_meaning=f"{_SSD}:ssd_prefill_by_token",
            reads_host=True,
        ),
        Operation(
            "ssd_decode",
            "q [T, G, D], k [T, G, D], v [T, G, J W], dt [T, G, J], rows [T], positions [T], weight [P, K], "
            "bias [P] | None, a_log [N] float32, dt_bias [N] float32, skip [N] float32, low, high, conv [S, K, P], "
            "state [S, N, D, W] kept -> [T, N, W]",
            ("G", "J", "D", "W", "K"),
            f"{_SSD}:ssd_decode",
            changes=frozenset({"conv", "state"}),
        ),
        Operation(
            "gated_group_norm",  # silu
            "x [T, N, W], gate [T, N, W], weight [N, W] | None, eps -> [T, N W]",
            ("N", "W"),
            f"{_SSD}:gated_group_norm",
            options=("norm_first",),
            invariant_meaning=f"{_SSD}:gated_group_norm_by_token",
        ),
        Operation(
            "sigmoid_gate",
            "x [T, N, D], gate [T, N, D] -> [T, N D]",
            ("N", "D"),
            f"{_DELTA}:sigmoid_gate",
            is_row_by_row=True,
        ),
        Operation(
            "rank_sum",
            "share [T, H], ranks -> [T, H]",
            ("H",),
            f"{_PLAIN}:rank_sum",
            over_ranks=True,
        ),
        Operation(
            "rank_sum_add",
            "share [T, H], value [T, H], ranks -> [T, H]",
            ("H",),
            f"{_PLAIN}:rank_sum_add",
            composed_of=(Component("rank_sum", {"H": "H"}),),
            composition=f"{_PLAIN}:added_rank_sum",
            over_ranks=True,
        ),
        Operation(
            "rank_sum_norm",
            "share [T, H], value [T, H], weight [H], eps, ranks -> norm of the sum [T, H], sum [T, H]",
            ("H",),
            f"{_PLAIN}:rank_sum_norm",
            composed_of=(Component("rank_sum", {"H": "H"}), Component("add_rms_norm", {"H": "H"})),
            composition=f"{_PLAIN}:normed_rank_sum",
            over_ranks=True,
        ),
        Operation(
            "mask_logits",
            "logits [T, V] float32, mask [K, W] int32, rows [K] -> None",
            ("V",),
            f"{_STEP}:mask_logits",
            changes=frozenset({"logits"}),
        ),
        Operation(
            "draw",
            "logits [T, V], greedy [T], temperature [T], top_p [T], min_p [T], top_k [T], seeds [T], positions [T] -> "
            "tokens [T]",
            ("V",),
            f"{_DRAWS}:draw",
            is_row_by_row=True,
        ),
        Operation(
            "draw_plainly",
            f"logits [T, V], greedy [T], rows [T], next_ids [S], seq_lens [S], {_ROWS} -> tokens [T]",
            ("V",),
            f"{_DRAWS}:draw_plainly",
            changes=frozenset({"next_ids"}),
        ),
        Operation(
            "draw_adjusted",
            "logits [T, V], rows [T], lines [T], masks [K, W], next_ids [S], seq_lens [S], "
            f"{_ROWS}, stops [S, A], bias_ids [S, B], bias [S, B], said [N, V], read [N, V], spare -> "
            "tokens [T], told [T, P]",
            ("V",),
            f"{_DRAWS}:draw_adjusted",
            changes=frozenset({"next_ids", "said"}),
        ),
        Operation(
            "begin_step",
            "rows [T], next_ids [S], seq_lens [S], page_table [S, P], page_size, spare -> "
            "tokens [T], positions [T], slots [T], lens [T]",
            (),
            f"{_STEP}:begin_step",
        ),
        Operation(
            "finish_step",
            "logits [T, V], rows [T], lens [T], next_ids [S], seq_lens [S], spare -> tokens [T], non_finite [T]",
            ("V",),
            f"{_STEP}:finish_step",
            changes=frozenset({"next_ids", "seq_lens"}),
        ),
        Operation(
            "check_finite",
            "hidden [T, H], starts [B], non_finite [B] -> None",
            ("H",),
            f"{_STEP}:check_finite",
            changes=frozenset({"non_finite"}),
        ),
        Operation(
            "write_changes",
            f"sent [E], tables [G, S, P], next_ids [S], seq_lens [S], {_ROWS}, num_entries, num_cleared, num_admits -> "
            "None",
            (),
            f"{_STEP}:write_changes",
            changes=frozenset({"tables", "next_ids", "seq_lens", "floats", "numbers"}),
        ),
    )
}
"""Every operation that a set may claim, by name. What it computes is its meaning, to the tolerance of the kit."""
