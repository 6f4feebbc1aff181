"""`suffix` of `/v1/completions`: filling in the middle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.errors import RequestError
from dovetail.processing.sampling import check_token_ids
from dovetail.text.tokenizer.fill_in import Infill
from dovetail_server import errors
from dovetail_server.openai.completions import CompletionRequest
from dovetail_server.serving.prompts import Prompt

if TYPE_CHECKING:
    from dovetail.processing.processor import Processor


def fill_in_of(request: CompletionRequest, text: Processor) -> Infill | None:
    """Return how the model fills in what stands before `suffix`; None where there is none.

    Raises:
        RequestError: The model cannot, or the request asks beside it for what belongs to the prompt alone.
    """
    if not request.suffix:
        return None
    if text.tokenizer.fill_in is None:
        why = "this model has no tokens for filling in the middle (such as <|fim_prefix|>); say it in a chat instead"
        raise errors.unsupported("suffix", why)
    others = {
        "truncate_prompt_tokens": bool(request.truncate_prompt_tokens),
        "prompt_logprobs": request.prompt_logprobs is not None,
        "echo": bool(request.echo) and request.logprobs is not None,
    }
    name = next((name for name, is_there in others.items() if is_there), None)
    if name is not None:
        why = f"{name} is about the prompt's tokens, and suffix puts others around them; leave one of them out"
        raise RequestError(why, param=name, code="invalid_value")
    return text.tokenizer.fill_in


def read_between(request: CompletionRequest, text: Processor, fill_in: Infill, *, special: bool) -> list[Prompt]:
    """Return every prompt as the model is asked for what stands between it and `suffix`.

    Raises:
        RequestError: A text is too big, or an id is outside the vocabulary.
    """
    after, given = request.suffix or "", request.prompt
    items: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)

    def encode(part: str) -> list[int]:
        return text.encode(part, "suffix", add_special_tokens=False)

    found = []
    for item in items:
        if isinstance(item, str):
            ids = text.encode(fill_in.text(item, after), "prompt", add_special_tokens=special)
            found.append(Prompt(ids, item))
        else:
            check_token_ids(item, text.limits.vocab_size, "prompt")
            before = text.tokenizer.decode(item, skip_special_tokens=False) if request.echo else ""
            found.append(Prompt(fill_in.ids(item, after, encode), before))
    return found
