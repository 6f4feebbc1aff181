"""What requests share that generate nothing: their choices, and how long their prompts may be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.contracts.errors import RequestError
from dovetail.messages import Pool, SamplerParams, Submit, TokenLogprob
from dovetail.processing.pairs import POOLING, check_lengths
from dovetail.text.parsing.stream import OutputStream
from dovetail_server.apis.fields import same_field
from dovetail_server.schema.pooled import EmbeddingUsage, PooledFields
from dovetail_server.serving.choice import Choice
from dovetail_server.serving.common import check_not_aborted, choice_rid, new_id, service_of
from dovetail_server.serving.generation import Generation
from dovetail_server.serving.prompts import Prompt, Prompts, empty, read_one

if TYPE_CHECKING:
    from dovetail.processing.processor import Processor
    from dovetail_server.serving.context import ServingContext


@dataclass(slots=True, kw_only=True)
class PooledJob:
    """A request that is ready to run.

    Attributes:
        model: The name that the reply carries.
        made: The prompts.
        write: Makes the reply of this, and of each choice's last log probabilities by its number; CPU work.
    """

    request: Any
    model: str
    generation: Generation
    made: Prompts
    write: Callable[[PooledJob, Mapping[int, TokenLogprob]], bytes]

    @property
    def usage(self) -> EmbeddingUsage:
        """Tokens of all prompts."""
        num = sum(choice.num_prompt for choice in self.generation.choices)
        return EmbeddingUsage(prompt_tokens=num, total_tokens=num)

    async def reply(self) -> bytes:
        """Run all choices and return the reply, written in a thread: numbers of 2,048 vectors take a second.

        Raises:
            DovetailError: The engine gave one up.
        """
        rows: dict[int, TokenLogprob] = {}
        async for steps in self.generation.steps(whole=True):
            for step in steps:
                if step.is_last:
                    check_not_aborted(step.choice)
                for row in step.logprobs:
                    rows[step.choice.index] = row
        return await asyncio.to_thread(self.write, self, rows)


def generation_of(
    state: ServingContext,
    request: PooledFields,
    prompts: Sequence[Prompt],
    prefix: str,
    *,
    pool: Pool | None,
    params: Sequence[SamplerParams] | None = None,
    what: str = "input",
) -> Generation:
    """Make the engine's requests of some prompts, one each.

    Args:
        state: The server's.
        request: With priority, salt and identifier.
        prompts: In order.
        prefix: Of an identifier, where the request brings none.
        pool: What of hidden states is asked for; None: a token's log probabilities are.
        params: Of each; None: nothing is generated.
        what: The field that the prompts came from.

    Raises:
        RequestError: So many never fit.
    """
    state.check_choices(len(prompts), what, f"the number of prompts of {what}")
    rid = same_field(request, "rid", "request_id") or new_id(f"{prefix}-")
    service = service_of(request.priority or 0, request.cache_salt or "")
    choices = [
        Choice(
            index=at,
            prompt_index=at,
            submit=Submit(
                rid=choice_rid(rid, at, len(prompts)),
                prompt_ids=prompt.ids,
                params=POOLING if params is None else params[at],
                pool=pool,
                second=prompt.second,
                **service,
            ),
            output=OutputStream(state.text.tokenizer),
        )
        for at, prompt in enumerate(prompts)
    ]
    return Generation(state=state, request_id=rid, choices=choices)


def read_texts(
    given: Any,
    text: Processor,
    *,
    special: bool,
    most: int | None,
    side: str | None = None,
    name: str | None = None,
) -> list[Prompt]:
    """Read `input`: a text, token ids, or a list of either; cut where that is asked for.

    Args:
        given: What was sent.
        text: The server's.
        special: The tokenizer adds its special tokens to texts.
        most: Keep so many tokens of each.
        side: Where to cut: see `Processor.encode_text`.
        name: Of the prompt that stands before each text.

    Raises:
        RequestError: An input is empty or too long, or has an id outside the vocabulary.
    """
    items = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    prompts = []
    for at, item in enumerate(items):
        param = "input" if len(items) == 1 else f"input[{at}]"
        if isinstance(item, str) and special:
            prompts.append(Prompt(text.encode_text(item, param, most=most, side=side, name=name)))
            if not prompts[-1].ids:
                raise empty(param)
            continue
        if name:
            why = "prompt_name is for texts to which the tokenizer adds its special tokens"
            raise RequestError(why, param="prompt_name", code="invalid_value")
        ids = read_one(item, text, param, special=special).ids
        prompts.append(Prompt(ids if most is None else ids[:most] if side == "right" else ids[-most:]))
    check_lengths([prompt.ids for prompt in prompts], text, "input")
    return prompts
