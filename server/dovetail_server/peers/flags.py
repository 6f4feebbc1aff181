"""Flags of SGLang and vLLM that are no settings here: what each means, accepted or refused.

A setting's own name and aliases go first (`settings.py`). Names are written without the dashes in front; one that ends
with `*` stands for every name that begins so, where no longer one fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from dovetail_server.peers.known import Known
from dovetail_server.peers.objects import kv_events, speculation

SHORT = {
    "-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-dp": "data-parallel-size",
    "-dcp": "decode-context-parallel-size", "-pcp": "prefill-context-parallel-size", "-q": "quantization",
    "-ep": "enable-expert-parallel", "-n": "nnodes", "-r": "node-rank", "-asc": "api-server-count",
    "-cc": "compilation-config", "-ac": "attention-config", "-sc": "speculative-config", "-dc": "diffusion-config",
    "-O": "optimization-level", "-dpn": "data-parallel-rank", "-dpr": "data-parallel-start-rank",
    "-dpl": "data-parallel-size-local", "-dpa": "data-parallel-address", "-dpp": "data-parallel-rpc-port",
    "-dpb": "data-parallel-backend", "-dph": "data-parallel-hybrid-lb", "-dpe": "data-parallel-external-lb",
    "-dpm": "data-parallel-multi-port-external-lb",
}  # fmt: skip
"""Flags of one dash."""


@dataclass(frozen=True, slots=True)
class Flag(Known):
    """A flag.

    Attributes:
        is_switch: It takes no value.
        sets: What it is written as here, where it is a setting under another form: by value, "" for a switch.
        rewrite: Makes arguments of our own of its value, where it says several things at once.
    """

    is_switch: bool = False
    sets: tuple[tuple[str, str], ...] = ()
    rewrite: Callable[[str], list[str]] | None = None


TABLE: dict[str, Flag] = {}


def _values(names: str, why: str, *at: str) -> None:
    """Flags with a value, accepted at `at` alone."""
    TABLE.update({name: Flag(why, at) for name in names.split()})


def _free(names: str, why: str) -> None:
    """Flags with a value that change nothing here."""
    TABLE.update({name: Flag(why, None) for name in names.split()})


def _off(names: str, why: str) -> None:
    """Switches that ask for what is not there."""
    TABLE.update({name: Flag(why, (), is_switch=True) for name in names.split()})


def _idle(names: str, why: str) -> None:
    """Switches that change nothing here."""
    TABLE.update({name: Flag(why, None, is_switch=True) for name in names.split()})


def _as(name: str, *sets: tuple[str, str]) -> None:
    """A flag that is a setting in another form."""
    ways = ", ".join(value for value, _ in sets if value)
    TABLE[name] = Flag(f"give {ways}" if ways else "", (), is_switch=sets[0][0] == "", sets=sets)


ONE = "not available; --tensor-parallel-size and --data-parallel-size divide work here (docs/deploy.md)"
_values(
    "pp-size pp pipeline-parallel-size "
    "dcp-size decode-context-parallel-size prefill-context-parallel-size attn-dp-size "
    "attention-data-parallel-size attn-cp-size attention-context-parallel-size moe-dp-size moe-data-parallel-size "
    "dwdp-size nnodes data-parallel-size-local api-server-count tokenizer-worker-num detokenizer-worker-num "
    "gpu-id-step shared-experts-tp-size moe-dense-tp-size max-ep-size elastic-ep-initial-size",
    ONE, "1",
)  # fmt: skip
_values("node-rank data-parallel-rank data-parallel-start-rank elastic-ep-join-rank-offset", ONE, "0")
_values("base-gpu-id", "choose the devices with --devices", "0")
_free(
    "nccl-port dist-timeout dist-init-addr nccl-init-addr master-addr master-port distributed-timeout-seconds "
    "cpu-distributed-timeout-seconds distributed-executor-backend load-balance-method data-parallel-address "
    "data-parallel-rpc-port data-parallel-backend data-parallel-supervisor-port dp-supervisor-* dp-sync-interval "
    "max-parallel-loading-workers gated-launch-port pp-max-micro-batch-size pp-async-batch-depth dcp-comm-backend "
    "dcp-kv-cache-interleave-size cp-kv-cache-interleave-size cp-strategy mooncake-ib-device numa-node "
    "numa-bind-nodes numa-bind-cpus",
    "the ranks of --tensor-parallel-size are on one host and find each other; further hosts are servers of their own",
)
_idle(
    "disable-custom-all-reduce enable-nccl-nvls enable-symm-mem enable-mscclpp enable-torch-symm-mem pre-warm-nccl "
    "enable-p2p-check disable-nccl-for-dp-synchronization ray-workers-use-nsight enable-dp-lm-head "
    "enable-tp-lm-head-all-to-all enable-attn-tp-input-scattered disable-attn-tp-gather enable-layernorm-sp "
    "enable-dense-mlp-attn-tp enable-nccl-comm-suspend numa-bind dcp-replicate-q-proj dcp-q-replicate "
    "enable-dp-attention-local-control-broadcast enable-shm-tensor-arena enable-quant-communications "
    "enforce-disable-flashinfer-allreduce-fusion enable-flashinfer-allreduce-fusion enable-aiter-allreduce-fusion "
    "disable-aiter-allreduce-fusion-in-prefill disable-aiter-allreduce-fusion-in-decode enable-scattered-sconv",
    "how the ranks of --tensor-parallel-size exchange sums is chosen at the start",
)
_free(
    "boundary-reduction flashinfer-allreduce-fusion-backend",
    "how the ranks of --tensor-parallel-size exchange sums is chosen at the start",
)
_off(
    "enable-dp-attention use-ray headless enable-prefill-cp enable-dsa-cache-layer-split enable-cp-decode-attn-tp "
    "enable-kv-cache-sharding data-parallel-hybrid-lb data-parallel-external-lb data-parallel-multi-port-external-lb "
    "enable-hc-sp enable-batch-sharded-sampling enable-elastic-ep enable-fault-tolerance",
    ONE,
)
_values(
    "worker-cls worker-extension-cls scheduler-cls fault-tolerance-config",
    "processes and scheduler are Dovetail's own; see docs/plugins.md",
    "auto",
)

MOE = "experts stay where --expert-parallel puts them, and are computed by Dovetail's own kernels"
_off(
    "enable-eplb enable-ep-weight-filter enable-paged-experts enable-elastic-expert-backup "
    "enable-waterfill enable-two-batch-overlap enable-single-batch-overlap enable-dbo enable-return-routed-experts "
    "enable-shared-experts-attn-tp enable-w4a4-mxfp4-megamoe enable-megamoe-for-layernorm-sp "
    "enable-fused-moe-sum-all-reduce enable-mixed-moe-lora-format enable-moe-shared-loras",
    MOE,
)
_free(
    "moe-* deepep-* fuseep-mode eplb-* ep-* expert-* init-expert-location all2all-backend kt-* elastic-ep-* "
    "flashinfer-mxfp4-moe-precision flashinfer-a2a-dispatch-type dbo-* ubatch-size tbo-* "
    "paged-experts-num-resident",
    "it is about how experts are moved and computed, which Dovetail does its own way",
)
_idle(
    "disable-flashinfer-cutlass-moe-fp4-allgather disable-shared-experts-fusion enforce-shared-experts-fusion",
    "it is about how experts are moved and computed, which Dovetail does its own way",
)

PREFIX = "prefixes are cached; --disable-radix-cache turns it off"
_idle("enable-prefix-caching", PREFIX)
_as("no-enable-prefix-caching", ("", "--disable-radix-cache"))
_as("no-enable-chunked-prefill", ("", "--chunked-prefill-size=-1"))
_as("no-async-scheduling", ("", "--disable-overlap-schedule"))
_as("enable-priority-scheduling", ("", "--schedule-policy=priority"))
_as("generation-config", ("auto", "--sampling-defaults=model"), ("vllm", "--sampling-defaults=openai"))
_as("uvicorn-log-level", *((level, f"--log-level={level}") for level in ("debug", "info", "warning", "error")))
_as("log-level-http", *((level, f"--log-level={level}") for level in ("debug", "info", "warning", "error")))
_as("is-embedding", ("", "--task=embed"))
_as(
    "convert",
    ("embed", "--task=embed"),
    ("classify", "--task=classify"),
    ("auto", "--task=auto"),
    ("none", "--task=auto"),
)
_idle(
    "enable-chunked-prefill enable-mixed-chunk",
    "prompts are computed in chunks; --chunked-prefill-size says of what size",
)
_idle("async-scheduling", "steps overlap; --disable-overlap-schedule turns it off")
_idle("enable-auto-tool-choice", "tool calls are parsed whenever there is a parser, see --tool-call-parser")
_idle("enable-cache-report enable-prompt-tokens-details", "cached tokens are always reported")
_idle(
    "enable-metrics enable-metrics-for-all-schedulers",
    "GET /metrics is always there; --metrics-style vllm or sglang adds their names",
)
_idle("disable-log-requests", "requests are not logged unless --log-requests is given")
_idle("disable-log-stats", "raise --decode-log-interval for fewer lines, or --log-level warning for none")
_idle("enable-request-id-headers", "every reply has x-request-id")
_idle("skip-server-warmup", "no request is made at the start; the engine is ready when it says so")
_idle(
    "enable-tokenizer-info-endpoint enable-server-load-tracking enable-scale-out enable-response-store",
    "the routes are always there",
)
_idle("trust-remote-code", "code from a model folder is never run; models are plugins (see `dovetail plugin list`)")
_idle("enable-offline-docs", "/docs loads nothing from elsewhere")
_free(
    "watchdog-timeout soft-watchdog-timeout watchdog-config",
    "an engine that stands still is told by its step counter: GET /readyz",
)
_free(
    "warmups optimization-level performance-mode",
    "what is prepared before the start is worked out from the model and the device",
)
_values("load-balance-method", ONE, "auto", "round_robin")
_values("tokenizer-mode", "the tokenizer is tokenizer.json, the fast one", "auto", "hf")
_values("tokenizer-backend", "the tokenizer is tokenizer.json, read by the tokenizers library", "huggingface")
_values("config-format", "config.json is what is read", "auto", "hf")
_values("model-config-parser", "models are plugins; see `dovetail plugin list`", "auto")
_values("runner", "every model generates and gives embeddings", "auto", "generate", "pooling")
_values("response-role", "replies have the role assistant", "assistant")
_values(
    "chat-template-content-format", "the form of content that a template reads is found out from the template", "auto"
)
_values("logprobs-mode", "log probabilities are the model's own, before temperature and filters", "raw_logprobs")
_values("model-loader-extra-config hf-overrides json-model-override-args model-class-overrides additional-config",
        "config.json is read as it is; change it in a copy of the folder", "{}", "")  # fmt: skip
_values("disaggregation-mode decoupled-spec-role", "an engine computes both prefill and decode here", "null")
_values("weight-version", "a server has one version of its weights", "default")
_values("ssl-cert-reqs", "clients show no certificates here; put a proxy in front", "0")
_values("allowed-methods allowed-headers", "pages of --allow-origins may send what the API takes", '["*"]', "*")
_off("allow-credentials", "a browser sends keys in a header here, not in cookies")
_values("tool-parser-plugin reasoning-parser-plugin", "give the file to --plugin-file", "")
_values("hf-token", "set HF_TOKEN in the environment: other users of the machine see command lines")
_values("tool-strict-level", "send strict: true with a tool, or see --strict-schema", "auto")
_values("stream-response-interval", "see --stream-interval", "1")

KERNELS = "Dovetail's kernels are chosen by --attention-backend and by the device"
_free(
    "sampling-backend fp8-gemm-backend fp4-gemm-backend bf16-gemm-backend linear-backend linear-attn-* mamba-* "
    "dsa-* dsv4-* gdn-prefill-backend kda-* sparse-indexer-topk-backend triton-attention-* "
    "flashinfer-autotune-skip-ops monokernel monokernel-backend ir-op-priority kernel-config qsa-indexer-dtype "
    "mm-attention-backend "
    "prefill-kv-cache-dequant-dtype c128-page-size swa-* replayssm-buffer-len linear-replayssm-cache-len "
    "max-mamba-cache-size int8-mamba-ckpt-size prefix-match-unit attention-config",
    KERNELS,
)
_idle(
    "disable-flashinfer-autotune enable-flashinfer-autotune flashinfer-mla-disable-ragged enable-fused-qk-norm-rope "
    "enable-lean-attention enable-nvidia-megakernel enable-amd-monokernel triton-attention-reduce-in-fp32 "
    "enable-deepseek-v4-fp4-indexer enable-dsa-fused-indexer enable-linear-replayssm enable-linear-replayssm-spec "
    "use-replayssm enable-int8-mamba-checkpoint disable-cascade-attn disable-sliding-window "
    "enable-mamba-cache-stochastic-rounding enable-mamba-shared-prefix-checkpoint enable-tf32-matmul "
    "enable-encoder-swa-bounded-replay enable-decoder-swa-bounded-replay swa-bounded-replay use-fp64-gumbel "
    "enable-precise-embedding-interpolation enable-fp32-lm-head disable-hybrid-swa-memory "
    "disable-hybrid-kv-cache-manager kv-sharing-fast-prefill enable-page-major-kv-layout enable-unified-memory",
    KERNELS,
)
GRAPHS = "CUDA graphs are captured for what --max-running-requests and the memory allow; see --disable-cuda-graph"
_free(
    "cuda-graph-* cudagraph-capture-sizes max-cudagraph-capture-size context-bucket torch-compile-max-bs "
    "compilation-config kv-cache-dtype-skip-layers",
    GRAPHS,
)
_idle(
    "disable-cuda-graph-padding enable-profile-cuda-graph enable-cudagraph-gc debug-cuda-graph "
    "disable-prefill-cuda-graph enable-torch-compile enable-torch-compile-debug-mode cudagraph-metrics "
    "enable-layerwise-nvtx-marker enable-layerwise-nvtx-tracing sleep-mode-offload-cudagraph",
    GRAPHS,
)
_off("disable-decode-cuda-graph", "give --disable-cuda-graph")
SCHEDULE = "the scheduler has no such setting; see --schedule-policy, --chunked-prefill-size and --max-running-requests"
_free(
    "schedule-conservativeness prefill-decode-interval prefill-decode-interval-min-bs prefill-max-requests "
    "num-continuous-decode-steps scheduler-recv-interval prefill-delayer-* min-free-slots-delay retraction-policy "
    "priority-scheduling-preemption-threshold long-prefill-token-threshold max-num-active-seqs watermark "
    "prefill-schedule-interval batch-notify-size dynamic-batch-tokenizer-* gc-threshold mamba-full-memory-ratio "
    "max-num-scheduled-tokens renderer-num-workers num-reserved-decode-tokens prefix-cache-retention-interval",
    SCHEDULE,
)
_idle(
    "enable-dynamic-chunking disable-priority-preemption disable-chunked-prefix-cache enable-prefill-delayer "
    "scheduler-reserve-full-isl long-prefill-token-threshold-adaptive disable-chunked-mm-input sleep-on-idle "
    "enable-dynamic-batch-tokenizer enable-tokenizer-batch-encode disable-tokenizer-batch-decode "
    "prefill-only-disable-kv-cache disable-outlines-disk-cache enable-http-worker-reuseport",
    SCHEDULE,
)
_off("schedule-low-priority-values-first", "a higher priority goes first here; turn the sign of the values")
_off("abort-on-priority-when-disabled", "priority never ends a request; it orders with --schedule-policy priority")
_values("default-priority-value", "a request without a priority has 0", "0")
MEMORY = "give --max-total-tokens, --mem-fraction-static or --gpu-memory-utilization"
_values("kv-cache-memory-bytes num-gpu-blocks-override", MEMORY)
_values(
    "cpu-offload-gb offload-num-in-group kv-offloading-size swap-space", "weights and KV cache stay on the device", "0"
)
_free(
    "offload-* cpu-offload-params kv-offloading-backend ple-offload-backend ple-offload-dir hicache-*",
    "nothing is kept off the device",
)
_off("ple-offload-embedding enable-memory-saver enable-weights-cpu-backup enable-draft-weights-cpu-backup "
     "enable-sleep-mode enable-cumem-allocator", "weights and KV cache stay on the device")  # fmt: skip
_free("sleep-mode-backend sleep-preserve-parameter-names", "this server does not sleep")
CACHE = "the prefix cache is on the device alone"
_off(
    "enable-hierarchical-cache enable-hicache enable-unified-cache-external-linker enable-linker-mla-dedup "
    "enable-hisparse enable-lmcache enable-flexkv enable-session-radix-cache enable-streaming-session "
    "disaggregation-* enable-pd-role-switch enable-pdmux strip-thinking-cache",
    CACHE,
)
_free("unified-cache-external-linker-* hisparse-config hierarchical-sparse-attention-extra-config lmcache-config-file "
      "flexkv-config-file", CACHE)  # fmt: skip
_values("radix-eviction-policy", "what was used longest ago goes first", "lru")
_values("radix-eviction-policy-config radix-cache-backend", "what was used longest ago goes first", "{}", "")
_free("prefix-caching-hash-algo", "prefixes are found by their tokens, not by a hash")
_values(
    "kv-transfer-config ec-transfer-config ec-manager-config weight-transfer-config",
    "an engine computes both prefill and decode here",
)
_free("disaggregation-transfer-backend disaggregation-bootstrap-port disaggregation-ib-device "
      "disaggregation-decode-allocation-policy", "an engine computes both prefill and decode here")  # fmt: skip
DRAFTING = "drafting is a plugin's, on the host: --speculator ngram looks for what followed the same tokens before"
_values("decoupled-spec-bind-endpoint decoupled-spec-connect-endpoints decoupled-spec-rank", DRAFTING)
_free("pdmux-config-path sm-group-num optimistic-prefill-attempts", "an engine computes both prefill and decode here")

_values(
    "speculative-* spec-* enable-multi-layer-eagle diffusion-config dllm-* uno-lora-path",
    DRAFTING,
)
_off("dllm-fdfo", DRAFTING)
TABLE["speculative-algorithm"] = Flag(f"give NGRAM: {DRAFTING}", (), sets=(("NGRAM", "--speculator=ngram"),))
TABLE["speculative-num-draft-tokens"] = Flag(DRAFTING, (), rewrite=lambda value: ["--ngram.max-drafts", value])
TABLE["speculative-config"] = Flag(DRAFTING, (), rewrite=speculation)
LORA = "adapters are not served; merge the adapter into the weights"
_off("enable-lora enable-tower-connector-lora fully-sharded-loras enable-lora-overlap-loading lora-use-virtual-experts "
     "lora-strict-loading experts-shared-outer-loras specialize-active-lora", LORA)  # fmt: skip
_values("lora-* max-lora-* max-loras* max-loaded-loras max-cpu-loras default-mm-loras", LORA)
QUANT = "weights are served as the checkpoint stores them; see --quantization"
_values("quantization-param-path quantization-config modelopt-* rl-quant-profile kt-weight-path", QUANT, "")
_off("quantize-and-serve allow-deprecated-quantization", QUANT)
PICTURES = "this server reads and writes text only"
_off("enable-multimodal enable-mm-embeds mm-enable-dp-encoder enable-prefix-mm-cache enable-mm-global-cache "
     "enable-prompt-embeds encoder-only mm-encoder-only enable-adaptive-dispatch-to-encoder "
     "enable-broadcast-mm-inputs-process enable-flash-late-interaction", PICTURES)  # fmt: skip
_free(
    "mm-* limit-mm-per-prompt limit-mm-data-per-request allowed-media-domains allowed-local-media-path media-* "
    "image-processor-backend video-* encoder-* asr-*",
    PICTURES,
)
_idle("language-only language-model-only interleave-mm-strings skip-mm-profiling mm-device-do-normalize "
      "disable-fast-image-processor trust-mm-content-hashes trust-request-mm-kwargs", PICTURES)  # fmt: skip
_values("pooler-config", "hidden states are pooled as the checkpoint's modules.json says", "{}", "")
_values("io-processor-plugin", "no part of this server reads plugins of that kind", "")


LOADING = "weights are mapped and read in one way"
_free(
    "safetensors-load-strategy safetensors-prefetch-* weight-loader-prefetch-num-threads startup-weight-load-mode "
    "pt-load-map-location ignore-patterns modelexpress-config weight-cache-* engine-info-bootstrap-port "
    "remote-instance-weight-loader-*",
    LOADING,
)
_idle("weight-loader-disable-mmap weight-loader-prefetch-checkpoints weight-loader-drop-cache-after-load "
      "use-tqdm-on-load remote-instance-weight-loader-start-seed-via-transfer-engine", LOADING)  # fmt: skip
_values("custom-weight-loader model-checksum decrypted-config-file decrypted-draft-config-file hf-config-path",
        "a model is a folder with config.json and safetensors, or a GGUF file")  # fmt: skip
_values("code-revision", "code from a model folder is never run")
_values("tokenizer-revision", "fetch the tokenizer into a folder and give --tokenizer-path")
_off(
    "delete-ckpt-after-loading checkpoint-engine-wait-weights-before-ready",
    "weights are loaded once and files are left alone",
)

LOGS = "logs and metrics have no such choice; see --log-level, --log-requests and --metrics-style"
_free(
    "log-requests-level log-requests-format log-requests-target uvicorn-access-log-exclude-prefixes "
    "disable-access-log-for-endpoints max-log-len crash-dump-folder load-snapshot-publish-interval "
    "tokenizer-metrics-* bucket-* prompt-tokens-buckets generation-tokens-buckets gc-warning-threshold-secs "
    "show-hidden-metrics-for-version kv-cache-metrics-sample custom-histogram-buckets smg-http-sidecar-port "
    "grpc-http-sidecar-port load-publish-endpoint forward-pass-metrics-* trace-modules "
    "logging-config log-config-file jit-monitor-mode fingerprint-mode fingerprint-value",
    LOGS,
)
_values("extra-metric-labels", "metrics carry model_name; add labels where they are scraped", "{}")
_idle(
    "show-time-cost enable-mfu-metrics enable-request-time-stats-logging enable-forward-pass-metrics "
    "kv-cache-metrics enable-logging-iteration-details jit-monitor-verbose aggregate-engine-logging "
    "log-error-stack enable-log-deltas per-request-spec-decode-metrics fail-on-environ-validation",
    LOGS,
)
_off("enable-log-outputs", "texts are never logged")
_off("enable-per-request-metrics", "times are in GET /metrics, and those of /generate in meta_info")
_values("collect-detailed-traces", "spans are of whole phases of a request; POST /start_profile looks into steps")
_off("export-metrics-to-file", "scrape GET /metrics")
_free("export-metrics-to-file-dir", "scrape GET /metrics")
_free("kv-canary kv-canary-* expert-balancedness-report-mode", LOGS)
_values(
    "debug-tensor-dump-* forward-hooks msprobe-dump-config profiler-config",
    "there is no such tool here; see docs/plugins.md for hooks",
)
OTEL = ("--plugin", "otel")
TABLE["enable-trace"] = Flag("", (), is_switch=True, rewrite=lambda value: [*OTEL])
TABLE["otlp-traces-endpoint"] = Flag("", (), rewrite=lambda value: [*OTEL, "--otel.endpoint", value])
TABLE["otlp-service-name"] = Flag("", (), rewrite=lambda value: [*OTEL, "--otel.service-name", value])
TABLE["kv-events-config"] = Flag("give plugin: kv-events and its settings (docs/plugins.md)", (), rewrite=kv_events)

OUTPUT = "replies carry text, token ids and log probabilities only"
_off(
    "enable-return-hidden-states enable-return-aux-hidden-states enable-return-indexer-topk return-sampling-mask "
    "enable-trace-replay",
    OUTPUT,
)
_values("return-hidden-states-mode return-aux-hidden-state-layer-ids aux-output-config", OUTPUT)
_free("sampling-mask-max-tokens routed-experts-*", OUTPUT)
_off("return-input-ids return-output-ids return-tokens-as-token-ids", "send return_token_ids: true with the request")
_off("incremental-streaming-output", "streams of /generate are cumulative, as SGLang's are by default")
_off("enable-watermark", "write a plugin; see docs/plugins.md")
_off(
    "enable-custom-logit-processor",
    "code from a request is never run; write a plugin, and name it in --logits-processors",
)
_values("watermark-config engram-config", "write a plugin; see docs/plugins.md", "")
_values("rl-on-policy-target", "this server is for serving")
_off("mlx-enable-sampling", "Apple's devices are not supported")
_off("enable-mis allow-auto-truncate", "a prompt is not cut unless a request asks for it: truncate_prompt_tokens")
_off("trust-request-chat-template", "a template in a request is not run; use --chat-template FILE")
_off("exclude-tools-when-tool-choice-none", "tools are shown to the model only where it may call them")
_off("enable-strict-thinking", "send thinking_budget")
_off("tokens-only skip-tokenizer-init", "the server needs the tokenizer; /generate takes input_ids")
_off("disable-fastapi-docs", "/docs asks for the key where one is set")
_off("grpc grpc-mode smg-grpc-mode", "this server speaks HTTP")
_off("enable-http2", "this server speaks HTTP/1.1; put a proxy in front")
_off("enable-ssl-refresh", "restart the server with the new certificate, or put a proxy in front")
_values("ssl-ca-certs ssl-ciphers", "clients show no certificates here; put a proxy in front")
_values("uds", "listens on --host and --port")
_values("grpc-port sidecar sidecar-args tool-server", "this server starts no servers of other kinds")
_free(
    "grpc-response-timeout-secs http2-* h11-*",
    "this server speaks HTTP/1.1 with limits of its own; see docs/security.md",
)
_values("middleware", "write a plugin with routes or observers; see docs/plugins.md")
_values("hf-chat-template-name completion-template", "give --chat-template")
_values(
    "constrained-json-* structured-outputs-config reasoning-config",
    "requests say how JSON is written; see docs/structured-outputs.md",
    "{}",
)
_free(
    "reasoning-effort-map anthropic-disabled-thinking-effort cohere-format",
    "efforts reach the chat template as they are",
)
_idle("cohere-is-reasoning-model", "there is no Cohere API here")


@cache
def find(name: str) -> Flag | None:
    """Return what is known of a flag, given without its dashes; `no-x` of a switch asks for what is so already."""
    if name in TABLE:
        return TABLE[name]
    stems = [stem for stem in TABLE if stem.endswith("*") and name.startswith(stem[:-1])]
    if stems:
        return TABLE[max(stems, key=len)]
    positive = find(name[3:]) if name.startswith("no-") else None
    if positive is None or not positive.is_switch or positive.sets:
        return None
    return Flag(positive.why, None, is_switch=True)
