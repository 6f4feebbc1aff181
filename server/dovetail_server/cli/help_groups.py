"""How `dovetail serve --help` is laid out: groups of flags, and metavars that say the unit."""

from __future__ import annotations

GROUPS: dict[str, str] = {
    "model": "model_path revision download_dir tokenizer_path load_format model_impl task dtype quantization "
    "context_length chat_template default_chat_template_kwargs processor sampling_defaults "
    "preferred_sampling_params random_seed",
    "memory": "mem_fraction_static gpu_memory_utilization max_total_tokens kv_cache_dtype state_dtype "
    "state_copies fold_replies page_size "
    "disable_radix_cache isolate_prefix_cache grammar_cache_bytes",
    "devices and parallelism": "device devices tensor_parallel_size expert_parallel expert_parallel_size "
    "data_parallel_size num_threads",
    "speed": "attention_backend prefill_attention_backend decode_attention_backend kernels max_running_requests "
    "chunked_prefill_size max_prefill_tokens schedule_policy speculator disable_cuda_graph disable_compile_ahead "
    "wait_for_kernels disable_overlap_schedule batch_invariant profile_dir",
    "output": "reasoning_parser tool_call_parser grammar_backend grammar_compile_timeout logits_processors "
    "strict_schema refuse_validate_only compact_json max_logprobs stream_interval "
    "stream_response_default_include_usage",
    "API": "apis host port served_model_name model_aliases max_tokens_beyond unknown_fields unservable_tools root_path "
    "api_key admin_api_key keys_file resume_key allow_origins allowed_hosts closed_probes open_metrics ssl_certfile "
    "ssl_keyfile ssl_keyfile_password disable_playground",
    "images": "limit_mm_per_prompt max_image_patches image_cache_bytes allowed_media_domains allowed_local_media_path",
    "limits and recovery": "max_queued_requests max_queued_tokens max_queued_bytes max_body_bytes max_prompt_bytes "
    "body_processes body_cpu_limit max_connections max_connections_per_address header_timeout body_timeout "
    "min_body_rate keep_alive_timeout websocket_idle_timeout stream_keep_alive stream_write_timeout drain_timeout "
    "drain_grace max_engine_restarts engine_restart_window engine_hang_timeout",
    "files and batches": "file_storage_path database_url max_file_bytes max_storage_bytes min_free_disk_bytes "
    "max_batch_lines max_batch_requests max_stored_responses max_stored_response_bytes stored_response_ttl",
    "logging and metrics": "log_level log_format log_requests log_slow_requests disable_access_log "
    "decode_log_interval metrics_style",
    "plugins and configuration": "config plugin plugin_file plugins_dir plugin_deny plugin_allow plugins_locked "
    "plugin_timeout",
}
"""The settings of each group, in the order in which they are shown."""
METAVARS: dict[str, str] = {
    "SECONDS": "grammar_compile_timeout header_timeout body_timeout keep_alive_timeout websocket_idle_timeout "
    "body_cpu_limit stream_keep_alive stream_write_timeout drain_timeout drain_grace engine_restart_window "
    "engine_hang_timeout stored_response_ttl log_slow_requests plugin_timeout",
    "BYTES": "grammar_cache_bytes image_cache_bytes max_queued_bytes max_body_bytes max_prompt_bytes max_file_bytes "
    "max_storage_bytes min_free_disk_bytes max_stored_response_bytes",
    "BYTES/S": "min_body_rate",
    "TOKENS": "context_length page_size max_total_tokens chunked_prefill_size max_prefill_tokens max_queued_tokens "
    "stream_interval",
    "FRACTION": "mem_fraction_static gpu_memory_utilization",
    "N": "tensor_parallel_size expert_parallel_size data_parallel_size num_threads state_copies max_running_requests "
    "max_queued_requests max_logprobs body_processes max_connections max_connections_per_address max_engine_restarts "
    "max_batch_lines max_batch_requests max_stored_responses max_image_patches random_seed port",
    "STEPS": "decode_log_interval",
    "GPU[,GPU]": "devices",
    "DIR": "download_dir profile_dir file_storage_path plugins_dir allowed_local_media_path",
    "FILE": "config ssl_certfile ssl_keyfile keys_file plugins_locked plugin_file",
    "JSON": "default_chat_template_kwargs preferred_sampling_params limit_mm_per_prompt",
    "URL": "database_url",
    "PATTERN": "model_aliases",
    "ORIGIN": "allow_origins",
    "HOST": "host allowed_hosts allowed_media_domains",
    "PASSWORD": "ssl_keyfile_password",
    "KEY": "api_key admin_api_key resume_key",
    "PACKAGE": "plugin_deny plugin_allow",
    "PATH": "root_path model_path tokenizer_path",
    "REVISION": "revision",
}
"""The metavar of each setting; `NAME` for all others that have no choices."""
GROUP_OF = {name: title for title, names in GROUPS.items() for name in names.split()}
_METAVAR_OF = {name: metavar for metavar, names in METAVARS.items() for name in names.split()}


def metavar_of(name: str, choices: tuple[str, ...] = ()) -> str:
    """Return what the help shows for a setting's value: its choices, its unit, or what it names."""
    return "{" + ",".join(choices) + "}" if choices else _METAVAR_OF.get(name, "NAME")
