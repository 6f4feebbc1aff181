"""Which prefills are captured into graphs: numbers only, as memory is planned without torch.

A graph computes a fixed number of tokens, so chunks of fewer are padded. That costs computing, and saves launching some
three hundred kernels from Python, which takes about as long as computing thousands of tokens with a small model, and
fewer than a thousand with a large one.
"""

from __future__ import annotations

from itertools import pairwise

from dovetail.messages.step import PrefillGraph

SINGLE = (16, 32, 64, 128, 256, 512)
"""Tokens of graphs for one chunk."""
TOGETHER = (128, 256, 512, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 7168, 8192)
"""Tokens of graphs for several chunks, or for one that is longer than `SINGLE` goes."""
MAX_CHUNKS = 64
"""Chunks that a graph for several takes at most; fewer where fewer requests run."""
MAX_WORK = 12e12
"""Bytes of weights times tokens, about floating-point operations in bfloat16, that graphs are made for. Twenty
milliseconds of an H200, which launching takes there too: a larger step is bound by computing, and padding only adds."""


FIRST = (PrefillGraph(64, 1), PrefillGraph(512, 1))
"""Graphs that the engine is not ready without; they stand in for smaller ones that are not captured yet."""


def sizes(weight_bytes: int, max_tokens: int, max_requests: int) -> list[PrefillGraph]:
    """Return the graphs for a model, the smaller first among those for one chunk and among the others.

    Args:
        weight_bytes: Of the model.
        max_tokens: Most prompt tokens of a step.
        max_requests: Most requests of a step.
    """
    most = max(SINGLE[-1], MAX_WORK / max(weight_bytes, 1))
    together = [tokens for before, tokens in pairwise((0, *TOGETHER)) if before < max_tokens and tokens <= most]
    chunks = min(MAX_CHUNKS, max_requests)
    single = [PrefillGraph(tokens, 1) for tokens in SINGLE]
    return list(dict.fromkeys(single + [PrefillGraph(tokens, chunks) for tokens in together]))
