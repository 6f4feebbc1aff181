"""What memory reading a body takes, as the system counts it: of a process for each body, forked as the server does it.

    python tests/benchmarks/body_memory.py                the demo model's tokenizer, bodies of 1 MiB
    python tests/benchmarks/body_memory.py --mib 32 --most 8

Shown is by how much the process grew at most beyond what a body of a kilobyte takes, as a multiple of the body, for
conversations, texts, ids and items. With `--most`, exit code 1 where it is more.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys

from dovetail.demo import MODEL_DIR
from dovetail.processing.embeddings import TextRules
from dovetail.processing.processor import Processor, ProcessorSetup, ProcessorStart
from dovetail.processing.reranker import Reranker
from dovetail.processing.sampling import SamplingLimits
from dovetail.processing.tasks import Tasks
from dovetail_server.apis.responses.references import ReferencedItems
from dovetail_server.reading.allocator import most_own_bytes, return_large_blocks
from dovetail_server.reading.wire import BodyJob
from dovetail_server.reading.work import do
from dovetail_server.serving.served import Served

NAME = "demo"
SMALL = 1024
"""Bytes of a body that takes what every body takes."""
WORDS = "The quick brown fox jumps over the lazy dog, and nobody knows why it does so. "


def bodies(size: int) -> dict[str, tuple[str, dict[str, object]]]:
    """Return by name what is done with a body of about so many bytes, and the body."""
    text = WORDS * (size // len(WORDS))
    one = {"role": "user", "content": WORDS * 10}
    tiny = {"role": "user", "content": "hi"}
    chats = [one] * (size // len(json.dumps(one) + ", "))
    ids = [i % 4000 for i in range(size // 6)]
    item = {"type": "function_call_output", "call_id": "a", "output": WORDS}
    return {
        "chat, one message": ("chat_completions", {"messages": [{**one, "content": text}]}),
        "chat, messages of 800 bytes": ("chat_completions", {"messages": chats}),
        "chat, messages of 2 bytes": ("chat_completions", {"messages": [tiny] * min(size // 36, 40_000)}),
        "completions, one text": ("create_completion", {"prompt": text}),
        "completions, ids": ("create_completion", {"prompt": ids}),
        "generate, one text": ("generate_text", {"text": text}),
        "generate, ids": ("generate_text", {"input_ids": ids}),
        "messages": ("create_message", {"max_tokens": 9, "messages": chats}),
        "count_tokens": ("count_tokens", {"messages": chats}),
        "responses, text": ("responses", {"input": text}),
        "responses, items": ("responses", {"input": [item] * min(size // len(json.dumps(item)), 30_000)}),
        "tokenize": ("tokenize", {"prompt": text}),
        "detokenize": ("detokenize", {"tokens": ids}),
        "separate_reasoning": ("separate_reasoning", {"text": text, "reasoning_parser": "qwen3"}),
    }


def grown(text: Processor, task: str, body: bytes) -> tuple[int, str]:
    """Do a job in a fork, and return by how many bytes it grew at most, with what came of it."""
    reading, writing = os.pipe()
    if not os.fork():
        gc.disable()
        before = most_own_bytes()
        held = [bytes(bytearray(body))]  # as it is received
        job = BodyJob(task=task, num_bytes=len(body), is_line=False, cpu_s=600, context=f"resp_{'0' * 40}")
        outcome = do(job, held.pop, text, Served([NAME], []), lambda question: ReferencedItems())
        came = outcome.refusal.message if outcome.refusal else outcome.fault or "done"
        os.write(writing, json.dumps([most_own_bytes() - before, came[-200:]]).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        size, came = json.loads(pipe.read())
    os.wait()
    return size, came


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of reading a body.")
    parser.add_argument("--mib", type=float, default=1.0)
    parser.add_argument("--most", type=float, default=float("inf"))
    parser.add_argument("--tokenizer", default=str(MODEL_DIR), help="folder of a model")
    arguments = parser.parse_args()
    limits = SamplingLimits(vocab_size=4096, context_len=1 << 26, max_prompt_bytes=1 << 30)
    setup = ProcessorSetup(folder=arguments.tokenizer, model=arguments.tokenizer)
    start = ProcessorStart(
        setup=setup,
        limits=limits,
        template_defaults={},
        tasks=Tasks(),
        rules=TextRules(),
        reranker=Reranker(),
    )
    text = Processor.of_start(start)
    return_large_blocks()
    gc.collect()
    gc.freeze()
    found = []
    small = bodies(SMALL)
    for name, (task, body) in bodies(int(arguments.mib * (1 << 20))).items():
        raw, little = (
            json.dumps(each if task == "separate_reasoning" else {"model": NAME, **each}).encode()
            for each in (body, small[name][1])
        )
        size, came = grown(text, task, raw)
        size -= grown(text, task, little)[0]
        found.append(size / len(raw))
        print(f"{name:<30} {len(raw):>11,} bytes {found[-1]:>6.1f} x  {came}", flush=True)
    sys.exit(max(found) > arguments.most)


if __name__ == "__main__":
    main()
