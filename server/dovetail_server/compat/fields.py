"""Fields that SGLang's, vLLM's and their gateways' clients put into bodies, beyond those of our own schemas.

A schema that has a field of such a name goes first. A field at a value that means nothing is dropped; at any other it
is a 400 with the reason. What nobody knows gets the nearest name of the schema.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dovetail_server.compat.dialects import SAID
from dovetail_server.compat.known import OFF, ForeignName
from dovetail_server.compat.sent import SENT


def _all(names: str, why: str, at: tuple[Any, ...] | None = OFF) -> dict[str, ForeignName]:
    return {name: ForeignName(why, at) for name in names.split()}


NOT_A_TEXT = "this server reads text and images, and writes text only"
EXPERTS = "which experts a token went to is not reported"
DISAGGREGATED = "an engine computes both prefill and decode here; send the request without it"

ELSEWHERE: dict[str, str] = {
    "prompt": "a prompt goes to /v1/completions; /generate takes text or input_ids",
    "messages": "a conversation goes to /v1/chat/completions or /v1/messages",
}
"""Inputs of other routes: what is said of them where they are no field."""

FIELDS: dict[str, ForeignName] = {
    **_all(
        "return_hidden_states return_indexer_topk return_bytes return_entropy return_sampling_mask "
        "return_pooled_hidden_states",
        "replies carry text, token ids and log probabilities only",
    ),
    **_all("return_routed_experts routed_experts_start_len routed_experts_prompt_start", EXPERTS),
    **_all(
        "return_cached_tokens_details return_spec_tokens_details return_meta_info",
        "a reply has these facts in usage, and those of /generate in meta_info; there are no more",
    ),
    **_all(
        "return_prompt_token_ids return_input_ids_in_sglext return_output_ids_in_sglext",
        "send return_token_ids: true for the ids of prompt and reply",
    ),
    **_all("return_token_offsets return_weight_versions return_prompt_text", "replies do not carry it"),
    **_all(
        "return_flat_raw_top_logprobs return_flat_raw_output_top_logprobs",
        "log probabilities come in the usual form; see logprobs and top_logprobs_num",
    ),
    "return_flat_raw_top_logprobs_b64": ForeignName("it only says how another field's reply is written", None),
    "sampling_logprobs_mode": ForeignName("log probabilities are the model's own, before temperature and filters"),
    **_all("lora_path lora_id", "adapters are not served; merge the adapter into the weights"),
    **_all(
        "watermark watermarking",
        "this server marks no output",
    ),
    "custom_logit_processor": ForeignName(
        "code from a request is never run; write a plugin, which requests ask for in logits_processors"
    ),
    **_all("custom_params vllm_xargs", "no part of this server reads arguments of that kind; write a plugin"),
    **_all("session_params multi_item_delimiter_indices token_indices_to_pool", "this server has no such sessions"),
    "session_id": ForeignName("prefixes are found by their tokens, whoever sent them", None),
    **_all(
        "routing_key conversation_id kv_hints", "it is for a router in front; prefixes are found by themselves", None
    ),
    **_all("data_parallel_rank routed_dp_rank decode_tp_size", "the server chooses the engine; a request cannot"),
    **_all(
        "bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key disagg_prefill_dp_rank kv_transfer_params "
        "ec_transfer_params encoder_urls",
        DISAGGREGATED,
    ),
    **_all(
        "max_dynamic_patch min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch use_audio_in_video "
        "images_config video_config media_io_kwargs video_data audio_data mm_hashes "
        "mm_content_hashes need_wait_for_mm_inputs return_mm_kwargs",
        NOT_A_TEXT,
    ),
    "mm_processor_kwargs": ForeignName("images are processed as the model's folder says"),
    "mm_payload": ForeignName("it only says how pictures would be written", None),
    "modalities": ForeignName(NOT_A_TEXT, (*OFF, ["text"])),
    **_all(
        "input_embeds prompt_embeds positional_embed_overrides embed_override_token_id embed_overrides "
        "query_embed_overrides item_embed_overrides",
        "a prompt is text or token ids; embeddings from outside are not read",
    ),
    **_all(
        "log_metrics no_logs custom_labels external_trace_header received_time",
        "metrics and logs have no such choice",
        None,
    ),
    **_all("http_worker_ipc num_items_assigned", "it is between processes of the peer's own server"),
    "background": ForeignName("/generate answers on the connection; /v1/responses has background: true"),
    "require_reasoning": ForeignName("/generate gives the text as the model wrote it; use /v1/chat/completions"),
    "max_thinking_tokens": ForeignName(
        "/generate does not tell thinking apart; send thinking_budget to /v1/chat/completions"
    ),
    "task": ForeignName("no chat template here has such tasks; say it in the prompt"),
    "beam_width": ForeignName(
        "beam search is not implemented; n with best_of samples several and ranks them", (*OFF, 1)
    ),
    "use_beam_search": ForeignName("beam search is not implemented; n with best_of samples several and ranks them"),
    "length_penalty": ForeignName("it belongs to beam search, which is not implemented", (*OFF, 1, 1.0)),
    **_all(
        "stop_strs stop_regex_strs",
        "send stop and stop_regex; these are the peer's own working fields",
    ),
    **_all("stop_str_max_len stop_regex_max_len is_normalized", "it is a working field of the peer's own", None),
    "ebnf_full_assistant": ForeignName("a grammar holds for the answer, after any thinking"),
    "stream_interval": ForeignName("tokens per event are the server's choice: --stream-interval", (*OFF, 1)),
    "repetition_detection": ForeignName("nothing looks for repetitions; use repetition_penalty or stop_regex"),
    "cache_control": ForeignName("prefixes are cached by themselves", None),
    "betas": ForeignName("what this server has of Anthropic's API needs no beta name", None),
    "padding": ForeignName("texts of a batch are not padded here", (*OFF, True)),
    "embed_dtype": ForeignName("numbers are float32", (*OFF, "float32")),
    "endianness": ForeignName("base64 holds little-endian numbers", (*OFF, "little", "native")),
    "thinking_token_budget": ForeignName("thinking is not told apart here; /v1/chat/completions has it"),
    **_all(
        "skip_special_tokens spaces_between_special_tokens include_reasoning", "this route shows items", (*OFF, True)
    ),
    **_all(
        "include_stop_str_in_output stop_token_ids ignore_eos structured_outputs",
        "/v1/chat/completions has it",
    ),
    "tool_choice": ForeignName("it is for generating; send tools", (*OFF, "auto", "none")),
    "async": ForeignName("a call of the model ends its turn; the client may answer it later, in another request"),
    "access_programs": ForeignName("this server has one way of answering for everybody", (*OFF, {"cyber": "standard"})),
    "background_options": ForeignName(
        "background: true answers as soon as it can", (*OFF, {"completion_window": "soonest"})
    ),
    "image": ForeignName(NOT_A_TEXT, (*OFF, *({"context_compression": how} for how in ("auto", "disabled")))),
    "multi_agent": ForeignName("one model answers here", (*OFF, {"enabled": False})),
    "personality": ForeignName("say in instructions how the model should write"),
    "mode": ForeignName("there is one mode of answering and of reasoning here", (*OFF, "standard", "instruct")),
    "score_extraction_token": ForeignName("labels are looked at behind the last token; send an item for each place"),
    **_all(
        "text_1 text_2 data_1 data_2",
        "it is for models made to compare texts; send query, items and label_token_ids",
    ),
    "chat_template": ForeignName("a template in a request is not run; use --chat-template FILE"),
    **_all("enable_response_messages previous_input_messages", "continue with previous_response_id, or send the items"),
}


OURS: dict[str, tuple[str, ...]] = {
    "max_tokens": ("max_output_tokens",),
    "max_completion_tokens": ("max_output_tokens", "max_tokens"),
    **dict.fromkeys(("response_format", "output_format", "text_format"), ("text.format", "output_config.format")),
    **dict.fromkeys(("reasoning_effort", "effort"), ("reasoning.effort", "output_config.effort")),
    "reasoning_summary": ("reasoning.summary",),
    **dict.fromkeys(("verbosity", "text_verbosity"), ("text.verbosity",)),
    **dict.fromkeys(("thinking_budget", "max_thinking_tokens"), ("thinking.budget_tokens",)),
    **dict.fromkeys(("enable_thinking", "think"), ("thinking", "reasoning.effort")),
    "thinking": ("reasoning",),
    "reasoning": ("thinking",),
    "stop": ("stop_sequences",),
    **dict.fromkeys(("system_prompt", "system"), ("system", "instructions")),
    "parallel_tool_calls": ("tool_choice.disable_parallel_tool_use",),
    "functions": ("tools",),
    "repeat_penalty": ("repetition_penalty",),
    "response_id": ("previous_response_id",),
}
"""Fields of the other of our APIs, and of its dialects: what says the same where a route has not this one."""


def ours(name: str, known: Collection[str]) -> str | None:
    """Return the field of a route's schema that says what one of another API does; None where there is none.

    Args:
        name: The field, which the schema does not have.
        known: Fields of the schema.
    """
    return next((other for other in OURS.get(name, ()) if other.partition(".")[0] in known), None)


def means_nothing(name: str, value: Any) -> bool:
    """Tell whether a field that a schema does not have may be dropped."""
    known = FIELDS.get(name)
    return value is None if known is None else value is None or known.means_nothing(value)


def refusal(name: str) -> str | None:
    """Return why a field is not supported; None for one that no peer knows."""
    if name in SAID:
        return "this route has no field that says it; see /v1/chat/completions"
    known = FIELDS.get(name) or SENT.get(name)
    return None if known is None else known.why
