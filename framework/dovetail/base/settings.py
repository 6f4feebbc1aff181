"""Settings of the engine: one field per flag, documented where it is defined.

The server's settings class extends this one; the offline `LLM` takes the same names as keyword arguments. A field's
`json_schema_extra` may carry `aliases` (flag names of other servers) and `common` (shown by `--help` without `=all`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_settings import NoDecode

from dovetail.base.word_lists import given_names
from dovetail.demo import MODEL_DIR

Task = Literal["generate", "embed", "classify", "score"]
"""What a model is asked for: text, embeddings, labels of a text, how well two texts go together."""
MIN_PLACES = 64
"""Places that a step may have for drafts however few requests run."""


def parse_tokens(value: object) -> object:
    """Accept `32k` and `1m` (powers of 1024) beside plain numbers for a length in tokens."""
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+)([kKmM])", value.strip())):
        return int(match[1]) * (1024 if match[2] in "kK" else 1024 * 1024)
    return value


def parse_list(value: object) -> object:
    """Accept `0,2` for several numbers."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def none_word(value: object) -> object:
    """Accept `none` for an optional plugin name, and normalize the spellings of vLLM and SGLang (`deepseek_r1`)."""
    if isinstance(value, str):
        value = value.strip().lower().replace("_", "-")
        return None if value in {"none", ""} else value
    return value


def cache_word(value: object) -> object:
    """Accept vLLM's and SGLang's other names for `fp8`."""
    return {"fp8_e4m3": "fp8", "float8_e4m3fn": "fp8"}.get(value, value) if isinstance(value, str) else value


def state_word(value: object) -> object:
    """Accept vLLM's name for the default."""
    return "float32" if value == "auto" else value


def task_word(value: object) -> object:
    """Accept `auto` for no task, and SGLang's name for `embed`."""
    return {"auto": None, "embedding": "embed"}.get(value, value) if isinstance(value, str) else value


Tokens = Annotated[int, BeforeValidator(parse_tokens)]
Names = Annotated[list[str], NoDecode, BeforeValidator(given_names)]


def flag(*aliases: str, common: bool = False) -> dict[str, Any]:
    """Return the `json_schema_extra` of a field: other flag names, and whether plain `--help` shows it."""
    return {"aliases": list(aliases), "common": common}


class EngineSettings(BaseModel):
    """What an engine is started with."""

    model_config = ConfigDict(extra="forbid", validate_default=True)

    model_path: str | None = Field(
        None,
        description="Directory with config.json, safetensors and tokenizer, a GGUF file, a hub name such as "
        "Qwen/Qwen3-0.6B, or the bundled demo:chat or demo:digits. Default: the bundled demo model, demo:chat.",
        json_schema_extra=flag("model", common=True),
    )
    revision: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Branch, tag or commit of a model from a hub. Default: main.",
        json_schema_extra=flag(),
    )
    download_dir: Path | None = Field(
        None,
        description="Directory for models from a hub. Default: the hub's own cache (HF_HOME).",
        json_schema_extra=flag(),
    )
    tokenizer_path: str | None = Field(
        None,
        description="Directory, or hub name, of the tokenizer. Default: the model's.",
        json_schema_extra=flag("tokenizer"),
    )
    load_format: str = Field(
        "auto",
        min_length=1,
        description="Format of the checkpoint, by plugin name. `auto`: the plugin that recognizes the files; "
        "`safetensors`: a directory as transformers writes it; `dummy`: random weights, for benchmarks.",
        json_schema_extra=flag(),
    )
    model_impl: Annotated[str, BeforeValidator(none_word)] = Field(
        "auto",
        min_length=1,
        description="Implementation of the model. `dovetail`: a plugin for its architecture; `transformers`: "
        "transformers' modules with Dovetail's KV cache; `auto`: the first if it exists, else the "
        "second; or the name of a plugin that serves any model.",
        json_schema_extra=flag(common=True),
    )
    device: str = Field(
        "auto",
        min_length=1,
        description="Device that runs the model, by plugin name: `cpu`, `cuda`; `auto`: CUDA if available.",
        json_schema_extra=flag(common=True),
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto",
        description="Dtype of weights and activations; `auto`: the checkpoint's.",
        json_schema_extra=flag(common=True),
    )
    context_length: Tokens | None = Field(
        None,
        ge=1,
        description="Maximum prompt plus output of a request, in tokens (`32k` works). Default: the model's.",
        json_schema_extra=flag("max-model-len", common=True),
    )
    attention_backend: str = Field(
        "auto", description="Attention backend, by plugin name.", json_schema_extra=flag(common=True)
    )
    prefill_attention_backend: str | None = Field(
        None,
        min_length=1,
        description="Attention backend for prefill. Default: --attention-backend.",
        json_schema_extra=flag(),
    )
    decode_attention_backend: str | None = Field(
        None,
        min_length=1,
        description="Attention backend for decode. Default: --attention-backend.",
        json_schema_extra=flag(),
    )
    kernels: Names = Field(
        default_factory=lambda: ["auto"],
        description="Kernel sets by plugin name, comma-separated, asked in this order for each operation of the "
        "model. `auto`, alone or last: those that fit the device; `plain`: plain torch for all.",
        json_schema_extra=flag(),
    )
    quantization: Annotated[str | None, BeforeValidator(none_word)] = Field(
        "auto",
        description="Quantization plugin; `auto`: the one for the method in the checkpoint's config.json. `fp8`, "
        "`int8` and `int4` quantize an unquantized checkpoint at load time.",
        json_schema_extra=flag(),
    )
    grammar_compile_timeout: float = Field(
        5.0,
        gt=0,
        le=600,
        allow_inf_nan=False,
        description="Maximum time to compile one request's grammar; beyond it, the request gets 400.",
        json_schema_extra=flag(),
    )
    grammar_cache_bytes: int = Field(
        256 << 20, ge=0, description="Maximum memory for cached compiled grammars.", json_schema_extra=flag()
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="Number of ranks (processes) that compute one model together, each with a shard of its heads "
        "and inner widths; one per GPU, or on CPU.",
        json_schema_extra=flag("tp-size", "tp", common=True),
    )
    devices: Annotated[tuple[Annotated[int, Field(ge=0)], ...] | None, BeforeValidator(parse_list)] = Field(
        None,
        min_length=1,
        description="GPUs of the ranks, such as `0,2`, as indices into CUDA_VISIBLE_DEVICES. Default: the first ones.",
        json_schema_extra=flag("device-ids"),
    )
    expert_parallel: bool = Field(
        False,
        description="Distribute whole experts over the ranks instead of splitting each by width.",
        json_schema_extra=flag("enable-expert-parallel"),
    )
    expert_parallel_size: int | None = Field(
        None,
        ge=1,
        le=64,
        description="SGLang's form of --expert-parallel: equal to --tensor-parallel-size for whole experts, or 1.",
        json_schema_extra=flag("ep-size", "ep"),
    )
    page_size: int = Field(
        16, ge=1, le=1024, description="Tokens per page of the KV cache.", json_schema_extra=flag("block-size")
    )
    kv_cache_dtype: Annotated[Literal["auto", "fp8", "int8"], BeforeValidator(cache_word)] = Field(
        "auto",
        description="Dtype of cached keys and values. `auto`: the model's; `fp8` (e4m3) or `int8` with a scale per "
        "token and head: twice the tokens in the same memory, with a loss that the page on quantization "
        "shows.",
        json_schema_extra=flag(),
    )
    state_dtype: Annotated[Literal["float32", "bfloat16", "float16"], BeforeValidator(state_word)] = Field(
        "float32",
        description="Dtype of the states of recurrent layers. The others take half the memory; float16 loses less "
        "than bfloat16, and the page on memory says how much.",
        json_schema_extra=flag("mamba-ssm-dtype", "mamba-ssm-cache-dtype"),
    )
    state_copies: int | None = Field(
        None,
        ge=0,
        description="Copies of recurrent layers' states that the prefix cache keeps; 0: none. Default: two for every "
        "4,096 tokens of the KV cache, or one for every four running requests.",
        json_schema_extra=flag(),
    )
    fold_replies: bool = Field(
        False,
        description="Compute each reply again, as a prompt, when it ends. The next turn of a conversation then "
        "finds it in the prefix cache. For models with recurrent layers: others cache replies anyway.",
        json_schema_extra=flag(),
    )
    max_total_tokens: Tokens | None = Field(
        None,
        ge=1,
        description="Size of the KV cache in tokens, rounded to whole pages. Default: from free memory.",
        json_schema_extra=flag(),
    )
    mem_fraction_static: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Fraction of the memory that is free before loading, for weights plus KV cache; the rest is for "
        "activations and graphs. Default: 0.88 on CUDA, or less if a step needs more than the rest; on "
        "CPU the KV cache gets half of what the weights leave, up to 4 GiB.",
        json_schema_extra=flag(common=True),
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Fraction of total device memory for the engine, including activations and graphs (CUDA). "
        "Replaces --mem-fraction-static.",
        json_schema_extra=flag("device-memory-utilization"),
    )
    max_running_requests: int = Field(
        256,
        ge=1,
        le=65536,
        description="Maximum number of requests decoded concurrently.",
        json_schema_extra=flag("max-num-seqs", common=True),
    )
    max_queued_requests: int = Field(
        4096,
        ge=1,
        description="Maximum number of queued requests; further requests get 429.",
        json_schema_extra=flag("max-num-queued-reqs"),
    )
    task: Annotated[Task | None, BeforeValidator(task_word)] = Field(
        None,
        description="Serve only this task: generate, embed, classify or score (two texts). Default: every task that "
        "the model and its directory support.",
        json_schema_extra=flag(),
    )
    chunked_prefill_size: Tokens | None = Field(
        None,
        ge=-1,
        description="Maximum prompt tokens per step. Longer prompts are computed in chunks, beside decoding "
        "requests; -1: never in chunks. Default: 8192 on CUDA and 256 to 4096 on CPU, fewer for larger "
        "models.",
        json_schema_extra=flag("max-num-batched-tokens", common=True),
    )
    max_prefill_tokens: Tokens = Field(
        16384,
        ge=1,
        description="Maximum prompt tokens per step without chunks; a longer prompt then runs alone.",
        json_schema_extra=flag(),
    )
    schedule_policy: str = Field(
        "fcfs",
        min_length=1,
        description="Order of queued requests, by plugin name. `fcfs`: first come; `lpm`: longest cached prefix; "
        "`lof`: longest output; `priority`: as fcfs, and lower priorities are retracted.",
        json_schema_extra=flag("scheduling-policy", common=True),
    )
    processor: Annotated[str | None, BeforeValidator(none_word)] = Field(
        "auto",
        description="Image processor, by plugin name. `auto`: the one for the model's architecture, if installed; "
        "`none`: text only, without the vision tower.",
        json_schema_extra=flag(),
    )
    max_image_patches: int | None = Field(
        None,
        ge=1,
        description="Maximum patches of one image, for which the vision tower's memory is planned; a larger image gets "
        "400. Default: what the image processor and --context-length allow.",
        json_schema_extra=flag(),
    )
    speculator: Annotated[str | None, BeforeValidator(none_word)] = Field(
        None,
        description="Speculative decoding plugin. It drafts tokens, and the model verifies several per step; the "
        "output is unchanged. `ngram` repeats what followed the same tokens before. On a GPU, drafts are verified "
        "only while that makes requests faster. Default: none.",
        json_schema_extra=flag(),
    )
    disable_radix_cache: bool = Field(
        False, description="Do not reuse cached prefixes.", json_schema_extra=flag(common=True)
    )
    disable_cuda_graph: bool = Field(
        False,
        description="Launch each operation of a decode step separately instead of replaying CUDA graphs.",
        json_schema_extra=flag("enforce-eager"),
    )
    disable_compile_ahead: bool = Field(
        False, description="Compile Triton kernels at their first launch instead of in parallel before the first step."
    )
    wait_for_kernels: bool = Field(
        False,
        description="Report ready only when every graph is captured and every kernel compiled. No effect on CPU.",
        json_schema_extra=flag(),
    )
    disable_overlap_schedule: bool = Field(
        False,
        description="Read a step's tokens before launching the next step, instead of meanwhile.",
        json_schema_extra=flag(),
    )
    batch_invariant: bool = Field(
        False,
        description="Make a request's tokens bit-identical whatever the batch, the chunks of its prompt and the "
        "prefix cache. Slower; startup fails if a part does not support it.",
        json_schema_extra=flag("enable-deterministic-inference"),
    )
    report_cache: bool = Field(
        False,
        description="Tell what the prefix cache holds; set where a plugin observes it.",
        json_schema_extra={"flag": False},
    )
    overlap_on_cpu: bool = Field(
        False,
        description="Overlap steps on CPU too: for tests, as it computes within the call and only delays the tokens.",
        json_schema_extra={"flag": False},
    )
    random_seed: int | None = Field(
        None,
        ge=0,
        lt=2**63,
        description="Seed for requests without one. Default: random.",
        json_schema_extra=flag("seed"),
    )
    decode_log_interval: int = Field(
        40, ge=1, description="Decode steps between two log lines.", json_schema_extra=flag()
    )
    num_threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of the engine. Default: one per 64 MiB of weights, at most all cores that the process "
        "or its container has; all of them for steps with 128 tokens or more, unless threads spin (OMP_WAIT_POLICY). "
        "More threads make short steps of a small model slower.",
        json_schema_extra=flag(),
    )

    @property
    def max_places(self) -> int:
        """Maximum positions of a step that sample a token: one per row, or more where a few rows have drafts."""
        return max(self.max_running_requests, MIN_PLACES if self.speculator else 0)

    @property
    def device_list(self) -> str:
        """`devices` as they are given."""
        return ",".join(map(str, self.devices or ()))

    @property
    def expert_shard(self) -> Literal["inner", "expert"]:
        """How ranks divide experts."""
        return "expert" if self.expert_parallel or (self.expert_parallel_size or 1) > 1 else "inner"

    @property
    def folder(self) -> Path:
        """The model's folder; the bundled demo model's if none was given."""
        return Path(self.model_path) if self.model_path is not None else MODEL_DIR

    @property
    def tokenizer_folder(self) -> Path:
        """Where the tokenizer is: the model's folder unless another was given."""
        return Path(self.tokenizer_path) if self.tokenizer_path else self.folder
