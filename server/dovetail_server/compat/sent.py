"""Fields that clients of other servers put into bodies, and that mean nothing here, or are not served."""

from __future__ import annotations

from typing import Any

from dovetail_server.compat.known import OFF, ForeignName


def _all(names: str, why: str, at: tuple[Any, ...] | None = OFF) -> dict[str, ForeignName]:
    return {name: ForeignName(why, at) for name in names.split()}


SEARCHES = "this server searches nothing; offer a tool that does"
TRACED = "it is for whoever traces requests; nothing of it reaches the model"
ROUTED = "it is for the router of another project"
SAMPLED = "no such sampler is here; see temperature, top_p, top_k and min_p"
MODEL = "how the model is loaded is said at the start of the server"
OF_DRY = "it says how another field's sampler works"
ADAPTERS = "adapters are not served; merge the adapter into the weights"
DRAFTS = "drafts change no reply; --speculator chooses them"
BIASED = "send logit_bias, or bad_words for texts"
BEAMS = "it belongs to beam search, which is not implemented"
BESIDE = "its fields go beside the messages: temperature, top_p, max_tokens"
RAW = (*OFF, "raw", "raw_logprobs")

SENT: dict[str, ForeignName] = {
    # OpenRouter, Cline, LiteLLM
    **_all("provider transforms models route preset", ROUTED, None),
    "plugins": ForeignName("this server runs no plugins of a gateway; offer tools"),
    **_all(
        "trace_id litellm_call_id litellm_metadata litellm_trace_id litellm_session_id conversationId", TRACED, None
    ),
    **_all("intent snippy strictJsonSchema trace_name generation_name session_name tags", TRACED, None),
    # llama.cpp
    **_all("cache_prompt id_slot n_cache_reuse", "prefixes are cached by themselves, and change no reply", None),
    **_all("timings_per_token return_progress", "replies tell no times; GET /metrics does", None),
    "backend_sampling": ForeignName("tokens are always drawn on the device", None),
    "samplers": ForeignName("samplers run in one order here", (*OFF, "edkypmxt", "edskypmxt")),
    "sampler_order": ForeignName("samplers run in one order here", (*OFF, [6, 0, 1, 3, 4, 2, 5])),
    **_all("dry_multiplier", "no such sampler is here; see repetition_penalty"),
    **_all("dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers", OF_DRY, None),
    **_all("dynatemp_range xtc_probability top_a mirostat mirostat_mode smoothing_factor epsilon_cutoff", SAMPLED),
    **_all("eta_cutoff penalty_alpha dynamic_temperature min_keep penalize_nl", SAMPLED),
    **_all("dynatemp_exponent dynatemp_low dynatemp_high xtc_threshold mirostat_tau mirostat_eta", OF_DRY, None),
    **_all("smoothing_curve", OF_DRY, None),
    **_all("typical_p typ_p typical tfs tfs_z", SAMPLED, (*OFF, 1, 1.0)),
    "top_n_sigma": ForeignName(SAMPLED, (*OFF, -1, -1.0, 0.0)),
    "repeat_last_n": ForeignName("repetition_penalty looks back over everything; send -1", (None, -1, 64)),
    "rep_pen_range": ForeignName("repetition_penalty looks back over everything; send 0", OFF),
    "n_probs": ForeignName("send logprobs, and how many in top_logprobs"),
    "post_sampling_probs": ForeignName("log probabilities are the model's own, before temperature and filters"),
    "n_keep": ForeignName("a prompt is never cut in its middle; see truncate_prompt_tokens", (*OFF, -1)),
    "n_discard": ForeignName("a prompt is never cut in its middle; see truncate_prompt_tokens"),
    "t_max_predict_ms": ForeignName("send the header x-request-timeout", (*OFF, -1)),
    "lora": ForeignName(ADAPTERS),
    "parse_tool_calls": ForeignName("calls are read where tools are offered; leave tools out", (*OFF, True)),
    # Ollama and Open WebUI
    **_all("num_ctx", "the context is the server's: --max-model-len", None),
    **_all(
        "keep_alive ttl num_batch num_gpu main_gpu num_thread num_keep numa use_mmap use_mlock low_vram", MODEL, None
    ),
    **_all("vocab_only f16_kv", MODEL, None),
    **_all("chat_id id features model_item background_tasks variables tool_ids tool_servers filter_ids", TRACED, None),
    "raw": ForeignName("a prompt without a template goes to /v1/completions"),
    "template": ForeignName("a template in a request is not run; use --chat-template FILE"),
    "system": ForeignName("send it as the first message, with the role system"),
    # LM Studio
    "draft_model": ForeignName(DRAFTS, None),
    # vLLM and transformers
    "best_of": ForeignName("/v1/completions has it", (*OFF, 1)),
    "early_stopping": ForeignName(BEAMS),
    "num_beams": ForeignName("beam search is not implemented; n samples several replies", (*OFF, 1)),
    "no_repeat_ngram_size": ForeignName('send logits_processors: {"no-repeat-ngram": {"size": …}}'),
    "guidance_scale": ForeignName("there is no guidance by a second prompt", (*OFF, 1, 1.0)),
    "negative_prompt": ForeignName("there is no guidance by a second prompt"),
    # Text Generation Inference
    **_all("details decoder_input_details", "send logprobs"),
    "return_full_text": ForeignName("send echo: true"),
    **_all("tool_prompt guideline", "say it in a message"),
    # Mistral, Fireworks, xAI, Perplexity, Google, Azure, Cohere
    "safe_prompt": ForeignName("this server adds no prompt of its own; say it in a system message"),
    "raw_output": ForeignName("send return_token_ids: true for the ids of prompt and reply"),
    "perf_metrics_in_response": ForeignName("replies tell no times; GET /metrics does", None),
    "deferred": ForeignName("/v1/responses has background: true"),
    **_all("return_images return_related_questions return_citations return_videos", SEARCHES),
    **_all("search_domain_filter search_recency_filter search_mode web_search enable_search search_options", SEARCHES),
    "disable_search": ForeignName("nothing is searched anyway", None),
    **_all("data_sources connectors", "this server reads no data of others; put it into the messages"),
    "cached_content": ForeignName("prefixes are cached by themselves; send the whole prompt"),
    "generationConfig": ForeignName(BESIDE),
    # DashScope, GLM, MiniMax
    "tool_stream": ForeignName("arguments of calls are streamed as they come", None),
    "incremental_output": ForeignName("chunks carry what is new", (*OFF, True)),
    "result_format": ForeignName("replies are messages", (*OFF, "message")),
    "enable_code_interpreter": ForeignName("this server runs no code; offer a tool that does"),
    "mask_sensitive_info": ForeignName("this server masks nothing"),
    **_all("user_id", TRACED, None),
    **_all(
        "vl_high_resolution_images asr_options translation_options",
        "this server reads text and images, and writes text only",
    ),
    **_all("enable_source search_strategy", SEARCHES),
    # Of LiteLLM what tells it where and how to send; a body that still has it was sent past it
    **_all("api_base base_url api_version custom_llm_provider organization deployment_id model_list", ROUTED, None),
    **_all("fallbacks context_window_fallback_dict num_retries max_retries drop_params", ROUTED, None),
    **_all("additional_drop_params allowed_openai_params proxy_server_request input_cost_per_token", ROUTED, None),
    **_all(
        "caching cache use_cache wait_for_model no-log", "replies are not cached; prefixes are, by themselves", None
    ),
    **_all("timeout request_timeout stream_timeout", "the client waits as long as it says; nothing ends here", None),
    "api_key": ForeignName("send a key in the header Authorization"),
    "extra_headers": ForeignName("send headers as headers"),
    "mock_response": ForeignName("replies are the model's"),
    "guardrails": ForeignName("this server judges no content"),
    **_all("prompt_id prompt_variables", "there are no stored prompts here; send messages"),
    "merge_reasoning_content_in_choices": ForeignName("send separate_reasoning: false"),
    # OpenRouter, Together, Fireworks, Groq, Cerebras, SambaNova, NVIDIA, Databricks
    **_all("debug trace", TRACED, None),
    **_all("image_config media_response", "this server writes text only"),
    **_all("safety_model compliance", "this server judges no content"),
    **_all("mirostat_lr mirostat_target", OF_DRY, None),
    "speculation": ForeignName(DRAFTS, None),
    "rewrite_speculation": ForeignName(DRAFTS, None),
    "reasoning_history": ForeignName("the chat template decides which reasoning the model sees"),
    "sampling_mask": ForeignName("replies carry text, token ids and log probabilities only"),
    "prompt_cache_isolation_key": ForeignName("send cache_salt"),
    "prompt_cache_max_len": ForeignName("prefixes are cached by themselves, and change no reply", None),
    "safe_tokenization": ForeignName("special tokens in a message's text are never read as such", (*OFF, True)),
    "citation_options": ForeignName("replies cite nothing", (*OFF, "disabled")),
    **_all("compound_custom exclude_domains include_domains search_settings", SEARCHES),
    "disable_tool_validation": ForeignName("calls are given as the model wrote them", None),
    "queue_threshold": ForeignName("send the header x-request-timeout"),
    "process_prompt": ForeignName("a prompt without a template goes to /v1/completions", (*OFF, True)),
    "select_expert": ForeignName("there are no experts to choose by name; send model"),
    **_all("nvext databricks_options", ROUTED),
    "min_thinking_tokens": ForeignName("thinking has no least length; see thinking_budget"),
    # Mistral, Perplexity, Cohere, Azure, Google, Bedrock
    **_all("document_image_limit document_page_limit", "this server reads text only", None),
    **_all("search_after_date_filter search_before_date_filter last_updated_after_filter", SEARCHES),
    **_all("image_domain_filter num_search_results enable_search_classifier", SEARCHES),
    "stream_mode": ForeignName("chunks carry what is new", (*OFF, "concise", "full")),
    "language_preference": ForeignName("say it in a system message"),
    "preamble": ForeignName("send it as the first message, with the role system"),
    **_all("chat_history contents", "send the conversation in messages"),
    **_all("systemInstruction system_instruction", "send it as the first message, with the role system"),
    "citation_mode": ForeignName("replies cite nothing", (*OFF, "OFF")),
    "safety_mode": ForeignName("this server judges no content", (*OFF, "NONE", "OFF")),
    "prompt_truncation": ForeignName("prompts are not cut by themselves; see truncate_prompt_tokens", (*OFF, "OFF")),
    "force_single_step": ForeignName("a call of the model ends its turn", None),
    **_all("dataSources enhancements", "this server reads no data of others; put it into the messages"),
    "user_security_context": ForeignName(TRACED, None),
    "toolConfig": ForeignName("send tools and tool_choice"),
    "generation_config": ForeignName(BESIDE),
    **_all("anthropic_version anthropic_beta", "what this server has of Anthropic's API needs no beta name", None),
    # llama.cpp, Ollama, LM Studio
    **_all("speculative.n_max speculative.n_min speculative.p_min speculative_decoding", OF_DRY, None),
    **_all("sse_ping_interval shift n_indent", "it says how its own server works; no reply here depends on it", None),
    **_all("adaptive_target penalize_newline top_p_decay logit_bias_exp temperature_last", SAMPLED),
    "adaptive_decay": ForeignName(OF_DRY, None),
    **_all("grammar_lazy grammar_triggers preserved_tokens", "calls are read and enforced where tools are offered"),
    "chat_format": ForeignName("the model's chat template says it"),
    "thinking_forced_open": ForeignName("the model's chat template says it"),
    "response_fields": ForeignName("replies are whole"),
    **_all("context_length max_context_length truncation_length", MODEL, None),
    "context": ForeignName("a conversation goes on with its messages"),
    "images": ForeignName("this server reads text only"),
    "structured": ForeignName("send response_format"),
    "integrations": ForeignName("this server calls no other; offer tools"),
    # vLLM, Text Generation Inference, Hugging Face
    "chat_template_content_format": ForeignName("the server finds out what the template reads", (*OFF, "auto")),
    "detokenize": ForeignName("replies are text; /generate has output_ids", (*OFF, True)),
    "top_n_tokens": ForeignName("send logprobs, and how many in top_logprobs"),
    "adapter_id": ForeignName(ADAPTERS),
    "inputs": ForeignName("send messages, or a prompt to /v1/completions"),
    "parameters": ForeignName(BESIDE),
    # KoboldCpp and text-generation-webui
    "max_length": ForeignName("send max_tokens"),
    **_all("memory character greeting", "say it in a message"),
    **_all("quiet genkey use_default_badwordsids", TRACED, None),
    **_all("trim_stop", "stop texts are left out of replies", (*OFF, True)),
    **_all("rep_pen_slope encoder_repetition_penalty", SAMPLED, (*OFF, 1, 1.0)),
    **_all("repetition_context_size presence_penalty_range", "penalties look back over everything"),
    **_all("banned_tokens custom_token_bans", "send bad_words, or logit_bias"),
    "instruction_template": ForeignName("a template in a request is not run; use --chat-template FILE"),
    "auto_max_new_tokens": ForeignName("without max_tokens a reply ends with the context", None),
    **_all("name1 name2 user_name bot_name", "names stand in messages", None),
    "static_cache": ForeignName(MODEL, None),
    # TensorRT-LLM and Triton, LMDeploy, transformers
    **_all("adapter_source adapter_name lora_request", ADAPTERS),
    **_all("draft_num_predict prompt_lookup_num_tokens assistant_model speculative_ngram", DRAFTS, None),
    **_all("speculation_length lookahead_config", DRAFTS, None),
    **_all("num_gqa logits_all session_len max_context_len enable_prefix_caching", MODEL, None),
    **_all("rope_frequency_base rope_frequency_scale modelfile embedding_only", MODEL),
    **_all("interactive_mode with_cache preserve_cache", "no conversation is kept; send the whole one in messages"),
    "do_preprocess": ForeignName("a prompt without a template goes to /v1/completions", (None, True)),
    "logprobs_mode": ForeignName("log probabilities are the model's own, before temperature and filters", RAW),
    **_all("return_context_logits return_generation_logits output_scores output_logits", "send logprobs"),
    **_all("return_log_probs return_likelihoods", "send logprobs", (*OFF, "NONE")),
    "return_perf_metrics": ForeignName("replies tell no times; GET /metrics does", None),
    "exclude_input_in_output": ForeignName("send echo: true", (None, True)),
    "echo_last": ForeignName("send echo: true"),
    "return_prompt": ForeignName("send return_token_ids: true for the ids of prompt and reply"),
    "prompt_ignore_length": ForeignName("penalties look back over everything"),
    **_all("embedding_bias embedding_bias_words sequence_bias suppress_tokens", BIASED),
    **_all("begin_suppress_tokens bad_token_ids bad_words_ids", BIASED),
    **_all("end_id eos_token_id forced_eos_token_id", "send stop_token_ids", (None, -1)),
    **_all("pad_id pad_token_id", "rows are not padded", None),
    **_all("kv_cache_retention_config kv_cache_retention", "prefixes are cached by themselves", None),
    "text_input": ForeignName("send messages, or a prompt to /v1/completions"),
    "disaggregated_params": ForeignName("an engine computes both prefill and decode here; leave it out"),
    "guided_decoding_params": ForeignName("send response_format"),
    "num_beam_groups": ForeignName(BEAMS, (*OFF, 1)),
    **_all("diversity_penalty beam_search_diversity_rate", BEAMS),
    **_all("top_p_min top_p_reset_ids exponential_decay_length_penalty encoder_no_repeat_ngram_size", SAMPLED),
    **_all("renormalize_logits remove_invalid_values return_dict_in_generate", "no reply here depends on it", None),
    "min_length": ForeignName("send min_tokens, which counts the reply alone"),
    **_all("max_time time_limit", "send the header x-request-timeout"),
    "token_healing": ForeignName("the last token of a prompt is never taken back"),
    # Cohere, Mistral's agents, Moonshot, DeepSeek, Baidu, AI21, Bedrock, watsonx
    **_all("strict_tools strict", "say strict in a tool's function"),
    "raw_prompting": ForeignName("a prompt without a template goes to /v1/completions"),
    "max_input_tokens": ForeignName("prompts are not cut by themselves; see truncate_prompt_tokens"),
    **_all("search_queries_only is_search_required use_search search_context_size user_location", SEARCHES),
    **_all("max_search_results search_info enable_citation enable_enhancement", SEARCHES),
    "message": ForeignName("send the conversation in messages"),
    "prompt_vars": ForeignName("there are no stored prompts here; send messages"),
    **_all("inferenceConfig additionalModelRequestFields completion_args generation_kwargs", BESIDE),
    **_all("sensitive_word_check stream_moderation guardrailConfig moderations", "this server judges no content"),
    "ref_file_ids": ForeignName("this server reads no data of others; put it into the messages"),
    "partial": ForeignName("send continue_final_message: true"),
    **_all("bot_setting reply_constraints", "say it in a message"),
    **_all("countPenalty temperatureDecay", SAMPLED),
    "model_id": ForeignName("send model"),
    **_all("meta project_id space_id", TRACED, None),
    # LiteLLM, OpenRouter, Together
    **_all("litellm_params rpm tpm max_parallel_requests enable_json_schema_validation modify_params", ROUTED, None),
    **_all("cooldown_time prompt_label user_continue_message assistant_continue_message ssl_verify", ROUTED, None),
    **_all("hf_model_name azure_ad_token aws_region_name vertex_project vertex_location retry_policy", ROUTED, None),
    **_all("standard_callback_dynamic_params no_log max_price zdr handoff_execution", ROUTED, None),
    "headers": ForeignName("send headers as headers"),
    "prompt_format_string": ForeignName("a template in a request is not run; use --chat-template FILE"),
    # MLX, llama-cpp-python, KoboldCpp
    "num_draft_tokens": ForeignName(DRAFTS, None),
    "adapters": ForeignName(ADAPTERS),
    "role_mapping": ForeignName("the model's chat template says it"),
    **_all("n_ctx n_batch n_gpu_layers", MODEL, None),
    "min_tokens_to_keep": ForeignName(OF_DRY, None),
    # Mistral, Tencent, Baidu, Spark, Venice, Google, Codex
    "safe_mode": ForeignName("this server adds no prompt of its own; say it in a system message"),
    **_all("citation force_search_enhancement enable_deep_search enable_trace show_ref_label", SEARCHES),
    "venice_parameters": ForeignName(
        "nothing is searched, and no character stands before the messages", (*OFF, {"enable_web_search": "off"})
    ),
    "cachedContent": ForeignName("prefixes are cached by themselves; send the whole prompt"),
    **_all("sessionId promptId", TRACED, None),
    "performanceConfig": ForeignName(ROUTED, None),
    "reasoning_summary": ForeignName("reasoning comes whole; nothing shortens it", (*OFF, "auto", "detailed", "none")),
    **_all("response_prefix assistant_prefix", "send it as the last message, with continue_final_message: true"),
    **_all("json_mode json_output force_json_object", 'send response_format: {"type": "json_object"}'),
    "context_management": ForeignName("/v1/responses compacts; /v1/messages clears results of tools and thinking"),
    # TabbyAPI, Aphrodite
    **_all("skew nsigma logit_threshold", SAMPLED),
    "dry_range": ForeignName(OF_DRY, None),
    "cfg_scale": ForeignName("there is no guidance by a second prompt", (*OFF, 1, 1.0)),
    "add_bos_token": ForeignName("the chat template says whether there is one", (None, True)),
    "no_repeat_ngram": ForeignName('send logits_processors: {"no-repeat-ngram": {"size": …}}'),
}
