"""The half of `llama_cpp.py` that runs under the interpreter that has llama-cpp-python; see there.

    PYTHON -P llama_cpp_peer.py FILE.gguf THREADS

Lines of JSON both ways. It says `{"version": …, "system": …}` once the model is loaded; each line
`{"prompt": [ids], "num_new": n}` is then answered with `{"step_s": seconds}`: the mean time of a greedy decode step.
`-P` keeps this folder off `sys.path`, where `llama_cpp` would be the benchmark.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
import time
from typing import Any

import numpy as np

CONTEXT = 512
"""Tokens that the cache of keys and values has room for."""


class Peer:
    """One model in llama.cpp, driven through its C interface: no tokenizer, no sampler, nothing kept in Python."""

    def __init__(self, path: str, threads: int) -> None:
        self.lib: Any = importlib.import_module("llama_cpp")
        self._keep = self.lib.llama_log_callback(lambda level, text, data: None)
        self.lib.llama_log_set(self._keep, None)
        self.lib.llama_backend_init()
        self.model = self.lib.llama_model_load_from_file(path.encode(), self.lib.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp does not load {path}")
        params = self.lib.llama_context_default_params()
        params.n_ctx = params.n_batch = CONTEXT
        params.n_threads = params.n_threads_batch = threads
        self.ctx = self.lib.llama_init_from_model(self.model, params)
        self.vocab_size = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))

    def system(self) -> str:
        """Return what llama.cpp says that it was built with and found."""
        found: bytes = self.lib.llama_print_system_info()
        return found.decode()

    def next_token(self, ids: list[int]) -> int:
        """Append ids to the sequence and return the most likely token behind them."""
        tokens = (ctypes.c_int32 * len(ids))(*ids)
        if self.lib.llama_decode(self.ctx, self.lib.llama_batch_get_one(tokens, len(ids))):
            raise SystemExit("llama_decode failed")
        logits = np.ctypeslib.as_array(self.lib.llama_get_logits_ith(self.ctx, -1), shape=(self.vocab_size,))
        return int(logits.argmax())

    def step_s(self, prompt: list[int], num_new: int) -> float:
        """Return the mean seconds of the steps behind the first token, over an empty cache."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.ctx), True)
        token = self.next_token(prompt)
        started = time.perf_counter()
        for _ in range(num_new - 1):
            token = self.next_token([token])
        return (time.perf_counter() - started) / (num_new - 1)


def main() -> None:
    """Answer until the input ends."""
    peer = Peer(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({"version": peer.lib.__version__, "system": peer.system()}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({"step_s": peer.step_s(asked["prompt"], asked["num_new"])}), flush=True)


if __name__ == "__main__":
    main()
