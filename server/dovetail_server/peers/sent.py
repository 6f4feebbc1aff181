"""Fields that clients of other servers put into bodies, and that mean nothing here, or are not served."""

from __future__ import annotations

from typing import Any

from dovetail_server.peers.known import OFF, Known


def _all(names: str, why: str, at: tuple[Any, ...] | None = OFF) -> dict[str, Known]:
    return {name: Known(why, at) for name in names.split()}


SEARCHES = "this server searches nothing; offer a tool that does"
TRACED = "it is for whoever traces requests; nothing of it reaches the model"
ROUTED = "it is for a gateway between several servers; this is one"
SAMPLED = "no such sampler is here; see temperature, top_p, top_k and min_p"
MODEL = "how the model is loaded is said at the start of the server"
OF_DRY = "it says how another field's sampler works"

SENT: dict[str, Known] = {
    # OpenRouter, Cline, LiteLLM
    **_all("provider transforms models route preset", ROUTED, None),
    "plugins": Known("this server runs no plugins of a gateway; offer tools"),
    **_all(
        "trace_id litellm_call_id litellm_metadata litellm_trace_id litellm_session_id conversationId", TRACED, None
    ),
    **_all("intent snippy strictJsonSchema trace_name generation_name session_name tags", TRACED, None),
    # llama.cpp
    **_all("cache_prompt id_slot n_cache_reuse", "prefixes are cached by themselves, and change no reply", None),
    **_all("timings_per_token return_progress", "replies tell no times; GET /metrics does", None),
    "backend_sampling": Known("tokens are always drawn on the device", None),
    "samplers": Known("samplers run in one order here", (*OFF, "edkypmxt", "edskypmxt")),
    "sampler_order": Known("samplers run in one order here", (*OFF, [6, 0, 1, 3, 4, 2, 5])),
    **_all("dry_multiplier", "no such sampler is here; see repetition_penalty"),
    **_all("dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers", OF_DRY, None),
    **_all("dynatemp_range xtc_probability top_a mirostat mirostat_mode smoothing_factor epsilon_cutoff", SAMPLED),
    **_all("eta_cutoff penalty_alpha dynamic_temperature min_keep penalize_nl", SAMPLED),
    **_all("dynatemp_exponent dynatemp_low dynatemp_high xtc_threshold mirostat_tau mirostat_eta", OF_DRY, None),
    **_all("smoothing_curve", OF_DRY, None),
    **_all("typical_p typ_p typical tfs tfs_z", SAMPLED, (*OFF, 1, 1.0)),
    "top_n_sigma": Known(SAMPLED, (*OFF, -1, -1.0, 0.0)),
    "repeat_last_n": Known("repetition_penalty looks back over everything; send -1", (None, -1, 64)),
    "rep_pen_range": Known("repetition_penalty looks back over everything; send 0", OFF),
    "n_probs": Known("send logprobs, and how many in top_logprobs"),
    "post_sampling_probs": Known("log probabilities are the model's own, before temperature and filters"),
    "n_keep": Known("a prompt is never cut in its middle; see truncate_prompt_tokens", (*OFF, -1)),
    "n_discard": Known("a prompt is never cut in its middle; see truncate_prompt_tokens"),
    "t_max_predict_ms": Known("send the header x-request-timeout", (*OFF, -1)),
    "lora": Known("adapters are not served; merge the adapter into the weights"),
    "parse_tool_calls": Known("calls are read where tools are offered; leave tools out", (*OFF, True)),
    # Ollama and Open WebUI
    **_all("num_ctx", "the context is the server's: --max-model-len", None),
    **_all(
        "keep_alive ttl num_batch num_gpu main_gpu num_thread num_keep numa use_mmap use_mlock low_vram", MODEL, None
    ),
    **_all("vocab_only f16_kv", MODEL, None),
    **_all("chat_id id features model_item background_tasks variables tool_ids tool_servers filter_ids", TRACED, None),
    "raw": Known("a prompt without a template goes to /v1/completions"),
    "template": Known("a template in a request is not run; use --chat-template FILE"),
    "system": Known("send it as the first message, with the role system"),
    # LM Studio
    "draft_model": Known("drafts change no reply; --speculator chooses them", None),
    # vLLM and transformers
    "best_of": Known("/v1/completions has it", (*OFF, 1)),
    "early_stopping": Known("it belongs to beam search, which is not implemented"),
    "num_beams": Known("beam search is not implemented; n samples several replies", (*OFF, 1)),
    "no_repeat_ngram_size": Known('send logits_processors: {"no-repeat-ngram": {"size": …}}'),
    "guidance_scale": Known("there is no guidance by a second prompt", (*OFF, 1, 1.0)),
    "negative_prompt": Known("there is no guidance by a second prompt"),
    # Text Generation Inference
    **_all("details decoder_input_details", "send logprobs"),
    "return_full_text": Known("send echo: true"),
    **_all("tool_prompt guideline", "say it in a message"),
    # Mistral, Fireworks, xAI, Perplexity, Google, Azure, Cohere
    "safe_prompt": Known("this server adds no prompt of its own; say it in a system message"),
    "raw_output": Known("send return_token_ids: true for the ids of prompt and reply"),
    "perf_metrics_in_response": Known("replies tell no times; GET /metrics does", None),
    "deferred": Known("/v1/responses has background: true"),
    **_all("return_images return_related_questions return_citations return_videos", SEARCHES),
    **_all("search_domain_filter search_recency_filter search_mode web_search enable_search search_options", SEARCHES),
    "disable_search": Known("nothing is searched anyway", None),
    **_all("data_sources connectors", "this server reads no data of others; put it into the messages"),
    "cached_content": Known("prefixes are cached by themselves; send the whole prompt"),
    "generationConfig": Known("its fields go beside the messages: temperature, top_p, max_tokens"),
    # DashScope, GLM, MiniMax
    "tool_stream": Known("arguments of calls are streamed as they come", None),
    "incremental_output": Known("chunks carry what is new", (*OFF, True)),
    "result_format": Known("replies are messages", (*OFF, "message")),
    "enable_code_interpreter": Known("this server runs no code; offer a tool that does"),
    "mask_sensitive_info": Known("this server masks nothing"),
    **_all("user_id", TRACED, None),
    **_all("vl_high_resolution_images asr_options translation_options", "this server reads and writes text only"),
}
