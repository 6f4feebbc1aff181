"""What a checkpoint says of comparing two texts: how a score is scaled, and how a generating model is asked. No torch.

Cross encoders have a score for a pair of texts; `config.json` may name what scales it, as sentence-transformers writes
it. Qwen3-Reranker is asked in words, and the score is how much likelier than "no" its "yes" is. Texts are put together
by the folder's chat template where that knows the roles `query` and `document`, else by Qwen3-Reranker's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dovetail.base.model_files import MAX_ID
from dovetail.contracts.errors import ConfigError, ModelError
from dovetail.runtime.checkpoint.folder import ModelFolder
from dovetail.text.chat.template import ChatTemplate
from dovetail.text.tokenizer.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
WORDS = ("no", "yes")
QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""How Qwen3-Reranker was trained to be asked, by its model card."""
SCALES = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
PROBLEMS = {**{"regression": "none", "single_label_classification": "softmax", "multi_label_classification": "sigmoid"}}


class Reranker(msgspec.Struct, frozen=True, kw_only=True):
    """How texts are compared, and labels scored.

    Attributes:
        scale: What makes scores of a classifier's numbers: `sigmoid`, `softmax` or `none`.
        labels: Names of the labels.
        no: The token that says that texts do not go together; -1: there is none.
        yes: The one that says that they do.
        by_template: The folder's chat template puts the texts together.
        in_words: Texts are put together in words, not by the tokenizer.
        is_declared: The folder says that the model answers so.
    """

    scale: str = "sigmoid"
    labels: tuple[str, ...] = ()
    no: int = -1
    yes: int = -1
    by_template: bool = False
    in_words: bool = False
    is_declared: bool = False

    @classmethod
    def of_folder(cls, folder: ModelFolder, tokenizer: Tokenizer, template: ChatTemplate, num_labels: int) -> Reranker:
        """Ask a model folder.

        Raises:
            ConfigError: What it says of scores is not served.
        """
        config, source = folder.config, template.source
        by_template = knows_roles(source)
        no, yes = _answers(folder, tokenizer)
        is_known = says_so(folder) and min(no, yes) >= 0
        return cls(
            scale=_scale(config, num_labels),
            labels=_labels(config, num_labels),
            no=no,
            yes=yes,
            by_template=by_template,
            in_words=by_template or is_known or not num_labels,
            is_declared=by_template or is_known,
        )

    def asked(self, query: str, document: str, instruction: str | None, template: ChatTemplate) -> str:
        """Put two texts together as the model is asked about them.

        Raises:
            RequestError: The template refuses them.
        """
        if not self.by_template:
            return QWEN3.format(instruction=instruction or INSTRUCTION, query=query, document=document)
        roles = [{"role": "system", "content": instruction}] if instruction else []
        roles += [{"role": "query", "content": query}, {"role": "document", "content": document}]
        return template.render(roles).text

    def scaled(self, numbers: Sequence[float]) -> list[float]:
        """Make scores of a classifier's numbers."""
        if self.scale == "none":
            return list(numbers)
        if self.scale == "sigmoid":
            return [sigmoid(number) for number in numbers]
        best = max(numbers)
        weights = [math.exp(number - best) for number in numbers]
        return [weight / sum(weights) for weight in weights]


def knows_roles(source: str) -> bool:
    """Whether a chat template puts a query and a document together."""
    return all(f"'{role}'" in source or f'"{role}"' in source for role in ("query", "document"))


def says_so(folder: ModelFolder) -> bool:
    """Whether a folder says that its model answers whether two texts go together.

    By a `LogitScore` module of sentence-transformers, or by `classifier_from_token` as vLLM reads it.
    """
    named = folder.config.get("classifier_from_token") or folder.config.get("is_original_qwen3_reranker")
    return bool(named) or _logit_score(folder) is not None


def _logit_score(folder: ModelFolder) -> Mapping[str, Any] | None:
    """Return the config of a `LogitScore` module that names its tokens.

    Raises:
        ModelError: One of the tokens is no id.
    """
    for module in folder.modules:
        given = module.config if module.kind == "LogitScore" else {}
        if given.get("false_token_id") is not None:
            for key in ("false_token_id", "true_token_id"):
                if type(given.get(key)) is not int or not 0 <= given[key] <= MAX_ID:
                    raise ModelError(f"{module.path / 'config.json'}: {key} is {given.get(key)!r}; give a token's id")
            return given
    return None


def sigmoid(number: float) -> float:
    """Return `1 / (1 + exp(-number))`, for any number."""
    return 1 / (1 + math.exp(-number)) if number >= 0 else 1 - 1 / (1 + math.exp(number))


def _scale(config: Mapping[str, Any], num_labels: int) -> str:
    """Read what scales a classifier's numbers; without a word, as vLLM: a sigmoid for one label, else a softmax.

    Raises:
        ConfigError: It is not served.
    """
    inner = config.get("sentence_transformers")
    named = inner.get("activation_fn") if isinstance(inner, Mapping) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if named is not None:
        kind = str(named).rpartition(".")[2]
        if kind not in SCALES:
            raise ConfigError(
                f"config.json: the activation {named!r} of scores is not served; possible: {', '.join(SCALES)}"
            )
        return SCALES[kind]
    usual = "softmax" if num_labels > 1 else "sigmoid"
    return usual if num_labels == 1 else PROBLEMS.get(str(config.get("problem_type")), usual)


def _labels(config: Mapping[str, Any], num_labels: int) -> tuple[str, ...]:
    """Name the labels in order."""
    names = config.get("id2label") or {}
    return tuple(str(names.get(str(at), f"LABEL_{at}")) for at in range(num_labels))


def _answers(folder: ModelFolder, tokenizer: Tokenizer) -> tuple[int, int]:
    """Find the tokens of both answers; -1 where one is none of its own, or the tokenizer may take long to tell."""
    if given := _logit_score(folder):
        return given["false_token_id"], given["true_token_id"]
    if not tokenizer.inline_chars:
        return -1, -1
    words = folder.config.get("classifier_from_token") or WORDS
    ids = [tokenizer.encode(str(word), add_special_tokens=False) for word in words]
    if len(ids) != 2 or any(len(one) != 1 for one in ids):
        return -1, -1
    return ids[0][0], ids[1][0]
