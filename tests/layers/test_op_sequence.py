"""Which operations a step of each built-in model is made of: on CUDA each of them is one launch of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dovetail.contracts.attention import AttentionLayer, ForwardBatch
from dovetail.contracts.kernels import PlainKernels, meaning
from dovetail_models.llama import Llama
from dovetail_models.qwen2 import Qwen2
from dovetail_models.qwen3 import Qwen3
from dovetail_testing.conformance import model_runtime
from dovetail_testing.conformance.model_runtime import ReferenceAttention, Running, TinyEngine
from dovetail_testing.models import make_model

MODELS = {"LlamaForCausalLM": Llama, "Qwen2ForCausalLM": Qwen2, "Qwen3ForCausalLM": Qwen3}
HIDDEN, QKV, INNER, HEADS, DIM = 64, 128, 96, 6, 16
"""Of `make_model`'s sizes: 4 query and 2 KV heads of 16."""


class OneKernelAttention(ReferenceAttention):
    """Serves decode rows from the projection, as the Triton backend does; notes each call."""

    calls: list[Any]

    def forward_decode_qkv(
        self,
        qkv: Tensor,
        norm: tuple[Tensor, float] | None,
        rope: tuple[Tensor, Tensor],
        layer: AttentionLayer,
        batch: ForwardBatch,
        out: Tensor,
    ) -> bool:
        self.calls.append(("decode_qkv", list(qkv.shape), norm is not None))
        out.zero_()
        return True

    def write_kv(self, layer: AttentionLayer, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        self.calls.append(("write_kv", list(k.shape)))
        super().write_kv(layer, k, v, batch)

    def forward_extend(self, q: Tensor, *args: Any) -> None:
        self.calls.append(("extend", list(q.shape)))
        super().forward_extend(q, *args)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is called, in order: operations with the shapes of their tensors, and the backend's methods."""
    found: list[Any] = []

    def noting(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            given = [a for a in args if not callable(a)]  # what computes a norm or a gate that no kernel fuses
            found.append((name, *(list(a.shape) if isinstance(a, Tensor) else a for a in given)))
            return operation(*given)

        return call

    monkeypatch.setattr(PlainKernels, "bind", lambda self, ask: noting(ask.op, meaning(ask)))
    monkeypatch.setattr(model_runtime, "ReferenceAttention", OneKernelAttention)
    monkeypatch.setattr(OneKernelAttention, "calls", found, raising=False)
    return found


def layer_calls(name: str, num: int, *, decode: bool) -> list[Any]:
    """What one decoder layer calls for `num` tokens."""
    eps, bias = 1e-6, [QKV] if name == "Qwen2ForCausalLM" else None
    normed = name == "Qwen3ForCausalLM"
    attention: list[Any] = [("decode_qkv", [num, 8, DIM], normed)]
    if not decode:
        weight = [HEADS, DIM] if normed else None
        rope = [[num, 1, DIM], [num, 1, DIM]]
        attention = [
            ("norm_rotate", [num, HEADS, DIM], weight, eps if normed else 0.0, *rope),
            ("write_kv", [num, 2, DIM]),
            ("extend", [num, 4, DIM]),
        ]
    return [
        ("norm_linear", [num, HIDDEN], [HIDDEN], eps, [QKV, HIDDEN], bias),
        *attention,
        ("linear_add", [num, 64], [HIDDEN, 64], None, [num, HIDDEN]),
        ("norm_gate", [num, HIDDEN], [HIDDEN], eps, [2 * INNER, HIDDEN], None),
        ("linear_add", [num, INNER], [HIDDEN, INNER], None, [num, HIDDEN]),
    ]


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_is_as_few_operations_as_ever(name: str, calls: list[Any], tmp_path: Path) -> None:
    """Five a decode layer with a backend that serves from the projection, seven a prefill layer, with these arguments.

    The norm is part of the first product, the gate of the second, and both additions of the others.
    """
    engine = TinyEngine(MODELS[name], make_model(tmp_path, name, rms_norm_eps=1e-6))
    requests = [Running([5, 7, 11], 0), Running([3, 4], 1)]
    for step in ("prefill", "decode"):
        calls.clear()
        if step == "prefill":
            engine.step((), [(r, len(r.ids)) for r in requests])
        else:
            for request in requests:
                request.ids.append(9)
            engine.step(requests)
        num = 5 if step == "prefill" else 2
        assert calls == [
            ("rotations", [num], [DIM // 2], 1.0),
            *(call for _ in range(3) for call in layer_calls(name, num, decode=step == "decode")),
            ("rms_norm", [num, HIDDEN], [HIDDEN], 1e-6),
            ("linear", [num, HIDDEN], [199, HIDDEN], None),
        ]
