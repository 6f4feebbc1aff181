"""Flags of SGLang, vLLM and llama.cpp: settings, or known with what they mean here; and lines that people paste."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dovetail.base.config_file import field_aliases
from dovetail.contracts.errors import ConfigError
from dovetail_server.cli.options import load_settings, parse_flags
from dovetail_server.compat import endpoints, environment, fields, flags, known
from dovetail_server.compat.flags import SHORT, TABLE, find
from dovetail_server.settings.serve import ServeSettings

FOLDER = Path(__file__).parent / "compat"
OWN = {name.replace("_", "-") for name in field_aliases(ServeSettings)}
OWN_PREFIXES = (
    *("SGLANG_", "SGL_", "VLLM_", "MOONCAKE_", "FLASHINFER_", "ASCEND_", "ENABLE_ASCEND_", "DEEP_", "USE_ROCM_"),
    *("USE_TRITON_", "IS_H200", "EXA_API_KEY", "DISABLE_OPENAPI_DOC"),
)
"""How the variables begin that the peers' own engines read."""
SHARED = frozenset((
    "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "CMAKE_BUILD_TYPE", "FORCE_COLOR", "HF_HUB_DISABLE_XET", "LD_LIBRARY_PATH",
    "LOCAL_RANK", "MAX_JOBS", "NO_COLOR", "NVCC_THREADS", "S3_ACCESS_KEY_ID", "S3_ENDPOINT_URL",
    "S3_SECRET_ACCESS_KEY", "VERBOSE",
))  # fmt: skip
"""Variables of others that the peers read, too; whatever reads them here goes on to."""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DOVETAIL_")]:
        monkeypatch.delenv(name)


def read(line: str) -> ServeSettings:
    flags = parse_flags(shlex.split(line))
    assert isinstance(flags, dict)
    return load_settings(flags)


@pytest.mark.parametrize("peer", ["sglang", "vllm"])
def test_every_flag_of_a_peer_is_known(peer: str) -> None:
    """A flag is a setting of ours, or in the table; a short one stands for a long one."""
    listed = tomllib.loads((FOLDER / f"{peer}.toml").read_text())["flags"]
    long = [flag[2:] for flag in listed if flag.startswith("--")]
    assert [name for name in long if name not in OWN and find(name) is None] == []
    assert [flag for flag in listed if not flag.startswith("--") and flag not in SHORT] == []
    assert [name for name in SHORT.values() if find(name) is None and name not in OWN] == []


FIRST_DAY: dict[str, dict[str, Any]] = {
    # SGLang
    "--model-path m --host 0.0.0.0 --port 30000": {"model_path": "m", "host": "0.0.0.0"},
    "--tp 2 --dp 1": {"tensor_parallel_size": 2},
    "--tp-size 1 --ep-size 1 --pp-size 1 --nnodes 1 --node-rank 0": {},
    "--tp 4 --ep 4": {"tensor_parallel_size": 4, "expert_shard": "expert"},
    "--tp 4 --ep-size 1": {"expert_shard": "inner"},
    "--trust-remote-code": {},
    "--mem-fraction-static 0.8": {"mem_fraction_static": 0.8},
    "--context-length 8192 --chunked-prefill-size -1": {"context_length": 8192, "chunked_prefill_size": -1},
    "--enable-metrics --enable-cache-report": {},
    "--speculative-algorithm NGRAM --speculative-num-draft-tokens 6": {"speculator": "ngram"},
    '-sc \'{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}\'': {"speculator": "ngram"},
    "--kv-cache-dtype auto --quantization none": {},
    "--kv-cache-dtype fp8_e4m3": {"kv_cache_dtype": "fp8"},
    "--skip-server-warmup --watchdog-timeout 600": {},
    "--schedule-conservativeness 0.3 --num-continuous-decode-steps 4": {},
    "--cuda-graph-max-bs-decode 64 --cuda-graph-bs-decode 1 2 4 --max-running-requests 8": {"max_running_requests": 8},
    "--log-level-http warning": {"log_level": "warning"},
    "--default-chat-template-kwargs '{\"enable_thinking\": false}'": {
        "default_chat_template_kwargs": {"enable_thinking": False}
    },
    "--json-model-override-args '{}'": {},
    "--disable-radix-cache --attention-backend triton --sampling-backend pytorch": {"disable_radix_cache": True},
    "--enable-torch-compile --disable-custom-all-reduce --enable-mixed-chunk": {},
    "--served-model-name a": {"served_model_name": ["a"]},
    "--fastapi-root-path /llm": {"root_path": "/llm"},
    "--dist-init-addr 127.0.0.1:5000 --random-seed 7": {"random_seed": 7},
    "--enable-priority-scheduling": {"schedule_policy": "priority"},
    "--stream-response-default-include-usage": {"stream_response_default_include_usage": True},
    "--preferred-sampling-params '{\"temperature\": 0.2}'": {"preferred_sampling_params": {"temperature": 0.2}},
    # vLLM
    "m --max-model-len 32k --max-num-seqs 4": {"model_path": "m", "context_length": 32768, "max_running_requests": 4},
    "-tp 2 -pp 1 -dp=1": {"tensor_parallel_size": 2},
    "-O3 -q none": {"quantization": None},
    "--quantization awq": {"quantization": "awq"},
    "-q fp8 m": {"quantization": "fp8", "model_path": "m"},
    "--enable-prefix-caching m": {"model_path": "m", "disable_radix_cache": False},
    "--no-enable-prefix-caching m": {"model_path": "m", "disable_radix_cache": True},
    "--enable-chunked-prefill --no-enable-chunked-prefill": {"chunked_prefill_size": -1},
    "--disable-log-requests --disable-log-stats": {},
    "--no-enable-log-requests --enforce-eager": {"log_requests": False, "disable_cuda_graph": True},
    "--no-enforce-eager": {"disable_cuda_graph": False},
    "--no-enable-lora --no-trust-remote-code": {},
    "--gpu-memory-utilization 0.9 --swap-space 0": {"gpu_memory_utilization": 0.9},
    "--generation-config vllm": {"sampling_defaults": "openai"},
    "--override-generation-config '{\"top_k\": 5}'": {"preferred_sampling_params": {"top_k": 5}},
    "--allowed-origins '[\"*\"]' --allowed-methods '[\"*\"]'": {"allow_origins": ["*"]},
    "--uvicorn-log-level warning --disable-uvicorn-access-log": {"log_level": "warning", "disable_access_log": True},
    "--root-path /llm": {"root_path": "/llm"},
    "--tokenizer-mode auto --config-format auto --load-format auto": {},
    "--enable-auto-tool-choice --tool-call-parser hermes": {"tool_call_parser": "hermes"},
    "--compilation-config '{\"level\": 3}' --compilation-config.mode 3": {},
    "--scheduling-policy priority --async-scheduling": {"schedule_policy": "priority"},
    "--no-async-scheduling": {"disable_overlap_schedule": True},
    "--max_num_seqs 4 --distributed_executor_backend mp": {"max_running_requests": 4},
    "--api-server-count 1 --max-logprobs 20 --response-role assistant": {},
    "--limit-mm-per-prompt '{\"image\": 2}'": {"limit_mm_per_prompt": {"image": 2}},
    '--limit-mm-per-prompt \'{"image": {"count": 2, "width": 512, "height": 512}, "video": {"count": 0}}\'': {
        "limit_mm_per_prompt": {"image": 2, "video": 0}
    },
    "--limit-mm-per-prompt.image 2 --limit_mm_per_prompt.video=0": {"limit_mm_per_prompt": {"image": 2, "video": 0}},
    "--limit-mm-per-prompt.image '{\"count\": 2}' m": {"limit_mm_per_prompt": {"image": 2}, "model_path": "m"},
    "--default-chat-template-kwargs.enable_thinking false --default-chat-template-kwargs.effort low": {
        "default_chat_template_kwargs": {"enable_thinking": False, "effort": "low"}
    },
    # llama.cpp
    "-m m -c 8192 -ngl 99 -fa on -np 4 -t 8 -b 2048": {
        "model_path": "m",
        "context_length": 8192,
        "max_running_requests": 4,
        "num_threads": 8,
    },
    "-hf Qwen/Qwen3-0.6B --jinja --no-webui --alias a": {
        "model_path": "Qwen/Qwen3-0.6B",
        "served_model_name": ["a"],
        "disable_playground": True,
    },
    "--no-mmap --mlock --no-warmup --cache-type-k f16 --reasoning-format none": {"reasoning_parser": None},
}


@pytest.mark.parametrize("line", FIRST_DAY)
def test_lines_of_the_peers_are_taken(line: str) -> None:
    """A line that somebody has for SGLang or vLLM starts the same server here."""
    found = read(line)
    assert {name: getattr(found, name) for name in FIRST_DAY[line]} == FIRST_DAY[line]


REFUSED = {
    "--pipeline-parallel-size=8": "--data-parallel-size divide work",
    "--nnodes 2": "--data-parallel-size divide work",
    "--kv-cache-dtype fp8_e5m2": "'auto', 'fp8' or 'int8'",
    "--speculative-algorithm EAGLE": "drafting",
    "--speculative-config '{}'": "drafting",
    '--speculative-config \'{"method": "ngram", "disable_by_batch_size": 4}\'': "not supported with ngram",
    "-sc.method ngram": "no JSON",
    '--speculative-config \'{"method": "eagle", "model": "x"}\'': "drafting",
    "--enable-lora": "merge the adapter",
    "--lora-modules a=b": "merge the adapter",
    "--hf-overrides '{\"rope_theta\": 1}'": "copy of the folder",
    '--pooler-config \'{"pooling_type": "CLS"}\'': "modules.json",
    "--enable-eplb": "experts",
    "--disaggregation-mode prefill": "both prefill and decode",
    "--cpu-offload-gb 4": "on the device",
    "--kv-cache-memory-bytes 1G": "--max-total-tokens",
    "--tokenizer-mode slow": "tokenizer.json",
    "--generation-config /x": "auto, vllm",
    "--ssl-ca-certs x": "proxy",
    "--hf-token x": "HF_TOKEN",
    "--no-trust-remote-code --uds /tmp/x": "--host",
    "--preferred-sampling-params '{\"heat\": 1}'": "temperature",
    "--default-chat-template-kwargs nope": "JSON",
    "--limit-mm-per-prompt '{\"images\": 2}'": "'images' is unknown; possible: image, video, audio",
    '--limit-mm-per-prompt \'{"image": {"most": 2}}\'': "'most' is unknown; possible: count, width, height",
    '--limit-mm-per-prompt \'{"image": {"width": 512}}\'': 'no count; give {"count": N}',
    '--limit-mm-per-prompt \'{"image": {"count": 2000}}\'': "image is 2000; possible: 0 to 1024",
    "--limit-mm-per-prompt.video 1": "video is not read here",
    "--limit-mm-per-prompt.image": "is no number of images",
    "--limit-mm-per-prompt.image 2 --limit_mm_per_prompt.image 3": "is given twice",
    "--limit-mm-per-prompt '{\"image\": 2}' --limit-mm-per-prompt.video 0": "give --limit-mm-per-prompt alone",
    "--mmproj x.gguf": "--processor auto",
    "-ctk q8_0": "--kv-cache-dtype",
    "--temp 0.7": "--preferred-sampling-params",
    "-md draft.gguf": "draft models",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_would_change_results_is_refused_with_the_reason(line: str) -> None:
    """One line says what is not done and what to do, and guesses no other flag."""
    with pytest.raises(ConfigError) as caught:
        read(line)
    text = str(caught.value)
    assert REFUSED[line] in text, text
    assert "did you mean" not in text
    assert "\n" not in text


def test_what_changes_nothing_is_said_at_the_start() -> None:
    """A flag that is accepted and changes nothing has a line in the log, with what would."""
    notes = read("--schedule-conservativeness 0.3 --tp 1 --enable-metrics").auto_notes
    assert [note.split(" ")[0] for note in notes] == ["--schedule-conservativeness", "--enable-metrics"]
    assert "--metrics-style" in notes[1]


def test_a_flag_that_nobody_knows_gets_the_nearest_name() -> None:
    """A slip of the pen is told from a peer's flag; a value that is missing is missed."""
    with pytest.raises(ConfigError, match="did you mean --port"):
        read("--prot 1")
    with pytest.raises(ConfigError, match="--n-gpu-thing: unknown option; `dovetail serve --help=all` lists them"):
        read("--n-gpu-thing 3")
    with pytest.raises(ConfigError, match="--pp: expected a value"):
        read("--pp --port 1")


def test_a_peers_configuration_file_is_read(tmp_path: Path) -> None:
    """Keys of a file are looked up as flags are."""
    file = tmp_path / "config.yaml"
    file.write_text("tensor-parallel-size: 1\nenable-prefix-caching: true\nenable_lora: false\nmax_num_seqs: 4\n")
    assert read(f"--config {file}").max_running_requests == 4
    file.write_text("pipeline-parallel-size: 2\n")
    with pytest.raises(ConfigError, match=r"'pipeline-parallel-size' in the configuration file .* divide work"):
        read(f"--config {file}")


@pytest.mark.parametrize("peer", ["sglang", "vllm"])
def test_every_environment_variable_of_a_peer_is_known(peer: str) -> None:
    """A variable is one that users rely on, one of others, or one that only the peer's own engine reads."""
    listed = tomllib.loads((FOLDER / f"{peer}.toml").read_text())["environment"]
    known = SHARED | set(environment.RELIED_ON)
    assert [name for name in listed if name not in known and not name.startswith(OWN_PREFIXES)] == []


def test_a_variable_that_a_user_relies_on_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was to have a key is not started without one; other variables of a peer have a line."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with pytest.raises(ConfigError, match="VLLM_API_KEY is not supported: set DOVETAIL_API_KEY"):
        read("m")
    assert read("m --api-key k").api_key
    monkeypatch.delenv("VLLM_API_KEY")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("SGLANG_USE_MODELSCOPE", "false")
    assert read("m").auto_notes == ("Environment variables of SGLang or vLLM change nothing here: VLLM_LOGGING_LEVEL.",)
    monkeypatch.setenv("SGLANG_USE_MODELSCOPE", "true")
    with pytest.raises(ConfigError, match="HF_ENDPOINT"):
        read("m")


UNTRUE = re.compile(r"\bone (device|engine|server|process)\b|no model here|the one that there is|in seconds")
"""What does not hold beside `--tensor-parallel-size 2`, `--data-parallel-size 2`, another plugin or a large model."""


def test_no_note_says_what_other_settings_make_untrue() -> None:
    """Of flags, paths, fields and variables: several devices and engines may serve, and any model or plugin."""
    notes = [flag.why for flag in TABLE.values()] + [*endpoints.PATHS.values(), *environment.RELIED_ON.values()]
    notes += [*fields.ELSEWHERE.values(), *(name.why for name in (*known.FIELDS.values(), *known.SENT.values()))]
    notes += re.findall(r'"([^"\n]+)"', inspect.getsource(flags))
    assert not [note for note in notes if UNTRUE.search(note)]
