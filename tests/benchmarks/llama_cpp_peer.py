"""The half of `llama_cpp.py` that runs under the interpreter that has llama-cpp-python; see there.

    PYTHON -P llama_cpp_peer.py FILE.gguf THREADS

Lines of JSON both ways. It says `{"version": …, "system": …}` once the model is loaded. Each line
`{"prompts": [[ids], …], "num_new": n, "clock": name}` is then answered with `{"step_s": seconds}`: the mean time of a
step in which all prompts' sequences decode greedily, by `time.perf_counter` or `time.process_time`.
`-P` keeps this folder off `sys.path`, where `llama_cpp` would be the benchmark.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

import numpy as np

CONTEXT = 256
"""Tokens of a sequence that the cache of keys and values has room for."""
SEQUENCES = 16
"""Most that decode at once."""


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
        params.n_ctx, params.n_batch = SEQUENCES * CONTEXT, max(CONTEXT, SEQUENCES)
        params.n_seq_max = SEQUENCES
        params.n_threads = params.n_threads_batch = threads
        self.ctx = self.lib.llama_init_from_model(self.model, params)
        self.vocab_size = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))

    def system(self) -> str:
        """Return what llama.cpp says that it was built with and found."""
        found: bytes = self.lib.llama_print_system_info()
        return found.decode()

    def next_tokens(self, ids: list[list[int]], first: int) -> list[int]:
        """Append as many ids to each sequence, from a position on; return the most likely token behind each one's."""
        width = len(ids[0])
        batch = self.lib.llama_batch_init(len(ids) * width, 0, 1)
        batch.n_tokens = len(ids) * width
        for sequence, each in enumerate(ids):
            for offset, token in enumerate(each):
                at = sequence * width + offset
                batch.token[at], batch.pos[at] = token, first + offset
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.logits[at] = offset == width - 1
        if self.lib.llama_decode(self.ctx, batch):
            raise SystemExit("llama_decode failed")
        shape = (self.vocab_size,)
        last = [self.lib.llama_get_logits_ith(self.ctx, (row + 1) * width - 1) for row in range(len(ids))]
        self.lib.llama_batch_free(batch)
        return [int(np.ctypeslib.as_array(logits, shape=shape).argmax()) for logits in last]

    def step_s(self, prompts: list[list[int]], num_new: int, clock: str) -> float:
        """Return the mean seconds of the steps behind the first tokens, over an empty cache."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.ctx), True)
        now, width = getattr(time, clock), len(prompts[0])
        tokens = self.next_tokens(prompts, 0)
        started = now()
        for step in range(num_new - 1):
            tokens = self.next_tokens([[token] for token in tokens], width + step)
        return float(now() - started) / (num_new - 1)


def main() -> None:
    """Answer until the input ends."""
    peer = Peer(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({"version": peer.lib.__version__, "system": peer.system()}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({"step_s": peer.step_s(**asked)}), flush=True)


if __name__ == "__main__":
    main()
