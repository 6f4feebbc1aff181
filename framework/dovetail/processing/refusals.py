"""Refusals of requests, worded once for the server and `LLM`; the server's own are its `errors.catalogue`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from dovetail.contracts.errors import RequestError

TOO_LONG = "context_length_exceeded"


def prompt_too_long(num_tokens: int, context_len: int, param: str) -> RequestError:
    """The prompt alone fills the context."""
    text = (
        f"the prompt has {num_tokens} tokens, which is longer than the model's context length, and leaves no room for "
        f"output: this model's maximum context length is {context_len} tokens; shorten the prompt"
    )
    return RequestError(text, param=param, code=TOO_LONG)


def prompt_far_too_long(num_tokens: int, context_len: int, param: str) -> RequestError:
    """A look at parts of the prompt says that it is several contexts long."""
    text = (
        f"the prompt has about {num_tokens} tokens, which is longer than the model's context length: this model's "
        f"maximum context length is {context_len} tokens; shorten the prompt"
    )
    return RequestError(text, param=param, code=TOO_LONG)


def token_without_row(token: str, token_id: int, num_rows: int, param: str) -> RequestError:
    """A text needs a token of which the tokenizer knows and the model does not."""
    text = (
        f"{param} holds {token!r}, which is token {token_id} of the tokenizer, and the model has embeddings of the "
        f"first {num_rows} tokens only; leave it out, or serve the model with its own tokenizer"
    )
    return RequestError(text, param=param, code="invalid_token_id")


def input_too_long(num_tokens: int, context_len: int, param: str) -> RequestError:
    """A text to be embedded does not fit the context."""
    text = (
        f"{param} has {num_tokens} tokens, which is longer than the model's context length: this model's maximum "
        f"context length is {context_len} tokens; shorten it, or send truncate_prompt_tokens: -1"
    )
    return RequestError(text, param=param, code=TOO_LONG)


def output_too_long(num_tokens: int, max_tokens: int, context_len: int, param: str) -> RequestError:
    """Prompt and requested output together exceed the context."""
    text = (
        f"{num_tokens} prompt tokens and {max_tokens} output tokens are {num_tokens + max_tokens} together, which is "
        f"longer than the model's context length: this model's maximum context length is {context_len} tokens; "
        f"shorten the prompt or lower {param}"
    )
    return RequestError(text, param=param, code=TOO_LONG)


def context_too_short(needed: int, context_len: int, param: str) -> RequestError:
    """The request wants a longer context than the model has."""
    text = (
        f"{param} asks for a context of {needed} tokens; this model's maximum context length is {context_len} tokens; "
        f"send at most that, or leave it out"
    )
    return RequestError(text, param=param, code=TOO_LONG)


def prompt_too_big(num_bytes: int, limit: int, context_len: int, param: str) -> RequestError:
    """The prompt is refused by its size, before it is tokenized."""
    text = (
        f"the prompt has {num_bytes} bytes, over this server's limit of {limit}, and is longer than the model's "
        f"context length: this model's maximum context length is {context_len} tokens; shorten the prompt"
    )
    return RequestError(text, param=param, code=TOO_LONG)


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
