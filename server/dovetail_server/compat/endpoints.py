"""Paths of other servers and of OpenAI that are not served here, each with the reason and the way out."""

from __future__ import annotations

import re
from functools import cache


def _all(paths: str, why: str) -> dict[str, str]:
    return dict.fromkeys(paths.split(), why)


WEIGHTS = "weights are loaded once; restart the server to serve others"
PROFILE = "there is no such tool here; POST /start_profile looks into steps, GET /metrics counts them"
EMBEDS = "POST /v1/embeddings gives vectors, /v1/classify scores of labels, /v1/score and /v1/rerank compare texts"
SPEECH = "this server reads text and images, and writes text only"
LORA = "adapters are not served; merge the adapter into the weights"
CACHE = "the prefix cache is on the device alone; POST /flush_cache empties it"
SLEEP = "this server does not sleep; stop it, and start it again when it is needed"
SPREAD = "--tensor-parallel-size and --data-parallel-size divide work from the start on; restart with other ones"
TOKENS = "POST /generate takes input_ids and answers with output_ids"
OLLAMA = "send it to /v1/chat/completions, /v1/completions or /v1/embeddings, which Ollama has, too"
STORE = "one model is served, which GET /v1/models names; start the server with another"
NOT_OPENAI = "this server has no such part of OpenAI's API"

PATHS: dict[str, str] = {
    **_all(
        "/begin_weight_update /end_weight_update /destroy_weights_update_group /get_weights_by_name "
        "/init_weights_send_group_for_remote_instance /init_weights_update_group /send_weights_to_remote_instance "
        "/update_weight_version /update_weights /update_weights_from_disk /update_weights_from_distributed "
        "/update_weights_from_ipc /update_weights_from_tensor /weights_checker /weight_checker /weight_info "
        "/start_weight_update /start_draft_weight_update /finish_weight_update /init_weight_transfer_engine "
        "/shutdown_weight_transfer_engine /get_remote_instance_transfer_engine_info /get_transfer_engine_info "
        "/register_transfer_engine_info /remote_instance_transfer_engine_info",
        WEIGHTS,
    ),
    **_all(
        "/start_expert_distribution_record /stop_expert_distribution_record "
        "/dump_expert_distribution_record /dumper/{} /set_trace_level /slow_down /freeze_gc /configure_logging",
        PROFILE,
    ),
    **_all("/encode /pooling /v2/embed /embed /embedding /predict", EMBEDS),
    **_all("/v1/audio/transcriptions /v1/audio/translations /v1/audio/speech /v1/realtime", SPEECH),
    **_all("/v1/images/generations /v1/images/edits /v1/images/variations /v1/videos", SPEECH),
    **_all(
        "/load_lora_adapter /load_lora_adapter_from_tensors /unload_lora_adapter /v1/load_lora_adapter "
        "/v1/unload_lora_adapter",
        LORA,
    ),
    **_all(
        "/hicache/storage-backend /hicache/storage-backend/clear /get_hicache_l3_cache_layout /add_external_corpus "
        "/remove_external_corpus /list_external_corpora /reset_prefix_cache /reset_encoder_cache /reset_mm_cache "
        "/open_session /close_session",
        CACHE,
    ),
    **_all(
        "/release_memory_occupation /resume_memory_occupation /pause_generation /continue_generation /sleep /wake_up "
        "/is_sleeping /is_paused /pause /resume /release_kv_cache_memory",
        SLEEP,
    ),
    **_all(
        "/pd_role_switch /scale_elastic_ep /is_scaling_elastic_ep /collective_rpc /get_world_size "
        "/fault_tolerance/apply /fault_tolerance/status /set_internal_state",
        SPREAD,
    ),
    **_all("/inference/v1/generate /v1/chat/completions/derender /v1/completions/derender /detokenize_batch", TOKENS),
    **_all("/kv_event_sources", "--plugin kv-events tells them over ZMQ; see docs/plugins.md"),
    **_all("/v1/decisions /v1/systemone /generative_scoring", "answer with a schema instead: response_format"),
    **_all("/cohere/v2/chat /cohere/v2/chat/render", "send it to /v1/chat/completions or /v1/messages"),
    **_all("/invocations", "send the body to its own route, /v1/chat/completions"),
    **_all("/v1/chat/completions/batch", "send several requests, or a file to /v1/batches"),
    **_all("/abort_requests", "POST /abort_request ends one request, or all"),
    **_all("/load /slots", "GET /v1/loads has the load"),
    **_all("/completion", "send it to /v1/completions"),
    **_all("/generate_stream", "POST /generate with stream: true"),
    **_all("/api/v0/models /api/v1/models /v1/internal/model/info", "GET /v1/models names what is served"),
    **_all("/api/v0/chat/completions /api/v1/chat", "send it to /v1/chat/completions"),
    **_all("/api/version", "GET /version"),
    **_all("/ready", "GET /readyz tells whether it should get traffic"),
    **_all("/api/chat /api/generate /api/embed /api/embeddings", OLLAMA),
    **_all("/api/tags /api/ps /api/show /api/pull /api/push /api/create /api/copy /api/delete", STORE),
    **_all("/v1/moderations /v1/assistants /v1/threads /v1/vector_stores /v1/fine_tuning/jobs /v1/uploads", NOT_OPENAI),
    **_all("/v1/evals /v1/containers /v1/organization/costs /v1/chatkit/sessions", NOT_OPENAI),
}
"""A part in braces is any one part of a path."""


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(path.replace("{}", "[^/]+")), why) for path, why in PATHS.items() if "{}" in path]


def why_not(path: str) -> str | None:
    """Return why a path is not served; None for one that nobody knows."""
    if path in PATHS:
        return PATHS[path]
    return next((why for pattern, why in _patterns() if pattern.fullmatch(path)), None)
