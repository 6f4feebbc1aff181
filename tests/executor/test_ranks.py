"""Several ranks say what one says, for every kind of layer; what they cannot divide is refused; none outlives another.

Most tests run the further ranks in threads, over gloo all the same: a process takes seconds to import torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from example_models import Example, prompt, run
from rank_engines import PROMPTS, SMALL, ThreadFollower, beside, make_core, said
from warm_starts import CODE

from dovetail.base.settings import EngineSettings
from dovetail.client import launch
from dovetail.contracts.cache import CacheTensor
from dovetail.contracts.config import LayerSpec
from dovetail.contracts.errors import ConfigError, ModelError
from dovetail.contracts.layers import BuildContext, Parallel
from dovetail.engine.core import EngineCore
from dovetail.executor.followers import ProcessFollower, RankError
from dovetail.executor.group import GroupExecutor
from dovetail.executor.rank_messages import next_command
from dovetail.messages import SamplerParams, Submit
from dovetail.messages.executor import StepError
from dovetail.plugins import Registry, load, make_plan
from dovetail.runtime.memory.checks import check_devices, check_equal, check_settings
from dovetail.runtime.ranks import GlooCommunicator
from dovetail_server.cli import plan
from dovetail_testing.models import make_model

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, grouped heads": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama, one key head for both ranks": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32}),
}


@pytest.mark.usefixtures("in_threads")
@pytest.mark.parametrize("model", DENSE)
def test_dense_families_on_two_ranks(model: str, tmp_path: Path) -> None:
    """Tokens equal those of one rank."""
    architecture, changes = DENSE[model]
    folder = make_model(tmp_path / "model", architecture, **changes)

    def make(**settings: Any) -> EngineCore:
        return make_core(folder, architecture, **settings)

    assert said(make, 2) == said(make, 1)


@pytest.mark.usefixtures("in_threads")
def test_three_ranks(tmp_path: Path) -> None:
    """Six query heads over three key heads, and over one."""
    sizes = {"num_attention_heads": 6, "intermediate_size": 96, "hidden_size": 96}
    for kv in (3, 1):
        folder = make_model(tmp_path / str(kv), "LlamaForCausalLM", num_key_value_heads=kv, **sizes)

        def make(folder: Path = folder, **settings: Any) -> EngineCore:
            return make_core(folder, "LlamaForCausalLM", **settings)

        assert said(make, 3) == said(make, 1)


@pytest.mark.first(1)
@pytest.mark.usefixtures("in_threads")
@pytest.mark.parametrize("group", [None, 16])
def test_an_int8_checkpoint(group: int | None, tmp_path: Path) -> None:
    """Scales are cut with the rows and inputs that they stand for."""
    _, folder = beside("quantised_checkpoints", "models/test_quantised.py").make_checkpoints(tmp_path, group)

    def make(**settings: Any) -> EngineCore:
        return make_core(folder, "LlamaForCausalLM", "int8", **settings)

    assert said(make, 2) == said(make, 1)


@pytest.mark.usefixtures("in_threads")
@pytest.mark.parametrize(
    ("architecture", "name", "changes", "shard"),
    [
        ("MixtralForCausalLM", "Mixture", {"num_local_experts": 4, "num_experts_per_tok": 2}, "inner"),
        ("MixtralForCausalLM", "Mixture", {"num_local_experts": 4, "num_experts_per_tok": 2}, "expert"),
        ("Gemma2ForCausalLM", "GemmaLike", {"sliding_window": 8, "query_pre_attn_scalar": 16}, ""),
    ],
)
def test_experts_and_norms_behind(
    architecture: str, name: str, changes: dict[str, Any], shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that are divided by width or handed out whole; sums that a norm takes before they are added."""
    beside("generality_models", "models/test_generality.py")
    folder = make_model(tmp_path / "model", architecture, **changes)
    experts = BuildContext.experts
    monkeypatch.setattr(BuildContext, "experts", lambda self, *a, **k: experts(self, *a, **k | {"shard": shard}))

    def make(**settings: Any) -> EngineCore:
        return make_core(folder, architecture, target=f"generality_models:{name}", **settings)

    assert said(make, 2) == said(make, 1)


EXAMPLES = {
    "two-widths": "TwoWidthsForCausalLM",
    "latent": "LatentForCausalLM",
    "recurrent": "RecurrentForCausalLM",
}


@pytest.mark.first(1)
@pytest.mark.usefixtures("in_threads")
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_models_on_two_ranks(name: str, tmp_path: Path) -> None:
    """Windows and heads of two widths, latent rows, and states whose channels ranks divide."""
    example = Example(name, EXAMPLES[name])
    folder = example.reference().write_checkpoint(tmp_path)

    def make(**settings: Any) -> EngineCore:
        return example.make_engine(folder, **{"chunked_prefill_size": 24} | settings)

    found = said(make, 2)
    assert found == said(make, 1)
    for given, tokens in zip(PROMPTS, found, strict=True):
        assert tokens == example.right(folder, given, tokens)


@pytest.mark.first(1)
@pytest.mark.usefixtures("in_threads")
@pytest.mark.parametrize("kv", [1, 2, 4])
def test_a_norm_over_all_heads(kv: int, tmp_path: Path) -> None:
    """OLMo 2 normalises all queries together: ranks add up the squares of their shares."""
    folder = make_model(tmp_path, "Olmo2ForCausalLM", num_key_value_heads=kv)

    def make(**settings: Any) -> EngineCore:
        return make_core(folder, "Olmo2ForCausalLM", **settings)

    found = said(make, 2)
    assert found == said(make, 1)
    model = transformers.Olmo2ForCausalLM.from_pretrained(folder)
    for given, tokens in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*given, *tokens[:-1]]])).logits[0, len(given) - 1 :]
        assert tokens == logits.argmax(-1).tolist()


@pytest.mark.usefixtures("in_threads")
def test_draws_and_masks_are_those_of_one_rank(tmp_path: Path) -> None:
    """Seeded draws with filters and penalties, a stop by length, and rows that wait: ranks draw the same."""
    folder = make_model(tmp_path / "model", "LlamaForCausalLM")
    params = SamplerParams(max_tokens=10, temperature=1.0, top_p=0.9, top_k=20, seed=5, repetition_penalty=1.2)
    found = []
    for num in (1, 2):
        core = make_core(folder, "LlamaForCausalLM", tensor_parallel_size=num)
        ids: list[int] = []
        try:
            core.handle(Submit(rid="", handle=1, prompt_ids=prompt(20, 1), params=params))
            while core.has_work:
                for delta in core.step().deltas:
                    ids += delta.ids
        finally:
            core.close()
        found.append(ids)
    assert found[0] == found[1]
    assert len(found[0]) == 10


@pytest.mark.usefixtures("in_threads")
@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 3, "layer 0: 4 query heads cannot be divided among 3 ranks; --tensor-parallel-size may be 1, 2, 4"),
        ({"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}, 3, "layer 0: 2 key and value heads"),
        ({"intermediate_size": 101}, 2, "layers.0.mlp.gate_up: 101 rows of part 'gate' cannot be divided among 2"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    changes: dict[str, Any], size: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, before a weight is read or a rank is started."""
    folder = make_model(tmp_path / "model", "LlamaForCausalLM", **{"num_key_value_heads": 2} | changes)

    def never(*args: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("dovetail.runtime.checkpoint.weights.load_weights", never)
    with pytest.raises(ConfigError) as caught:
        make_core(folder, "LlamaForCausalLM", tensor_parallel_size=size)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_layers_cache_is_divided_as_it_says() -> None:
    """Heads are, a latent row is not, and of states what names its axis."""
    spec = LayerSpec(index=0, num_qo_heads=8, num_kv_heads=4, qk_dim=16, v_dim=16)
    assert [spec.of_rank(n).num_kv_heads for n in (1, 2, 4, 8)] == [4, 2, 1, 1]
    latent = replace(spec, num_kv_heads=1, mixer="latent")
    assert latent.of_rank(4).cache_tensors == latent.cache_tensors
    assert latent.of_rank(4).num_qo_heads == 2
    assert CacheTensor("s", (3, 8), shard=-1).of_rank(4).shape == (3, 2)
    assert CacheTensor("s", (8, 3), shard=0).of_rank(2).shape == (4, 3)
    assert CacheTensor("s", (8, 3)).of_rank(2).shape == (8, 3)
    several = CacheTensor("s", (4, 24), shard=1, parts=((4, 2), (4, 4), (16, 1)))
    assert [several.of_rank(n).shape for n in (1, 2, 4, 8)] == [(4, 24), (4, 14), (4, 10), (4, 8)]
    with pytest.raises(ModelError, match="6 of 's' cannot be divided among 4 ranks"):
        CacheTensor("s", (10,), shard=0, parts=((4, 1), (6, 2))).of_rank(4)
    odd = replace(spec, extra=(CacheTensor("s", (3, 7), shard=1),))
    with pytest.raises(ModelError, match="layer 0: 7 of 's' cannot be divided among 2 ranks"):
        odd.of_rank(2)


@pytest.mark.usefixtures("in_threads")
def test_a_step_that_fails_on_all_ranks_is_a_step_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine tries it again; where one rank alone fails, nothing can be computed any more."""
    folder = make_model(tmp_path / "model", "LlamaForCausalLM")
    core = make_core(folder, "LlamaForCausalLM", tensor_parallel_size=2)
    group: Any = core.executor
    failing: set[bool] = set()
    forward = type(group.runner.model).forward
    main = threading.get_ident()

    def forward_or_fail(self: Any, *args: Any) -> Any:
        if (threading.get_ident() == main) in failing:
            raise ValueError("this prompt")
        # With no sums in it, nothing waits for the other rank.
        return torch.zeros(len(args[0]), group.info.hidden_size) if failing else forward(self, *args)

    def joined(self: Any, mine: torch.Tensor) -> torch.Tensor:
        return mine.repeat(1, 2) if failing else join(self, mine)

    join = Parallel.join
    monkeypatch.setattr(Parallel, "join", joined)
    monkeypatch.setattr(type(group.runner.model), "forward", forward_or_fail)
    steps: list[Any] = []
    launched = group.launch

    def noted(step: Any) -> None:
        steps.append(step)
        launched(step)

    monkeypatch.setattr(group, "launch", noted)
    try:
        before = run(core, PROMPTS[:1], 3)
        failing |= {True, False}
        with pytest.raises(StepError, match="this prompt"):
            launched(steps[0])
        failing.clear()
        assert run(core, PROMPTS[:1], 3) == before
        failing.add(False)
        launched(replace(steps[0], step=99))
        with pytest.raises(RankError, match="rank 0: no error; rank 1: ValueError: this prompt"):
            group.read()
    finally:
        core.close()


def test_ranks_are_processes_that_end_together(tmp_path: Path) -> None:
    """Tokens equal one rank's; a rank that is killed ends the executor in its next step; closed, none is left."""
    folder = make_model(tmp_path / "model", "LlamaForCausalLM")

    def make(**settings: Any) -> EngineCore:
        return make_core(folder, "LlamaForCausalLM", **settings)

    expected = said(make, 1)
    core = make(tensor_parallel_size=2)
    group: Any = core.executor
    [follower] = group.followers
    assert isinstance(follower, ProcessFollower)
    try:
        assert run(core, PROMPTS, 12) == expected
        os.kill(follower.pid, signal.SIGKILL)
        params = SamplerParams(max_tokens=4, temperature=0.0)
        core.handle(Submit(rid="", handle=1000, prompt_ids=prompt(9, 1), params=params))
        began = time.monotonic()
        with pytest.raises(RankError, match=r"^rank 1 was ended by SIGKILL$"):
            core.step()
        assert time.monotonic() - began < 30
    finally:
        core.close()
    with pytest.raises(ProcessLookupError):
        os.kill(follower.pid, 0)


HANGING = """
import signal, sys, time
from dovetail.executor import rank_main
rank_main.SHUTDOWN_TIMEOUT_S = 0.2
rank_main.next_command = lambda pipe: (pipe.send_bytes(b"here"), time.sleep(600))
rank_main.main(sys.argv[1:])
"""


def test_a_rank_that_hangs_ends_with_the_first() -> None:
    """Even in the middle of what never ends, and though it ignores what a terminal sends."""
    near, far = Pipe()
    with near, far:
        command = [sys.executable, CODE, HANGING, str(far.fileno())]
        process = subprocess.Popen(command, pass_fds=[far.fileno()])
        far.close()
        assert near.poll(120)
        process.terminate()
        near.close()
        assert process.wait(60) == -signal.SIGALRM


def test_a_rank_that_cannot_load_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a further rank finds is told as if the first had found it."""
    folder = make_model(tmp_path / "model", "LlamaForCausalLM")
    settings = EngineSettings(model_path=str(folder), tensor_parallel_size=2, **SMALL)
    plan = make_plan(
        Registry.scan(), model="LlamaForCausalLM", attention_backend="auto", schedule_policy="fcfs", device="cpu"
    )

    def vanishing(pipe: Connection) -> ThreadFollower:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_act": "no-such"}))
        return ThreadFollower(pipe)

    with pytest.raises(ConfigError, match="hidden_act 'no-such' is not supported"):
        GroupExecutor(settings, load(plan, "engine"), vanishing)


def test_sums_have_the_same_bits_on_all_ranks(tmp_path: Path) -> None:
    """In any dtype, and added in the order of the ranks; what is gathered stands in that order."""
    for dtype in (torch.float32, torch.bfloat16):
        links = [GlooCommunicator(rank, 3) for rank in range(3)]
        shares = [torch.randn(7, 5, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(3)]
        found: dict[int, Any] = {}

        def work(rank: int, links: Any = links, shares: Any = shares, found: Any = found) -> None:
            links[rank].connect(tmp_path / str(shares[0].dtype), 30, 30)
            joined = Parallel(rank=rank, size=3, all_reduce=links[rank].all_reduce).join(shares[rank])
            own = Parallel(rank=rank, size=3, all_reduce=max, all_gather=links[rank].all_gather).join(shares[rank])
            found[rank] = links[rank].all_reduce(shares[rank]), joined, own

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected = (shares[0].float() + shares[1].float() + shares[2].float()).to(dtype)
        for rank in range(3):
            assert torch.equal(found[rank][0], expected)
            assert all(torch.equal(joined, torch.cat(shares, 1)) for joined in found[rank][1:])


def test_devices_are_chosen_and_refused_in_one_line() -> None:
    """By their numbers among those that the process sees; one for each rank, each once."""
    assert check_devices(EngineSettings(tensor_parallel_size=2), 4, None) == (0, 1)
    settings = EngineSettings.model_validate({"tensor_parallel_size": 2, "devices": "0,2"})
    assert check_devices(settings, 4, "4,5,6,7") == (0, 2)
    for changes, num, part in (
        ({"tensor_parallel_size": 2}, 1, "--tensor-parallel-size 2: 1 GPU is here (CUDA_VISIBLE_DEVICES is '3'); give"),
        ({"tensor_parallel_size": 2, "devices": "0,2"}, 2, "--devices 0,2: there is no device 2; 2 GPUs are here"),
        ({"tensor_parallel_size": 2, "devices": "1"}, 2, "--devices 1: 1 for 2 ranks; give one for each"),
        ({"tensor_parallel_size": 2, "devices": "1,1"}, 2, "--devices 1,1: one is given twice"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_devices(EngineSettings.model_validate(changes), num, "3")
        assert str(caught.value).startswith(part)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="--devices 0: they are GPUs, and the device is cpu"):
        check_settings(EngineSettings.model_validate({"devices": "0"}), "cpu")


def test_ranks_need_the_same_memory() -> None:
    """The two that differ most are named."""
    gib = 1 << 30
    check_equal([("cuda:0 X", 78 * gib), ("cuda:1 X", 75 * gib)])
    with pytest.raises(ConfigError, match=r"cuda:1 X has 40\.00 GiB free, and cuda:0 X 78\.00 GiB: ranks need"):
        check_equal([("cuda:0 X", 78 * gib), ("cuda:1 X", 40 * gib)])


def test_plan_is_that_of_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """`dovetail plan` divides weights and cache as an engine does, and refuses what one refuses."""
    found = []
    for num in ("1", "2"):
        flags = ["--device", "cpu", "--device-memory", "8GiB", "--max-total-tokens", "1024", "--tp", num]
        assert plan.main([*flags, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[1]["page_bytes"] * 2 == found[0]["page_bytes"]
    assert found[1]["device"]["total"] * 2 == found[0]["device"]["total"]
    assert found[1]["weight_bytes"] * 2 == pytest.approx(found[0]["weight_bytes"], rel=0.01)
    assert plan.main(["--device", "cpu", "--tp", "7"]) == 2
    assert "cannot be divided among 7 ranks" in capsys.readouterr().err


def test_arrays_travel_as_they_are() -> None:
    """A command that was sent is the command that comes, arrays of no elements among it."""
    from dovetail.executor.rank_messages import Choose, send
    from dovetail.messages.step import StepLate

    near, far = Pipe()
    no = np.zeros(2, dtype=np.bool_)
    late = StepLate(
        step=3,
        mask_of=np.array([0, -1], dtype=np.int32),
        skip=no,
        ends_only=no,
        keep=np.array([[0, 5]], dtype=np.int32),
    )
    with near, far:
        for masks in (np.arange(8, dtype=np.int32).reshape(1, 8), np.empty((0, 0), dtype=np.int32)):
            send(near, Choose(late, masks))
            got: Any = next_command(far)
            assert (got.late.mask_of == late.mask_of).all()
            assert (got.late.keep == late.keep).all()
            assert (got.masks.shape, got.masks.dtype) == (masks.shape, masks.dtype)
            assert (got.masks == masks).all()


@pytest.mark.usefixtures("in_threads")
def test_drafts_and_processors_are_those_of_one_rank(tmp_path: Path) -> None:
    """Ranks find the same drafts to hold, each by itself, and forbid the same tokens."""
    folder = make_model(tmp_path / "model", "LlamaForCausalLM")
    registry, found = Registry.scan(), []
    for num in (1, 2):
        settings = EngineSettings(model_path=str(folder), tensor_parallel_size=num, speculator="ngram", **SMALL)
        plan = make_plan(
            registry, model="LlamaForCausalLM", attention_backend="auto", device="cpu", speculator="ngram",
            logits_processor=["no-repeat-ngram"],
        )  # fmt: skip
        core = launch.make_engine(settings, load(plan, "engine"))
        said: dict[int, list[int]] = {1: [], 2: [], 3: []}
        try:
            for handle in said:
                processors: dict[str, Any] = {"no-repeat-ngram": {"size": 2, "prompt": True}} if handle == 2 else {}
                params = SamplerParams(
                    max_tokens=80, temperature=handle // 3, seed=3, ignore_eos=True, processors=processors
                )
                core.handle(Submit(rid="", handle=handle, prompt_ids=[5, 6, 7] * 6, params=params))
            while core.has_work:
                for delta in core.step().deltas:
                    said[delta.handle] += delta.ids
            assert core.stats().num_accepted_tokens > 0
        finally:
            core.close()
        found.append(said)
    assert found[0] == found[1]
