"""A short suite for an installed Dovetail: chat, tools, a schema, a batch, hybrids, and a model through transformers.

It runs with the Python that has Dovetail, and needs nothing else: `tests/packaging/lowest.py` runs it with the lowest
versions that Dovetail says it takes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smoke import BIN, ask

TOOL = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
SCHEMA = {
    **{"type": "object", "properties": {"capital": {"enum": ["Paris", "Rome"]}}, "required": ["capital"]},
    "additionalProperties": False,
}
SIZES = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": None},
}
LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    **{"full_attention_interval": 4, "moe_intermediate_size": 40, "num_experts": 4, "num_experts_per_tok": 2},
    "shared_expert_intermediate_size": 48,
}
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
CONV = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
MODELS = {
    "qwen3_next": ("Qwen3NextForCausalLM", SIZES | LINEAR),
    "falcon_h1": ("FalconH1ForCausalLM", SIZES | MAMBA),
    "lfm2": ("Lfm2ForCausalLM", SIZES | CONV),
    "gpt_neox": ("GPTNeoXForCausalLM", SIZES),
}
"""Architecture and sizes by `model_type`: three hybrids, of each kind of state one, and a model without a plugin."""


def send(url: str, body: Any = None, kind: str = "application/json") -> Any:
    """Ask a server; returns the reply's JSON."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": kind})
    with urllib.request.urlopen(request, timeout=300) as reply:
        return json.loads(reply.read())


def chat(port: int, question: str, **fields: Any) -> Any:
    """Return the message that answers a question."""
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, **fields}
    return send(f"http://127.0.0.1:{port}/v1/chat/completions", body)["choices"][0]["message"]


@contextmanager
def serving(*flags: str) -> Iterator[int]:
    """Run a server; its port."""
    from dovetail.utils import launch_server_cmd, terminate_process, wait_for_server

    server, port = launch_server_cmd(" ".join(["dovetail serve", *flags]))
    try:
        wait_for_server(f"http://127.0.0.1:{port}", timeout=300)
        yield port
    finally:
        terminate_process(server)


def use_the_demo(folder: Path) -> None:
    """Chat, call a function, fill a schema, and run a batch."""
    with serving("--file-storage-path", str(folder / "files")) as port:
        assert "Paris" in ask(port)
        message = chat(port, "What is the weather in Paris?", tools=[{"type": "function", "function": TOOL}])
        [call] = message["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
            "get_weather",
            {"city": "Paris"},
        )
        wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        message = chat(port, "What is the capital of France?", response_format=wanted)
        assert json.loads(message["content"]) in [{"capital": "Paris"}, {"capital": "Rome"}], message
        assert run_batch(f"http://127.0.0.1:{port}/v1") == 3


def run_batch(api: str) -> int:
    """Upload requests, have them answered, and return how many were."""
    asked = {"messages": [{"role": "user", "content": "What is 2 plus 3?"}], "max_tokens": 8}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": asked}
    lines = "\n".join(json.dumps(line | {"custom_id": str(number)}) for number in range(3))
    parts = (
        '--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
        f'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{lines}\r\n--x--\r\n'
    )
    file = send(f"{api}/files", parts.encode(), "multipart/form-data; boundary=x")
    given = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = send(f"{api}/batches", given)
    for _ in range(600):
        batch = send(f"{api}/batches/{batch['id']}")
        if batch["status"] not in {"validating", "in_progress", "finalizing"}:
            break
        time.sleep(0.1)
    assert batch["status"] == "completed", batch
    return int(batch["request_counts"]["completed"])


def serve_random(kind: str, folder: Path) -> None:
    """Serve a small model with random weights, and generate with it."""
    from transformers import AutoConfig

    from dovetail.demo import MODEL_DIR

    architecture, sizes = MODELS[kind]
    config = AutoConfig.for_model(kind, vocab_size=8192, **sizes)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL_DIR / file, folder)
    with serving("--model-path", str(folder), "--load-format", "dummy", "--dtype", "float32") as port:
        assert chat(port, "a " * 40, max_tokens=8, ignore_eos=True)["role"] == "assistant"


def main() -> int:
    """Run all of it; what fails ends the run with its traceback."""
    os.environ["PATH"] = f"{BIN}:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory(prefix="dovetail-short-") as name:
        start = time.monotonic()
        use_the_demo(Path(name))
        print(f"demo: chat, tools, schema and batch work, {time.monotonic() - start:.0f} s", flush=True)
        for kind in MODELS:
            start = time.monotonic()
            serve_random(kind, Path(name, kind))
            print(f"{kind}: works, {time.monotonic() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
