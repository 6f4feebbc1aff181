"""Refusals of requests, worded once for the server and `LLM`; the server's own are its `errors.catalogue`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from dovetail.contracts.errors import RequestError

TOO_LONG = "context_length_exceeded"


_LONGER = "is longer than the model's context length"


def _beyond(what: str, context_len: int, fix: str, param: str) -> RequestError:
    text = f"{what} this model's maximum context length is {context_len} tokens; {fix}"
    return RequestError(text, param=param, code=TOO_LONG)


def prompt_too_long(num_tokens: int, context_len: int, param: str) -> RequestError:
    """The prompt alone fills the context."""
    what = f"the prompt has {num_tokens} tokens, which {_LONGER}, and leaves no room for output:"
    return _beyond(what, context_len, "shorten the prompt", param)


def prompt_far_too_long(num_tokens: int, context_len: int, param: str) -> RequestError:
    """A look at parts of the prompt says that it is several contexts long."""
    what = f"the prompt has about {num_tokens} tokens, which {_LONGER}:"
    return _beyond(what, context_len, "shorten the prompt", param)


def input_too_long(num_tokens: int, context_len: int, param: str) -> RequestError:
    """A text to be embedded does not fit the context."""
    what = f"{param} has {num_tokens} tokens, which {_LONGER}:"
    return _beyond(what, context_len, "shorten it, or send truncate_prompt_tokens: -1", param)


def output_too_long(num_tokens: int, max_tokens: int, context_len: int, param: str) -> RequestError:
    """Prompt and requested output together exceed the context."""
    num = num_tokens + max_tokens
    what = f"{num_tokens} prompt tokens and {max_tokens} output tokens are {num} together, which {_LONGER}:"
    return _beyond(what, context_len, f"shorten the prompt or lower {param}", param)


def context_too_short(needed: int, context_len: int, param: str) -> RequestError:
    """The request wants a longer context than the model has."""
    what = f"{param} asks for a context of {needed} tokens;"
    return _beyond(what, context_len, "send at most that, or leave it out", param)


def prompt_too_big(num_bytes: int, limit: int, context_len: int, param: str) -> RequestError:
    """The prompt is refused by its size, before it is tokenized."""
    what = f"the prompt has {num_bytes} bytes, over this server's limit of {limit}, and {_LONGER}:"
    return _beyond(what, context_len, "shorten the prompt", param)


def token_without_row(token: str, token_id: int, num_rows: int, param: str) -> RequestError:
    """A text needs a token of which the tokenizer knows and the model does not."""
    text = (
        f"{param} holds {token!r}, which is token {token_id} of the tokenizer, and the model has embeddings of the "
        f"first {num_rows} tokens only; leave it out, or serve the model with its own tokenizer"
    )
    return RequestError(text, param=param, code="invalid_token_id")


def unsupported(param: str, why: str) -> RequestError:
    """A field that is not implemented; never ignored, because it would change the output."""
    return RequestError(f"{param} is not supported: {why}", param=param, code="unsupported_parameter")


def wrong(text: str, param: str) -> RequestError:
    """A value that means nothing."""
    return RequestError(text, param=param, code="invalid_value")


def empty_prompt(param: str) -> RequestError:
    """A prompt without tokens."""
    return wrong(f"{param} is empty; send at least one token", param)


def no_infill() -> RequestError:
    """The model was not trained to fill in what stands between two texts."""
    why = "this model has no tokens for filling in the middle (such as <|fim_prefix|>); say it in a chat instead"
    return unsupported("suffix", why)


@contextmanager
def fields_named(renamed: Mapping[str, str]) -> Iterator[None]:
    """Have refusals speak of fields as a request's API calls them: see `Names.renamed`.

    Raises:
        RequestError: What the block raised, in the client's words.
    """
    try:
        yield
    except RequestError as error:
        if not renamed:
            raise
        param, message = error.param, error.message
        for pattern, name in renamed.items():
            if param is not None and re.match(rf"{pattern}(?![A-Za-z_])", param):
                param = re.sub(rf"^{pattern}", name, param)
            message = re.sub(rf"(?<![\w.]){pattern}(?![A-Za-z_])", name, message)
        raise RequestError(message, param=param, code=error.code, status=error.status) from error
