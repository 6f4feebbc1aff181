"""A model whose tokens are scripted: its "weights" are a list of replies, its KV cache the ids that it has read.

Everything around it is what serves any model: template, tokenizer, prefix cache, grammar masks, sampling, parsers,
streams. `script.json` beside the model's files is a list of rules; the first whose texts all stand in the prompt
(`has`), none of `lacks`, and that follows so many results of tools (`results`, if given) says what is said (`say`).
Each prompt is a line of `prompts.jsonl` there, with the reply.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tokenizers
import torch
from torch import Tensor, nn

from dovetail.contracts import BuildContext, CausalLM, ForwardBatch, ModelConfig, ModelPlugin, WeightRule
from dovetail.sdk.config import dense_config

RESULT = "<tool_response>\n"
HEADER = "assistant\n"
NO_THOUGHT = "<think>\n\n</think>\n\n"
SURE = 1000.0
"""The scripted token's logit; all others have 0, among which a grammar's mask leaves the sampler to choose."""


class Scripted(nn.Module):
    """Says what the script says."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.width, self.vocab_size = config.hidden_size, config.vocab_size
        self.slots = np.zeros(1 << 16, dtype=np.int64)
        self.replies: dict[bytes, list[int]] = {}

    def load_checkpoint(self, folder: Path, headers: Sequence[Any]) -> None:
        """Read tokenizer and script."""
        self.folder = folder
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.begin, self.end = (self.tokenizer.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>"))
        self.rules = json.loads((folder / "script.json").read_text("utf-8"))

    def forward(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Map token ids `[T]` to `[T, H]`, whose first column is the id of the token that follows."""
        slots = batch.kv_slots.cpu().numpy()
        if slots.max(initial=0) >= len(self.slots):
            self.slots = np.resize(self.slots, 2 * int(slots.max()))
        self.slots[slots] = ids.cpu().numpy()
        hidden = torch.zeros(len(ids), self.width)
        for request, end in enumerate(np.cumsum(batch.q_lens_cpu)):
            hidden[int(end) - 1, 0] = self.next_id(self.history(batch, request))
        return hidden

    def history(self, batch: ForwardBatch, request: int) -> Any:
        """Return the ids of a request so far."""
        length, size = batch.seq_lens_cpu[request], batch.attention.kv_pool.page_size
        pages = batch.page_table[batch.rows[request], : -(-length // size)].cpu().numpy().astype(np.int64)
        return self.slots[(pages[:, None] * size + np.arange(size)).reshape(-1)[:length]]

    def next_id(self, history: Any) -> int:
        """Return what follows: the scripted reply's next token, or the end."""
        begins = np.flatnonzero(history == self.begin)
        if not len(begins):
            return 0
        prompt, said = history[: begins[-1]], history[begins[-1] + 1 :]
        key = prompt.tobytes()
        if key not in self.replies:
            self.replies[key] = self.reply(self.tokenizer.decode(prompt.tolist(), skip_special_tokens=False))
        header, no_thought = self.encode(HEADER), self.encode(NO_THOUGHT)
        skip = len(header)
        if said[skip : skip + len(no_thought)].tolist() == no_thought:
            skip += len(no_thought)
        reply, at = self.replies[key], len(said) - skip
        return reply[at] if 0 <= at < len(reply) else self.end

    def reply(self, prompt: str) -> list[int]:
        """Return the ids of what is said to a prompt."""
        rule = next(rule for rule in self.rules if holds(rule, prompt))
        with (self.folder / "prompts.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps({"prompt": prompt, "say": rule["say"]}) + "\n")
        return self.encode(rule["say"])

    def encode(self, text: str) -> list[int]:
        """Return a text's ids."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Map `[R, H]` to logits `[R, V]`."""
        logits = torch.zeros(len(hidden), self.vocab_size)
        return logits.scatter_(1, hidden[:, :1].long(), SURE)


def holds(rule: Mapping[str, Any], prompt: str) -> bool:
    """Whether a rule is for a prompt."""
    if "results" in rule and rule["results"] != prompt.count(RESULT):
        return False
    return all(text in prompt for text in rule.get("has", ())) and not any(t in prompt for t in rule.get("lacks", ()))


class ScriptedModel(ModelPlugin):
    """Serves `AgentScriptForCausalLM`."""

    architectures: ClassVar[Sequence[str]] = ("AgentScriptForCausalLM",)

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Translate `config.json`."""
        return dense_config(hf)

    @classmethod
    def build(cls, config: ModelConfig, ctx: BuildContext) -> CausalLM:
        """Build the module."""
        return Scripted(config, ctx)

    @classmethod
    def weight_map(cls, config: ModelConfig) -> Sequence[WeightRule]:
        """Name no tensor: there are none."""
        return ()
