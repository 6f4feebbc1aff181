"""SGLang's frontend language (`gen`, `select`, `fork`) and its serving benchmark, as its package brings them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import Worker

from dovetail.demo import MODEL_DIR

pytestmark = [pytest.mark.full, pytest.mark.registry, pytest.mark.timeout(480)]
PACKAGES = (
    "sglang==0.5.23", "orjson==3.13.0", "psutil==7.2.2", "pybase64==1.5.1", "ipython==9.18.1", "traitlets==5.16.1",
)  # fmt: skip
"""The frontend, without what SGLang's own engine needs."""


@pytest.fixture(scope="module")
def sglang(python_package: Callable[..., Path]) -> Path:
    """A folder with SGLang's own package."""
    return python_package(*PACKAGES)


def run(sglang: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program of this folder beside SGLang's package."""
    paths = os.pathsep.join([str(sglang), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / program), *arguments],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_a_program_of_sglangs_runs_unchanged(sglang: Path, workers: list[Worker]) -> None:
    """It generates, chooses the likeliest text, forks, keeps to an expression, and streams."""
    done = run(sglang, "sglang_program.py", workers[0].base)
    found = json.loads(done.stdout.splitlines()[-1])
    assert "Paris" in found["gen"]
    assert found["stream"] == found["gen"]
    assert found["select"] == " Paris"
    assert "Rome" in found["fork"]
    assert "Tokyo" in found["fork"]
    assert re.fullmatch("[0-9]{3}", found["regex"])
    assert "Paris" in found["batch"][0]
    assert "Rome" in found["batch"][1]


IDS = "--dataset-name random-ids --random-input-len 40 --random-output-len 8"
PREFIXES = (
    "--dataset-name generated-shared-prefix --gsp-num-groups 2 --gsp-prompts-per-group 3 --gsp-system-prompt-len 64 "
    "--gsp-question-len 8 --gsp-output-len 8"
)
RUNS = (
    f"sglang --return-logprob --top-logprobs-num 2 --cache-report --flush-cache {IDS}",
    f"sglang --tokenize-prompt --disable-stream {IDS}",
    f"sglang-oai {IDS}",
    f"sglang-oai-chat {PREFIXES}",
    f"vllm {IDS}",
    f"vllm-chat --disable-stream {IDS}",
    f"sglang-embedding {IDS}",
)


def test_its_serving_benchmark_runs_against_every_route(sglang: Path, workers: list[Worker], tmp_path: Path) -> None:
    """Its own requests, unchanged, all answered with as many tokens as they ask for."""
    report, model = tmp_path / "report.jsonl", str(MODEL_DIR)
    common = f"--base-url {workers[0].base} --served-model-name default --num-prompts 6 --max-concurrency 3"
    common += f" --warmup-requests 1 --disable-tqdm --output-file {report}"
    runs = [["--backend", *line.split(), *common.split(), "--model", model, "--tokenizer", model] for line in RUNS]
    run(sglang, "sglang_bench.py", json.dumps(runs))
    found = [json.loads(line) for line in report.read_text().splitlines()]
    assert [(one["backend"], one["completed"]) for one in found] == [(line.split()[0], 6) for line in RUNS]
    for one in found:
        assert one["total_input_tokens"] > 0
        assert (one["total_output_tokens"] > 0) == (one["backend"] != "sglang-embedding")
