"""Serves a tiny random checkpoint of every family over HTTP and compares what comes back with transformers.

    python tests/benchmarks/tiny_checkpoints.py [KIND …]

For each, a server in this process is asked over a socket, all prompts at once. Decoders: greedy tokens of `/generate`,
every one transformers' choice behind those before it. Encoders: `/v1/embeddings` and `/v1/classify`, within 1e-4. One
that is refused says why. The last line counts; the exit status is 1 if a reply was wrong, or fewer than 55 were right.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))  # what makes the checkpoints
sys.path.insert(0, str(Path(__file__).parents[1] / "server"))  # the server in a thread

import torch
from encoder_server import EncoderServer, write_encoder
from encoders import ENCODERS
from families import DECODERS, SEEING, make_checkpoint, make_seeing
from parity import prompt, reference
from server_tiny import write_model

from dovetail.contracts.errors import DovetailError

NUM_NEW = 24
LENGTHS = (5, 40, 100)
LEAST = 55
OTHER_ENCODERS = ("nomic_bert", "eurobert", "jina_embeddings_v3")
"""Encoders without a plugin: they have to be refused."""
SETTINGS: dict[str, Any] = {"max_total_tokens": 2048, "max_running_requests": 8, "grammar_backend": "none"}


def decoder(folder: Path, kind: str) -> str:
    """Serve a decoder, or the text of one that sees; return how it was served."""
    write_model(folder)
    model = (make_seeing if kind in SEEING else make_checkpoint)(folder, kind, vocab_size=280)
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    params = {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True}
    with EncoderServer(folder, **SETTINGS) as server, ThreadPoolExecutor(len(prompts)) as pool:

        def ask(ids: list[int]) -> list[int]:
            found: list[int] = server.ok("/generate", input_ids=ids, sampling_params=params)["output_ids"]
            return found

        replies = list(pool.map(ask, prompts))
    for ids, tokens in zip(prompts, replies, strict=True):
        want = reference(model, [*ids, *tokens[:-1]])[len(ids) - 1 :].argmax(-1).tolist()
        if tokens != want:
            raise AssertionError(f"a prompt of {len(ids)} tokens: {tokens} instead of {want}")
    return f"{len(prompts) * NUM_NEW} tokens"


def encoder(folder: Path, kind: str) -> str:
    """Serve an encoder and its classifier; return what was compared."""
    texts = [[2, *range(5, 5 + length), 3] for length in (3, 11, 40)]
    model = write_encoder(folder / "base", kind)
    with EncoderServer(folder / "base") as server:
        data = server.ok("/v1/embeddings", model="tiny", input=texts)["data"]
    for row, ids in zip(data, texts, strict=True):
        hidden = model(torch.tensor([ids])).last_hidden_state[0]
        wanted = [torch.nn.functional.normalize(pooled, dim=0) for pooled in (hidden[0], hidden[-1], hidden.mean(0))]
        error = min(float((torch.tensor(row["embedding"]) - want).abs().max()) for want in wanted)
        if error > 1e-4:
            raise AssertionError(f"an embedding of {len(ids)} tokens is off by {error:.2g} from every pooling")
    model = write_encoder(folder / "labels", kind, "SequenceClassification", num_labels=3)
    with EncoderServer(folder / "labels") as server:
        rows = server.ok("/v1/classify", model="tiny", input=texts)["data"]
    for row, ids in zip(rows, texts, strict=True):
        want = model(torch.tensor([ids])).logits[0].softmax(-1)
        if float((torch.tensor(row["probs"]) - want).abs().max()) > 1e-4:
            raise AssertionError(f"the labels of {len(ids)} tokens: {row['probs']} instead of {want.tolist()}")
    return f"{len(texts)} embeddings, {len(texts)} classified"


def other_encoder(folder: Path, kind: str) -> str:
    """Try an encoder that has no plugin; it is refused."""
    write_encoder(folder, kind)
    with EncoderServer(folder):
        raise AssertionError("it is served, and nothing here compares it")


def tried(kind: str, serve: Callable[[Path, str], str]) -> tuple[str, str]:
    """Return `served`, `refused` or `WRONG`, and what there is to say."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return "served", serve(Path(folder), kind)
        except DovetailError as error:
            return "refused", str(error)
        except Exception as error:  # one family's fault is a line of the table
            return "WRONG", f"{type(error).__name__}: {error}"
        finally:
            gc.collect()


def main(kinds: Sequence[str]) -> int:
    """Try them all and print the table; returns the exit status."""
    ways: dict[str, Callable[[Path, str], str]] = {
        **dict.fromkeys((*DECODERS, *SEEING), decoder),
        **dict.fromkeys(ENCODERS, encoder),
        **dict.fromkeys(OTHER_ENCODERS, other_encoder),
    }
    counts = {"served": 0, "refused": 0, "WRONG": 0}
    for kind in kinds or ways:
        outcome, said = tried(kind, ways[kind])
        counts[outcome] += 1
        print(f"{kind:24} {outcome:8} {said[:160]}", flush=True)
    print(json.dumps(counts))
    return int(counts["WRONG"] > 0 or (not kinds and counts["served"] < LEAST))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
