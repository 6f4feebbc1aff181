"""Examples in the OpenAPI document, which `/docs` offers to run. A test runs each against the demo model.

`$model` stands for the first served name.
"""

from __future__ import annotations

from typing import Any

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CITY_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
BODIES: dict[str, dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {
        "A question": {"model": "$model", "messages": QUESTION},
        "As a stream": {
            "model": "$model",
            "messages": QUESTION,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        "With a tool": {
            "model": "$model",
            "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
            "tools": [WEATHER],
        },
        "As JSON of a schema": {
            "model": "$model",
            "messages": QUESTION,
            "max_completion_tokens": 300,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "city", "schema": CITY_SCHEMA, "strict": True},
            },
        },
    },
    "/v1/chat/completions/{completion_id}": {"Other metadata": {"metadata": {"topic": "geography"}}},
    "/v1/completions": {
        "A text to continue": {"model": "$model", "prompt": "The capital of France is", "max_tokens": 8},
        "Two prompts, with log probabilities": {
            "model": "$model",
            "prompt": ["One, two,", "A, B,"],
            "max_tokens": 4,
            "logprobs": 2,
        },
    },
    "/v1/responses": {
        "A question": {"model": "$model", "input": "What is the capital of France?"},
        "As a stream": {"model": "$model", "input": "What is the capital of France?", "stream": True},
    },
    "/v1/responses/input_tokens": {"A question": {"model": "$model", "input": "What is the capital of France?"}},
    "/v1/conversations": {"With a first message": {"items": QUESTION, "metadata": {"topic": "capitals"}}},
    "/v1/responses/compact": {"A conversation so far": {"model": "$model", "input": QUESTION}},
    "/v1/messages": {
        "A question": {"model": "$model", "max_tokens": 200, "messages": QUESTION},
        "As a stream": {"model": "$model", "max_tokens": 200, "messages": QUESTION, "stream": True},
    },
    "/v1/messages/batches": {
        "One question": {
            "requests": [
                {"custom_id": "capital", "params": {"model": "$model", "max_tokens": 200, "messages": QUESTION}}
            ]
        }
    },
    "/v1/score": {
        "How likely each label is": {
            "model": "$model",
            "query": "Is Paris in France? Answer:",
            "items": ["", " Yes or no?"],
            "label_token_ids": [40, 41],
        }
    },
    "/v1/rerank": {
        "Two documents": {
            "model": "$model",
            "query": "What is the capital of France?",
            "documents": ["Berlin is a city in Germany.", "Paris is the capital of France."],
        }
    },
    "/score": {"Two texts": {"model": "$model", "text_1": "What is the capital of France?", "text_2": "It is Paris."}},
    "/v1/classify": {"A text": {"model": "$model", "input": "I like it."}},
    "/v1/embeddings": {"Two texts": {"model": "$model", "input": ["What is the capital of France?", "Paris"]}},
    "/v1/messages/count_tokens": {"A question": {"model": "$model", "messages": QUESTION}},
    "/generate": {
        "A text": {
            "text": "The capital of France is",
            "sampling_params": {"temperature": 0, "max_new_tokens": 8},
        },
        "Matching a regular expression": {
            "text": "The year is ",
            "sampling_params": {"regex": "[12][0-9]{3}", "max_new_tokens": 12},
        },
    },
    "/tokenize": {
        "A text": {"model": "$model", "prompt": "Hello, world"},
        "A conversation": {"model": "$model", "messages": QUESTION},
    },
    "/detokenize": {"Three tokens": {"model": "$model", "tokens": [40, 41, 42]}},
    "/separate_reasoning": {
        "Thinking before an answer": {
            "text": "<think>It is in France.</think>Paris.",
            "reasoning_parser": "qwen3",
        }
    },
    "/parse_function_call": {
        "One call": {
            "text": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
            "tools": [WEATHER],
            "tool_call_parser": "hermes",
        }
    },
    "/start_profile": {"Twenty steps": {"num_steps": 20, "activities": ["CPU"]}},
    "/abort_request": {"One request": {"rid": "chatcmpl-1f0c"}},
    "/v1/batches": {
        "Of an uploaded file": {
            "input_file_id": "file-1f0c",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
    },
}
BODIES |= {f"/v1{path}": BODIES[path] for path in ("/tokenize", "/detokenize")}
BODIES |= {"/classify": BODIES["/v1/classify"], "/rerank": BODIES["/v1/rerank"], "/v2/rerank": BODIES["/v1/rerank"]}
BODIES |= {
    f"{path}/render": {name: {**body, "stream": False} for name, body in list(BODIES[path].items())[:1]}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
}
"""Bodies by path, each under the name that the page shows."""
PARAMETERS: dict[str, dict[str, str]] = {"/v1/models/{model_id}": {"model_id": "$model"}}
"""Values of path parameters that exist on every server."""


def fill(value: Any, model: str) -> Any:
    """Put the model's name into an example."""
    if isinstance(value, dict):
        return {key: fill(item, model) for key, item in value.items()}
    if isinstance(value, list):
        return [fill(item, model) for item in value]
    return model if value == "$model" else value


def add_examples(document: dict[str, Any], model: str) -> None:
    """Write the examples into an OpenAPI document."""
    for path, examples in BODIES.items():
        operation = document["paths"].get(path, {}).get("post", {})
        if "requestBody" not in operation:  # `--apis` leaves its API out; perhaps a package has the path
            continue
        content = operation["requestBody"]["content"]["application/json"]
        content["examples"] = {
            name: {"summary": name, "value": fill(example, model)} for name, example in examples.items()
        }
    for path, values in PARAMETERS.items():
        for operation in document["paths"][path].values():
            for parameter in operation["parameters"]:
                if parameter["name"] in values:
                    parameter["example"] = fill(values[parameter["name"]], model)
