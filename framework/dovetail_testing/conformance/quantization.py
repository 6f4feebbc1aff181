"""What every quantisation must do: multiply as the weights that its checkpoints stand for, in every part and rank.

T tokens, K inputs, N outputs, E experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from dovetail.checkpoint.formats import Formats
from dovetail.contracts.errors import ModelError
from dovetail.contracts.layers import BuildContext, LayerFactory, Parallel, Part, Stream
from dovetail.contracts.model import WeightRule
from dovetail.contracts.quantization import Quantization, Stored
from dovetail.runtime.checkpoint.files import Checkpoint, open_checkpoint
from dovetail.runtime.checkpoint.quantization import Widths, convert, made_by, stored_tensors
from dovetail.runtime.checkpoint.weights import fill, load_weights
from dovetail.sdk.layers.norm import RMSNorm
from dovetail.sdk.layers.plain import PLAIN
from dovetail_testing.checks import check, fail, no_error
from dovetail_testing.conformance.base import Conformance
from dovetail_testing.targets import target_for

TOKENS = (1, 2, 9, 65)
PARTS = (Part("q", 96, unit=16), Part("k", 32, unit=16), Part("v", 32, unit=16))
LOUD = {"q": 1.0, "k": 50.0, "v": 0.02}
"""Magnitudes so far apart that one scale for all parts would show."""
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03}


class ModuleHolder(nn.Module):
    """A model of one matrix, or of one set of experts."""

    def __init__(self, ctx: BuildContext, make: Any) -> None:
        super().__init__()
        self.m: Any = make(ctx)


class QuantizationConformance(Conformance):
    """What every quantisation must do. The kit packs weights with `pack`, and compares with what `unpack` gives.

    Attributes:
        config: A `quantization_config` of `config.json` that the plugin reads.
        has_experts: It reads experts, too; else it must refuse them.
        inner: Width between an expert's two matrices, where a format cannot have 48 inputs; 64 without experts.
        stays_packed: Its matrices stay packed on CPU; else they are written out while they are read.
        quantises: It takes checkpoints without a `quantization_config`, and quantises them while they load.
    """

    kind = "quantization"
    config: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    has_experts: ClassVar[bool] = True
    inner: ClassVar[int] = 48
    stays_packed: ClassVar[bool] = True
    quantises: ClassVar[bool] = False

    def pack(self, weight: Tensor) -> Mapping[str, Tensor]:
        """Return the tensors that a checkpoint has for a matrix `[N, K]`, by suffix (`.weight`, `.weight_scale`)."""
        pytest.skip("how a checkpoint packs weights is not said: write pack(weight) and unpack(tensors)")

    def unpack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the weight `[N, K]` float32 that the tensors of `pack` stand for: the reference."""
        pytest.skip("what packed weights stand for is not said: write unpack(tensors)")

    @pytest.fixture(autouse=True)
    def _inference(self) -> Iterator[None]:
        """As an engine computes."""
        with torch.inference_mode():
            yield

    # The standard tests.

    def test_says_which_checkpoints_it_reads(self) -> None:
        """`why_not` takes its own configuration, answers every other one with a sentence, and never raises."""
        plugin: type[Quantization] = self.plugin()
        self._need_config()
        reason = plugin.why_not(self.config)
        check(reason is None, f"it does not read its own config: {reason}")
        for other in self._other_configs():
            with no_error("why_not", f" for {other}"):
                reason = plugin.why_not(other)
            check(reason is None or bool(reason), f"why_not gave {reason!r} for {other}: a sentence or None")
        check(not self.quantises or plugin.why_not({}) is None, "quantises is True, and why_not refuses {}")
        for other in ({}, {"quant_method": "nobody-reads-this"})[self.quantises :]:
            check(plugin.why_not(other) is not None, f"why_not takes {other}, which is not its format")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_product_equals_the_unpacked_weight(self, dtype: torch.dtype, tmp_path: Path) -> None:
        """With and without bias, norm, activation, addition and factor, from 1 to 65 tokens, as the plain matrix."""
        cases = itertools.product((False, True), (None, "silu_and_mul"), (False, True))
        for number, (bias, act, has_norm) in enumerate(cases):
            parts = (Part("gate", 64), Part("up", 64)) if act else (Part("", 80),)
            tensors, plain = self._checkpoint(parts, 96, bias=bias)
            mine = self._load(tmp_path / f"q{number}", tensors, parts, 96, dtype, bias=bias, act=act)
            right = self._load(tmp_path / f"p{number}", plain, parts, 96, dtype, bias=bias, act=act, factory=PLAIN)
            norm = self._norm(96, dtype) if has_norm else None
            for tokens in TOKENS:
                x = torch.randn(tokens, 96, generator=torch.Generator().manual_seed(tokens)).to(dtype)
                what = f"{tokens} tokens, bias {bias}, act {act}, norm {norm is not None}"
                self._same(mine(x, norm=norm), right(x, norm=norm), dtype, what)
                self._same(mine(Stream(x.clone()), norm=norm, scale=0.5), right(x, norm=norm) * 0.5, dtype, what)
                base = torch.ones(tokens, 64 if act else 80, dtype=dtype)
                added = mine(x, norm=norm, add=Stream(base.clone()))
                self._same(added.total(), base + right(x, norm=norm), dtype, f"{what}, added to a stream")

    def test_parts_keep_their_own_scales(self, tmp_path: Path) -> None:
        """Projections of very different size that are fused into one matrix each keep their precision."""
        tensors, plain = self._checkpoint(PARTS, 64)
        mine = self._load(tmp_path / "q", tensors, PARTS, 64, torch.float32)
        right = self._load(tmp_path / "p", plain, PARTS, 64, torch.float32, factory=PLAIN)
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
        got, want, start = mine(x), right(x), 0
        for part in PARTS:
            rows = slice(start, start + part.width)
            self._same(got[:, rows], want[:, rows], torch.float32, f"part {part.name} of a fused matrix")
            start += part.width

    def test_matrices_that_are_not_quantised_are_plain(self, tmp_path: Path) -> None:
        """What the checkpoint stores in the model's dtype is served so, beside what it packs."""
        _, plain = self._checkpoint((Part("", 48),), 64, bias=True)
        mine = self._load(tmp_path / "q", plain, (Part("", 48),), 64, torch.float32, bias=True)
        x = torch.randn(5, 64)
        want = F.linear(x, plain["m.weight"], plain["m.bias"])
        self._same(mine(x), want, torch.float32, "a matrix that the checkpoint does not pack")

    @pytest.mark.parametrize("shard", ["out", "in"])
    def test_ranks_add_up(self, shard: Literal["out", "in"], tmp_path: Path) -> None:
        """Two ranks together give what one gives, or the cut is refused with the matrix's name."""
        tensors, plain = self._checkpoint(PARTS, 128, bias=True)
        right = self._load(tmp_path / "p", plain, PARTS, 128, torch.float32, bias=True, factory=PLAIN)
        x = torch.randn(7, 128, generator=torch.Generator().manual_seed(2))
        got = []
        for rank in range(2):
            parallel = Parallel(rank=rank, size=2, all_reduce=lambda share: share)
            try:
                mine = self._load(
                    tmp_path / f"q{rank}", tensors, PARTS, 128, torch.float32, bias=True, shard=shard, parallel=parallel
                )
            except ModelError as error:
                check(str(error).startswith("m:"), f"a cut is refused without the matrix's name: {error}")
                return
            got.append(mine(x if shard == "out" else x[:, 64 * rank : 64 * rank + 64]))
        want = right(x)
        if shard == "in":
            self._same(got[0] + got[1], want, torch.float32, "the sum of two ranks' shares")
            return
        for rank, start in itertools.product(range(2), (0,)):
            mine_at = 0
            for part in PARTS:
                half = part.width // 2
                rows = slice(start + rank * half, start + rank * half + half)
                got_rows = got[rank][:, mine_at : mine_at + half]
                self._same(got_rows, want[:, rows], torch.float32, f"part {part.name} of rank {rank} of two")
                start, mine_at = start + part.width, mine_at + half

    def test_experts(self, tmp_path: Path) -> None:
        """Packed experts compute what their unpacked weights do, or are refused by name."""
        tensors, plain = self._expert_checkpoint(num=3, hidden=64, inner=self._inner())
        try:
            mine = self._load_experts(tmp_path / "q", tensors)
        except ModelError as error:
            check(not self.has_experts and str(error).startswith("m"), f"experts are refused: {error}")
            return
        check(self.has_experts, "it makes experts although has_experts is False")
        right = self._load_experts(tmp_path / "p", plain, PLAIN)
        x = torch.randn(9, 64, generator=torch.Generator().manual_seed(3))
        ids = torch.tensor([[i % 3, (i + 1) % 3] for i in range(9)])
        weights = torch.rand(9, 2, generator=torch.Generator().manual_seed(4))
        self._same(mine(x, ids, weights), right(x, ids, weights), torch.float32, "experts")

    def test_weights_stay_packed(self, tmp_path: Path) -> None:
        """Once loaded, a matrix takes the memory of its stored tensors and not that of a copy written out."""
        if not self.stays_packed:
            pytest.skip("stays_packed is False: its matrices are written out while they are read")
        parts = (Part("", 512),)
        tensors, _ = self._checkpoint(parts, 512)
        mine = self._load(tmp_path, tensors, parts, 512, torch.float32)
        kept = sum(t.numel() * t.element_size() for t in (*mine.parameters(), *mine.buffers()))
        kept += sum(t.numel() * t.element_size() for t in vars(mine).values() if isinstance(t, Tensor))
        stored = sum(t.numel() * t.element_size() for t in tensors.values())
        check(kept <= 1.25 * stored, f"{stored:,} bytes are stored for a matrix, and {kept:,} are kept")

    def test_works_without_a_checkpoint(self) -> None:
        """With `--load-format dummy` matrices are made, filled, and give finite numbers."""
        self._need_config()
        made = made_by(self.plugin(), self.config, Stored({}, is_known=False))
        ctx = BuildContext(device=CPU, dtype=torch.float32, factory=made)
        holder = ModuleHolder(ctx, lambda at: at.linear("m", 64, PARTS))
        filler = Formats.installed("dummy").filler()
        if filler is None:
            fail("dummy makes no weights up")
        fill(holder, filler)
        y = holder.m(torch.randn(4, 64))
        check(tuple(y.shape) == (4, 160), f"a matrix [160, 64] gives {tuple(y.shape)} for 4 tokens")
        check(bool(y.isfinite().all()), "a dummy matrix gives numbers that are not finite")

    # Helpers.

    def _need_config(self) -> None:
        if not self.config:
            pytest.skip("no configuration is given: config = {…}")

    def _other_configs(self) -> Iterator[Mapping[str, Any]]:
        """The plugin's configuration with each key gone, null, or of a wrong type, two levels deep."""
        for key in self.config:
            yield {name: value for name, value in self.config.items() if name != key}
            for wrong in (None, 3, "x", [], {}, [1], {"x": 1}):
                yield {**self.config, key: wrong}
            if isinstance(inner := self.config[key], Mapping):
                for name in inner:
                    for wrong in (None, 3, "x", [], {}):
                        yield {**self.config, key: {**inner, name: wrong}}

    def _weight(self, name: str, num_out: int, num_in: int) -> Tensor:
        generator = torch.Generator().manual_seed(sum(map(ord, name)) + num_out)
        return torch.randn(num_out, num_in, generator=generator) * 0.1 * LOUD.get(name, 1.0)

    def _checkpoint(
        self, parts: Sequence[Part], num_in: int, *, bias: bool = False
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """A packed matrix, and the same written out."""
        packed: dict[str, Tensor] = {}
        plain: dict[str, Tensor] = {}
        for part in parts:
            name = f"m.{part.name}".rstrip(".")
            tensors = dict(self.pack(self._weight(part.name, part.width, num_in)))
            packed |= {name + suffix: tensor.contiguous() for suffix, tensor in tensors.items()}
            plain[f"{name}.weight"] = self.unpack(tensors).float().contiguous()
            if bias:
                packed[f"{name}.bias"] = plain[f"{name}.bias"] = torch.randn(part.width)
        return packed, plain

    def _expert_checkpoint(self, num: int, hidden: int, inner: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        packed: dict[str, Tensor] = {}
        plain: dict[str, Tensor] = {}
        for expert, (name, rows, columns) in itertools.product(
            range(num), (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner))
        ):
            tensors = dict(self.pack(self._weight(f"{name}{expert}", rows, columns) * (expert + 1)))
            packed |= {f"m.{expert}.{name}{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
            plain[f"m.{expert}.{name}.weight"] = self.unpack(tensors).float().contiguous()
        return packed, plain

    def _read(
        self, folder: Path, rules: Sequence[WeightRule], matrices: Mapping[str, int], dtype: torch.dtype
    ) -> tuple[Checkpoint, LayerFactory]:
        """What the plugin has read of a checkpoint, and what it makes of that, as the runner asks it."""
        widths = Widths(matrices, biased=matrices.keys())
        read = convert(
            open_checkpoint(folder),
            self.plugin(),
            self.config,
            rules,
            widths,
            target_for(str(dtype).removeprefix("torch.")),
        )
        return read, made_by(self.plugin(), self.config, Stored(stored_tensors(rules, read.headers)))

    def _load(
        self,
        folder: Path,
        tensors: Mapping[str, Tensor],
        parts: Sequence[Part],
        num_in: int,
        dtype: torch.dtype,
        *,
        bias: bool = False,
        act: Any = None,
        shard: Any = None,
        parallel: Parallel | None = None,
        factory: LayerFactory | None = None,
    ) -> Any:
        """Build a matrix and fill it with the loader that models use."""
        rules = [WeightRule(r"m\.(\w+)", "m", part=r"\1")] if parts[0].name else [WeightRule("m", "m")]
        _write(tensors, folder)
        read: Checkpoint | Path = folder
        if factory is None:
            read, factory = self._read(folder, rules, {"m": num_in}, dtype)
        ctx = BuildContext(device=CPU, dtype=dtype, factory=factory, parallel=parallel or Parallel())
        holder = ModuleHolder(ctx, lambda at: at.linear("m", num_in, parts, bias=bias, act=act, shard=shard))
        load_weights(holder, rules, read)
        return holder.m

    def _load_experts(self, folder: Path, tensors: Mapping[str, Tensor], factory: LayerFactory | None = None) -> Any:
        _write(tensors, folder)
        read: Checkpoint | Path = folder
        if factory is None:
            matrices = {"m.gate_up": 64, "m.down": self._inner()}
            read, factory = self._read(folder, EXPERT_RULES, matrices, torch.float32)
        ctx = BuildContext(device=CPU, dtype=torch.float32, factory=factory)
        holder = ModuleHolder(ctx, lambda at: at.experts("m", 3, 2, 64, self._inner(), act="silu_and_mul"))
        load_weights(holder, EXPERT_RULES, read)
        return holder.m

    def _inner(self) -> int:
        """Of a format that has no experts nobody has said that it packs the width of theirs."""
        return self.inner if self.has_experts else 64

    def _norm(self, width: int, dtype: torch.dtype) -> RMSNorm:
        norm = RMSNorm(width, 1e-6, BuildContext(device=CPU, dtype=dtype, factory=PLAIN))
        norm.weight.data.fill_(1.5)
        return norm

    def _same(self, got: Tensor, want: Tensor, dtype: torch.dtype, what: str) -> None:
        check(got.shape == want.shape, f"{what}: the result is {tuple(got.shape)} instead of {tuple(want.shape)}")
        check(got.dtype == want.dtype, f"{what}: the result is {got.dtype} instead of {want.dtype}")
        most = float((got.float() - want.float()).abs().max() / want.float().abs().max().clamp_min(1e-6))
        check(most <= TOLERANCE[dtype], f"{what} in {dtype}: off by {most:.2g} of the largest number")


EXPERT_RULES = [
    WeightRule(r"m\.(\d+)\.(gate|up)", "m.gate_up", part=r"\2", expert=r"\1"),
    WeightRule(r"m\.(\d+)\.down", "m.down", expert=r"\1"),
]


def _write(tensors: Mapping[str, Tensor], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors")
