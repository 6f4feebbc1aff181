"""What a model may be asked for: text, embeddings, labels of a text, how well two texts go together.

It follows from the model and its folder; `--task` keeps to one. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from dovetail.base.settings import Task
from dovetail.contracts.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from dovetail.contracts.config import ModelConfig
    from dovetail.messages import EngineInfo

Comparison = Literal["labels", "cosine", "yes_no"]
"""How two texts are compared: by the score of a label, by their embeddings, by what the model would answer."""
ROUTES: Mapping[Task, str] = {
    "generate": "/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /generate",
    "embed": "/v1/embeddings",
    "classify": "/v1/classify",
    "score": "/v1/rerank, /v1/score",
}
ACTS: Mapping[Task, str] = {
    "generate": "generate text",
    "embed": "give embeddings",
    "classify": "score labels of a text",
    "score": "compare two texts",
}


class Tasks(msgspec.Struct, frozen=True, kw_only=True):
    """What is served.

    Attributes:
        name: The model's architecture.
        possible: The tasks.
        comparison: How texts are compared, if they are.
        hint: What to do about one that is not possible.
        encodes: The model has no output head: it reads whole texts, with special tokens around them.
    """

    name: str = ""
    possible: tuple[Task, ...] = get_args(Task)
    comparison: Comparison | None = None
    hint: str = ""
    encodes: bool = False

    @classmethod
    def of(cls, info: EngineInfo | ModelConfig, task: Task | None, *, embeds: bool, answers: bool) -> Tasks:
        """Find out what is served.

        Args:
            info: Facts of the model, loaded or not.
            task: `--task`; None: whatever is possible.
            embeds: The folder says that the model is for embeddings.
            answers: It says that the model answers whether two texts go together.

        Raises:
            ConfigError: The model cannot do what is asked for.
        """
        comparison = _comparison(info, task, embeds=embeds, answers=answers)
        found: dict[Task, bool] = {
            "generate": info.generates,
            "embed": not info.num_labels,
            "classify": bool(info.num_labels),
            "score": comparison is not None,
        }
        able = tuple(one for one in get_args(Task) if found[one])
        if task is None:
            fix = "start the server with --task embed or --task score for that"
            hint = "" if comparison or info.num_labels else fix
        elif not found[task]:
            raise ConfigError(f"--task {task}: {info.architecture} cannot {ACTS[task]}; possible: {', '.join(able)}")
        else:
            able = ("embed", "score") if task == "embed" else (task,)
            hint = f"the server was started with --task {task}"
        return cls(name=info.architecture, possible=able, comparison=comparison, hint=hint, encodes=not info.generates)

    def check(self, task: Task) -> None:
        """Refuse a request for what is not served.

        Raises:
            RequestError: Saying what is.
        """
        if task in self.possible:
            return
        routes = "; ".join(f"it can {ACTS[one]} ({ROUTES[one]})" for one in self.possible)
        hint = f"; {self.hint}" if self.hint else ""
        text = f"{self.name} does not {ACTS[task]} here: {routes}{hint}"
        raise RequestError(text, param="model", code="unsupported_task")


def _comparison(info: EngineInfo | ModelConfig, task: Task | None, *, embeds: bool, answers: bool) -> Comparison | None:
    """How the model compares texts; only a classifier of a single label has one score for a pair."""
    if info.num_labels:
        return "labels" if info.num_labels == 1 else None
    if not info.generates or embeds or task == "embed":
        return "cosine"
    return "yes_no" if answers or task == "score" else None
