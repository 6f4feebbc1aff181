"""Requests that are about what fields mean together: two names of one wish, tools, grammars, thinking, roles.

By route, what each changes in a good body. A value of `Ellipsis` leaves a field out.
"""

from __future__ import annotations

from typing import Any

Changes = dict[str, dict[str, Any]]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"name": "f", "schema": SCHEMA}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
FLAT_TOOL = {"type": "function", "name": "f", "parameters": SCHEMA}
ANTHROPIC_TOOL = {"name": "f", "input_schema": SCHEMA}
HEY = {"role": "user", "content": "Hey"}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "x"}
BEGUN = {"messages": [HEY, {"role": "assistant", "content": "He"}]}
NO_CALL = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]}


def both(first: str, second: str, value: Any, other: Any) -> Changes:
    """Return two names of one wish: each alone, equal, different, and one of them null."""
    return {
        f"{first} alone": {first: value},
        f"{second} alone": {second: value},
        f"{first} and {second}, equal": {first: value, second: value},
        f"{first} and {second}, different": {first: value, second: other},
        f"{first} and {second}, the second null": {first: value, second: None},
        f"{first} and {second}, the first null": {first: None, second: value},
    }


GRAMMARS: Changes = {
    "a schema": {"response_format": {"type": "json_schema", "json_schema": NAMED}},
    "a schema of no object": {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": 1}}},
    "a schema without a name": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "a schema of no such type": {"json_schema": {"type": "no-such-type"}},
    "a schema as text": {"json_schema": '{"type": "integer"}'},
    "a schema that is no JSON": {"json_schema": "{"},
    "any object": {"response_format": {"type": "json_object"}},
    "text": {"response_format": {"type": "text"}},
    "no such format": {"response_format": {"type": "no-such-format"}},
    "an expression": {"regex": "[ab]+"},
    "a broken expression": {"regex": "[ab"},
    "an endless expression": {"regex": "(((a{1000}){1000}){1000}){1000}"},
    "a grammar": {"ebnf": 'root ::= "a"'},
    "a broken grammar": {"ebnf": "root ::= "},
    "a choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "an empty choice": {"structured_outputs": {"choice": []}},
    "two of structured_outputs": {"structured_outputs": {"choice": ["yes"], "regex": "a"}},
    "two grammars": {"regex": "a", "ebnf": 'root ::= "a"'},
    "no such backend": {"regex": "a", "grammar_backend": "no-such-backend"},
    "a backend without a grammar": {"grammar_backend": "llguidance"},
    "vLLM's guided_json": {"guided_json": SCHEMA},
}
COMMON: Changes = {
    **both("rid", "request_id", "one", "two"),
    **both("cache_salt", "extra_key", "one", "two"),
    **both("no_stop_trim", "include_stop_str_in_output", True, False),
    **GRAMMARS,
    "two stops": {"stop": ["a", "b"]},
    "an empty stop": {"stop": ""},
    "an expression to stop at": {"stop_regex": "[ab]"},
    "a broken expression to stop at": {"stop_regex": "["},
    "a bias of a token": {"logit_bias": {"39": 5}},
    "a bias beyond the vocabulary": {"logit_bias": {"99999": 5}},
    "a bias of no token": {"logit_bias": {"a": 5}},
    "words that are bad": {"bad_words": ["Hi"]},
    "tokens that are allowed": {"allowed_token_ids": [39, 68]},
    "tokens beyond the vocabulary": {"allowed_token_ids": [99999]},
    "a processor that is not there": {"logits_processors": {"no-such-processor": {}}},
    "greedy": {"temperature": 0},
    "three choices with a seed": {"n": 3, "seed": 7},
    "usage of a stream": {"stream": True, "stream_options": {"include_usage": True}},
    "options without a stream": {"stream_options": {"include_usage": True}},
    "least above most": {"min_tokens": 9, "max_tokens": 3},
    "what all take": {
        "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "frequency_penalty": 0.5, "presence_penalty": 0.5,
        "repetition_penalty": 1.1, "min_tokens": 1, "max_tokens": 9, "seed": 3, "stop": ["x"], "ignore_eos": True,
        "skip_special_tokens": False, "priority": 3,
    },
    "another model": {"model": "no-such-model"},
    "no model": {"model": ...},
    "its other name": {"model": "tiny-too"},
}  # fmt: skip
CHAT: Changes = {
    **COMMON,
    **both("max_completion_tokens", "max_tokens", 5, 6),
    **both("thinking_budget", "thinking_token_budget", 5, 6),
    **both("include_reasoning", "separate_reasoning", False, True),
    "no messages": {"messages": []},
    "no such role": {"messages": [{"role": "no-such-role", "content": "Hey"}]},
    "parts": {"messages": [{"role": "user", "content": PARTS}]},
    "a picture": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    "a system message behind": {"messages": [HEY, {"role": "system", "content": "a"}]},
    "a call and its result": {"messages": [HEY, {"role": "assistant", "tool_calls": [CALL]}, RESULT], "tools": [TOOL]},
    "arguments that are no JSON": {
        "messages": [HEY, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, RESULT]
    },
    "a result of no call": {"messages": [HEY, RESULT]},
    "tools": {"tools": [TOOL]},
    "two tools of one name": {"tools": [TOOL, TOOL]},
    "tools, none": {"tools": [TOOL], "tool_choice": "none"},
    "tools, required": {"tools": [TOOL], "tool_choice": "required"},
    "tools, this": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    "tools, another": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    "tools, no such choice": {"tools": [TOOL], "tool_choice": "no-such-choice"},
    "a choice without tools": {"tool_choice": "required"},
    "tools and functions": {"tools": [TOOL], "functions": [TOOL["function"]]},
    "functions": {"functions": [TOOL["function"]], "function_call": "auto"},
    "tools and a schema": {"tools": [TOOL], **GRAMMARS["a schema"]},
    "one call at a time": {"tools": [TOOL], "parallel_tool_calls": False},
    "log probabilities": {"logprobs": True, "top_logprobs": 2},
    "top without log probabilities": {"top_logprobs": 2},
    "tokens without log probabilities": {"logprob_token_ids": [39]},
    "thinking off": {"chat_template_kwargs": {"enable_thinking": False}},
    "effort": {"reasoning_effort": "none"},
    "effort and thinking": {"reasoning_effort": "low", "thinking": {"type": "disabled"}},
    "a template": {"chat_template": "{{ messages[0].content }}"},
    "a broken template": {"chat_template": "{{"},
    "ids beside messages": {"input_ids": [39]},
    "ids": {"input_ids": [39], "messages": ...},
    "ids beyond the vocabulary": {"input_ids": [99999], "messages": ...},
    "go on": {**BEGUN, "continue_final_message": True, "add_generation_prompt": False},
    "go on with a prompt": {"continue_final_message": True, "add_generation_prompt": True},
    "cut": {"truncate_prompt_tokens": 3},
    "metadata without a store": {"metadata": {"a": "b"}},
    "an echo": {"echo": True},
    "sound": {"modalities": ["text", "audio"], "audio": {"voice": "a"}},
    "a search": {"web_search_options": {}},
    "a prediction": {"prediction": {"type": "content", "content": "Hi"}},
}  # fmt: skip
COMPLETIONS: Changes = {
    **COMMON,
    "two prompts": {"prompt": ["a", "b"]},
    "an empty prompt": {"prompt": ""},
    "no prompts": {"prompt": []},
    "ids": {"prompt": [39, 68]},
    "lists of ids": {"prompt": [[39], [68]]},
    "texts and ids": {"prompt": ["a", [39]]},
    "an echo": {"echo": True, "max_tokens": 0, "logprobs": 1},
    "the best of": {"best_of": 2, "n": 1},
    "a suffix": {"suffix": "b"},
    "log probabilities": {"logprobs": 5},
    "of the prompt": {"prompt_logprobs": 1},
    "of the prompt in a stream": {"prompt_logprobs": 1, "stream": True},
}
NATIVE: Changes = {
    "a list of texts": {"text": ["a", "b"]},
    "ids": {"text": ..., "input_ids": [39]},
    "text and ids": {"input_ids": [39]},
    "neither": {"text": ...},
    "a list of wishes": {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}]},
    "too few wishes": {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 1}]},
    "log probabilities": {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0},
    "a stream of two": {"text": ["a", "b"], "stream": True},
    **{
        f"wish: {name}": {"sampling_params": changes}
        for name, changes in {
            **both("max_new_tokens", "max_tokens", 5, 6),
            **both("min_new_tokens", "min_tokens", 1, 2),
            **both("sampling_seed", "seed", 1, 2),
            **{
                key: GRAMMARS[key]
                for key in ("a schema as text", "an expression", "a broken expression", "two grammars")
            },
        }.items()
    },
}
MESSAGES: Changes = {
    "tools": {"tools": [ANTHROPIC_TOOL]},
    "tools, any": {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any"}},
    "tools, this": {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "tool", "name": "f"}},
    "tools, another": {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "tool", "name": "g"}},
    "tools, none": {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "none"}},
    "a choice without tools": {"tool_choice": {"type": "any"}},
    "a system": {"system": "a"},
    "a system of blocks": {"system": [{"type": "text", "text": "a"}]},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 100},
    "no thinking": {"thinking": {"type": "disabled"}},
    "stops": {"stop_sequences": ["a", "b"]},
    "a stream": {"stream": True},
    "begun": BEGUN,
    "begun with a space": {"messages": [HEY, {"role": "assistant", "content": "He "}]},
    "a system among messages": {"messages": [{"role": "system", "content": "a"}, HEY]},
    "two in a row": {"messages": [HEY, HEY]},
    "none": {"messages": []},
    "a result of no call": {"messages": [NO_CALL]},
    "a picture": {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    "a schema": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "no limit": {"max_tokens": ...},
    "another model": {"model": "no-such-model"},
}  # fmt: skip
RESPONSES: Changes = {
    "a stream": {"stream": True},
    "items": {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
    "a call and its result": {
        "input": [
            HEY,
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "x"},
        ],
        "tools": [FLAT_TOOL],
    },
    "no such item": {"input": [{"type": "no-such-item"}]},
    "a picture": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
    "instructions": {"instructions": "a"},
    "tools, required": {"tools": [FLAT_TOOL], "tool_choice": "required"},
    "tools, another": {"tools": [FLAT_TOOL], "tool_choice": {"type": "function", "name": "g"}},
    "a tool of others": {"tools": [{"type": "web_search"}]},
    "a schema": {"text": {"format": {"type": "json_schema", "name": "f", "schema": SCHEMA}}},
    "a schema without a name": {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "effort": {"reasoning": {"effort": "low"}},
    "two summaries": {"reasoning": {"summary": "auto", "generate_summary": "concise"}},
    "behind another": {"previous_response_id": "resp_nothing"},
    "in a conversation": {"conversation": "conv_nothing"},
    "in the background, not stored": {"background": True},
    "log probabilities": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "cut": {"truncation": "auto"},
    "a prompt of theirs": {"prompt": {"id": "pmpt_1"}},
    **{key: GRAMMARS[key] for key in ("an expression", "two grammars")},
}
POOLED: Changes = {
    "two texts": {"input": ["a", "b"]},
    "ids": {"input": [39]},
    "none": {"input": []},
    "an empty text": {"input": ""},
    "sizes": {"dimensions": 4},
    "as base64": {"encoding_format": "base64"},
    "another model": {"model": "no-such-model"},
}
WISHES: dict[str, Changes] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/generate": NATIVE,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": {name: MESSAGES[name] for name in ("tools", "a system", "thinking", "none")},
    "/v1/responses": RESPONSES,
    "/v1/responses/input_tokens": {name: RESPONSES[name] for name in ("items", "instructions", "behind another")},
    "/v1/embeddings": POOLED,
    "/classify": POOLED,
    "/tokenize": {
        **both("prompt", "text", "a", "b"),
        "messages": {"prompt": ..., "messages": [HEY]},
        "a prompt and messages": {"messages": [HEY]},
    },
}
