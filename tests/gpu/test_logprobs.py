"""Log probabilities of a busy engine on a CUDA device are the model's: at 1 to 256 streams, beside any other rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from logprobs_of import Reference, check_sane, differences, entries, reported
from served_loads import STEP, Load, ScriptedGrammars

from dovetail.engine.core import EngineCore
from dovetail.messages import SamplerParams, Submit, TokenDelta
from dovetail_testing.engine import make_core

pytestmark = pytest.mark.gpu
STREAMS = (1, 2, 16, 64, 256)
KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 5},
    {"temperature": 0.9, "logprobs": 3},
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5, "logprobs": 0},
    {"temperature": 0, "logprobs": 2},
]
"""Those at odd places of a load are structured, too."""


@pytest.fixture(scope="module", autouse=True)
def exact() -> Iterator[None]:
    """No tf32: comparisons are in full float32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def make_checkpoint(folder: Path, **sizes: int) -> Path:
    """Write a random Qwen3 in bfloat16, whose numbers are then the same in every dtype."""
    config = transformers.Qwen3Config(
        head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=1, **sizes
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, and a vocabulary of three blocks of the kernels that rank it, none of them full."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 20_011}
    folder = tmp_path_factory.mktemp("small")
    return make_checkpoint(folder, num_attention_heads=4, num_key_value_heads=2, **sizes)


def requests(num: int, vocab: int, num_new: int, kinds: list[dict[str, Any]], seed: int) -> list[Load]:
    """Prompts of different lengths; how long replies are differs, too."""
    rng = random.Random(seed)
    found: list[Load] = []
    for i in range(num):
        prompt = [rng.randrange(2, vocab) for _ in range(rng.randrange(1, 160))]
        params = SamplerParams(
            max_tokens=rng.randrange(num_new // 2, num_new + 1), seed=i, ignore_eos=True, **kinds[i % len(kinds)]
        )
        found.append((prompt, params, len(kinds) > 1 and i % 4 == 1))
    return found


class Served:
    """Serves a load with a fixed number of streams, and counts the steps of both kinds of graphs."""

    def __init__(self, folder: Path, streams: int, **settings: Any) -> None:
        self.core: EngineCore = make_core(
            folder, device="cuda", max_running_requests=streams, max_total_tokens=1 << 18, wait_for_kernels=True,
            **settings,
        )  # fmt: skip
        self.streams, self.num_mixed = streams, 0
        stepper: Any = self.core.executor.stepper  # type: ignore[attr-defined]
        replay = stepper._replay

        def counted(step: Any) -> Any:
            self.num_mixed += step.decode_graph is not None and step.prefill_graph is not None
            return replay(step)

        stepper._replay = counted

    def run(self, load: list[Load]) -> list[list[TokenDelta]]:
        """Return all deltas of each request."""
        grammars: Any = ScriptedGrammars(0)
        self.core.grammars = self.core._masks.grammars = self.core._replies.grammars = grammars
        found: list[list[TokenDelta]] = [[] for _ in load]
        left, running = list(enumerate(load)), 0
        while left or self.core.has_work:
            while left and running < self.streams:
                handle, (prompt, params, constrained) = left.pop(0)
                grammar = STEP if constrained else ()
                self.core.handle(Submit(rid="", handle=handle, prompt_ids=prompt, params=params, grammar=grammar))
                running += 1
            for delta in self.core.step().deltas:
                found[delta.handle].append(delta)
                running -= delta.finish is not None
        assert all(deltas[-1].finish.reason == "length" for deltas in found)  # type: ignore[union-attr]
        return found


@pytest.mark.parametrize("streams", STREAMS)
def test_float32_reports_what_transformers_computes(streams: int, small: Path) -> None:
    """Greedy, sampled, penalised, structured and plain rows together: every value within 1e-4."""
    load = requests(max(24, 3 * streams), 20_011, 24, KINDS, streams)
    served = Served(small, streams, dtype="float32")
    found = served.run(load)
    reference = Reference(small, torch.float32)
    num = 0
    for (prompt, params, constrained), deltas in zip(load, found, strict=True):
        reply = entries(deltas)
        assert bool(reply) == (params.logprobs is not None)
        check_sane(reply, is_greedy=params.temperature == 0 and not constrained)
        if reply:
            off = differences(reported(reply), reference.values(prompt, reply))
            assert off.max() < 1e-4, (off.max(), prompt[:3])
            num += len(reply)
    assert num > 200
    assert served.num_mixed > 3 or streams == 1
    served.core.close()


@pytest.mark.parametrize("streams", [64, 256])
def test_bfloat16_is_as_near_as_transformers_is(streams: int, tmp_path: Path) -> None:
    """Over 50,000 tokens of the shape of Qwen3-0.6B: errors against float32 as large as transformers' own bfloat16."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151_936}
    folder = make_checkpoint(tmp_path, num_attention_heads=16, num_key_value_heads=8, **sizes)
    load = requests(51_200 // 192 + streams, 151_936, 256, [{"temperature": 0, "logprobs": 5}], streams)
    served = Served(folder, streams, dtype="bfloat16")
    found = served.run(load)
    assert served.num_mixed > 10
    served.core.close()
    del served
    exact, rounded = Reference(folder, torch.float32), Reference(folder, torch.bfloat16)
    mine, usual, num = [], [], 0
    for (prompt, _, _), deltas in zip(load, found, strict=True):
        reply = entries(deltas)
        check_sane(reply, is_greedy=True)
        want = exact.values(prompt, reply)
        mine.append(differences(reported(reply), want))
        usual.append(differences(rounded.values(prompt, reply), want))
        num += len(reply)
    own, others = torch.cat(mine), torch.cat(usual)
    print(f"\n{streams} streams, {num} tokens: mean {own.mean():.2e}, max {own.max():.2e};"
          f" transformers' bfloat16: mean {others.mean():.2e}, max {others.max():.2e}")  # fmt: skip
    assert num > 50_000
    assert own.mean() < 1.25 * others.mean()
    assert own.max() < 2 * others.max()
