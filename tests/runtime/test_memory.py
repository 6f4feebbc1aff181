"""How device memory is divided: sizes, limits, and one line for what does not fit."""

from __future__ import annotations

import dataclasses
import logging
import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dovetail.base.settings import EngineSettings
from dovetail.cache.pool import KVCache
from dovetail.client.launch import make_engine
from dovetail.contracts.cache import CacheTensor, Recurrent, Window
from dovetail.contracts.config import LayerSpec, ModelConfig, RopeConfig, VisionPart, dense_layers
from dovetail.contracts.errors import ConfigError, ModelError
from dovetail.messages import SamplerParams, Submit
from dovetail.plugins import Registry, load, make_plan
from dovetail.runtime import device_memory
from dovetail.runtime.cache_dtype import with_cache_dtype
from dovetail.runtime.checkpoint import weight_size as weight_size_module
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.runtime.checkpoint.weight_files import WeightFiles
from dovetail.runtime.checkpoint.weight_size import MAX_HEADER_BYTES, headers, headers_of, weight_size
from dovetail.runtime.graphs import decode as graphs
from dovetail.runtime.memory import host as host_memory
from dovetail.runtime.memory.checks import gib
from dovetail.runtime.memory.estimates import BUCKET_SUM, GRAPH_ROWS, NUM_DECODE_GRAPHS, activation_bytes
from dovetail.runtime.memory.host import rows_of
from dovetail.runtime.memory.plan import DeviceBytes, MemoryPlan, floor_pages, plan_memory
from dovetail.runtime.runner import ModelRunner
from dovetail.sdk.checkpoint import dense_numel
from dovetail_testing.engine import generate
from dovetail_testing.models import make_model

GIB = 1 << 30
LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    layers=dense_layers(32, num_qo_heads=32, num_kv_heads=8, head_dim=128),
    norm_eps=1e-5,
    hidden_act="silu",
    max_position_embeddings=131072,
    tie_word_embeddings=False,
    rope=RopeConfig(),
    dtype="bfloat16",
)
WEIGHTS = 2 * dense_numel(LLAMA_8B)


WINDOWED_8B = replace(
    LLAMA_8B, layers=tuple(replace(s, reach=Window(1024)) if s.index % 4 else s for s in LLAMA_8B.layers)
)
"""Three of four layers see 1,024 tokens."""


def gpu(total: float = 80, free: float | None = None, left: float | None = None) -> DeviceBytes:
    """A GPU, sizes in GiB."""
    in_bytes = [None if size is None else int(size * GIB) for size in (total, total if free is None else free, left)]
    return DeviceBytes(kind="cuda", name="cuda:0", total=in_bytes[0] or 0, free=in_bytes[1] or 0, left=in_bytes[2])


def planned(
    device: DeviceBytes | None = None, *, has_graphs: bool = True, config: ModelConfig = LLAMA_8B, **changes: Any
) -> MemoryPlan:
    """A plan for an 8B model."""
    device = device or gpu()
    return plan_memory(EngineSettings(**changes), config, "bfloat16", device, WEIGHTS, has_graphs=has_graphs)


def refused(device: DeviceBytes | None = None, **changes: Any) -> str:
    """The one line for a plan that cannot be made."""
    with pytest.raises(ConfigError) as caught:
        planned(device, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_size_of_an_8b_model_is_that_of_its_checkpoint() -> None:
    """A dense config gives the parameters that the published checkpoint of Llama 3.1 8B has: 8,030,261,248."""
    assert dense_numel(LLAMA_8B) == 8_030_261_248


def test_mem_fraction_static_is_the_share_of_free_memory_for_weights_and_cache() -> None:
    """As in SGLang: what is free before loading, times the fraction, less the weights, is the KV cache."""
    found = planned(gpu(80, free=60), mem_fraction_static=0.5)
    assert 30 * GIB - WEIGHTS - found.page_bytes < found.kv_bytes <= 30 * GIB - WEIGHTS
    measured = planned(gpu(80, free=60, left=40), mem_fraction_static=0.5)
    assert 10 * GIB - found.page_bytes < measured.kv_bytes <= 10 * GIB


def test_gpu_memory_utilization_is_the_share_of_all_memory_for_everything() -> None:
    """As in vLLM: the process stays below the share, activations and graphs included; more than is free is refused."""
    found = planned(gpu(80, free=79), gpu_memory_utilization=0.75)
    used = WEIGHTS + found.kv_bytes + found.activation_bytes + found.graph_bytes
    assert 60 * GIB - 2 * found.page_bytes < used <= 60 * GIB
    line = refused(gpu(80, free=40), gpu_memory_utilization=0.9)
    assert all(part in line for part in ("--gpu-memory-utilization 0.9", "72.00 GiB", "40.00 GiB", "0.50"))


def test_by_default_the_cache_leaves_room_for_what_a_step_needs() -> None:
    """The default share shrinks where 12% are too little for activations and graphs; nothing is over-committed."""
    for total in (24, 40, 80, 141):
        found = planned(gpu(total))
        assert found.free_bytes >= 0
        assert found.kv_bytes <= int(0.88 * total * GIB) - WEIGHTS
    tight = planned(gpu(24), chunked_prefill_size=16384)
    assert tight.activation_bytes + tight.graph_bytes > 0.12 * 24 * GIB
    assert tight.kv_bytes < planned(gpu(24), chunked_prefill_size=512).kv_bytes


def test_a_share_that_leaves_too_little_is_kept_and_said() -> None:
    """What the user configured is not changed; a note tells that a step may not find its memory."""
    found = planned(mem_fraction_static=0.99)
    assert found.kv_bytes > 0.98 * 80 * GIB - WEIGHTS
    assert "--mem-fraction-static 0.99 leaves" in found.notes[0]
    assert not planned(mem_fraction_static=0.8).notes


def test_tokens_and_concurrency_follow_from_the_pages() -> None:
    """A request takes whole pages; the table's figures are those."""
    found = planned(max_total_tokens=100_010, page_size=16, context_length=5000)
    assert (found.num_tokens, found.num_requests(5000), found.num_requests(4096)) == (100_000, 19, 24)
    assert found.page_bytes == 32 * 2 * 16 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("device", "changes", "parts"),
    [
        (gpu(8), {}, ["does not fit", "14.96 GiB in bfloat16", "8.00 GiB of 8.00 GiB", "smaller model"]),
        (
            gpu(16),
            {},
            ["no room for the KV cache", "--chunked-prefill-size", "CUDA graphs 1.61 GiB", "page of 16 tokens"],
        ),
        (gpu(80), {"mem_fraction_static": 0.1}, ["no room", "raise --mem-fraction-static 0.1"]),
        (gpu(80), {"gpu_memory_utilization": 0.2}, ["no room", "raise --gpu-memory-utilization 0.2"]),
        (gpu(80), {"max_total_tokens": 15}, ["--max-total-tokens 15", "page of 16", "--page-size"]),
        (gpu(80), {"max_total_tokens": "8m"}, ["--max-total-tokens 8388608 takes 1,024.00 GiB", "lower it"]),
        (
            gpu(80),
            {"max_total_tokens": 1000, "context_length": 2000},
            ["--context-length 2000", "992 tokens", "raise --max-total-tokens"],
        ),
        (gpu(24), {"context_length": 100_000}, ["--context-length 100000", "KV cache holds", "lower --chunked"]),
        (gpu(80), {"context_length": "1m"}, ["--context-length 1048576", "131072 positions"]),
        (gpu(80), {"mem_fraction_static": 0.5, "gpu_memory_utilization": 0.5}, ["give one of them"]),
        (
            DeviceBytes(kind="cpu", name="cpu", total=64 * GIB, free=60 * GIB),
            {"gpu_memory_utilization": 0.5},
            ["--gpu-memory-utilization 0.5: the device is cpu", "--max-total-tokens"],
        ),
        (gpu(80), {"chunked_prefill_size": 0}, ["--chunked-prefill-size 0", "-1"]),
    ],
)
def test_what_does_not_fit_is_one_line(device: DeviceBytes, changes: dict[str, Any], parts: list[str]) -> None:
    """The line has the cause, the numbers and the flag to change."""
    line = refused(device, **changes)
    assert all(part in line for part in parts), line


def test_a_cache_smaller_than_the_context_bounds_requests_and_says_so() -> None:
    """Where no context was asked for, requests are limited to what the cache holds, with a note."""
    found = planned(max_total_tokens=1000)
    assert found.context_len == 992
    assert "limited to 992 tokens" in found.notes[-1]
    assert "131,072" in found.notes[-1]


def test_what_is_known_of_graphs_is_what_they_do() -> None:
    """The figures that the estimate takes from the graphs' files are still theirs."""
    assert max(graphs.BUCKETS) == GRAPH_ROWS
    assert set(graphs.SHARING_BUCKETS) <= set(graphs.BUCKETS)
    assert sum(graphs.BUCKETS + graphs.SHARING_BUCKETS) <= BUCKET_SUM * GRAPH_ROWS
    assert len(graphs.BUCKETS + graphs.SHARING_BUCKETS) * 3 == NUM_DECODE_GRAPHS


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host can give is bounded by the control group, of either version; cache that can go is not in use."""
    meminfo, group = tmp_path / "meminfo", tmp_path / "cgroup"
    meminfo.write_text("MemTotal: 8192 kB\nMemFree: 1 kB\nMemAvailable: 6144 kB\nHugePages_Total: 0\n")
    (group / "memory").mkdir(parents=True)
    monkeypatch.setattr(host_memory, "MEMINFO", meminfo)
    monkeypatch.setattr(host_memory, "CGROUP", group)

    def found() -> tuple[int, int]:
        device = host_memory.host_bytes()
        return device.total >> 20, device.free >> 20

    assert found() == (8, 6)
    (group / "memory.max").write_text("max\n")
    assert found() == (8, 6)
    (group / "memory.max").write_text(f"{4 << 20}\n")
    (group / "memory.current").write_text(f"{3 << 20}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {1 << 20}\n")
    assert found() == (4, 2)
    (group / "memory.max").unlink()
    (group / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert found() == (8, 6)
    (group / "memory" / "memory.limit_in_bytes").write_text(f"{5 << 20}\n")
    (group / "memory" / "memory.usage_in_bytes").write_text(f"{1 << 20}\n")
    assert found() == (5, 4)


def test_free_memory_is_that_of_the_processs_own_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `ulimit -v` a pool of what the machine has free left the engine nothing to compute with."""
    meminfo, statm = tmp_path / "meminfo", tmp_path / "statm"
    meminfo.write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {12 << 20} kB\n")
    statm.write_text(f"{(1 << 30) // os.sysconf('SC_PAGE_SIZE')} 5 5 5 0 5 0\n")
    for name, value in {"MEMINFO": meminfo, "STATM": statm, "CGROUP": tmp_path / "none"}.items():
        monkeypatch.setattr(host_memory, name, value)

    def found(limit: int) -> tuple[float, float]:
        monkeypatch.setattr(host_memory.resource, "getrlimit", lambda kind: (limit, resource.RLIM_INFINITY))
        device = host_memory.host_bytes()
        return device.total / 2**30, device.free / 2**30

    assert found(resource.RLIM_INFINITY) == (16, 12)
    assert found(4 << 30) == (4, 4 - 1 - 0.625)
    assert found(1 << 30) == (1, 0)
    assert host_memory.host_bytes().name == "cpu within ulimit -v"
    assert found(64 << 30) == (16, 12)
    statm.unlink()
    assert found(4 << 30) == (16, 12)


def test_headers_give_the_size_that_the_engine_measures(tmp_path: Path) -> None:
    """Sizes from safetensors headers are those of the built model, which repeats norms of heads, within 1%."""
    for architecture, changes in (
        ("LlamaForCausalLM", {}),
        ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
        ("Qwen3ForCausalLM", {"head_dim": 32}),
    ):
        folder = make_model(tmp_path / architecture, architecture, shard_size="100KB", **changes)
        for dtype in ("float32", "bfloat16"):
            settings = EngineSettings(model_path=str(folder), dtype=dtype, device="cpu", max_total_tokens=512)
            plan = make_plan(Registry.scan(), model=architecture, attention_backend="auto", device="cpu")
            runner = ModelRunner(settings, load(plan, "engine"))
            size = weight_size(ModelFolder(folder).headers, runner.config, dtype).num_bytes
            assert size == pytest.approx(runner.weight_bytes, rel=0.01)


def test_a_tied_head_that_cpu_repacks_is_counted(tmp_path: Path) -> None:
    """On CPU in bfloat16 the tied output head is a second copy."""
    folder = make_model(tmp_path, "Qwen2ForCausalLM", tie_word_embeddings=True)
    config = dataclasses.replace(LLAMA_8B, vocab_size=199, hidden_size=64, tie_word_embeddings=True)
    sizes = [
        weight_size(ModelFolder(folder).headers, config, "bfloat16", head_row_bytes=row).num_bytes
        for row in (64 * 2, 0)
    ]
    assert sizes[0] - sizes[1] == 199 * 64 * 2


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    """A file that is no safetensors is reported with its name."""
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"model\.safetensors: broken safetensors file"):
        headers(tmp_path / "model.safetensors")


def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine compares the headers with the device first; nothing is built."""
    folder = make_model(tmp_path, "LlamaForCausalLM")
    small = DeviceBytes(kind="cpu", name="cpu", total=GIB, free=1000)
    monkeypatch.setattr(device_memory, "device_bytes", lambda device: small)
    monkeypatch.setattr("dovetail.runtime.start.load.load", lambda checked: pytest.fail("weights are loaded"))
    with pytest.raises(ConfigError, match="does not fit on cpu: its weights take"):
        generate(folder, [], [])


def test_memory_that_runs_out_while_loading_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device has less than was expected, the reason is one line and no traceback."""

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    folder = make_model(tmp_path, "LlamaForCausalLM")
    monkeypatch.setattr("dovetail.runtime.start.load.load_checkpoint", fail)
    with pytest.raises(ConfigError, match=r"does not fit on cpu: .* were free") as caught:
        generate(folder, [], [])
    assert "\n" not in str(caught.value)


def test_a_started_engine_shows_the_plan(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """At level info the table stands on standard error without a terminal's codes; at warning only the notes do."""
    folder = make_model(tmp_path, "LlamaForCausalLM")
    with caplog.at_level(logging.INFO, "dovetail"):
        generate(folder, [], [], max_total_tokens=100)
    shown = capfd.readouterr().err
    assert all(part in shown for part in ("memory of cpu", "KV cache", "96 tokens", "requests"))
    assert "\x1b[" not in shown
    assert any("limited to 96 tokens" in record.getMessage() for record in caplog.records)
    with caplog.at_level(logging.WARNING, "dovetail"):
        generate(folder, [], [], max_total_tokens=100)
    assert "memory of cpu" not in capfd.readouterr().err


@pytest.mark.gpu
def test_a_started_engine_measures_what_was_taken_on_a_gpu(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """After capturing, the table says what buffers and graphs really took."""
    folder = make_model(tmp_path, "LlamaForCausalLM", head_dim=64)
    with caplog.at_level(logging.INFO, "dovetail"):
        generate(folder, [], [], device="cuda", dtype="bfloat16")
    assert "taken until ready" in capfd.readouterr().err


def test_the_estimate_of_activations_is_near_what_a_step_allocates(tmp_path: Path) -> None:
    """The peak of live tensors in a step with a chunk of 1,000 tokens is at most the estimate, and most of it."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64, "max_position_embeddings": 2048}
    folder = make_model(tmp_path, "LlamaForCausalLM", **sizes)
    changes = {"dtype": "float32", "device": "cpu", "max_total_tokens": 2048, "max_running_requests": 4}
    settings = EngineSettings(model_path=str(folder), chunked_prefill_size=1000, **changes)
    plan = make_plan(Registry.scan(), model="LlamaForCausalLM", attention_backend="auto", device="cpu")
    core = make_engine(settings, load(plan, "engine"))
    core.handle(Submit(rid="a", prompt_ids=[1] * 1500, params=SamplerParams(max_tokens=1)))
    with torch.profiler.profile(profile_memory=True) as profile:
        core.step()
    running = peak = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            running += event.nbytes()
            peak = max(peak, running)
    tokens = 1000 + settings.max_running_requests
    estimate = activation_bytes(core.executor.runner.config, 4, tokens)
    assert 0.6 * estimate < peak <= estimate


def resident_bytes() -> int:
    """Memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def test_a_cache_on_cpu_takes_memory_as_it_is_used() -> None:
    """A pool of 1 GiB is zero and takes next to nothing; what is written stays, and what cannot be is refused."""
    cpu = torch.device("cpu")
    before = resident_bytes()
    pool = KVCache(LLAMA_8B.cache_groups, [512], 16, torch.bfloat16, cpu)
    assert pool.num_bytes == GIB
    assert resident_bytes() - before < GIB // 16
    last = pool.layer(31)
    assert not last[-1].any()
    last[-1] = 1
    assert last[-1].all()
    pool.zero_pages(0, [511])
    assert not last[-1].any()
    with pytest.raises(OSError, match="Cannot allocate memory"):
        KVCache(LLAMA_8B.cache_groups, [1 << 30], 16, torch.bfloat16, cpu)


def test_groups_are_balanced_by_what_requests_use() -> None:
    """A window has room for what all rows see and two steps compute, and for as many prefixes as there are others."""
    plain, plan = planned(context_length=32768), planned(context_length=32768, config=WINDOWED_8B)
    full, window = plan.groups
    assert (full.name, window.name, window.seen_pages) == ("full", "window-1024", 66)
    assert (full.page_bytes, window.page_bytes) == (16 * 8 * 4096, 16 * 24 * 4096)
    assert window.num_pages >= floor_pages(66, plan.max_running_requests, 8192, 16)
    assert window.num_pages * 4096 // 16 >= full.num_pages * 66
    assert abs(plan.kv_bytes - plain.kv_bytes) < 0.001 * plain.kv_bytes
    assert full.num_pages > 1.5 * plain.num_pages
    assert plan.num_requests(32768) > 1.5 * plain.num_requests(32768)
    assert plan.as_dict()["kv_bytes"] == full.num_bytes + window.num_bytes


def test_a_window_has_no_more_pages_than_there_are_tokens() -> None:
    """A small cache has as many pages of each group; then pages of one never lack where the other has some."""
    plan = planned(max_total_tokens=4096, config=WINDOWED_8B)
    assert [group.num_pages for group in plan.groups] == [256, 256]


STATE = (CacheTensor("state", (16, 128, 128), "float32"), CacheTensor("conv", (3, 4096)))
STATE_BYTES = 16 * 128 * 128 * 4 + 3 * 4096 * 2
HYBRID_8B = replace(
    LLAMA_8B,
    layers=tuple(
        spec if spec.index % 4 == 3 else LayerSpec(index=spec.index, reach=Recurrent(64), state=STATE)
        for spec in LLAMA_8B.layers
    ),
)


def test_states_are_planned_by_row_and_not_by_token() -> None:
    """One for each device row, in each recurrent layer, and two copies for every request of a typical length."""
    plain, plan = planned(context_length=32768), planned(context_length=32768, config=HYBRID_8B)
    full, states = plan.groups
    assert (full.page_bytes, states.page_bytes) == (16 * 8 * 4096, 24 * STATE_BYTES)
    assert states.num_rows == plan.max_running_requests + 3
    assert states.num_pages == -(-2 * plan.num_tokens // 4096)
    assert states.num_bytes == (states.num_rows + states.num_pages + 1) * states.page_bytes
    assert plan.page_bytes == full.page_bytes
    assert abs(plan.kv_bytes - plain.kv_bytes) < 0.01 * plain.kv_bytes
    assert plan.num_requests(4096) == full.num_pages // 256
    small = planned(max_total_tokens=512, config=HYBRID_8B)
    assert small.groups[1].num_pages == min(small.max_running_requests // 4, small.num_pages)  # of memory that is left
    few = planned(max_total_tokens=512, max_running_requests=4, config=HYBRID_8B)
    assert (few.groups[1].num_pages, few.notes) == (2, small.notes)
    lines = {what: rest for what, _, rest in rows_of(plan)}
    rows, copies = (gib(num * states.page_bytes) for num in (states.num_rows, states.num_pages + 1))
    assert lines["  recurrent"] == (
        f"states of {states.num_rows} rows, {rows}, and {states.num_pages} copies for the prefix cache, {copies}; "
        f"{gib(states.page_bytes)} each"
    )


def test_copies_of_states_are_as_many_as_were_asked_for() -> None:
    """Any number, and none where nothing is looked for in the cache; the tokens get what is left."""
    usual, few, many = (
        planned(config=HYBRID_8B, **asked) for asked in ({}, {"state_copies": 7}, {"state_copies": 900})
    )
    assert (few.groups[1].num_pages, many.groups[1].num_pages) == (7, 900)
    assert many.num_pages < usual.num_pages < few.num_pages
    assert planned(config=HYBRID_8B, disable_radix_cache=True).groups[1].num_pages == 0
    assert planned(config=HYBRID_8B, max_total_tokens=512, state_copies=3).groups[1].num_pages == 3
    with pytest.raises(ConfigError, match=r"lower --max-running-requests \(256\) or --state-copies \(9000\)"):
        planned(config=HYBRID_8B, state_copies=9000)
    assert refused(fold_replies=True).startswith("--fold-replies: LlamaForCausalLM keeps no states")
    for more in ({"state_copies": 0}, {"disable_radix_cache": True}):
        with pytest.raises(ConfigError, match=r"with --.* nothing of a reply is kept"):
            planned(config=HYBRID_8B, fold_replies=True, **more)
    assert refused(state_copies=7).startswith("--state-copies 7: LlamaForCausalLM keeps no states")


def test_states_in_fewer_bits_take_half() -> None:
    """Where every layer that has some knows how; refused, with why, where one does not."""
    settings = EngineSettings(state_dtype="bfloat16")
    able = [replace(tensor, dtypes=("bfloat16",)) if tensor.dtype else tensor for tensor in STATE]
    layers = [replace(spec, state=tuple(able)) if spec.state else spec for spec in HYBRID_8B.layers]
    config = with_cache_dtype(replace(HYBRID_8B, layers=tuple(layers)), settings)
    assert planned(config=config).groups[1].page_bytes == 24 * (STATE_BYTES - 16 * 128 * 128 * 2)
    for other, why in ((HYBRID_8B, "keeps its states in float32 only"), (LLAMA_8B, "keeps no states in float32")):
        with pytest.raises(ConfigError, match=f"--state-dtype bfloat16: LlamaForCausalLM {why}; leave it out"):
            with_cache_dtype(other, settings)


def test_states_that_do_not_fit_are_one_line() -> None:
    """However few tokens are cached: the flag to lower is that of the rows."""
    for changes in ({}, {"max_total_tokens": 64}):
        with pytest.raises(
            ConfigError, match=r"states of 4099 rows and 2 copies take 9\d\.\d\d GiB; lower --max-running"
        ):
            planned(config=HYBRID_8B, max_running_requests=4096, **changes)


def test_of_states_alone_tokens_take_no_memory() -> None:
    """Their pages are as many as requests can use, up to a bound; copies of states share what is left by the budget."""
    layers = tuple(LayerSpec(index=index, reach=Recurrent(64), state=STATE) for index in range(32))
    config = replace(LLAMA_8B, layers=layers)
    plan = planned(config=config)
    tokens, states = plan.groups
    assert (tokens.name, tokens.num_bytes, plan.page_bytes) == ("tokens", 0, 0)
    assert (plan.num_tokens, plan.context_len) == (1 << 22, 131072)
    assert states.page_bytes == 32 * STATE_BYTES
    assert plan.kv_bytes == states.num_bytes > 0.9 * planned().kv_bytes
    assert states.num_pages > 1000
    assert planned(config=config, max_running_requests=2, context_length=4096).num_tokens == 8192
    asked = planned(config=config, max_total_tokens=8192)
    assert (asked.num_tokens, asked.context_len) == (8192, 8192)
    assert planned(config=config, state_copies=5).groups[1].num_pages == 5


def test_each_group_has_a_line_in_the_table() -> None:
    """Where there are several; a plain model has the one line."""
    lines = {what: rest for what, _, rest in rows_of(planned(config=WINDOWED_8B))}
    assert "pages of 16 tokens, at most 66 of a decoding request" in lines["  window-1024"]
    assert not [what for what, _, _ in rows_of(planned()) if what.startswith(" ")]


def test_more_tensors_than_any_model_has_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million empty tensors took half a minute and 1.3 GB before anything was read of them; headers have a bound."""
    monkeypatch.setattr(weight_size_module, "MAX_TENSORS", 5)
    for number in range(2):
        tensors = {f"t{number}.{i}": torch.zeros(0) for i in range(3)}
        save_file(tensors, tmp_path / f"model-{number}.safetensors")
    files = sorted(tmp_path.iterdir())
    assert len(headers_of(tmp_path, WeightFiles(files[:1]))) == 3
    with pytest.raises(ModelError, match="more than 5 tensors"):
        headers_of(tmp_path, WeightFiles(files))
    long = tmp_path / "long.safetensors"
    with long.open("wb") as opened:
        opened.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        opened.truncate(MAX_HEADER_BYTES + 100)
    with pytest.raises(ModelError, match="claims a header of 67,108,865 bytes"):
        headers_of(tmp_path, WeightFiles([long]))


SEES = replace(
    LLAMA_8B,
    vision=VisionPart(
        embed_id=1,
        patches_per_token=4,
        width=1280,
        tensors="x",
        patch_numbers=13_000,
        piece_numbers=9,
        piece_patches=8192,
    ),
)


def test_the_largest_image_is_part_of_the_plan() -> None:
    """As many patches as are served at most: what the tower holds for these is not the cache's."""
    room = LLAMA_8B.max_position_embeddings * 4
    for asked, most in ((None, room), (room + 1, room), (room, room), (room - 1, room - 1), (65_536, 65_536)):
        assert planned(config=SEES, max_image_patches=asked).image_patches == most
    assert planned(config=SEES, context_length=1000).image_patches == 4000
    few, many = (planned(config=SEES, max_image_patches=num, max_total_tokens=9000) for num in (8192, 65_536))
    kept = 65_536 // 4 * SEES.hidden_size * 2 - (256 << 20)
    assert many.image_bytes - few.image_bytes == 2 * 13_000 * (65_536 - 8192) + max(0, kept)
    assert few.free_bytes - many.free_bytes == many.image_bytes - few.image_bytes
    rows = [row for row in rows_of(many) if row[0] == "images"]
    assert rows == [("images", gib(many.image_bytes), "estimated for images of up to 65,536 patches")]
    tight = [planned(gpu(24), config=SEES, max_image_patches=num) for num in (8192, 119_716)]
    assert tight[1].kv_bytes < tight[0].kv_bytes
    assert tight[1].free_bytes >= 0


def test_images_without_room_or_tower_are_named() -> None:
    """A plan that images leave no room says so, with the flag; a text model takes no such flag."""
    assert "--max-image-patches 5: LlamaForCausalLM reads text only; leave it out" in refused(max_image_patches=5)
    with pytest.raises(ConfigError, match=r"images of up to 400,000 patches 1\d\.\d\d GiB.* or --max-image-patches"):
        planned(gpu(24), config=SEES, max_image_patches=400_000)
    note = planned(config=SEES, mem_fraction_static=0.99, max_image_patches=65_536).notes[0]
    assert "for activations, images and graphs" in note
    assert note.endswith("lower it or --chunked-prefill-size or --max-image-patches (65536)")
