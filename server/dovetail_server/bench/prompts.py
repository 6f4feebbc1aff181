"""The prompts of a workload: random token ids, random text of a tokenizer, or the lines of a file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dovetail.contracts.errors import ConfigError
from dovetail_server.bench.wire import Prompt
from dovetail_server.bench.workloads import Workload


class PromptSource(Protocol):
    """Where prompts come from."""

    def draw(self, workload: Workload, num: int) -> Iterator[tuple[Prompt, int]]:
        """Yield `num` prompts, each with the tokens to generate; the same ones every time."""
        ...


@dataclass(frozen=True, slots=True)
class PromptVocabulary:
    """Ids that prompts are made of, and where they come from. `decode` is known if there is a tokenizer."""

    ids: Sequence[int]
    origin: str
    tokenizer: Any = None

    @classmethod
    def of_size(cls, size: int, origin: str) -> PromptVocabulary:
        """Take the middle of a vocabulary: special tokens are at its ends.

        Raises:
            ConfigError: There is no middle.
        """
        ids = range(min(1000, size // 10), size - size // 10)
        if len(ids) < 2:
            raise ConfigError(f"a vocabulary of {size} tokens ({origin}) is too small for random prompts")
        return cls(ids, origin)

    @classmethod
    def of_folder(cls, folder: Path, *, readable: bool = False) -> PromptVocabulary:
        """Take all ordinary tokens of a tokenizer, or those that are `readable` by themselves: for prompts of text.

        Raises:
            ConfigError: There is no tokenizer that can be read.
        """
        from dovetail.checkpoint.formats import Formats
        from dovetail.text.tokenizer.backend import load_backend

        backend = load_backend(folder, Formats.installed().at(folder))
        special = backend.get_added_tokens_decoder()
        ids = [i for i in range(backend.get_vocab_size(with_added_tokens=False)) if i not in special]
        if readable:
            texts = backend.decode_batch([[i] for i in ids])
            ids = [
                i for i, text in zip(ids, texts, strict=True) if text.isprintable() and text and "\ufffd" not in text
            ]
        if len(ids) < 2:
            raise ConfigError(f"the tokenizer in {folder} has no ordinary tokens to make prompts of")
        return cls(ids, f"tokenizer in {folder}", backend)


@dataclass(frozen=True, slots=True)
class RandomIds:
    """Random ids, exactly as many as the workload says."""

    vocabulary: PromptVocabulary
    seed: str

    def draw(self, workload: Workload, num: int) -> Iterator[tuple[Prompt, int]]:
        """Yield lists of ids; the shared prefix is the same in all."""
        rng = random.Random(f"{self.seed}/{workload.name}")
        ids = self.vocabulary.ids
        prefix = rng.choices(ids, k=workload.shared_prefix_len)
        for _ in range(num):
            length, output_len = rng.randint(*workload.input_len), rng.randint(*workload.output_len)
            yield prefix + rng.choices(ids, k=length), output_len


@dataclass(frozen=True, slots=True)
class RandomText:
    """Random ids as text: lengths are about right, since text may be tokenized in another way than it came about."""

    source: RandomIds

    def draw(self, workload: Workload, num: int) -> Iterator[tuple[Prompt, int]]:
        """Yield texts."""
        for prompt, output_len in self.source.draw(workload, num):
            yield self.source.vocabulary.tokenizer.decode(prompt), output_len


@dataclass(frozen=True, slots=True)
class FilePrompts:
    """The lines of a file, from the start again when they are used up; `skip` begins further down."""

    lines: Sequence[tuple[Prompt, int | None]]
    skip: int = 0

    def draw(self, workload: Workload, num: int) -> Iterator[tuple[Prompt, int]]:
        """Yield prompts in the file's order; lines without a length of their own get the workload's."""
        rng = random.Random(workload.name)
        for i in range(num):
            prompt, output_len = self.lines[(self.skip + i) % len(self.lines)]
            yield prompt, output_len or rng.randint(*workload.output_len)


def read_dataset(path: Path, endpoint: str) -> list[tuple[Prompt, int | None]]:
    """Read JSON lines: `{"prompt": text or ids}` or `{"messages": […]}`, either with `output_len`.

    Raises:
        ConfigError: The file or a line cannot be used with the endpoint.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset {str(path)!r}: {error}; give a file of JSON lines") from None
    found = [_read_line(line, endpoint, f"--dataset {str(path)!r} line {n}") for n, line in enumerate(lines, 1) if line]
    if not found:
        raise ConfigError(f"--dataset {str(path)!r}: no lines; give JSON lines with a prompt each")
    return found


def _read_line(line: str, endpoint: str, where: str) -> tuple[Prompt, int | None]:
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(item, dict):
        raise ConfigError(f'{where}: expected an object such as {{"prompt": "…", "output_len": 128}}')
    output_len = item.get("output_len")
    if output_len is not None and (type(output_len) is not int or output_len < 1):
        raise ConfigError(f"{where}: output_len must be a whole number of at least 1, not {output_len!r}")
    messages, prompt = item.get("messages"), item.get("prompt")
    if endpoint == "chat" and isinstance(messages, list) and messages:
        return messages, output_len
    if isinstance(prompt, str) and prompt:
        return prompt, output_len
    if endpoint != "chat" and isinstance(prompt, list) and prompt and all(type(i) is int for i in prompt):
        return prompt, output_len
    wanted = "prompt (text) or messages" if endpoint == "chat" else "prompt (text or token ids)"
    raise ConfigError(f"{where}: --endpoint {endpoint} needs {wanted}")
