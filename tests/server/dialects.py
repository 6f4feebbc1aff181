"""What clients of other servers put into a chat, by sender: a field, a value, and what it is here.

An object has the fields of ours that say the same, and is empty where it means nothing; a text is part of the reason
why it is refused. Taken from what the clients of November 2026 send, and from their servers' documents.
"""

from __future__ import annotations

from typing import Any

Row = tuple[str, Any, dict[str, Any] | str]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ON, OFF = {"thinking": {"type": "enabled"}}, {"thinking": {"type": "disabled"}}
LEFT_IN, LEFT_OUT = {"separate_reasoning": False}, {"include_reasoning": False}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MARKED = {"cache_control": {"type": "ephemeral"}}
SAMPLER = "no such sampler"


def nothing(values: dict[str, Any]) -> list[Row]:
    """Return rows of fields that mean nothing."""
    return [(name, value, {}) for name, value in values.items()]


def refused(why: str, values: dict[str, Any]) -> list[Row]:
    """Return rows of fields that are refused."""
    return [(name, value, why) for name, value in values.items()]


SENT: dict[str, list[Row]] = {
    "OpenRouter, Cline": [
        ("usage", {"include": True}, {"stream_options": {"include_usage": True}}),
        ("usage", {"include": "yes"}, "boolean"),
        ("reasoning", {"effort": "high"}, {"reasoning_effort": "high"}),
        ("reasoning", {"max_tokens": 9, "exclude": True}, {"thinking_budget": 9, **LEFT_OUT}),
        ("reasoning", {"enabled": True}, ON),
        ("reasoning", {"effort": "no-such-effort"}, "should be"),
        ("reasoning", {"colour": 1}, "unknown field 'colour'"),
        *nothing({
            "provider": {"order": ["a"]}, "transforms": ["middle-out"], "models": ["a", "b"], "route": "fallback",
            "preset": "x", "plugins": [],
        }),
        ("plugins", [{"id": "web"}], "runs no plugins"),
    ],
    "DashScope, Qwen": [
        ("enable_thinking", True, ON),
        ("enable_thinking", False, OFF),
        ("enable_thinking", "yes", "must be one of: true, false"),
        ("thinking_budget", 9, {"thinking_budget": 9}),
        ("preserve_thinking", True, {"chat_template_kwargs": {"preserve_thinking": True}}),
        ("enable_search", True, "searches nothing"),
        ("enable_code_interpreter", True, "runs no code"),
        ("translation_options", {"a": 1}, "text only"),
        *nothing({"incremental_output": True, "result_format": "message", "enable_search": False}),
    ],
    "Groq": [
        ("reasoning_format", "parsed", {"separate_reasoning": True}),
        ("reasoning_format", "raw", LEFT_IN),
        ("reasoning_format", "hidden", LEFT_OUT),
        ("reasoning_format", "no-such-format", "must be one of: parsed, raw, hidden"),
        ("reasoning_effort", "default", {}),
    ],
    "llama.cpp": [
        ("repeat_penalty", 1.1, {"repetition_penalty": 1.1}),
        ("repeat_penalty", "1.1", "should be a valid number"),
        ("n_predict", 9, {"max_tokens": 9}),
        ("n_predict", -1, {}),
        ("n_predict", -2, {}),
        ("grammar", 'root ::= "a"', {"ebnf": 'root ::= "a"'}),
        ("grammar", "", {}),
        ("reasoning_format", "auto", {}),
        ("reasoning_format", "none", LEFT_IN),
        ("reasoning_format", "deepseek", {"separate_reasoning": True}),
        ("reasoning_in_content", True, LEFT_IN),
        ("reasoning_budget", -1, {}),
        ("thinking_budget_tokens", 9, {"thinking_budget": 9}),
        ("return_tokens", True, {"return_token_ids": True}),
        *nothing({
            "cache_prompt": True, "timings_per_token": True, "return_progress": True, "samplers": "edkypmxt",
            "id_slot": -1, "backend_sampling": False, "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2,
            "dry_penalty_last_n": -1, "dry_sequence_breakers": ["\n"], "dynatemp_range": 0, "dynatemp_exponent": 1,
            "xtc_probability": 0, "xtc_threshold": 0.1, "typical_p": 1, "typ_p": 1.0, "tfs": 1, "tfs_z": 1.0,
            "top_a": 0, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "repeat_last_n": 64,
            "top_n_sigma": -1, "n_probs": 0, "n_keep": 0, "n_discard": 0, "t_max_predict_ms": -1, "lora": [],
            "post_sampling_probs": False, "parse_tool_calls": True, "min_keep": 0, "penalize_nl": False,
        }),
        *refused(SAMPLER, {
            "dry_multiplier": 0.8, "dynatemp_range": 0.5, "xtc_probability": 0.5, "typical_p": 0.9, "tfs": 0.9,
            "top_a": 0.1, "mirostat": 2, "top_n_sigma": 1.0,
        }),
        ("samplers", ["temperature", "top_p"], "in one order"),
        ("repeat_last_n", 16, "looks back over everything"),
        ("n_probs", 3, "top_logprobs"),
        ("t_max_predict_ms", 100, "x-request-timeout"),
        ("lora", [{"id": 0, "scale": 1}], "adapters are not served"),
    ],
    "Ollama, Open WebUI": [
        ("options", {"num_ctx": 4096, "num_predict": 9, "temperature": 0.5, "seed": 3},
         {"max_tokens": 9, "temperature": 0.5, "seed": 3}),
        ("options", {"repeat_penalty": 1.1, "repeat_last_n": -1, "num_gpu": 1}, {"repetition_penalty": 1.1}),
        ("options", {"mirostat": 1}, SAMPLER),
        ("options", {"no_such_option": 1}, "unknown field"),
        ("options", [], "must be an object"),
        ("options", {}, {}),
        ("think", True, ON),
        ("think", False, OFF),
        ("think", "high", {"reasoning_effort": "high"}),
        ("format", "json", {"response_format": {"type": "json_object"}}),
        ("format", SCHEMA, {"json_schema": SCHEMA}),
        ("num_predict", 9, {"max_tokens": 9}),
        ("system", "You are kind.", "first message"),
        ("template", "{{ .Prompt }}", "--chat-template"),
        ("raw", True, "/v1/completions"),
        *nothing({
            "keep_alive": "5m", "num_ctx": 4096, "session_id": "a", "chat_id": "a", "id": "a",
            "features": {"web_search": False}, "model_item": {}, "background_tasks": {}, "variables": {"a": "b"},
            "tool_ids": [], "filter_ids": [], "tool_servers": [], "raw": False,
        }),
    ],
    "LM Studio": [
        ("max_tokens", -1, {}),
        *nothing({"ttl": 300, "draft_model": "small"}),
    ],
    "vLLM": [
        ("guided_json", SCHEMA, {"structured_outputs": {"json": SCHEMA}}),
        ("guided_choice", ["a", "b"], {"structured_outputs": {"choice": ["a", "b"]}}),
        ("guided_regex", "[ab]", {"structured_outputs": {"regex": "[ab]"}}),
        ("guided_grammar", 'root ::= "a"', {"structured_outputs": {"grammar": 'root ::= "a"'}}),
        ("guided_decoding_backend", "auto", {}),
        ("guided_decoding_backend", "no-such-backend", "no-such-backend"),
        *nothing({"best_of": 1, "early_stopping": False, "num_beams": 1, "guided_json": None}),
        ("best_of", 3, "/v1/completions has it"),
        ("early_stopping", True, "beam search"),
        ("no_repeat_ngram_size", 3, "no-repeat-ngram"),
    ],
    "Text Generation Inference": [
        ("max_new_tokens", 9, {"max_tokens": 9}),
        ("truncate", 9, {"truncate_prompt_tokens": 9}),
        ("grammar", {"type": "json", "value": SCHEMA}, {"json_schema": SCHEMA}),
        ("grammar", {"type": "regex", "value": "[ab]"}, {"regex": "[ab]"}),
        ("grammar", {"type": "no-such-type", "value": 1}, "a type of: json"),
        ("details", True, "logprobs"),
        ("return_full_text", True, "echo"),
        ("tool_prompt", "Use:", "in a message"),
        *nothing({"details": False, "return_full_text": False}),
    ],
    "KoboldCpp, text-generation-webui": [
        ("rep_pen", 1.1, {"repetition_penalty": 1.1}),
        ("stopping_strings", ["a"], {"stop": ["a"]}),
        ("ban_eos_token", True, {"ignore_eos": True}),
        ("smoothing_factor", 0.5, SAMPLER),
        ("guidance_scale", 2, "second prompt"),
        *nothing({"smoothing_factor": 0, "guidance_scale": 1, "negative_prompt": "", "epsilon_cutoff": 0}),
    ],
    "Mistral": [
        ("random_seed", 3, {"seed": 3}),
        ("prompt_mode", "reasoning", ON),
        ("safe_prompt", False, {}),
        ("safe_prompt", True, "no prompt of its own"),
    ],
    "Fireworks, xAI, Perplexity, Google, Azure": [
        ("context_length_exceeded_behavior", "truncate", {"context_length_exceeded_behavior": "truncate"}),
        ("context_length_exceeded_behavior", "no-such", "should be"),
        ("prompt_truncate_len", 9, {"truncate_prompt_tokens": 9}),
        ("raw_output", True, "return_token_ids"),
        ("search_parameters", {"mode": "off"}, {}),
        ("search_parameters", {"mode": "auto"}, "searches nothing"),
        ("deferred", True, "/v1/responses"),
        ("return_images", True, "searches nothing"),
        ("search_domain_filter", ["a.org"], "searches nothing"),
        ("extra_body", {"enable_thinking": False}, OFF),
        ("extra_body", {"google": {"thinking_config": {}}}, {}),
        ("extra_body", {"no_such": {"thinking_config": {}}}, "unknown field 'no_such'"),
        ("safety_settings", [{"category": "a", "threshold": "BLOCK_NONE"}], {}),
        ("safety_settings", [{"category": "a", "threshold": "BLOCK_LOW_AND_ABOVE"}], "judges no content"),
        ("generationConfig", {"topK": 3}, "beside the messages"),
        ("maxOutputTokens", 9, {"max_tokens": 9}),
        ("stopSequences", ["a"], {"stop": ["a"]}),
        ("topP", 0.5, {"top_p": 0.5}),
        ("topK", 3, {"top_k": 3}),
        ("data_sources", [{"type": "a"}], "no data of others"),
        *nothing({
            "return_images": False, "return_related_questions": False, "disable_search": True, "extra_body": {},
            "perf_metrics_in_response": False, "deferred": False, "raw_output": False, "safety_settings": [],
        }),
    ],
    "GLM, MiniMax, DeepSeek": [
        ("do_sample", False, {"temperature": 0}),
        ("do_sample", True, {}),
        ("thinking", {"type": "disabled"}, OFF),
        ("thinking", {"type": "enabled", "clear_thinking": False},
         {**ON, "chat_template_kwargs": {"clear_thinking": False}}),
        ("thinking", {"type": "enabled", "reasoning_effort": "high"}, {**ON, "reasoning_effort": "high"}),
        ("thinking", {"type": "enabled", "budget_tokens": 9}, {**ON, "thinking_budget": 9}),
        ("thinking", {"type": "auto"}, {}),
        ("thinking", {"type": "no-such-type"}, "should be"),
        ("reasoning_split", False, LEFT_IN),
        ("tokens_to_generate", 9, {"max_tokens": 9}),
        ("mask_sensitive_info", True, "masks nothing"),
        ("web_search", {"enable": True}, "searches nothing"),
        *nothing({"tool_stream": True, "mask_sensitive_info": False, "user_id": "a"}),
    ],
    "whatever traces": nothing({
        "trace_id": "a", "litellm_call_id": "a", "litellm_metadata": {"a": "b"}, "litellm_trace_id": "a",
        "conversationId": "a", "intent": True, "snippy": {"enabled": False}, "strictJsonSchema": True, "tags": ["a"],
        "session_name": "a", "generation_name": "a",
    }),
    "JavaScript": [
        ("max_tokens", 2.0, {"max_tokens": 2}),
        ("n", 1.0, {"n": 1}),
        ("max_tokens", 2.5, "should be a valid integer"),
        ("temperature", "0.7", "should be a valid number"),
    ],
    "Anthropic, in a chat": [
        ("stop_sequences", ["a"], {"stop": ["a"]}),
        ("max_tokens_to_sample", 9, {"max_tokens": 9}),
        ("cache_control", {"type": "ephemeral"}, {}),
    ],
    "many": [
        ("top_logprobs", 0, {}),
        ("logprobs", False, {}),
        ("tools", [{**TOOL, **MARKED}], {"tools": [TOOL]}),
        ("tools", [{**TOOL, "function": {**TOOL["function"], **MARKED}}], {"tools": [TOOL]}),
        ("max_tokens", 100_000, {}),
        ("max_completion_tokens", 32_000, {}),
    ],
    "Gemini's OpenAI endpoint, Cohere, Cerebras, Hugging Face, KoboldCpp": [
        ("google", {"thinking_config": {"thinking_budget": 9, "include_thoughts": True}}, {"thinking_budget": 9}),
        ("google", {"thinking_config": {"thinking_level": "low"}}, {"reasoning_effort": "low"}),
        ("google", {"cached_content": "a"}, "send the whole prompt"),
        ("extra_body", {"google": {"thinking_config": {"thinking_budget": -1}}}, {}),
        ("thinkingConfig", {"thinkingBudget": 9, "includeThoughts": False}, {"thinking_budget": 9}),
        ("thinking_config", {"budget": 9}, "unknown field 'budget'"),
        ("thinkingBudget", 9, {"thinking_budget": 9}),
        ("include_thoughts", True, {}),
        ("candidateCount", 2, {"n": 2}),
        ("response_mime_type", "application/json", {"response_format": {"type": "json_object"}}),
        ("responseMimeType", "text/plain", {}),
        ("responseMimeType", "text/x.enum", "must be one of: text/plain, application/json"),
        ("response_schema", {"type": "object"}, {"json_schema": {"type": "object"}}),
        ("safetySettings", [{"category": "a", "threshold": "BLOCK_NONE"}], {}),
        ("safetySettings", [{"category": "a", "threshold": "BLOCK_LOW"}], "judges no content"),
        ("p", 0.5, {"top_p": 0.5}),
        ("k", 5, {"top_k": 5}),
        ("disable_reasoning", True, {"thinking": {"type": "disabled"}}),
        ("min_new_tokens", 3, {"min_tokens": 3}),
        ("num_return_sequences", 2, {"n": 2}),
        ("sampler_seed", 7, {"seed": 7}),
        ("sampler_seed", -1, {}),
        ("api_key", "a", "header Authorization"),
        ("stream_mode", "concise", {}),
        ("max_length", 9, "send max_tokens"),
    ],
    "Kimi, OpenAI": [
        ("tools", [{"type": "builtin_function", "function": {"name": "$web_search"}}], {}),
        ("tools", [{"type": "web_search"}], {}),
        ("tools", [{"type": "no-such-tool"}], "should be 'function'"),
    ],
}  # fmt: skip
ROWS = [(sender, *row) for sender, rows in SENT.items() for row in rows]
