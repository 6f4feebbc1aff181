"""The builds of FlashAttention-3 that may be installed, behind one call.

FlashAttention-3 (arXiv:2407.08608) itself is on no package index. What is looked for, in this order:

- `flash_attn_interface` or `flash_attn_3.flash_attn_interface`, as the folder `hopper` of Dao-AILab/flash-attention
  installs them;
- the library in vLLM's wheel (`vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so`, of a vLLM for this torch): it alone is
  loaded, nothing of vLLM is imported;
- `kernels-community/flash-attn3` by way of the package `kernels`, if it is in the local cache: nothing is downloaded.

R requests, T queries, Hq query heads, D head dim.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dovetail_backends.flash import Build, Queries, ScoreOptions

MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
VLLM = "vllm.vllm_flash_attn"
VLLM_LIBRARY = "vllm_flash_attn/_vllm_fa3_C*.so"
HUB_REPO = "kernels-community/flash-attn3"
INSTALL = (
    "install it from the folder `hopper` of github.com/Dao-AILab/flash-attention (it is on no package index), or vLLM "
    f"of the version for this torch, or `pip install kernels` and fetch {HUB_REPO} once with kernels.get_kernel"
)
NEEDED = (
    *("page_table", "cache_seqlens", "cu_seqlens_q", "max_seqlen_q", "softmax_scale", "window_size", "num_splits"),
    *("softcap", "return_softmax_lse"),
)
FIXED: dict[str, Any] = {"is_rotary_interleaved": False, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}
"""Arguments of vLLM's operators that are not optional and mean nothing here."""


def add_sinks(out: Tensor, sums: Tensor, sinks: Tensor) -> None:
    """Give sinks, keys without a value, their share of the sum of weights.

    Args:
        out: `[T, Hq, D]`, attended without them.
        sums: `[T, Hq]` float32, the logarithm of the sum of the exponentials of each query's scores.
        sinks: `[Hq]` float32.
    """
    out.mul_(torch.sigmoid(sums - sinks)[..., None])


class UpstreamBuild:
    """`flash_attn_with_kvcache`, as Dao-AILab publishes it and `kernels` has it.

    Single queries are given unpacked: there a build was seen to leave packed rows unwritten when it splits (pytorch
    issue 194167).
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._takes_out = "out" in inspect.signature(function).parameters

    def attend(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        out: Tensor,
        of: Queries,
        look: ScoreOptions,
        schedule: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """See `Build`."""
        is_single = of.longest == 1
        target = out.unsqueeze(1) if is_single else out
        more: dict[str, Any] = {"out": target} if self._takes_out else {}
        if not is_single:
            more |= {"cu_seqlens_q": of.starts, "max_seqlen_q": of.longest}
        found, lse, *_ = self.function(
            q.unsqueeze(1) if is_single else q, *kv, cache_seqlens=of.lens, page_table=of.pages,
            softmax_scale=look.scale, causal=True, window_size=look.window, softcap=look.cap, num_splits=of.splits,
            return_softmax_lse=True, **more,
        )  # fmt: skip
        if not self._takes_out:
            target.copy_(found)
        if sinks is not None:
            add_sinks(out, lse.squeeze(-1) if is_single else lse.t(), sinks)

    def schedule(self, q: Tensor, keys: Tensor, of: Queries, look: ScoreOptions) -> Tensor | None:
        """Nothing: what versions of it lay down there differs."""
        return None


class VllmBuild:
    """The operators of vLLM's library: packed queries only, with a schedule for the layers of a step.

    Args:
        fwd: `torch.ops._vllm_fa3_C.fwd`.
        plan: `torch.ops._vllm_fa3_C.get_scheduler_metadata`.
        arguments: Of both, in this order: each one's name, and whether it may be None.

    Raises:
        ValueError: An operator takes what is not known here.
    """

    def __init__(
        self,
        fwd: Callable[..., Any],
        plan: Callable[..., Any],
        arguments: tuple[Mapping[str, bool], Mapping[str, bool]],
    ) -> None:
        self._fwd, self._plan = fwd, plan
        self._none = [{name: None for name, may_be_none in found.items() if may_be_none} for found in arguments]
        self._fixed = [{name: FIXED[name] for name in found if name in FIXED} for found in arguments]
        for found, known in zip(arguments, (FWD, PLAN), strict=True):
            wrong = [
                name for name, may_be_none in found.items() if not may_be_none and name not in known | FIXED.keys()
            ]
            lacking = known - found.keys()
            if wrong or lacking:
                what = f"wants {', '.join(wrong)}" if wrong else f"does not take {', '.join(sorted(lacking))}"
                raise ValueError(f"it {what}; it is another version")

    def attend(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        out: Tensor,
        of: Queries,
        look: ScoreOptions,
        schedule: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """See `Build`."""
        given = {
            **self._none[0], **self._fixed[0], **self._shared(kv[0], of, look), "q": q, "k": kv[0], "v": kv[1],
            "out": out, "page_table": of.pages, "softmax_scale": look.scale, "softcap": look.cap,
            "scheduler_metadata": schedule,
        }  # fmt: skip
        _, lse, *_ = self._fwd(**given)
        if sinks is not None:
            add_sinks(out, lse.t(), sinks)

    def schedule(self, q: Tensor, keys: Tensor, of: Queries, look: ScoreOptions) -> Tensor | None:
        """See `Build`; one kernel."""
        given = {
            **self._none[1], **self._fixed[1], **self._shared(keys, of, look), "batch_size": of.lens.shape[0],
            "num_heads": q.shape[1], "num_heads_k": keys.shape[2], "headdim": q.shape[2], "headdim_v": q.shape[2],
            "qkv_dtype": q.dtype, "page_size": keys.shape[1], "max_seqlen_k_new": 0, "has_softcap": look.cap > 0,
        }  # fmt: skip
        found: Tensor = self._plan(**given)
        return found

    @staticmethod
    def _shared(keys: Tensor, of: Queries, look: ScoreOptions) -> dict[str, Any]:
        """What both operators are given, which must agree."""
        return {
            "cu_seqlens_q": of.starts, "seqused_k": of.lens, "max_seqlen_q": of.longest,
            "max_seqlen_k": of.pages.shape[1] * keys.shape[1], "is_causal": True, "window_size_left": look.window[0],
            "window_size_right": look.window[1], "num_splits": of.splits,
        }  # fmt: skip


SHARED = {
    *("cu_seqlens_q", "seqused_k", "max_seqlen_q", "max_seqlen_k", "is_causal", "window_size_left"),
    *("window_size_right", "num_splits"),
}
FWD = SHARED | {"q", "k", "v", "out", "page_table", "softmax_scale", "softcap", "scheduler_metadata"}
PLAN = SHARED | {
    *("batch_size", "num_heads", "num_heads_k", "headdim", "headdim_v", "qkv_dtype", "page_size"),
    *("max_seqlen_k_new", "has_softcap"),
}
"""What the operators are given by name."""


def find_build() -> Build | str:
    """Return the first FlashAttention-3 that is installed, or say in one line why there is none."""
    problems: list[str] = []
    for name, load in (
        *((name, _importer(name)) for name in MODULES),
        (VLLM, _from_vllm),
        (HUB_REPO, _from_hub),
    ):
        try:
            return load()
        except ModuleNotFoundError as error:
            if (error.name or "") not in {"kernels", "vllm", *MODULES, "flash_attn_3"}:
                problems.append(f"{name} needs {error.name}")
        except ValueError as error:
            problems.append(f"{name}: {error}")
        except Exception as error:  # a build for another torch may raise anything when it is imported
            problems.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())}")
    found = f" ({'; '.join(problems)})" if problems else ""
    return f"FlashAttention-3 is not installed{found}; {INSTALL}"


def installed() -> str:
    """Name the files of all that may be a build, with their times of change; nothing is imported."""
    found = []
    for name in ("flash_attn_interface", "flash_attn_3", "vllm", "kernels"):
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):  # a module without a spec, put there by hand
            continue
        if spec is None:
            continue
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
        libraries = [file for folder in folders for file in folder.glob(VLLM_LIBRARY)]
        files = libraries if name == "vllm" else [Path(spec.origin)] if spec.origin else folders
        found += [f"{file} {file.stat().st_mtime_ns}" for file in files if file.exists()]
    return ", ".join(found)


def _importer(name: str) -> Callable[[], Build]:
    return lambda: _upstream(importlib.import_module(name))


def _upstream(module: Any) -> Build:
    function = module.flash_attn_with_kvcache
    missing = [argument for argument in NEEDED if argument not in inspect.signature(function).parameters]
    if missing:
        raise ValueError(f"it does not take {', '.join(missing)}; it is another version")
    return UpstreamBuild(function)


def _from_vllm() -> Build:
    """Load the library of an installed vLLM; it is found without importing vLLM."""
    spec = importlib.util.find_spec("vllm")
    folders = [] if spec is None or spec.submodule_search_locations is None else spec.submodule_search_locations
    files = [file for folder in folders for file in Path(folder).glob(VLLM_LIBRARY)]
    if not files:
        raise ModuleNotFoundError(f"no {VLLM}", name="vllm")
    operators: Any = torch.ops
    operators.load_library(str(files[0]))
    fwd, plan = operators._vllm_fa3_C.fwd.default, operators._vllm_fa3_C.get_scheduler_metadata.default
    return VllmBuild(fwd, plan, (_arguments(fwd), _arguments(plan)))


def _arguments(operator: Any) -> dict[str, bool]:
    """Return the names of an operator's arguments, and which may be None."""
    return {argument.name: argument.type.kind() == "OptionalType" for argument in operator._schema.arguments}


def _from_hub() -> Build:
    """Load the kernel that the package `kernels` has in its cache."""
    kernels = importlib.import_module("kernels")
    with _offline():
        return _upstream(kernels.get_kernel(HUB_REPO, version=1))


@contextmanager
def _offline() -> Iterator[None]:
    """Keep huggingface_hub, and `kernels` above it, to what is cached."""
    constants: Any = importlib.import_module("huggingface_hub.constants")
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
