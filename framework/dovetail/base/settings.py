"""Settings of the engine: one field per flag, documented where it is defined.

The server's settings class extends this one; the offline `LLM` takes the same names as keyword arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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


def spelled(names: Mapping[str, str | None]) -> BeforeValidator:
    """Accept other names of values, such as other servers'."""
    return BeforeValidator(lambda value: names.get(value, value) if isinstance(value, str) else value)


Tokens = Annotated[int, BeforeValidator(parse_tokens)]
Names = Annotated[list[str], NoDecode, BeforeValidator(given_names)]
Devices = Annotated[tuple[Annotated[int, Field(ge=0)], ...] | None, BeforeValidator(parse_list)]
CacheDtype = Annotated[Literal["auto", "fp8", "int8"], spelled({"fp8_e4m3": "fp8", "float8_e4m3fn": "fp8"})]
StateDtype = Annotated[Literal["float32", "bfloat16", "float16"], spelled({"auto": "float32"})]
Seconds = Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)]


def setting(default: Any = ..., *aliases: str, common: bool = False, has_flag: bool = True, **given: Any) -> Any:
    """Declare a setting, which the docstring behind it describes.

    Args:
        default: Its value where nobody gives one.
        aliases: Flag names of other servers, without the dashes.
        common: Whether plain `--help` shows it.
        has_flag: Whether it has a flag of its own.
        given: Anything else that pydantic's `Field` takes.
    """
    if "default_factory" not in given:
        given["default"] = default
    return Field(**given, json_schema_extra={"aliases": list(aliases), "common": common, "flag": has_flag})


class Settings(BaseModel):
    """Fields that their docstrings describe, in `--help` and in the documentation.

    Those read them from the sources: with pydantic's `use_attribute_docstrings` every start would parse these.
    """


class EngineSettings(Settings):
    """What an engine is started with."""

    model_config = ConfigDict(extra="forbid", validate_default=True)

    model_path: str | None = setting(None, "model", common=True)
    """Directory with config.json, safetensors and tokenizer, a GGUF file, a hub name such as Qwen/Qwen3-0.6B, or the
    bundled demo:chat or demo:digits. Default: the bundled demo model, demo:chat.
    """
    revision: str | None = setting(None, min_length=1, max_length=256)
    """Branch, tag or commit of a model from a hub. Default: main."""
    download_dir: Path | None = setting(None)
    """Directory for models from a hub. Default: the hub's own cache (HF_HOME)."""
    tokenizer_path: str | None = setting(None, "tokenizer")
    """Directory, or hub name, of the tokenizer. Default: the model's."""
    load_format: str = setting("auto", min_length=1)
    """Format of the checkpoint, by plugin name. `auto`: the plugin that recognizes the files; `safetensors`: a
    directory as transformers writes it; `dummy`: random weights, for benchmarks.
    """
    model_impl: Annotated[str, BeforeValidator(none_word)] = setting("auto", min_length=1, common=True)
    """Implementation of the model. `dovetail`: a plugin for its architecture; `transformers`: transformers' modules
    with Dovetail's KV cache; `auto`: the first if it exists, else the second; or the name of a plugin that serves any
    model.
    """
    device: str = setting("auto", min_length=1, common=True)
    """Device that runs the model, by plugin name: `cpu`, `cuda`; `auto`: CUDA if available."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = setting("auto", common=True)
    """Dtype of weights and activations; `auto`: the checkpoint's."""
    context_length: Tokens | None = setting(None, "max-model-len", ge=1, common=True)
    """Maximum prompt plus output of a request, in tokens (`32k` works). Default: the model's."""
    attention_backend: str = setting("auto", common=True)
    """Attention backend, by plugin name."""
    prefill_attention_backend: str | None = setting(None, min_length=1)
    """Attention backend for prefill. Default: --attention-backend."""
    decode_attention_backend: str | None = setting(None, min_length=1)
    """Attention backend for decode. Default: --attention-backend."""
    kernels: Names = setting(default_factory=lambda: ["auto"])
    """Kernel sets by plugin name, comma-separated, asked in this order for each operation of the model. `auto`, alone
    or last: those that fit the device; `plain`: plain torch for all.
    """
    quantization: Annotated[str | None, BeforeValidator(none_word)] = setting("auto")
    """Quantization plugin; `auto`: the one for the method in the checkpoint's config.json. `fp8`, `int8` and `int4`
    quantize an unquantized checkpoint at load time.
    """
    grammar_compile_timeout: float = setting(5.0, gt=0, le=600, allow_inf_nan=False)
    """Maximum time to compile one request's grammar; beyond it, the request gets 400."""
    grammar_cache_bytes: int = setting(256 << 20, ge=0)
    """Maximum memory for cached compiled grammars."""
    tensor_parallel_size: int = setting(1, "tp-size", "tp", ge=1, le=64, common=True)
    """Number of ranks (processes) that compute one model together, each with a shard of its heads and inner widths; one
    per GPU, or on CPU.
    """
    devices: Devices = setting(None, "device-ids", min_length=1)
    """GPUs of the ranks, such as `0,2`, as indices into CUDA_VISIBLE_DEVICES. Default: the first ones."""
    expert_parallel: bool = setting(False, "enable-expert-parallel")
    """Distribute whole experts over the ranks instead of splitting each by width."""
    expert_parallel_size: int | None = setting(None, "ep-size", "ep", ge=1, le=64)
    """SGLang's form of --expert-parallel: equal to --tensor-parallel-size for whole experts, or 1."""
    page_size: int = setting(16, "block-size", ge=1, le=1024)
    """Tokens per page of the KV cache."""
    kv_cache_dtype: CacheDtype = setting("auto")
    """Dtype of cached keys and values. `auto`: the model's; `fp8` (e4m3) or `int8` with a scale per token and head:
    twice the tokens in the same memory, with a loss that the page on quantization shows.
    """
    state_dtype: StateDtype = setting("float32", "mamba-ssm-dtype", "mamba-ssm-cache-dtype")
    """Dtype of the states of recurrent layers. The others take half the memory; float16 loses less than bfloat16, and
    the page on memory says how much.
    """
    state_copies: int | None = setting(None, ge=0)
    """Copies of recurrent layers' states that the prefix cache keeps; 0: none. Default: two for every 4,096 tokens of
    the KV cache, or one for every four running requests.
    """
    fold_replies: bool = setting(False)
    """Compute each reply again, as a prompt, when it ends. The next turn of a conversation then finds it in the prefix
    cache. For models with recurrent layers: others cache replies anyway.
    """
    max_total_tokens: Tokens | None = setting(None, ge=1)
    """Size of the KV cache in tokens, rounded to whole pages. Default: from free memory."""
    mem_fraction_static: float | None = setting(None, gt=0, lt=1, common=True)
    """Fraction of the memory that is free before loading, for weights plus KV cache; the rest is for activations and
    graphs. Default: 0.88 on CUDA, or less if a step needs more than the rest; on CPU the KV cache gets half of what the
    weights leave, up to 4 GiB.
    """
    gpu_memory_utilization: float | None = setting(None, "device-memory-utilization", gt=0, le=1)
    """Fraction of total device memory for the engine, including activations and graphs (CUDA). Replaces
    --mem-fraction-static.
    """
    max_running_requests: int = setting(256, "max-num-seqs", ge=1, le=65536, common=True)
    """Maximum number of requests decoded concurrently."""
    max_queued_requests: int = setting(4096, "max-num-queued-reqs", ge=1)
    """Maximum number of queued requests; further requests get 429."""
    task: Annotated[Task | None, spelled({"auto": None, "embedding": "embed"})] = setting(None)
    """Serve only this task: generate, embed, classify or score (two texts). Default: every task that the model and its
    directory support.
    """
    chunked_prefill_size: Tokens | None = setting(None, "max-num-batched-tokens", ge=-1, common=True)
    """Maximum prompt tokens per step. Longer prompts are computed in chunks, beside decoding requests; -1: never in
    chunks. Default: 8192 on CUDA and 256 to 4096 on CPU, fewer for larger models.
    """
    max_prefill_tokens: Tokens = setting(16384, ge=1)
    """Maximum prompt tokens per step without chunks; a longer prompt then runs alone."""
    schedule_policy: str = setting("fcfs", "scheduling-policy", min_length=1, common=True)
    """Order of queued requests, by plugin name. `fcfs`: first come; `lpm`: longest cached prefix; `lof`: longest
    output; `priority`: as fcfs, and lower priorities are retracted.
    """
    processor: Annotated[str | None, BeforeValidator(none_word)] = setting("auto")
    """Image processor, by plugin name. `auto`: the one for the model's architecture, if installed; `none`: text only,
    without the vision tower.
    """
    max_image_patches: int | None = setting(None, ge=1)
    """Maximum patches of one image, for which the vision tower's memory is planned; a larger image gets 400. Default:
    what the image processor and --context-length allow; on a CPU also what a layer of the tower reads in 15 s.
    """
    speculator: Annotated[str | None, BeforeValidator(none_word)] = setting(None)
    """Speculative decoding plugin. It drafts tokens, and the model verifies several per step; the output is unchanged.
    `ngram` repeats what followed the same tokens before. On a GPU, drafts are verified only while that makes requests
    faster. Default: none.
    """
    disable_radix_cache: bool = setting(False, common=True)
    """Do not reuse cached prefixes."""
    disable_cuda_graph: bool = setting(False, "enforce-eager")
    """Launch each operation of a decode step separately instead of replaying CUDA graphs."""
    disable_compile_ahead: bool = setting(False)
    """Compile Triton kernels at their first launch instead of in parallel before the first step."""
    wait_for_kernels: bool = setting(False)
    """Report ready only when every graph is captured and every kernel compiled. No effect on CPU."""
    disable_overlap_schedule: bool = setting(False)
    """Read a step's tokens before launching the next step, instead of meanwhile."""
    batch_invariant: bool = setting(False, "enable-deterministic-inference")
    """Make a request's tokens bit-identical whatever the batch, the chunks of its prompt and the prefix cache. Slower;
    startup fails if a part does not support it.
    """
    report_cache: bool = setting(False, has_flag=False)
    """Tell what the prefix cache holds; set where a plugin observes it."""
    times_images: bool = setting(False, has_flag=False)
    """Time the vision tower on a CPU; set where the result bounds the images of requests."""
    overlap_on_cpu: bool = setting(False, has_flag=False)
    """Overlap steps on CPU too: for tests, as it computes within the call and only delays the tokens."""
    random_seed: int | None = setting(None, "seed", ge=0, lt=2**63)
    """Seed for requests without one. Default: random."""
    decode_log_interval: int = setting(40, ge=1)
    """Decode steps between two log lines."""
    num_threads: int | None = setting(None, ge=1)
    """CPU threads of the engine. Default: one per 64 MiB of weights, at most all cores that the process or its
    container has; all of them for steps with 128 tokens or more, unless threads spin (OMP_WAIT_POLICY). More threads
    make short steps of a small model slower.
    """

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
