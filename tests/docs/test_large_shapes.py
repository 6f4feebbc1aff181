"""Published shapes for four and eight GPUs: what a rank holds is planned to the byte, or refused by name."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dovetail_server.cli import plan

BENCH = Path(__file__).parents[1] / "benchmarks"
NUM_PARAMS = {
    "qwen3-235b-a22b": 235.09, "glm-4.5": 352.80, "glm-4.5-air": 106.85, "deepseek-v3": 671.03, "kimi-k2": 1026.41,
    "gpt-oss-120b": 116.83, "llama-3.3-70b": 70.55,
}  # fmt: skip
"""In billions, without layers that predict further tokens."""
CACHE_BYTES = {
    "qwen3-235b-a22b": 94 * 2 * 1 * 128 * 2,  # one of four key heads
    "glm-4.5": 92 * 2 * 2 * 128 * 2,  # two of eight
    "glm-4.5-air": 46 * 2 * 2 * 128 * 2,
    "deepseek-v3": 61 * 576 * 2,  # a latent row is every rank's
    "kimi-k2": 61 * 576 * 2,
    "gpt-oss-120b": 36 * 2 * 2 * 64 * 2,
    "llama-3.3-70b": 80 * 2 * 2 * 128 * 2,
}
"""Of a token, on one rank."""


@pytest.fixture(scope="module")
def paper() -> Iterator[Any]:
    """The program as a module; it imports the one of the shapes."""
    sys.path.insert(0, str(BENCH))
    try:
        yield importlib.import_module("large_steps")
    finally:
        sys.path.remove(str(BENCH))
        for name in ("large_steps", "large_names", "large_shapes"):
            sys.modules.pop(name, None)


@pytest.fixture
def folder(paper: Any, tmp_path: Path) -> Any:
    """Writes a shape's `config.json`."""
    return lambda name, **changes: paper.write_shape(tmp_path / name, name, **changes)


def planned(capsys: pytest.CaptureFixture[str], folder: Path, ranks: int, *flags: str) -> Any:
    """The plan of a rank on a card of 141 GiB, or the line that refuses it."""
    argv = [str(folder), "--load-format", "dummy", "--device-memory", "141GiB", "--json", "--tp", str(ranks), *flags]
    code = plan.main(argv)
    said = capsys.readouterr()
    if code:
        assert (code, said.out, said.err.count("\n")) == (2, "", 1)
        return said.err
    return json.loads(said.out)


@pytest.mark.parametrize("name", NUM_PARAMS)
def test_a_rank_is_planned_to_the_byte(name: str, paper: Any, folder: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights as they are counted from the published sizes, by width and with whole experts; so is a token's cache."""
    config, ranks = paper.SHAPES[name], paper.NUM_RANKS[name]
    assert paper.held(config, 1, whole=False).num_params / 1e9 == pytest.approx(NUM_PARAMS[name], abs=0.005)
    for whole, flags in ((False, ()), (True, ("--expert-parallel",))):
        if not paper.is_divided(config, ranks, whole=whole):
            assert "--expert-parallel" in planned(capsys, folder(name), ranks, *flags)
            continue
        found, held = planned(capsys, folder(name), ranks, *flags), paper.held(config, ranks, whole=whole)
        assert found["weight_bytes"] == held.weights, flags
        assert found["page_bytes"] == 16 * held.cache_token == 16 * CACHE_BYTES[name]
        assert found["num_tokens"] > 400_000


def test_what_does_not_fit_or_divide_is_refused(folder: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One line with the numbers and what to give instead; whole experts go where a cut would split a scale's block."""
    kimi, qwen = folder("kimi-k2"), folder("qwen3-235b-a22b")
    assert "the model does not fit on a GPU: its weights take 277.71 GiB" in planned(capsys, kimi, 2)
    assert "no room for the KV cache on a GPU: 140.50 GiB were free, the weights leave 0." in planned(capsys, kimi, 4)
    cut = planned(capsys, qwen, 8)
    assert "layers.0.mlp.experts.down: weight_scale has one number for 128 inputs, and 8 ranks have 192" in cut
    assert "or --expert-parallel, which leaves experts whole" in cut
    assert planned(capsys, qwen, 8, "--expert-parallel")["weight_bytes"] < 29 << 30
    assert "64 query heads cannot be divided among 6 ranks; --tensor-parallel-size may be 1, 2, 4, 8" in planned(
        capsys, qwen, 6
    )
    odd = folder("glm-4.5", n_routed_experts=162)
    said = planned(capsys, odd, 4, "--expert-parallel")
    assert "162 experts cannot be divided among 4 ranks; give a --tensor-parallel-size that divides them, or" in said
    assert "--expert-parallel: one rank has all experts" in planned(capsys, qwen, 1, "--expert-parallel")


def test_whole_experts_of_models_without_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`dovetail plan` says what `dovetail serve` says."""
    dense = {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 99,
        "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(dense))
    said = planned(capsys, tmp_path, 2, "--expert-parallel")
    assert "--expert-parallel: Qwen3ForCausalLM has no experts; leave it out" in said


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2"])
def test_published_tensors_have_their_places(name: str, paper: Any) -> None:
    """Of four layers, under their names, packed as published, on one of eight ranks: none is left over or missing."""
    config = paper.SHAPES[name] | {"num_hidden_layers": 4}
    found = importlib.import_module("large_names").measure(config, 8)
    experts, sparse = config["n_routed_experts"], 4 - config["first_k_dense_replace"]
    if name == "deepseek-v3":  # kv_b is written out: its scale has no place
        assert found["tensors"] - found["moves"] == 4
        assert found["tensors"] == 3 + 4 * (4 + 2 * 5) + 3 * 2 * 3 + sparse * (2 + 2 * 3 * (experts + 1))
    else:  # of three tensors of an expert's matrix, its shape is only compared
        assert found["tensors"] - found["moves"] == sparse * 3 * experts
        assert found["tensors"] == 3 + 4 * (4 + 5) + 3 + sparse * (2 + 3 + 3 * 3 * experts)


def test_steps_on_paper_add_up(paper: Any) -> None:
    """Sums grow with rows and ranks from what was measured; experts are never read by less than an even share."""
    assert paper.sum_us(16, 4096, 4) == pytest.approx(6.9)
    assert paper.sum_us(256, 4096, 4) == pytest.approx(45.8)
    assert paper.sum_us(1, 4096, 8) == pytest.approx(5.1 + 4 * 0.9)
    for ranks in (4, 8):
        found = [paper.sum_us(rows, 7168, ranks) for rows in (1, 4, 16)]
        assert found == sorted(found)
        assert found[0] <= paper.sum_us(1, 7168, 8) < 10
    for name in ("deepseek-v3", "kimi-k2"):
        config = paper.SHAPES[name]
        rng = random.Random(1)
        for _ in range(20):
            ids = paper.chosen(config, rng)
            assert len(set(ids)) == 8
            assert len({one * config["n_group"] // config["n_routed_experts"] for one in ids}) <= config["topk_group"]
        for streams in paper.STREAMS:
            by_width, whole = (paper.step(config, 8, streams, whole=whole) for whole in (False, True))
            assert whole["reads_us"] > by_width["reads_us"] == pytest.approx(by_width["floor_us"])
            assert whole["floor_us"] == pytest.approx(by_width["floor_us"], rel=1e-6)
            assert 0 < whole["guess"] < whole["bound"] < 1


@pytest.mark.parametrize(
    ("name", "launches"),
    [("qwen3-235b-a22b", 582.1), ("glm-4.5-air", 428.1), ("gpt-oss-120b", 280.1), ("llama-3.3-70b", 418.1)],
)
def test_launches_are_counted_as_profiles_have_them(name: str, launches: float, paper: Any) -> None:
    """Of one stream on four GPUs, without all-reduces; a layer has none too many or too few."""
    assert abs(paper.launches(paper.SHAPES[name]) - launches) < 11


def test_what_was_measured_corrects_the_guess(paper: Any) -> None:
    """Rates that a guess would give lead back to the times that it was made of; too few of them change no time."""
    sums = {1: 4.0, 4: 4.5, 16: 6.0, 64: 9.0, 256: 20.0}
    times = paper.Times(
        bandwidth=3e12, sum_us=sums, ranks=4, launch_us={1: 1.5, 64: 3.0}, experts_share={1: 0.8, 64: 0.7}
    )
    steps: dict[str, Any] = {"same:glm-4.5": {}}
    for name, way in (("qwen3-235b-a22b", ":whole"), ("glm-4.5-air", ""), ("llama-3.3-70b", "")):
        steps[f"serve:{name}{way}"] = {
            f"tok_s_{num}": paper.step(paper.SHAPES[name], 4, num, whole=bool(way), times=times)["guess_tok_s"]
            for num in paper.STREAMS
        }
    found = {"copy": {"bytes_per_s": 3e12}, "ranks": 4, "steps": steps}
    found["sums"] = {"rows": [{"rows": rows, "KB": 8 * rows, "norm_us": us} for rows, us in sums.items()]}
    corrected = paper.measured(found)
    assert corrected.launch_us == pytest.approx(times.launch_us)
    assert corrected.experts_share == pytest.approx(times.experts_share)
    assert paper.sum_us(64, 4096, 4, corrected) == pytest.approx(9.0)
    assert paper.sum_us(64, 4096, 8, corrected) > 9.0
    del steps["serve:llama-3.3-70b"]
    assert paper.measured(found).launch_us == paper.PAPER.launch_us
